//! What the operations of a session share: the endpoint, what is known of the region, the client's
//! location cache, and the allocator. Setup lives here, the operations in `protocol/`.

use std::cell::Cell;

use farside_fabric::waiting::WaitTimer;
use farside_fabric::{Buffer, Counters, Endpoint, Fabric, LaneId, Nanos, Verb};
use farside_layout::{
    DirectoryEntry, Format, FreeBlock, INCARNATIONS, LayoutError, STATE_OFFSET, SUPERBLOCK_BYTES,
    SizeClass, Superblock, prefix_of, proof_age_max_ns,
};

use crate::Action;
use crate::Lifetime;
use crate::allocator::{BlockSource, TakeResult};
use crate::directory::Directory;
use crate::failure::Failure;
use crate::location_cache::ConnectionCache;
use crate::open_region::{OpenRegion, ROOM_ALL};
use crate::waiting::{is_over, no_answer};
use crate::{Exhausted, OperationError};

/// The constants of `docs/protocol.md`, for one region over one fabric.
#[derive(Clone, Copy, Debug)]
pub struct Constants {
    /// GRACE: how long an unlinked block stays untouched.
    pub grace_ns: Nanos,
    /// What an operation believes for: 7/8 GRACE, because clocks drift.
    pub patience_ns: Nanos,
    /// How long a READ may take for its hints to be exact (invariant I7).
    pub exact_hint_read_ns_max: Nanos,
    /// How old a proof of a word may be for a compare-and-swap to rely on (invariant I4).
    pub proof_age_ns_max: Nanos,
    /// How late a posted chain can take effect.
    pub lateness_ns: Nanos,
}

impl Constants {
    fn new(format: &Format, fabric: &impl Fabric) -> Self {
        let timing = fabric.timing();
        let grace_ns = Nanos::from(format.grace_ms) * 1_000_000;
        Self {
            grace_ns,
            patience_ns: grace_ns / 8 * 7,
            exact_hint_read_ns_max: (INCARNATIONS - 1) * timing.round_trip_min_ns,
            proof_age_ns_max: proof_age_max_ns(grace_ns, timing.lateness_max_ns),
            lateness_ns: timing.lateness_max_ns,
        }
    }
}

/// Which region a session works on, and how.
#[derive(Clone, Copy, Debug)]
pub struct EngineOptions {
    /// The region's own number: another one at the same place is refused.
    pub region_id: [u8; 16],
    /// The region's length, in bytes.
    pub region_bytes: u64,
    /// The number that the server gave the client.
    pub client_id: u16,
    /// How much memory the client's location cache takes, in bytes.
    pub cache_bytes: usize,
    /// How many operations can be in flight.
    pub lanes: u16,
}

/// What a session has for its operations: the way to the region, the lanes, the clock.
pub struct Engine<F> {
    /// The way to the region.
    pub endpoint: Endpoint<F>,
    /// What the session knows of the region.
    pub region: OpenRegion,
    /// How many operations can be in flight.
    pub lanes: u16,
    /// Wall clock minus the fabric's clock, in nanoseconds.
    wall_offset_ns: u64,
    random: Cell<u64>,
    /// A pipeline has operations on the lanes.
    pub pipelined: Cell<bool>,
}

/// The lane that setup and synchronous calls use.
pub const LANE: LaneId = LaneId(0);
/// How much of the directory one READ brings, in bytes.
const DIRECTORY_READ_BYTES: u64 = 64 << 10;
impl<F: Fabric> Engine<F> {
    /// Reads and checks the superblock and the directory: a round trip for the first, one for each
    /// 64 KiB of the second.
    pub fn open(
        fabric: F,
        blocks: Box<dyn BlockSource + Send>,
        options: EngineOptions,
        cache: &ConnectionCache,
    ) -> Result<Self, Failure> {
        let wall = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let wall = wall.unwrap_or_default().as_nanos() as u64;
        Self::open_at(fabric, blocks, options, cache, wall)
    }

    /// [`Engine::open`] when the wall clock reads this many nanoseconds since 1970; it also seeds
    /// the random numbers.
    pub fn open_at(
        fabric: F,
        blocks: Box<dyn BlockSource + Send>,
        options: EngineOptions,
        cache: &ConnectionCache,
        wall: u64,
    ) -> Result<Self, Failure> {
        let endpoint = Endpoint::new(fabric, options.lanes);
        let bytes = SUPERBLOCK_BYTES.min(options.region_bytes / 8 * 8) as u32;
        let read = [Verb::Read { remote: 0, into: Buffer::ReadBlock, bytes }];
        endpoint.drive(endpoint.chain(LANE, &read, Nanos::MAX))?;
        let (_, format) =
            Superblock::decode(&endpoint.buffer(LANE, Buffer::ReadBlock), options.region_bytes)?;
        if format.region_id != options.region_id {
            return Err(LayoutError::NotARegion.into());
        }
        let constants = Constants::new(&format, &*endpoint.fabric());
        endpoint.fabric_mut().set_patience(constants.patience_ns);
        let now = endpoint.fabric().now();
        let engine = Self {
            endpoint,
            region: OpenRegion::new(format, constants, blocks, &options, cache, now),
            lanes: options.lanes,
            wall_offset_ns: wall.wrapping_sub(now),
            random: Cell::new(wall | 1),
            pipelined: Cell::new(false),
        };
        engine.endpoint.drive(engine.load_directory(LANE))?;
        Ok(engine)
    }

    /// Reads the directory in use.
    pub async fn load_directory(&self, lane: LaneId) -> Result<(), Failure> {
        let bytes = SUPERBLOCK_BYTES as u32;
        let read = [Verb::Read { remote: 0, into: Buffer::ReadBlock, bytes }];
        self.endpoint.chain(lane, &read, Nanos::MAX).await?;
        let depth = {
            let block = self.endpoint.buffer(lane, Buffer::ReadBlock);
            let (superblock, _) = Superblock::decode(&block, self.region.format.region_bytes)?;
            superblock.directory_depth(&self.region.geometry)?
        };
        let Some(offset) = self.region.geometry.directory_offset(depth) else {
            return Err(LayoutError::Field { field: "depth", value: depth.into() }.into());
        };
        let mut directory = Directory::with_depth(depth);
        let total = 8u64 << depth;
        for done in (0..total).step_by(DIRECTORY_READ_BYTES as usize) {
            let bytes = DIRECTORY_READ_BYTES.min(total - done) as u32;
            let read = [Verb::Read { remote: offset + done, into: Buffer::ReadBlock, bytes }];
            self.endpoint.chain(lane, &read, Nanos::MAX).await?;
            let block = self.endpoint.buffer(lane, Buffer::ReadBlock);
            directory.extend(&block[..bytes as usize], &self.region.geometry)?;
        }
        *self.region.directory.borrow_mut() = directory;
        Ok(())
    }

    /// READs the one directory entry for keys with this directory hash anew: its subtable was
    /// split. Two round trips.
    pub async fn reload_entry(&self, lane: LaneId, directory_hash: u32) -> Result<(), Failure> {
        let word = |remote| [Verb::Read { remote, into: Buffer::Window, bytes: 8 }];
        let found = || {
            let buffer = self.endpoint.buffer(lane, Buffer::Window);
            u64::from_le_bytes(buffer.first_chunk().copied().unwrap_or_default())
        };
        self.endpoint.chain(lane, &word(STATE_OFFSET), Nanos::MAX).await?;
        let depth = (found() >> 32).min(u8::MAX.into()) as u8;
        let Some(directory) = self.region.geometry.directory_offset(depth) else {
            return Err(LayoutError::Field { field: "depth", value: depth.into() }.into());
        };
        let number = u64::from(prefix_of(directory_hash, depth));
        let entry = directory + number * size_of::<DirectoryEntry>() as u64;
        self.endpoint.chain(lane, &word(entry), Nanos::MAX).await?;
        let entry = DirectoryEntry::from_bits(found());
        Ok(self.region.directory.borrow_mut().update(
            directory_hash,
            entry,
            &self.region.geometry,
        )?)
    }

    /// Receives what the server answered.
    #[inline]
    pub fn receive(&self) {
        self.region.allocator.borrow_mut().receive(|| self.endpoint.fabric().now());
    }

    /// Whether what was seen in a READ posted then is still to be believed (invariant I3).
    #[inline]
    pub fn is_fresh(&self, posted: Nanos) -> bool {
        self.endpoint.now().saturating_sub(posted) <= self.region.constants.patience_ns
    }

    /// A free block of the class, and when it was taken: at once, or after the server answered or
    /// GRACE ended.
    pub async fn take_block(
        &self,
        lane: LaneId,
        class: SizeClass,
    ) -> Result<(FreeBlock, Nanos), Failure> {
        let mut now = self.endpoint.now();
        let mut waiting = WaitTimer::since(now);
        loop {
            self.receive();
            let taken = self.region.allocator.borrow_mut().take(lane, class, now);
            let out_of_space = || {
                let what = Exhausted::Blocks { bytes: class.block_bytes() };
                Err(OperationError::OutOfSpace { what }.into())
            };
            match taken {
                TakeResult::Block(block) => {
                    if let Some(next) = self.region.allocator.borrow().upcoming() {
                        let bytes = class.block_bytes() as u32;
                        self.endpoint.fabric().prefetch(next.offset(), bytes);
                    }
                    return Ok((block, now));
                }
                TakeResult::Asked(_) if self.region.allocator.borrow().is_lost() => {
                    return Err(Failure::Disconnected);
                }
                TakeResult::Asked(_) if is_over(&waiting) => return Err(no_answer(&waiting)),
                TakeResult::Soon(_) | TakeResult::Resting(_) if is_over(&waiting) => {
                    return out_of_space();
                }
                TakeResult::Asked(until) | TakeResult::Soon(until) | TakeResult::Resting(until) => {
                    self.endpoint.sleep_until(lane, until).await;
                }
                TakeResult::Exhausted => return out_of_space(),
            }
            now = self.endpoint.now();
            waiting.advance(now);
        }
    }

    /// The wall clock, nanoseconds since 1970, by the fabric's clock.
    pub fn wall_clock_ns(&self, now: Nanos) -> u64 {
        now.wrapping_add(self.wall_offset_ns)
    }

    /// A random number below `bound`, good enough to keep sessions apart.
    pub fn random_below(&self, bound: u64) -> u64 {
        // xorshift64
        let mut state = self.random.get();
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        self.random.set(state);
        state % bound.max(1)
    }

    /// From now on INSERTs of this key do not look first; the next one claims this slot of its
    /// home row.
    pub fn expect_room(&self, key: &[u8], slot: usize) {
        self.region.room.set(ROOM_ALL);
        let hash = self.region.hasher.hash(key);
        let window = self.region.directory().window(hash);
        self.region.confirm_directory(hash, window);
        let slots = farside_layout::SLOTS_PER_ROW as u64;
        let mut before = self.random.get();
        while self.random_below(slots) != slot as u64 {
            before = self.random.get();
        }
        self.random.set(before);
    }

    /// Mixes into a hash what operations that begin later depend on.
    pub fn hash_state(&self, hasher: &mut impl std::hash::Hasher) {
        hasher.write_u64(self.random.get());
        hasher.write_u32(self.region.room.get());
        self.region.directory().hash_state(hasher);
        self.region.cache.hash_state(hasher);
        self.region.allocator().hash_state(hasher);
    }

    /// What all lanes did so far.
    pub fn counters(&self) -> Counters {
        self.endpoint.fabric().counters()
    }

    /// That a value may end when it is to.
    #[inline]
    pub fn check_end(&self, action: Action<'_>) -> Result<(), OperationError> {
        match action.lifetime() {
            Lifetime::Forever => Ok(()),
            lifetime => lifetime.check(self.endpoint.fabric().wall_clock_ns()),
        }
    }
}
