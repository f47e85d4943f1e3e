//! Values that are longer than a block: writing, reading and retiring their extents.
//!
//! A slot leads to the head, which names the extents (`farside_layout::ExtentTable`). The head is
//! an ordinary block to all operations on slots. What this module adds:
//!
//! - A PUT WRITEs the extents before the head exists, so no reader sees a part of a value.
//! - A GET READs the extents behind their head. The session remembers the tables of the heads that
//!   it has seen, so a GET of a cached location READs head and extents together.
//! - The session that unlinks a head owns its extents (invariant I27). It learns them before the
//!   compare-and-swap, so that the server never takes them for lost.

use farside_fabric::{Buffer, ChainError, Fabric, LaneId, Nanos, Verb};
use farside_layout::{
    BLOCK_HEADER_BYTES, Block, BlockAddress, BlockRef, BlockStamp, Extent, ExtentTable, FreeBlock,
    HeaderWord, LayoutError, SizeClass, extent_data_offset, extent_table_bytes, seal_extent,
    set_extent, set_value_bytes,
};

use super::{Found, Operation, OperationError, ProtocolResult, ProvenSlot, read_block};
use crate::Lifetime;
use crate::failure::Failure;
use crate::location_cache::PackedLocation;
use crate::region_handle::RegionHandle;

/// How many extents a chain READs. One place is for the head.
const READS_PER_CHAIN: usize = 3;
/// How many extents a chain WRITEs: two verbs each.
const WRITES_PER_CHAIN: usize = 2;
/// How many tables of extents a session remembers.
const TABLES: usize = 256;
/// Limit on the attempts of a chain that was late.
const LATE_ATTEMPTS_MAX: u32 = 100;

/// The table of a head.
#[derive(Default)]
struct Table {
    head: BlockAddress,
    generation: u32,
    value_bytes: u64,
    extents: Vec<Extent>,
}

/// The tables of the heads that a session has seen, and those with which its lanes work.
pub(crate) struct ExtentTables {
    /// By the address of the head. Two heads may have the same place.
    seen: Vec<Table>,
    by_lane: Vec<Table>,
}

impl ExtentTables {
    pub(crate) fn new(lanes: u16) -> Self {
        let by_lane = (0..lanes).map(|_| Table::default()).collect();
        Self { seen: Vec::new(), by_lane }
    }

    /// Mixes the heads whose tables are known into a hash.
    pub(crate) fn hash_state(&self, hasher: &mut impl std::hash::Hasher) {
        for seen in &self.seen {
            hasher.write_u64(u64::from(seen.head.0) << 32 | u64::from(seen.generation));
        }
    }

    fn place(head: BlockAddress) -> usize {
        (head.0 / 64) as usize % TABLES
    }

    fn lane(&mut self, lane: LaneId) -> &mut Table {
        &mut self.by_lane[usize::from(lane.0)]
    }

    /// Gives the lane the table of this head, if it was seen. Returns whether it was.
    fn recall(&mut self, lane: LaneId, head: BlockAddress, generation: u32) -> bool {
        let seen = self.seen.get(Self::place(head));
        let seen = seen.filter(|seen| (seen.head, seen.generation) == (head, generation));
        let Some(seen) = seen else { return false };
        self.by_lane[usize::from(lane.0)].copy(seen);
        true
    }

    /// Gives the lane this table, and remembers it.
    fn learn(&mut self, lane: LaneId, head: (BlockAddress, u32), table: &ExtentTable<'_>) {
        let mine = self.lane(lane);
        (mine.head, mine.generation) = head;
        mine.value_bytes = table.value_bytes;
        mine.extents.clear();
        mine.extents.extend_from_slice(table.extents);
        if self.seen.is_empty() {
            self.seen.resize_with(TABLES, Table::default);
        }
        let Self { seen, by_lane } = self;
        seen[Self::place(head.0)].copy(&by_lane[usize::from(lane.0)]);
    }
}

impl Table {
    fn copy(&mut self, other: &Self) {
        (self.head, self.generation) = (other.head, other.generation);
        self.value_bytes = other.value_bytes;
        self.extents.clear();
        self.extents.extend_from_slice(&other.extents);
    }
}

/// The result of the READs of a value's extents.
enum ExtentsRead {
    /// All parts are in the buffer.
    Whole,
    /// The head may have been replaced before the READs: they prove nothing.
    Stale,
}

impl<F: Fabric> RegionHandle<'_, F> {
    /// READs the extents of a head that a READ posted at `posted` has found, and that is in
    /// [`Buffer::ReadBlock`]. Returns where the value is; `None` if the head was replaced before
    /// the READs ended. One round trip for each [`READS_PER_CHAIN`] extents.
    pub(crate) async fn read_extents(
        self,
        lane: LaneId,
        head: BlockRef,
        found: Found,
        posted: Nanos,
    ) -> ProtocolResult<Option<Found>> {
        let key_bytes = found.value_start as usize - BLOCK_HEADER_BYTES as usize;
        {
            let buffer = self.engine.endpoint.buffer(lane, Buffer::ReadBlock);
            let table =
                ExtentTable::decode(key_bytes, found.value_in(&buffer), self.region.extent_shape)?;
            let head = (head.address, found.version.generation());
            self.region.extent_tables.borrow_mut().learn(lane, head, &table);
        }
        match self.read_parts(lane, head, key_bytes, false, posted).await? {
            ExtentsRead::Whole => Ok(Some(self.whole(lane, head, found))),
            ExtentsRead::Stale => Ok(None),
        }
    }

    /// The value behind this head, whose parts are in [`Buffer::ReadBlock`].
    fn whole(self, lane: LaneId, head: BlockRef, found: Found) -> Found {
        let value_bytes = self.region.extent_tables.borrow_mut().lane(lane).value_bytes as u32;
        Found { value_start: head.class.block_bytes() as u32, value_bytes, ..found }
    }

    /// READs the parts of the lane's table to [`Buffer::ReadBlock`], behind the head. With
    /// `reads_head`, the head as well, before them.
    ///
    /// The last READ is that of the head's header: if the head is still linked, it was linked all
    /// the time, however long the READs took. If not, its extents rest for GRACE (invariant I26).
    async fn read_parts(
        self,
        lane: LaneId,
        head: BlockRef,
        key_bytes: usize,
        reads_head: bool,
        posted: Nanos,
    ) -> ProtocolResult<ExtentsRead> {
        let (start, part_bytes) =
            (head.class.block_bytes(), self.region.extent_shape.part_bytes(key_bytes));
        let (generation, value_bytes, count) = {
            let mut tables = self.region.extent_tables.borrow_mut();
            let table = tables.lane(lane);
            (table.generation, table.value_bytes, table.extents.len())
        };
        let buffer_bytes = (start + value_bytes).next_multiple_of(8) as usize;
        self.engine.endpoint.fabric_mut().reserve(lane, Buffer::ReadBlock, buffer_bytes);
        let remote = head.address.offset();
        let (mut damaged, mut has_header, mut first) = (None, false, 0);
        while first < count || first == 0 {
            let mut chain = Chain::new();
            if first == 0 && reads_head {
                chain.push(read_block(head, head.class.block_bytes()));
            }
            let begun = chain.count;
            let here = (count - first).min(READS_PER_CHAIN);
            for number in first..first + here {
                let extent = self.region.extent_tables.borrow_mut().lane(lane).extents[number];
                let at = number as u64 * part_bytes;
                let block = BlockRef {
                    address: extent.address(),
                    class: SizeClass::EXTENT,
                    generation_low: 0,
                };
                self.region.geometry.check_block(block)?;
                chain.push(Verb::ReadPart {
                    remote: extent.address().offset() + extent_data_offset(key_bytes),
                    into: Buffer::ReadBlock,
                    at: (start + at) as u32,
                    bytes: (value_bytes - at).min(part_bytes).next_multiple_of(8) as u32,
                });
            }
            if first + here == count && chain.count < chain.verbs.len() {
                has_header = true;
                chain.push(Verb::Read { remote, into: Buffer::Window, bytes: 8 });
            }
            self.read(lane, chain.verbs()).await?;
            let fabric = self.engine.endpoint.fabric();
            let mut tables = self.region.extent_tables.borrow_mut();
            for number in 0..here {
                let Verb::ReadPart { into, at, bytes, .. } = chain.verbs[begun + number] else {
                    continue;
                };
                let sum = fabric.part_sum(lane, begun + number, (into, at, bytes));
                let extent = tables.lane(lane).extents[first + number];
                if !extent.has_sum(sum) {
                    damaged = Some(extent.address());
                }
            }
            drop(tables);
            drop(fabric);
            first += here.max(1);
        }
        if !has_header && (damaged.is_some() || !self.is_fresh(posted)) {
            has_header = true;
            self.read(lane, &[Verb::Read { remote, into: Buffer::Window, bytes: 8 }]).await?;
        }
        let is_linked = {
            let window = self.engine.endpoint.buffer(lane, Buffer::Window);
            let bits = u64::from_le_bytes(window.first_chunk().copied().unwrap_or_default());
            let header = HeaderWord::from_bits(bits);
            has_header && header.generation == generation && !header.mark.is_set()
        };
        match damaged {
            None if is_linked || self.is_fresh(posted) => Ok(ExtentsRead::Whole),
            Some(address) if is_linked => {
                let (what, offset) = ("extent", address.offset());
                Err(LayoutError::Checksum { what, offset }.into())
            }
            _ => Ok(ExtentsRead::Stale),
        }
    }
}

/// The verbs of a chain that is being made.
struct Chain {
    verbs: [Verb; farside_fabric::CHAIN_VERBS_MAX],
    count: usize,
}

impl Chain {
    fn new() -> Self {
        let verb = Verb::Read { remote: 0, into: Buffer::Window, bytes: 0 };
        Self { verbs: [verb; _], count: 0 }
    }

    fn push(&mut self, verb: Verb) {
        self.verbs[self.count] = verb;
        self.count += 1;
    }

    fn verbs(&self) -> &[Verb] {
        &self.verbs[..self.count]
    }
}

impl<F: Fabric> Operation<'_, F> {
    /// Returns the value that was found, with its extents if it has any. `None` if the head was
    /// replaced before the READs of the extents ended.
    pub(crate) async fn with_extents(&self, found: Found) -> ProtocolResult<Option<Found>> {
        let Some((location, _)) = self.located.get() else { return Ok(Some(found)) };
        let head = location.word.block()?;
        if !head.class.is_head() {
            return Ok(Some(found));
        }
        self.handle().read_extents(self.lane, head, found, location.proved_at).await
    }

    /// READs a cached head, and its extents with it if their table is known. `None` if the cached
    /// location is no head's, or leads nowhere any more.
    pub(crate) async fn get_cached_head(&self) -> ProtocolResult<Option<Option<Found>>> {
        let (handle, lane) = (self.handle(), self.lane);
        let Some(read) = handle.cached_head(self.hash, self.now()) else { return Ok(None) };
        let (location, posted) = (read.location(), read.posted());
        let head = location.block()?;
        self.region.geometry.check_block(head)?;
        let known = self.recall(location, head);
        if known {
            let parts = handle.read_parts(lane, head, self.key_bytes, true, posted).await?;
            if matches!(parts, ExtentsRead::Stale) {
                return Ok(None);
            }
        } else {
            handle.read(lane, &[read_block(head, head.class.block_bytes())]).await?;
        }
        let Some(completed) = self.complete_cached_read(&read) else { return Ok(None) };
        Ok(match completed {
            Some(found) if known => Some(Some(handle.whole(lane, head, found))),
            Some(found) => self.with_extents(found).await?.map(Some),
            None => Some(None),
        })
    }

    /// Gives the lane the table of a cached head, if it is known.
    fn recall(&self, location: PackedLocation, head: BlockRef) -> bool {
        let mut tables = self.region.extent_tables.borrow_mut();
        tables.recall(self.lane, head.address, location.generation())
    }

    /// Takes blocks for the extents of a value of this length, and WRITEs them. The value is behind
    /// the key in [`Buffer::NewBlock`], and stays there. Returns the offset in the buffer at which
    /// the image of the head begins, with key and table, and the length of the table. One round
    /// trip for each [`WRITES_PER_CHAIN`] extents.
    pub(crate) async fn write_extents(
        &self,
        value_bytes: usize,
        lifetime: Lifetime,
    ) -> ProtocolResult<(usize, usize)> {
        let written = self.take_and_write(value_bytes, lifetime).await;
        if written.is_err() {
            self.region.allocator().put_back_extents(self.lane);
        }
        written
    }

    async fn take_and_write(
        &self,
        value_bytes: usize,
        lifetime: Lifetime,
    ) -> ProtocolResult<(usize, usize)> {
        let key_bytes = self.key_bytes;
        let count = self.region.extent_shape.count(key_bytes, value_bytes as u64);
        let mut taken_at = self.now();
        for taken in 0..count {
            self.region.allocator().want(SizeClass::EXTENT, (count - taken) as u32);
            let (free, at) = self.handle().take_block(self.lane, SizeClass::EXTENT).await?;
            self.region.allocator().hold_extent(self.lane, free);
            taken_at = at;
        }
        let value_start = BLOCK_HEADER_BYTES as usize + key_bytes;
        let value_end = value_start + value_bytes;
        let images = value_end.next_multiple_of(64);
        let image_bytes = extent_data_offset(key_bytes) as usize;
        let head_at = images + WRITES_PER_CHAIN * image_bytes;
        let table_at = head_at + value_start;
        let table_bytes = extent_table_bytes(count);
        {
            let mut fabric = self.engine.endpoint.fabric_mut();
            fabric.reserve(self.lane, Buffer::NewBlock, (table_at + table_bytes + 8) as usize);
            let image = fabric.buffer_mut(self.lane, Buffer::NewBlock);
            let short = || LayoutError::Truncated { what: "buffer", bytes: image.len() as u64 };
            if image.len() < table_at + table_bytes {
                return Err(short().into());
            }
            image[value_end..images].fill(0);
            image.copy_within(BLOCK_HEADER_BYTES as usize..value_start, head_at + 32);
            set_value_bytes(&mut image[table_at..], value_bytes as u64)?;
        }
        let stamp = BlockStamp {
            address: BlockAddress(0),
            generation: 0,
            writer: self.region.client_id,
            written_at_ms: self.engine.estimated_wall_clock_ns(taken_at) / 1_000_000,
            expires_at_ms: 0,
            is_pinned: lifetime.is_pinned,
        };
        let mut late = 0;
        let mut first = 0;
        while first < count {
            let here = (count - first).min(WRITES_PER_CHAIN);
            let mut chain = Chain::new();
            let mut blocks = [None; WRITES_PER_CHAIN];
            for (at, block) in blocks.iter_mut().enumerate().take(here) {
                let free = self.region.allocator().held_extent(self.lane, first + at);
                *block = Some(free);
                let part = (images + at * image_bytes, first + at);
                self.push_extent(&mut chain, free, (value_start, value_bytes), part, stamp)?;
            }
            match self.chain(chain.verbs(), self.now()).await {
                Ok(_) => {}
                Err(ChainError::Late) if late < LATE_ATTEMPTS_MAX => {
                    late += 1;
                    continue;
                }
                // The blocks are not linked, so nothing has happened that another client can see.
                Err(ChainError::Unknown) => return Err(Failure::Lost(self.region.index)),
                Err(error) => return Err(self.failed(error)),
            }
            let mut fabric = self.engine.endpoint.fabric_mut();
            for (at, free) in blocks.iter().flatten().enumerate() {
                let Verb::WritePart { from, at: start, bytes, .. } = chain.verbs[2 * at + 1] else {
                    continue;
                };
                let sum = fabric.part_sum(self.lane, 2 * at + 1, (from, start, bytes));
                let image = fabric.buffer_mut(self.lane, Buffer::NewBlock);
                set_extent(&mut image[table_at..], first + at, Extent::new(*free, sum))?;
            }
            first += here;
        }
        Ok((head_at, table_bytes))
    }

    /// Adds the WRITEs of an extent to a chain: header and key, then the part of the value.
    fn push_extent(
        &self,
        chain: &mut Chain,
        free: FreeBlock,
        (value_start, value_bytes): (usize, usize),
        (image_at, number): (usize, usize),
        stamp: BlockStamp,
    ) -> ProtocolResult<()> {
        let block = BlockRef { address: free.address, class: SizeClass::EXTENT, generation_low: 0 };
        self.region.geometry.check_block(block)?;
        let part_bytes = self.region.extent_shape.part_bytes(self.key_bytes) as usize;
        let part_start = number * part_bytes;
        let bytes = (value_bytes - part_start).min(part_bytes);
        let mut fabric = self.engine.endpoint.fabric_mut();
        let image = fabric.buffer_mut(self.lane, Buffer::NewBlock);
        image.copy_within(BLOCK_HEADER_BYTES as usize..value_start, image_at + 32);
        let stamp = BlockStamp { address: free.address, generation: free.generation, ..stamp };
        seal_extent(&mut image[image_at..], self.key_bytes as u16, bytes as u32, stamp)?;
        let remote = free.address.offset();
        chain.push(Verb::WritePart {
            remote,
            from: Buffer::NewBlock,
            at: image_at as u32,
            bytes: value_start.next_multiple_of(8) as u32,
        });
        chain.push(Verb::WritePart {
            remote: remote + extent_data_offset(self.key_bytes),
            from: Buffer::NewBlock,
            at: (value_start + part_start) as u32,
            bytes: bytes.next_multiple_of(8) as u32,
        });
        Ok(())
    }

    /// Notes the extents of the head that a swing of this target is about to unlink. They are held
    /// before the compare-and-swap, because from then on nothing else leads to them. Returns the
    /// target with what was learnt. One round trip, unless the session knows the head's table.
    ///
    /// The extents of a damaged head stay unknown: the server finds them once they are unlinked.
    pub(crate) async fn hold_old_extents(&self, target: &ProvenSlot) -> ProtocolResult<ProvenSlot> {
        let head = target.word.block()?;
        self.region.geometry.check_block(head)?;
        let is_known = target.generation.is_some_and(|generation| {
            let mut tables = self.region.extent_tables.borrow_mut();
            tables.recall(self.lane, head.address, generation)
        });
        let mut target = *target;
        if !is_known {
            self.read_block(head).await?;
            let fabric = self.engine.endpoint.fabric();
            let buffer = fabric.buffer(self.lane, Buffer::ReadBlock);
            let bytes = &buffer[..head.class.block_bytes() as usize];
            let Some(block) = Block::of_key(bytes, head, self.key_in(&fabric)) else {
                return Ok(target);
            };
            let Ok(table) = ExtentTable::of(&block, self.region.extent_shape) else {
                return Ok(target);
            };
            let generation = block.header_word().generation;
            let mut tables = self.region.extent_tables.borrow_mut();
            tables.learn(self.lane, (head.address, generation), &table);
            target.generation = Some(generation);
            target.expires_at_ms = Some(block.expires_at_ms());
        }
        let mut tables = self.region.extent_tables.borrow_mut();
        let extents = tables.lane(self.lane).extents.iter().map(Extent::unlinked);
        self.region.allocator().hold_old_extents(self.lane, extents);
        Ok(target)
    }

    /// The class of the block to which a slot leads, for the key and a value of this length.
    pub(crate) fn class_in_slot(&self, value_bytes: usize) -> ProtocolResult<SizeClass> {
        let class = self.region.extent_shape.class_in_slot(self.key_bytes, value_bytes);
        class.ok_or_else(|| {
            let (bytes, max) = (value_bytes, self.region.format.value_bytes_max as usize);
            OperationError::ValueTooLong { bytes, max }.into()
        })
    }
}
