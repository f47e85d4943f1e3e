//! The server's own way to change what clients compare-and-swap.

use std::sync::Arc;

use farside_fabric::shm::{Region, ShmFabric};
#[cfg(feature = "verbs")]
use farside_fabric::verbs::Loopback;
use farside_fabric::{AnyFabric, ChainError, Endpoint, Fabric, LaneId, Nanos, RegionIndex, Verb};
use farside_layout::{
    BlockHeader, BlockRef, Format, Geometry, Mark, SlotState, SlotWord, proof_age_max_ns,
};
use farside_protocol::split::{Split, SplitProgress, SubtableSplitter};
use farside_protocol::sweep::{clear, clear_left_by};
use zerocopy::IntoBytes;

use crate::content::read_block;
use crate::walk::Budget;

/// How many slots of a split are under way at a time: on RDMA each batch takes four round trips.
pub(crate) const LANES: u16 = 32;
/// The lane of whatever goes one by one.
const LANE: LaneId = LaneId(0);
/// The server's own region, the only one that its endpoint reaches.
const REGION: RegionIndex = RegionIndex::FIRST;

/// Verbs like those of clients (invariant I11), never fenced.
pub(crate) struct OwnEndpoint {
    endpoint: Box<Endpoint<AnyFabric>>,
    /// The other end of a connection through the device, which lives as long.
    _peer: Option<Box<dyn Send>>,
}

impl OwnEndpoint {
    pub(crate) fn over_memory(region: &Arc<Region>) -> Self {
        let fabric = AnyFabric::Shm(ShmFabric::new(region.clone(), None, LANES));
        Self { endpoint: Box::new(Endpoint::new(fabric, LANES)), _peer: None }
    }

    /// Fails if the device may not have the memory that splits need.
    #[cfg(feature = "verbs")]
    pub(crate) fn over(
        Loopback { fabric, peer }: Loopback,
        format: &Format,
    ) -> Result<Self, ChainError> {
        let endpoint = Endpoint::new(AnyFabric::Verbs(fabric), LANES);
        SubtableSplitter::new(&endpoint, REGION, LANES, format).reserve()?;
        Ok(Self { endpoint: Box::new(endpoint), _peer: Some(Box::new(peer)) })
    }

    /// How long after it was fenced a client's verbs can still take effect.
    pub(crate) fn fence_delay_ns(&self) -> Nanos {
        // Of a device the queue pairs were destroyed.
        if self.is_remote() { 0 } else { self.endpoint.fabric().timing(REGION).lateness_max_ns }
    }

    fn is_remote(&self) -> bool {
        self.endpoint.fabric().is_remote()
    }

    /// How old a word may be for a compare-and-swap to rely on (invariant I4).
    pub(crate) fn word_ns(&self, grace: Nanos) -> Nanos {
        proof_age_max_ns(grace, self.endpoint.fabric().timing(REGION).lateness_max_ns)
    }

    /// Empties a slot whose owner is gone; false if a client changed it meanwhile.
    pub(crate) fn clear(&self, slot: u64, word: SlotWord) -> Result<bool, ChainError> {
        let own = &*self.endpoint;
        own.drive(clear(own, REGION, slot, word))
    }

    /// Empties a slot if one of these clients, all fenced, is in the middle of an INSERT with this
    /// word; whether it did. A block of another client is read no further than its header.
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
        let own = &*self.endpoint;
        own.drive(clear_left_by((own, REGION), geometry, clients, slot, read))
    }

    /// Whether the slot held this word, which is replaced then.
    pub(crate) fn swap(&self, slot: u64, from: SlotWord, to: SlotWord) -> Result<bool, ChainError> {
        let (expected, desired) = (from.bits(), to.bits());
        let swap = Verb::CompareSwap { remote: slot, expected, desired };
        Ok(self.chain(&[swap], Nanos::MAX)? == expected)
    }

    /// Takes a LIVE slot out of service if it still holds this word, at the latest at `deadline`;
    /// false if it does not. The mark goes first (invariant I2). TOMB absorbs no PUT: the key is
    /// removed because of its value, so a PUT that lost to this must not call itself overwritten.
    pub(crate) fn unlink_to_tombstone(
        &self,
        slot: u64,
        word: SlotWord,
        block: BlockRef,
        deadline: Nanos,
    ) -> Result<bool, ChainError> {
        let tomb = word.with_state(SlotState::Tomb);
        let chain = [
            Verb::WriteU32 { remote: block.address.offset(), value: Mark::SUPERSEDED.bits() },
            Verb::CompareSwap { remote: slot, expected: word.bits(), desired: tomb.bits() },
        ];
        match self.chain(&chain, deadline) {
            Ok(found) => Ok(found == word.bits()),
            Err(ChainError::Late) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Empties a slot that was taken out of service GRACE ago. Its hint may stay (invariant I6).
    pub(crate) fn clear_tomb(&self, slot: u64, tomb: SlotWord) -> Result<(), ChainError> {
        self.swap(slot, tomb, tomb.emptied()).map(drop)
    }

    /// The time, on the clock of deadlines.
    pub(crate) fn now(&self) -> Nanos {
        self.endpoint.fabric().now()
    }

    fn chain(&self, chain: &[Verb], deadline: Nanos) -> Result<u64, ChainError> {
        self.endpoint.drive(self.endpoint.chain(LANE, REGION, chain, deadline))
    }

    /// Moves the entries of a subtable to two others and makes the directory, which is `depth`
    /// deep, lead there; returns how far that came, and the directory's depth afterwards.
    pub(crate) fn split(
        &self,
        split: &Split,
        format: &Format,
        depth: u8,
    ) -> Result<(SplitProgress, u8), ChainError> {
        self.drive(SubtableSplitter::new(&self.endpoint, REGION, LANES, format).run(split, depth))
    }

    /// Makes a place free that a split has emptied; false while a client has not cleared what it
    /// left there.
    pub(crate) fn vacate(&self, place: u64, format: &Format) -> Result<bool, ChainError> {
        self.drive(SubtableSplitter::new(&self.endpoint, REGION, LANES, format).vacate(place))
    }

    /// With chains of several lanes in flight, if there is a round trip to overlap: the processor
    /// waits for nothing.
    fn drive<T>(&self, future: impl Future<Output = T>) -> T {
        match self.is_remote() {
            true => self.endpoint.drive_lanes(future),
            false => self.endpoint.drive(future),
        }
    }
}
