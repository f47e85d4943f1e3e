//! Values that are longer than a block: writing, reading and retiring their extents.
//!
//! A slot leads to the head, which names the extents (`farside_layout::ExtentTable`). The head is
//! an ordinary block to all operations on slots. What this module adds:
//!
//! - A PUT WRITEs the extents before the head exists, so no reader sees a part of a value.
//! - A GET READs the extents behind their head. The session remembers the tables of the heads that
//!   it has seen, so a GET of a cached location READs head and extents together.
//! - The session that unlinks a head owns its extents (invariant I27). It learns them before the
//!   compare-and-swap, so that the server never takes them for lost. It frees them itself only if
//!   it has written the head, with exactly this table. Otherwise it gives the head to the server,
//!   which compares the extents' headers: a hostile writer may have made a head that names blocks
//!   of other keys.

use std::hash::{BuildHasher, RandomState};

use farside_fabric::{Buffer, CHAIN_VERBS_MAX, Fabric, LaneId, Verb};
use farside_layout::{
    Block, BlockAddress, BlockHeader, Extent, ExtentTable, FreeBlock, NamedBlock, SizeClass,
    block_bytes,
};
use zerocopy::{FromBytes, IntoBytes};

use super::{Operation, OperationError, ProtocolResult, ProvenSlot};

mod direct;
mod read;
mod write;

pub use direct::ReadRange;
pub use write::ExtentWriter;

/// How many tables of extents a session remembers.
const TABLES: usize = 256;
/// How many lanes a synchronous call uses, whose chains share doorbells.
pub(crate) const LANES_MAX: usize = 8;

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
    /// The heads that the session has written and linked, by their addresses.
    own: Vec<OwnHead>,
    /// Makes the digests of their tables, which no other client can foresee.
    digests: RandomState,
}

/// A head that the session has written.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct OwnHead {
    head: BlockAddress,
    generation: u32,
    digest: u64,
}

impl ExtentTables {
    pub(crate) fn new(lanes: u16) -> Self {
        let by_lane = (0..lanes).map(|_| Table::default()).collect();
        let (seen, own) = (Vec::new(), Vec::new());
        Self { seen, by_lane, own, digests: RandomState::new() }
    }

    /// Mixes the heads whose tables are known into a hash.
    pub(crate) fn hash_state(&self, hasher: &mut impl std::hash::Hasher) {
        for seen in &self.seen {
            hasher.write_u64(u64::from(seen.head.0) << 32 | u64::from(seen.generation));
        }
        for own in &self.own {
            hasher.write_u64(u64::from(own.head.0) << 32 | u64::from(own.generation));
        }
    }

    fn own_head(&self, (head, generation): (BlockAddress, u32), extents: &[Extent]) -> OwnHead {
        OwnHead { head, generation, digest: self.digests.hash_one(extents.as_bytes()) }
    }

    /// Notes that the session has written and linked this head.
    fn note_own(&mut self, head: (BlockAddress, u32), table: &ExtentTable<'_>) {
        let own = self.own_head(head, table.extents);
        if self.own.is_empty() {
            self.own.resize(TABLES, OwnHead::default());
        }
        self.own[Self::place(head.0)] = own;
    }

    /// Whether the session has written this head, with the table that the lane has.
    fn is_own(&self, lane: LaneId, head: BlockAddress) -> bool {
        let table = &self.by_lane[usize::from(lane.0)];
        let own = self.own_head((table.head, table.generation), &table.extents);
        table.head == head && self.own.get(Self::place(head)) == Some(&own)
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
        let Self { seen, by_lane, .. } = self;
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

/// The verbs of a chain that is being made, and which of them transfer parts of a value.
#[derive(Clone, Copy)]
struct Chain {
    verbs: [Verb; CHAIN_VERBS_MAX],
    count: usize,
    /// The extent of the first part, and the number of parts.
    first: usize,
    parts: usize,
}

impl Chain {
    const EMPTY: Self = {
        let verb = Verb::Read { remote: 0, into: Buffer::Window, bytes: 0 };
        Self { verbs: [verb; _], count: 0, first: 0, parts: 0 }
    };

    fn has_room(&self, verbs: usize) -> bool {
        self.count + verbs <= self.verbs.len()
    }

    fn push(&mut self, verb: Verb) {
        self.verbs[self.count] = verb;
        self.count += 1;
    }

    fn verbs(&self) -> &[Verb] {
        &self.verbs[..self.count]
    }
}

/// Divides a part that is in the caller's memory: the whole words, and the bytes after them. These
/// go by a buffer of the lane, because verbs transfer whole words.
fn split_at_word(bytes: u64, buffer: Buffer) -> (u64, u64) {
    let rest = if buffer == Buffer::Lent { bytes % 8 } else { 0 };
    (bytes - rest, rest)
}

impl<F: Fabric> Operation<'_, F> {
    /// Notes that the lane's new head, whose image begins at this offset of [`Buffer::NewBlock`],
    /// is linked.
    #[cold]
    pub(crate) fn note_own_head(&self, head: FreeBlock, at: usize) {
        let fabric = self.engine.endpoint.fabric();
        let image = fabric.buffer(self.lane, Buffer::NewBlock).get(at..).unwrap_or_default();
        let start = block_bytes(self.key_bytes, 0) as usize;
        let Ok((header, _)) = BlockHeader::ref_from_prefix(image) else { return };
        let table = image.get(start..header.block_bytes() as usize).unwrap_or_default();
        let table = ExtentTable::decode(self.key_bytes, table, self.region.extent_shape);
        if let Ok(table) = table {
            let mut tables = self.region.extent_tables.borrow_mut();
            tables.note_own((head.address, head.generation), &table);
        }
    }

    /// Frees the head that the lane has just unlinked, and its extents.
    pub(crate) fn free_old_head(&self, head: NamedBlock) {
        let is_own = self.region.extent_tables.borrow().is_own(self.lane, head.address);
        let mut allocator = self.region.allocator();
        if is_own {
            allocator.retire_old_extents(self.lane, self.now());
        } else {
            allocator.give_old_head(self.lane, head.class, head.address);
        }
    }

    /// Notes the extents of the head that a swing of this target is about to unlink. They are held
    /// before the compare-and-swap, because from then on nothing else leads to them. Returns the
    /// target with what was learnt. One round trip, unless the session knows the head's table.
    ///
    /// The extents of a damaged head stay unknown: the server finds them once they are unlinked.
    pub(crate) async fn hold_old_extents(&self, target: &ProvenSlot) -> ProtocolResult<ProvenSlot> {
        let head = self.region.geometry.block_of(target.word)?;
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
