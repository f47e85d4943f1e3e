//! READs of extents.

use farside_fabric::{Buffer, Fabric, LaneId, Nanos, Verb};
use farside_layout::{
    BLOCK_HEADER_BYTES, BlockRef, ExtentTable, HeaderWord, LayoutError, SizeClass, extend_sum,
    extent_data_offset,
};

use super::tables::Table;
use super::{Chain, split_at_word};
use crate::get::CachedRead;
use crate::region_handle::RegionHandle;
use crate::{Found, Operation, ProtocolResult, RetryState, read_block};

/// Where the last bytes of a value arrive in [`Buffer::Window`]. Before them is a header.
const TAIL_AT: u32 = 8;

/// A head that leads to a value. The lane has its table.
pub(super) struct Head {
    pub(super) block: BlockRef,
    /// The value, if the head was READ. Its length is that of the table.
    found: Option<Found>,
    /// The READ of the head that goes along with those of its extents, if it was not READ yet.
    read: Option<CachedRead>,
    /// When the READ of the head was posted.
    posted: Nanos,
}

/// What a GET found.
pub(super) enum Value {
    /// A value in [`Buffer::ReadBlock`].
    Short(Found),
    Extents(Head),
}

/// Extents that are READ, and where they go.
#[derive(Clone, Copy)]
pub(super) struct Parts {
    /// The first of them, and the one after the last.
    pub(super) first: usize,
    pub(super) end: usize,
    pub(super) into: Buffer,
    /// Where the first part begins in the buffer.
    pub(super) at: u64,
}

/// The result of the READs of a value's extents.
pub(super) enum ExtentsRead {
    /// All parts are in the buffer.
    Whole {
        /// The bytes after the last word of the caller's memory.
        tail: [u8; 8],
        /// When a READ was posted that has shown that the head is linked.
        proved_at: Nanos,
    },
    /// The head may have been replaced before the READs: they prove nothing.
    Stale,
}

impl<F: Fabric> RegionHandle<'_, F> {
    /// Gives the lane the table of a head that a READ has found, and that is in
    /// [`Buffer::ReadBlock`].
    pub(super) fn learn_table(
        self,
        lane: LaneId,
        block: BlockRef,
        found: Found,
        posted: Nanos,
    ) -> ProtocolResult<Head> {
        let buffer = self.engine.endpoint.buffer(lane, Buffer::ReadBlock);
        let key_bytes = found.value_start as usize - BLOCK_HEADER_BYTES as usize;
        let table =
            ExtentTable::decode(key_bytes, found.value_in(&buffer), self.region.extent_shape)?;
        let head = (block.address, found.version.generation());
        self.region.extent_tables.borrow_mut().learn(lane, head, &table);
        Ok(Head { block, found: Some(found), read: None, posted })
    }

    /// READs the extents of a head that a READ posted at `posted` has found, and that is in
    /// [`Buffer::ReadBlock`]. Returns where the value is; `None` if the head was replaced before
    /// the READs ended. One round trip for each four extents.
    pub(crate) async fn read_extents(
        self,
        lane: LaneId,
        block: BlockRef,
        found: Found,
        posted: Nanos,
    ) -> ProtocolResult<Option<Found>> {
        let key_bytes = found.value_start as usize - BLOCK_HEADER_BYTES as usize;
        let head = self.learn_table(lane, block, found, posted)?;
        let parts = self.all_parts(lane, &head);
        let read = self.read_parts::<1>(lane, &head, key_bytes, parts).await?;
        Ok(matches!(read, ExtentsRead::Whole { .. }).then(|| self.whole(lane, &head, found)))
    }

    /// All parts of the lane's table, to be READ to [`Buffer::ReadBlock`] behind the head.
    fn all_parts(self, lane: LaneId, head: &Head) -> Parts {
        let mut tables = self.region.extent_tables.borrow_mut();
        let end = tables.lane(lane).extents.len();
        Parts { first: 0, end, into: Buffer::ReadBlock, at: head.block.class.block_bytes() }
    }

    /// The value behind this head, whose parts are in [`Buffer::ReadBlock`].
    fn whole(self, lane: LaneId, head: &Head, found: Found) -> Found {
        let value_bytes = self.region.extent_tables.borrow_mut().lane(lane).value_bytes as u32;
        Found { value_start: head.block.class.block_bytes() as u32, value_bytes, ..found }
    }

    /// READs parts of the lane's table, and the head before them if it was not READ yet. Uses this
    /// lane and those after it, up to `LANES`. Their chains share doorbells.
    ///
    /// If they took longer than patience, the last READ is that of the head's header. If the head
    /// is still linked, it was linked all the time. If not, its extents rest for GRACE (invariant
    /// I26).
    pub(super) async fn read_parts<const LANES: usize>(
        self,
        lane: LaneId,
        head: &Head,
        key_bytes: usize,
        parts: Parts,
    ) -> ProtocolResult<ExtentsRead> {
        let (mut chains, mut posted) = ([Chain::EMPTY; LANES], [const { None }; LANES]);
        let lane_of = |at: usize| LaneId(lane.0 + at as u16);
        let lanes = LANES.min(usize::from(self.engine.lanes - lane.0));
        let generation = self.begin_reads((lane, lanes), parts);
        let header = Verb::Read { remote: head.block.offset(), into: Buffer::Window, bytes: 8 };
        let (mut damaged, mut header_posted, mut tail) = (None, None, [0; 8]);
        let (mut next, mut reads_head) = (parts.first, head.read.is_some());
        while next < parts.end || reads_head {
            let (mut count, now) = (0, self.engine.endpoint.now());
            while count < lanes && (next < parts.end || reads_head) {
                let chain = &mut chains[count];
                *chain = Chain { first: next, ..Chain::EMPTY };
                if std::mem::take(&mut reads_head) {
                    chain.push(read_block(head.block, head.block.class.block_bytes()));
                }
                while next < parts.end && self.push_read(lane, chain, key_bytes, parts)? {
                    next += 1;
                }
                if LANES == 1 && next == parts.end && chain.has_room(1) {
                    header_posted = Some(now);
                    chain.push(header);
                }
                count += 1;
            }
            for (at, posted) in posted.iter_mut().enumerate().take(count) {
                *posted =
                    Some(self.chain_of_parts(lane_of(at), chains[at].verbs(), now, Nanos::MAX));
            }
            let mut done = Ok(0);
            for posted in posted.iter_mut().filter_map(Option::take) {
                done = posted.await.and(done);
            }
            done.map_err(|error| self.failed(error))?;
            for (at, chain) in chains[..count].iter().enumerate() {
                let sums = self.check_sums(lane, lane_of(at), chain, (key_bytes, parts), &mut tail);
                damaged = damaged.or(sums);
            }
        }
        if header_posted.is_none() && (damaged.is_some() || !self.is_fresh(head.posted)) {
            header_posted = Some(self.engine.endpoint.now());
            self.read(lane, &[header]).await?;
        }
        let is_linked = {
            let window = self.engine.endpoint.buffer(lane, Buffer::Window);
            let bits = u64::from_le_bytes(window.first_chunk().copied().unwrap_or_default());
            let header = HeaderWord::from_bits(bits);
            header.generation == generation && !header.mark.is_set()
        };
        let proved_at = header_posted.filter(|_| is_linked);
        match damaged {
            None if proved_at.is_some() || self.is_fresh(head.posted) => {
                Ok(ExtentsRead::Whole { tail, proved_at: proved_at.unwrap_or(head.posted) })
            }
            Some(offset) if proved_at.is_some() => {
                Err(LayoutError::Checksum { what: "extent", offset }.into())
            }
            _ => Ok(ExtentsRead::Stale),
        }
    }

    /// Makes room for parts. Returns the generation of the head.
    fn begin_reads(self, (lane, lanes): (LaneId, usize), parts: Parts) -> u32 {
        let mut tables = self.region.extent_tables.borrow_mut();
        let table = tables.lane(lane);
        let mut fabric = self.engine.endpoint.fabric_mut();
        if parts.into != Buffer::Lent {
            let end = parts.at + table.value_bytes.next_multiple_of(8);
            let part_bytes = SizeClass::EXTENT.block_bytes();
            let most = parts.at + (parts.end - parts.first) as u64 * part_bytes;
            fabric.reserve(lane, parts.into, end.min(most) as usize);
        }
        for at in 0..lanes as u16 {
            fabric.reserve(LaneId(lane.0 + at), Buffer::Window, TAIL_AT as usize + 8);
        }
        table.generation
    }

    /// The lengths of a part, as [`split_at_word`] returns them.
    fn part_lengths(
        self,
        table: &Table,
        number: usize,
        key_bytes: usize,
        into: Buffer,
    ) -> (u64, u64) {
        let part_bytes = self.region.extent_shape.part_bytes(key_bytes);
        let left = table.value_bytes.saturating_sub(number as u64 * part_bytes);
        split_at_word(left.min(part_bytes), into)
    }

    /// Adds the READ of the chain's next extent. Returns false if the chain has no room.
    fn push_read(
        self,
        lane: LaneId,
        chain: &mut Chain,
        key_bytes: usize,
        parts: Parts,
    ) -> ProtocolResult<bool> {
        let mut tables = self.region.extent_tables.borrow_mut();
        let (table, number) = (tables.lane(lane), chain.first + chain.parts);
        let part_bytes = self.region.extent_shape.part_bytes(key_bytes);
        let (words, rest) = self.part_lengths(table, number, key_bytes, parts.into);
        let verbs = usize::from(words > 0) + usize::from(rest > 0);
        if !chain.has_room(verbs) {
            return Ok(false);
        }
        let block = self.region.geometry.check_block(table.extents[number].block())?;
        let remote = block.offset() + extent_data_offset(key_bytes);
        if words > 0 {
            let at = (parts.at + (number - parts.first) as u64 * part_bytes) as u32;
            let bytes = words.next_multiple_of(8) as u32;
            chain.push(Verb::ReadPart { remote, into: parts.into, at, bytes });
        }
        if rest > 0 {
            let (remote, into) = (remote + words, Buffer::Window);
            chain.push(Verb::ReadPart { remote, into, at: TAIL_AT, bytes: 8 });
        }
        chain.parts += 1;
        Ok(true)
    }

    /// Compares the sums of the parts that a chain has READ. Returns the offset of a damaged
    /// extent. Notes the bytes after the last word of the value.
    fn check_sums(
        self,
        lane: LaneId,
        by_lane: LaneId,
        chain: &Chain,
        (key_bytes, parts): (usize, Parts),
        tail: &mut [u8; 8],
    ) -> Option<u64> {
        let mut tables = self.region.extent_tables.borrow_mut();
        let mut fabric = self.engine.endpoint.fabric_mut();
        let (table, mut damaged) = (tables.lane(lane), None);
        let mut verbs = chain.verbs().iter().enumerate();
        for number in chain.first..chain.first + chain.parts {
            let (words, rest) = self.part_lengths(table, number, key_bytes, parts.into);
            let mut sum = 0;
            if words > 0
                && let Some((at, Verb::ReadPart { into, at: start, bytes, .. })) =
                    verbs.find(|(_, verb)| matches!(verb, Verb::ReadPart { .. }))
            {
                sum = fabric.part_sum(by_lane, at, (*into, *start, *bytes), 0);
            }
            if rest > 0 {
                let words = fabric.buffer(by_lane, Buffer::Window).get(TAIL_AT as usize..);
                *tail = words.and_then(<[u8]>::first_chunk).copied().unwrap_or_default();
                sum = extend_sum(sum, tail);
            }
            if !table.extents[number].has_sum(sum) {
                damaged = Some(table.extents[number].address().claimed_offset());
            }
        }
        damaged
    }
}

impl<F: Fabric> Operation<'_, F> {
    /// Finds the key's value. READs a head only if its table is not known.
    pub(super) async fn find_value(&self) -> ProtocolResult<Option<Value>> {
        if let Some(read) = self.handle().cached_head(self.hash, self.now()) {
            let block = read.location().block()?;
            let is_known = {
                let mut tables = self.region.extent_tables.borrow_mut();
                tables.recall(self.lane, block.address, read.location().generation())
            };
            if is_known {
                let posted = read.posted();
                let head = Head { block, found: None, read: Some(read), posted };
                return Ok(Some(Value::Extents(head)));
            }
            self.handle().read(self.lane, &[read_block(block, block.class.block_bytes())]).await?;
            if let Some(found) = self.complete_cached_read(&read) {
                return self.value_of(found);
            }
            return self.find_uncached_value().await;
        }
        let found = self.find().await?;
        self.value_of(found)
    }

    /// As [`Operation::find_value`], by the key's window.
    pub(super) async fn find_uncached_value(&self) -> ProtocolResult<Option<Value>> {
        let found = self.get_uncached().await?;
        self.value_of(found)
    }

    /// The value that was found, whose block is in [`Buffer::ReadBlock`].
    fn value_of(&self, found: Option<Found>) -> ProtocolResult<Option<Value>> {
        let (Some(found), Some((location, _))) = (found, self.located.get()) else {
            return Ok(found.map(Value::Short));
        };
        let block = self.region.geometry.block_of(location.word)?;
        if !block.class.is_head() {
            return Ok(Some(Value::Short(found)));
        }
        let head = self.handle().learn_table(self.lane, block, found, location.proved_at)?;
        Ok(Some(Value::Extents(head)))
    }

    /// READs parts of the value behind this head. Returns the value's version and expiry, and the
    /// last bytes as [`ExtentsRead::Whole`]; the inner `None` if it has expired. Without the outer
    /// one the head was replaced, or the cached location was wrong.
    pub(super) async fn read_value<const LANES: usize>(
        &self,
        head: &Head,
        parts: Parts,
    ) -> ProtocolResult<Option<Option<(Found, [u8; 8])>>> {
        let handle = self.handle();
        let read = handle.read_parts::<LANES>(self.lane, head, self.key_bytes, parts).await?;
        let ExtentsRead::Whole { tail, proved_at } = read else { return Ok(None) };
        let found = match &head.read {
            None => Some(head.found),
            Some(read) => self.complete_cached_read(&read.proved_at(proved_at)),
        };
        Ok(found.map(|found| found.map(|found| (found, tail))))
    }

    /// READs all parts of a value to [`Buffer::ReadBlock`], as [`Operation::read_value`].
    async fn read_whole(&self, head: &Head) -> ProtocolResult<Option<Option<Found>>> {
        let parts = self.handle().all_parts(self.lane, head);
        let read = self.read_value::<1>(head, parts).await?;
        let whole = |(found, _)| self.handle().whole(self.lane, head, found);
        Ok(read.map(|found| found.map(whole)))
    }

    /// Returns the key's value. One round trip if its location is cached; two if not; one if the
    /// key is absent. Mostly two, with three READs, if another session replaced the value since. A
    /// value with extents takes round trips for these.
    pub async fn get(&self) -> ProtocolResult<Option<Found>> {
        match self.find_value().await? {
            None => Ok(None),
            Some(Value::Short(found)) => Ok(Some(found)),
            Some(Value::Extents(head)) => match self.read_whole(&head).await? {
                Some(found) => Ok(found),
                None => self.get_again().await,
            },
        }
    }

    /// Returns the key's value by its window, with its extents.
    pub(crate) async fn get_again(&self) -> ProtocolResult<Option<Found>> {
        let mut tries = RetryState::default();
        loop {
            match self.find_uncached_value().await? {
                None => return Ok(None),
                Some(Value::Short(found)) => return Ok(Some(found)),
                Some(Value::Extents(head)) => {
                    if let Some(found) = self.read_whole(&head).await? {
                        return Ok(found);
                    }
                }
            }
            self.try_again(&mut tries).await?;
        }
    }
}

impl Head {
    /// The READ of the head was done, so that it is not repeated.
    pub(super) fn after_read(self, found: Found) -> Self {
        Self { found: Some(found), read: None, ..self }
    }
}
