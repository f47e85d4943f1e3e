//! Drivers of published stores on Farside's fabrics. Each driver issues the sequence of verbs of
//! its store. It is written from the published description, not from the store's code, and its file
//! says what it leaves out. The drivers work in free blocks of a kv-server ([`Segments`]), so that
//! they use the same memory region and the same fabric as Farside.
//!
//! A driver supports one client: several would need the parts that are left out. Its cache of
//! locations has no bound.

pub mod fusee;
pub mod index;
pub mod lanes;
pub mod race;
pub mod swarm;
#[cfg(test)]
mod tests;

use std::cell::{Ref, RefCell};
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};

use farside_bench::records::Key;
use farside_bench::store::Action;
use farside_fabric::{Buffer, ChainError, Endpoint, Fabric, LaneId, Nanos, RegionIndex, Verb};
use farside_layout::hash::KeyHasher;
use farside_layout::{BLOCK_BYTES_MAX, BLOCK_UNIT};
use index::{KeySlots, Slot, Word, words};

/// Why an operation of a peer fails.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PeerError {
    /// A verb failed.
    #[error("a verb failed: {0}")]
    Chain(#[from] ChainError),
    /// There is no free piece of memory, or no free slot.
    #[error("its memory is full, and it does not grow: leave out workload d, which inserts")]
    OutOfMemory,
    /// Other operations kept changing the slot.
    #[error("gave up after {0} attempts, because other operations kept changing the same slot")]
    Contended(usize),
}

/// The result of a peer's operation.
pub type Result<T> = std::result::Result<T, PeerError>;

/// Limit on the attempts of an operation. After the last one it fails.
const ATTEMPTS_MAX: usize = 1000;

/// The capacity that a peer needs.
#[derive(Clone, Copy, Debug)]
pub struct PeerDemand {
    /// Limit on the number of records.
    pub records: u64,
    /// The length of each value, in bytes.
    pub value_bytes: usize,
    /// Limit on the operations in flight.
    pub depth: u16,
}

/// The number of pieces that belong to no record: operations use them, or they rest before
/// reuse.
const SPARE_PIECES: u64 = 1 << 14;

impl PeerDemand {
    /// The number of pieces of memory: each record has one, and every change takes another.
    fn pieces(&self) -> u64 {
        self.records + SPARE_PIECES + u64::from(self.depth)
    }
}

/// A published store, over any fabric.
pub trait Peer {
    /// The fabric that executes the store's verbs.
    type Fabric: Fabric;
    /// How many lanes of the fabric an operation uses. The second lane of operation n is n + depth.
    const LANES: u16 = 1;

    /// The endpoint that its verbs go through.
    fn endpoint(&self) -> &Endpoint<Self::Fabric>;

    /// Puts the key's value into the buffer. Returns whether the key is there.
    fn get(
        &self,
        lane: LaneId,
        key: &Key,
        value: &mut Vec<u8>,
    ) -> impl Future<Output = Result<bool>>;

    /// Stores a value; for an INSERT only if the key is absent. Returns whether it stored the
    /// value.
    fn store(
        &self,
        lane: LaneId,
        key: &Key,
        value: &[u8],
        is_insert: bool,
    ) -> impl Future<Output = Result<bool>>;

    /// Performs one operation, on a lane of its own. Returns whether the key was as required. A GET
    /// puts the value into the buffer. A change takes the value from the buffer.
    fn perform(
        &self,
        lane: LaneId,
        action: Action,
        key: &Key,
        value: &mut Vec<u8>,
    ) -> impl Future<Output = Result<bool>> {
        async move {
            match action {
                Action::Get => self.get(lane, key, value).await,
                Action::Put => self.store(lane, key, value, false).await,
                Action::Insert => self.store(lane, key, value, true).await,
            }
        }
    }

    /// Waits for the chains that ended operations left in flight.
    fn wait_for_chains(&self) -> impl Future<Output = Result<()>> {
        async { Ok(()) }
    }

    /// Whether ended operations left no chain in flight.
    fn has_no_chain_in_flight(&self) -> bool {
        true
    }
}

/// A client's cache of facts about keys, by their hash. Always empty if the cache is not used.
struct Cache<T> {
    known: RefCell<HashMap<u64, T, BuildHasherDefault<Hashed>>>,
    is_used: bool,
}

impl<T: Copy> Cache<T> {
    fn new(is_used: bool) -> Self {
        Self { known: RefCell::default(), is_used }
    }

    #[inline]
    fn get(&self, tag: u64) -> Option<T> {
        self.known.borrow().get(&tag).copied()
    }

    #[inline]
    fn insert(&self, tag: u64, value: T) {
        if self.is_used {
            self.known.borrow_mut().insert(tag, value);
        }
    }

    fn remove(&self, tag: u64) {
        self.known.borrow_mut().remove(&tag);
    }
}

/// A hasher for keys that are hashes already.
#[derive(Default)]
struct Hashed(u64);

impl Hasher for Hashed {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {}

    #[inline]
    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
}

/// How many bytes one WRITE zeroes.
const ZEROS_BYTES: u64 = 64 << 10;
/// The deadline of the peers' verbs, which is never reached: the published descriptions have none.
const NO_DEADLINE: Nanos = Nanos::MAX;
/// The region: peers use one region only.
const REGION: RegionIndex = RegionIndex::FIRST;
/// The lane for zeroing memory, when no other lane is in use.
const LANE: LaneId = LaneId(0);

/// A fabric on the region, and a hasher for keys.
pub struct PeerEndpoint<F> {
    /// The endpoint of the protocol.
    pub inner: Endpoint<F>,
    /// The same hash function as Farside's. Farside takes its key from the region.
    pub hasher: KeyHasher,
}

impl<F: Fabric> PeerEndpoint<F> {
    /// An endpoint over a fabric that has this number of lanes, each with buffers of this length.
    pub fn new(mut fabric: F, lanes: u16, bytes: u64) -> Self {
        for lane in (0..lanes).map(LaneId) {
            for buffer in [Buffer::Window, Buffer::NewBlock, Buffer::ReadBlock] {
                fabric.reserve(lane, buffer, bytes.max(256) as usize);
            }
        }
        let hasher = KeyHasher::new(b"of the benchmark");
        Self { inner: Endpoint::new(fabric, lanes), hasher }
    }

    /// Posts a chain and waits for it: one round trip.
    #[inline]
    pub async fn chain(&self, lane: LaneId, verbs: &[Verb]) -> Result<u64> {
        Ok(self.inner.chain(lane, REGION, verbs, NO_DEADLINE).await?)
    }

    /// Posts a chain without waiting for it; [`Endpoint::take_result`] returns its result.
    #[inline]
    pub fn post(&self, lane: LaneId, verbs: &[Verb]) {
        self.inner.fabric_mut().post(lane, REGION, verbs, NO_DEADLINE);
    }

    /// The content of a buffer. Do not hold the reference across an `.await`.
    #[inline]
    pub fn buffer(&self, lane: LaneId, buffer: Buffer) -> Ref<'_, [u8]> {
        self.inner.buffer(lane, buffer)
    }

    /// Fills the buffer of the next WRITE.
    #[inline]
    pub fn fill(&self, lane: LaneId, fill: impl FnOnce(&mut [u8])) {
        fill(self.inner.fabric_mut().buffer_mut(lane, Buffer::NewBlock));
    }

    /// Finds the first slot with a wanted word in the choices just read, from this number on.
    #[inline]
    pub fn find(
        &self,
        lane: LaneId,
        slots: &KeySlots,
        from: usize,
        wanted: impl Fn(Word) -> bool,
    ) -> Option<Slot> {
        slots.find(|buffer| words(&self.buffer(lane, buffer)), from, wanted)
    }

    /// Zeroes these pieces. Nothing else may be in flight.
    pub fn clear(&self, pieces: &Pieces) -> Result<()> {
        self.inner.fabric_mut().reserve(LANE, Buffer::NewBlock, ZEROS_BYTES as usize);
        self.fill(LANE, |image| image.fill(0));
        for (start, bytes) in pieces.stretches() {
            for at in (0..bytes).step_by(ZEROS_BYTES as usize) {
                let bytes = ZEROS_BYTES.min(bytes - at) as u32;
                let write = Verb::Write { remote: start + at, from: Buffer::NewBlock, bytes };
                self.inner.drive_lanes(self.chain(LANE, &[write]))?;
            }
        }
        Ok(())
    }
}

/// How much of a block of the largest class a peer uses: the whole cache lines after the header.
pub const SEGMENT_BYTES: u64 = BLOCK_BYTES_MAX - BLOCK_UNIT;

/// The number of segments that `count` pieces of `piece_bytes` need, each on a cache line of its
/// own.
pub const fn segments(piece_bytes: u64, count: u64) -> u64 {
    let per_segment = SEGMENT_BYTES / piece_bytes.next_multiple_of(BLOCK_UNIT);
    count.div_ceil(per_segment)
}

/// Memory that is not used yet.
pub struct Segments {
    /// The start of each segment in the region.
    segments: Vec<u64>,
}

impl Segments {
    /// Segments of [`SEGMENT_BYTES`] that start at these multiples of a cache line.
    pub fn new(segments: Vec<u64>) -> Self {
        Self { segments }
    }

    /// Takes as many segments as `count` pieces need.
    pub fn cut(&mut self, bytes: u64, count: u64) -> Result<Pieces> {
        let bytes = bytes.next_multiple_of(BLOCK_UNIT);
        let left = self.segments.len().checked_sub(segments(bytes, count) as usize);
        let starts = self.segments.split_off(left.ok_or(PeerError::OutOfMemory)?);
        Ok(Pieces { starts, per_segment: SEGMENT_BYTES / bytes, bytes, count })
    }
}

/// Pieces of one length.
pub struct Pieces {
    starts: Vec<u64>,
    per_segment: u64,
    bytes: u64,
    count: u64,
}

impl Pieces {
    /// The number of pieces.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The start of a piece in the region.
    #[inline]
    pub fn at(&self, index: u64) -> u64 {
        let (segment, within) = (index / self.per_segment, index % self.per_segment);
        self.starts[segment as usize] + within * self.bytes
    }

    /// The ranges of memory that contain the pieces: start, and length in bytes.
    pub fn stretches(&self) -> impl Iterator<Item = (u64, u64)> {
        self.starts.iter().map(|start| (*start, self.per_segment * self.bytes))
    }
}

/// Pieces that are taken and given back. The piece that was free for the longest time is taken
/// first, because only this delay protects a reader from memory that has a new use.
pub struct Heap {
    pieces: Pieces,
    /// The number of pieces that were taken at least once.
    fresh: u64,
    free: VecDeque<u64>,
}

impl Heap {
    /// A heap with all pieces free.
    pub fn new(pieces: Pieces) -> Self {
        let free = VecDeque::with_capacity(pieces.count as usize);
        Self { pieces, fresh: 0, free }
    }

    /// Takes a free piece. Returns its start.
    #[inline]
    pub fn take(&mut self) -> Result<u64> {
        if self.fresh < self.pieces.count() {
            self.fresh += 1;
            return Ok(self.pieces.at(self.fresh - 1));
        }
        self.free.pop_front().ok_or(PeerError::OutOfMemory)
    }

    /// Gives a piece back.
    #[inline]
    pub fn give(&mut self, at: u64) {
        self.free.push_back(at);
    }
}
