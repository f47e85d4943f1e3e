//! The server's own endpoint, with which it changes the words that clients CAS.

use std::sync::Arc;

use farside_fabric::memory::Region;
use farside_fabric::shm::{LATENESS_MAX_NS, ShmFabric};
#[cfg(feature = "verbs")]
use farside_fabric::verbs::Loopback;
use farside_fabric::{AnyFabric, ChainError, Endpoint, Fabric, Nanos, RegionIndex};
use farside_layout::{BlockHeader, BlockRef, Format, Geometry, SlotWord, proof_age_max_ns};
use farside_protocol::removal::{clear_tomb, unlink_to_tombstone};
use farside_protocol::split::{Split, SplitProgress, SubtableSplitter};
use farside_protocol::sweep::{clear, clear_left_by};
use zerocopy::IntoBytes;

use crate::region::content::Budget;
use crate::region::content::read_block;

/// How many slots a split moves at a time. Over RDMA each batch takes four round trips.
pub(crate) const LANES: u16 = 32;
/// The only region that the endpoint reaches.
const REGION: RegionIndex = RegionIndex::FIRST;

/// Executes verbs as a client does (invariant I11), but is never fenced.
pub(crate) struct OwnEndpoint {
    endpoint: Box<Endpoint<AnyFabric>>,
    fence_delay_ns: Nanos,
    /// The peer queue pair of the loopback connection, which must live as long as the endpoint.
    _peer: Option<Box<dyn Send>>,
}

impl OwnEndpoint {
    pub(crate) fn over_memory(region: &Arc<Region>) -> Self {
        let fabric = AnyFabric::Shm(ShmFabric::new(region.clone(), None, LANES));
        let endpoint = Box::new(Endpoint::new(fabric, LANES));
        Self { endpoint, fence_delay_ns: LATENESS_MAX_NS, _peer: None }
    }

    /// The endpoint over a device. `fence_delay_ns` is the result of
    /// [`OwnEndpoint::fence_delay_ns`].
    ///
    /// # Errors
    /// The device cannot register the memory that splits need.
    #[cfg(feature = "verbs")]
    pub(crate) fn over(
        Loopback { fabric, peer }: Loopback,
        format: &Format,
        fence_delay_ns: Nanos,
    ) -> Result<Self, ChainError> {
        let endpoint = Endpoint::new(AnyFabric::Verbs(fabric), LANES);
        SubtableSplitter::new(&endpoint, REGION, LANES, format).reserve()?;
        let (endpoint, peer) = (Box::new(endpoint), Some(Box::new(peer) as Box<dyn Send>));
        Ok(Self { endpoint, fence_delay_ns, _peer: peer })
    }

    /// Returns how long the verbs of a client can still take effect after the server fenced it.
    pub(crate) fn fence_delay_ns(&self) -> Nanos {
        self.fence_delay_ns
    }

    fn is_remote(&self) -> bool {
        self.endpoint.fabric().is_remote()
    }

    /// Returns how old a word may be for a CAS that expects it (invariant I4).
    pub(crate) fn proof_age_max_ns(&self, grace: Nanos) -> Nanos {
        proof_age_max_ns(grace, self.endpoint.fabric().timing(REGION).lateness_max_ns)
    }

    /// Empties the slot of a fenced client. Returns false if another client changed it meanwhile.
    pub(crate) fn clear(&self, slot: u64, word: SlotWord) -> Result<bool, ChainError> {
        let endpoint = &*self.endpoint;
        endpoint.drive(clear(endpoint, REGION, slot, word))
    }

    /// Empties a slot if its word is an unfinished INSERT of one of these fenced clients. Returns
    /// whether it emptied the slot. Reads only the header of a block of another client.
    pub(crate) fn clear_left_by(
        &self,
        clients: &[u16],
        slot: (u64, SlotWord),
        (region, geometry): (&Region, &Geometry),
        budget: &mut Budget,
    ) -> Result<bool, ChainError> {
        let read = async |block: BlockRef| {
            let is_theirs = |header: &BlockHeader| clients.contains(&header.writer());
            let words = read_block(region, block, budget, is_theirs)?;
            Ok(words.unwrap_or_default().as_bytes().to_vec())
        };
        let endpoint = &*self.endpoint;
        endpoint.drive(clear_left_by((endpoint, REGION), geometry, clients, slot, read))
    }

    /// Makes a LIVE slot a tombstone if it still has this word, at the latest at `deadline`.
    /// Returns false if the word has changed, or if the deadline has passed.
    pub(crate) fn unlink_to_tombstone(
        &self,
        slot: u64,
        word: SlotWord,
        block: BlockRef,
        deadline: Nanos,
    ) -> Result<bool, ChainError> {
        let endpoint = &*self.endpoint;
        endpoint.drive(unlink_to_tombstone((endpoint, REGION), (slot, word), block, deadline))
    }

    /// Empties a slot that became a tombstone GRACE ago.
    pub(crate) fn clear_tomb(&self, slot: u64, tomb: SlotWord) -> Result<(), ChainError> {
        let endpoint = &*self.endpoint;
        endpoint.drive(clear_tomb((endpoint, REGION), slot, tomb))
    }

    /// Returns the present time on the clock of deadlines.
    pub(crate) fn now(&self) -> Nanos {
        self.endpoint.fabric().now()
    }

    /// Returns the wall clock, in milliseconds since 1970.
    pub(crate) fn wall_ms(&self) -> u64 {
        self.endpoint.fabric().wall_clock_ns() / 1_000_000
    }

    /// Moves the entries of a subtable to two others, and makes the directory of depth `depth` lead
    /// there. Returns the progress, and the directory's depth afterwards.
    pub(crate) fn split(
        &self,
        split: &Split,
        format: &Format,
        depth: u8,
    ) -> Result<(SplitProgress, u8), ChainError> {
        self.drive(SubtableSplitter::new(&self.endpoint, REGION, LANES, format).run(split, depth))
    }

    /// Frees a place that a split has emptied. Returns false while a client has an unfinished
    /// INSERT in it.
    pub(crate) fn vacate(&self, place: u64, format: &Format) -> Result<bool, ChainError> {
        self.drive(SubtableSplitter::new(&self.endpoint, REGION, LANES, format).vacate(place))
    }

    /// Runs a future to its end. Over a device several lanes are in flight, to overlap round trips.
    /// The CPU has no round trips, so it runs one chain after the other.
    fn drive<T>(&self, future: impl Future<Output = T>) -> T {
        match self.is_remote() {
            true => self.endpoint.drive_lanes(future),
            false => self.endpoint.drive(future),
        }
    }
}
