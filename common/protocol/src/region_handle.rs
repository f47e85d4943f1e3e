//! A region together with the engine that reaches it: opening it, and waits for its server.

use farside_fabric::wait_timer::WaitTimer;
use farside_fabric::{Buffer, ChainError, Fabric, InFlight, LaneId, Nanos, RegionIndex, Verb};
use farside_layout::{
    DirectoryEntry, FreeBlock, LayoutError, STATE_OFFSET, SUPERBLOCK_BYTES, SizeClass, Superblock,
    prefix_of,
};

use crate::allocator::{BlockSource, TakeResult};
use crate::directory::Directory;
use crate::engine::{Engine, LANE};
use crate::failure::Failure;
use crate::location_cache::ConnectionCache;
use crate::open_region::{Constants, OpenRegion, RegionOptions, UNUSED_SHARE_MAX};
use crate::operation_metrics::RetryReason;
use crate::waiting::{has_timed_out, no_answer};
use crate::{Exhausted, OperationError, ProtocolResult};

/// The size of one READ of the directory, in bytes.
const DIRECTORY_READ_BYTES: u64 = 64 << 10;

/// A region, and the engine of a session that reaches it.
pub struct RegionHandle<'e, F> {
    /// The state that all regions of the session share.
    pub engine: &'e Engine<F>,
    /// The session's state for this region.
    pub region: &'e OpenRegion,
}

impl<F> Clone for RegionHandle<'_, F> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<F> Copy for RegionHandle<'_, F> {}

impl<F: Fabric> Engine<F> {
    /// Pairs a region with this engine, which reaches it.
    #[inline]
    pub fn at<'e>(&'e self, region: &'e OpenRegion) -> RegionHandle<'e, F> {
        RegionHandle { engine: self, region }
    }

    /// Opens a region of the fabric: reads and checks its superblock and its directory. One round
    /// trip for the superblock, and one for each 64 KiB of the directory. No operation may be in
    /// flight.
    pub fn open(
        &self,
        index: RegionIndex,
        blocks: Box<dyn BlockSource + Send>,
        options: RegionOptions,
        cache: &ConnectionCache,
    ) -> Result<OpenRegion, Failure> {
        self.endpoint.drive(self.open_on(LANE, index, blocks, options, cache))
    }

    /// [`Engine::open`] on this lane, while others have operations in flight.
    pub async fn open_on(
        &self,
        lane: LaneId,
        index: RegionIndex,
        blocks: Box<dyn BlockSource + Send>,
        options: RegionOptions,
        cache: &ConnectionCache,
    ) -> Result<OpenRegion, Failure> {
        let bytes = SUPERBLOCK_BYTES.min(options.region_bytes / 8 * 8) as u32;
        let read = [Verb::Read { remote: 0, into: Buffer::ReadBlock, bytes }];
        let found = self.endpoint.chain(lane, index, &read, Nanos::MAX).await;
        found.map_err(|error| Failure::at(index, error))?;
        let (depth, format) = {
            let block = self.endpoint.buffer(lane, Buffer::ReadBlock);
            let (superblock, format) = Superblock::decode(&block, options.region_bytes)?;
            (superblock.directory_depth(&format.geometry())?, format)
        };
        if format.region_id != options.region_id {
            return Err(LayoutError::NotARegion.into());
        }
        let constants = Constants::new(&format, self.endpoint.fabric().timing(index));
        self.endpoint.fabric_mut().set_patience(index, constants.patience_ns);
        let (format, now) = ((format, constants), self.endpoint.fabric().now());
        let region = OpenRegion::new(index, format, blocks, (&options, self.lanes), cache, now);
        self.at(&region).load_directory(lane, depth).await?;
        Ok(region)
    }
}

impl<'e, F: Fabric> RegionHandle<'e, F> {
    /// Posts a chain: one round trip to the region. `posted` is the time, at which the client must
    /// still trust the server (invariant I24). Only for futures: a chain that is refused has its
    /// result at once, and no completion.
    #[inline(always)]
    pub(crate) fn chain(
        self,
        lane: LaneId,
        verbs: &[Verb],
        posted: Nanos,
        deadline: Nanos,
    ) -> InFlight<'e> {
        if !self.region.trust.holds_at(posted) {
            return self.engine.endpoint.refuse(lane, ChainError::Fenced);
        }
        self.post(lane, verbs, deadline)
    }

    /// As [`RegionHandle::chain`]. The compiler inlines that where it has few callers, in each PUT.
    #[inline(never)]
    pub(crate) fn chain_of_parts(
        self,
        lane: LaneId,
        verbs: &[Verb],
        posted: Nanos,
        deadline: Nanos,
    ) -> InFlight<'e> {
        self.chain(lane, verbs, posted, deadline)
    }

    /// Posts a chain of a caller that has seen that the client trusts the server. If the trust ends
    /// after that, the chain is posted all the same: its completion is awaited.
    #[inline(always)]
    pub(crate) fn post(self, lane: LaneId, verbs: &[Verb], deadline: Nanos) -> InFlight<'e> {
        self.engine.endpoint.chain(lane, self.region.index, verbs, deadline)
    }

    /// Executes a chain that changes nothing. One round trip.
    pub(crate) async fn read(self, lane: LaneId, verbs: &[Verb]) -> ProtocolResult<()> {
        let done = self.chain(lane, verbs, self.engine.endpoint.now(), Nanos::MAX).await;
        done.map(drop).map_err(|error| self.failed(error))
    }

    /// Returns an error if the client does not trust the server at this time (invariant I24).
    #[inline]
    pub(crate) fn check_trust(self, posted: Nanos) -> ProtocolResult<()> {
        match self.region.trust.holds_at(posted) {
            true => Ok(()),
            false => Err(Failure::Lost(self.region.index)),
        }
    }

    /// Converts the error of a chain at this region.
    #[cold]
    pub(crate) fn failed(self, error: ChainError) -> Failure {
        Failure::at(self.region.index, error)
    }

    /// Reads the whole directory, which has this depth.
    async fn load_directory(self, lane: LaneId, depth: u8) -> Result<(), Failure> {
        let Some(offset) = self.region.geometry.directory_offset(depth) else {
            return Err(LayoutError::Field { field: "depth", value: depth.into() }.into());
        };
        let mut directory = Directory::with_depth(depth);
        let directory_bytes = 8u64 << depth;
        for start in (0..directory_bytes).step_by(DIRECTORY_READ_BYTES as usize) {
            let bytes = DIRECTORY_READ_BYTES.min(directory_bytes - start) as u32;
            let read = [Verb::Read { remote: offset + start, into: Buffer::ReadBlock, bytes }];
            self.read(lane, &read).await?;
            let block = self.engine.endpoint.buffer(lane, Buffer::ReadBlock);
            directory.extend(&block[..bytes as usize], &self.region.geometry)?;
        }
        *self.region.directory.borrow_mut() = directory;
        Ok(())
    }

    /// Reads the directory entry for keys with this directory hash again, because its subtable was
    /// split. Two round trips.
    pub async fn reload_entry(self, lane: LaneId, directory_hash: u32) -> Result<(), Failure> {
        let word = |remote| [Verb::Read { remote, into: Buffer::Window, bytes: 8 }];
        let found = || {
            let buffer = self.engine.endpoint.buffer(lane, Buffer::Window);
            u64::from_le_bytes(buffer.first_chunk().copied().unwrap_or_default())
        };
        self.read(lane, &word(STATE_OFFSET)).await?;
        let depth = (found() >> 32).min(u8::MAX.into()) as u8;
        let Some(directory) = self.region.geometry.directory_offset(depth) else {
            return Err(LayoutError::Field { field: "depth", value: depth.into() }.into());
        };
        let number = u64::from(prefix_of(directory_hash, depth));
        let entry = directory + number * size_of::<DirectoryEntry>() as u64;
        self.read(lane, &word(entry)).await?;
        let entry = DirectoryEntry::from_bits(found());
        Ok(self.region.directory.borrow_mut().update(
            directory_hash,
            entry,
            &self.region.geometry,
        )?)
    }

    /// Receives the server's answers to requests for blocks and splits.
    #[inline]
    pub fn receive(self) {
        self.region.allocator().receive(|| self.engine.endpoint.fabric().now());
    }

    /// Whether the data of a READ that was posted at this time is still valid (invariant I3).
    #[inline]
    pub fn is_fresh(self, posted: Nanos) -> bool {
        self.region.is_fresh(posted, self.engine.endpoint.now())
    }

    /// Takes a free block of the class, or returns why there is none. Prefetches the next one.
    #[inline(always)]
    pub(crate) fn try_take_block(self, lane: LaneId, class: SizeClass, now: Nanos) -> TakeResult {
        let mut allocator = self.region.allocator();
        allocator.receive(|| self.engine.endpoint.fabric().now());
        let taken = allocator.take(lane, class, now);
        if let (TakeResult::Block(_), Some(next)) = (&taken, allocator.upcoming()) {
            let (fabric, bytes) = (self.engine.endpoint.fabric(), class.block_bytes());
            fabric.prefetch(self.region.index, next.claimed_offset(), bytes as u32);
        }
        taken
    }

    /// Takes a free block of the class, or of a larger one if the server says so. Returns the
    /// block, its class, and the time at which it was taken. If there is none, waits for the
    /// server's answer or for the end of GRACE.
    pub async fn take_block(
        self,
        lane: LaneId,
        mut class: SizeClass,
    ) -> Result<(FreeBlock, SizeClass, Nanos), Failure> {
        let mut now = self.engine.endpoint.now();
        let (mut waiting, mut waits) = (WaitTimer::since(now), false);
        loop {
            let bytes = class.block_bytes();
            let out_of_space = |what| Err(OperationError::OutOfSpace { what }.into());
            match self.try_take_block(lane, class, now) {
                TakeResult::Block(block) => return Ok((block, class, now)),
                // Each is larger than the one before, so this ends.
                TakeResult::Larger(larger) => class = larger,
                TakeResult::Asked(_) if self.region.allocator().is_lost() => {
                    return Err(Failure::Lost(self.region.index));
                }
                TakeResult::Asked(_) if has_timed_out(&waiting) => return Err(no_answer(&waiting)),
                TakeResult::Soon(_) | TakeResult::Resting(_) if has_timed_out(&waiting) => {
                    return out_of_space(Exhausted::Blocks { bytes });
                }
                TakeResult::Asked(until) | TakeResult::Soon(until) | TakeResult::Resting(until) => {
                    if !std::mem::replace(&mut waits, true) {
                        self.count_retry(RetryReason::Memory);
                    }
                    self.engine.endpoint.sleep_until(lane, until).await;
                }
                TakeResult::Exhausted => return out_of_space(Exhausted::Blocks { bytes }),
                TakeResult::AllPinned => return out_of_space(Exhausted::Pinned { bytes }),
                TakeResult::RoomAt(at) => {
                    let room_in_ms = at.saturating_sub(now) / 1_000_000;
                    return out_of_space(Exhausted::BlocksUntil { bytes, room_in_ms });
                }
            }
            now = self.engine.endpoint.now();
            waiting.advance(now);
        }
    }

    /// For tests: makes the next INSERT of this key blind. Searches for a state of the random
    /// numbers with which that INSERT claims this slot of the home row.
    pub fn expect_unused_slot(self, key: &[u8], slot: usize) {
        self.region.unused_share.set(UNUSED_SHARE_MAX);
        let hash = self.region.hasher.hash(key);
        let window = self.region.directory().window(hash);
        self.region.confirm_directory(hash, window);
        let slots = farside_layout::SLOTS_PER_ROW as u64;
        let mut before = self.engine.random.0.get();
        while self.engine.random.below(slots) != slot as u64 {
            before = self.engine.random.0.get();
        }
        self.engine.random.0.set(before);
    }

    /// Mixes the state on which later operations depend into a hash.
    pub fn hash_state(self, hasher: &mut impl std::hash::Hasher) {
        hasher.write_u64(self.engine.random.0.get());
        hasher.write_u32(self.region.unused_share.get());
        self.region.directory().hash_state(hasher);
        self.region.cache.hash_state(hasher);
        self.region.extent_tables.borrow().hash_state(hasher);
        self.region.allocator().hash_state(hasher);
    }
}
