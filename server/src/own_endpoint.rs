//! The server's own way to change what clients compare-and-swap.

use std::sync::Arc;

use farside_fabric::shm::{Region, ShmFabric};
use farside_fabric::verbs::{Loopback, LoopbackPeer, VerbsFabric};
use farside_fabric::{ChainError, Endpoint, Fabric, LaneId, Nanos, Verb};
use farside_layout::{
    BlockHeader, BlockRef, Format, Geometry, Mark, SlotState, SlotWord, proof_age_max_ns,
};
use farside_protocol::split::{Split, SplitProgress, SubtableSplitter};
use farside_protocol::sweep::{clear, clear_left_by};
use zerocopy::IntoBytes;

use crate::content::{ReadBudget, read_block};

/// How many slots of a split are under way at a time: on RDMA each batch takes four round trips.
pub(crate) const LANES: u16 = 32;
/// The lane of whatever goes one by one.
const LANE: LaneId = LaneId(0);

/// Verbs like everybody's (invariant I11), never fenced.
pub(crate) enum OwnEndpoint {
    Memory(Box<Endpoint<ShmFabric>>),
    /// With the other end, which lives as long.
    Device(Box<Endpoint<VerbsFabric>>, #[allow(dead_code, reason = "only kept")] LoopbackPeer),
}

impl OwnEndpoint {
    pub(crate) fn over_memory(region: &Arc<Region>) -> Self {
        let fabric = ShmFabric::new(region.clone(), None, LANES);
        Self::Memory(Box::new(Endpoint::new(fabric, LANES)))
    }

    /// Fails if the device may not have the memory that splits need.
    pub(crate) fn over(
        Loopback { fabric, peer }: Loopback,
        format: &Format,
    ) -> Result<Self, ChainError> {
        let endpoint = Endpoint::new(fabric, LANES);
        SubtableSplitter::new(&endpoint, LANES, format).reserve()?;
        Ok(Self::Device(Box::new(endpoint), peer))
    }

    /// How long after it was fenced a client's verbs can still take effect.
    pub(crate) fn settles_ns(&self) -> Nanos {
        match self {
            Self::Memory(endpoint) => endpoint.fabric().timing().lateness_max_ns,
            // Its queue pairs were destroyed.
            Self::Device(..) => 0,
        }
    }

    /// How old a word may be for a compare-and-swap to rely on (invariant I4).
    pub(crate) fn word_ns(&self, grace: Nanos) -> Nanos {
        let lateness = match self {
            Self::Memory(endpoint) => endpoint.fabric().timing().lateness_max_ns,
            Self::Device(endpoint, _) => endpoint.fabric().timing().lateness_max_ns,
        };
        proof_age_max_ns(grace, lateness)
    }

    /// Empties a slot whose owner is gone; false if somebody else changed it meanwhile.
    pub(crate) fn clear(&self, slot: u64, word: SlotWord) -> Result<bool, ChainError> {
        match self {
            Self::Memory(own) => own.drive(clear(own, slot, word)),
            Self::Device(own, _) => own.drive(clear(own, slot, word)),
        }
    }

    /// Empties a slot if one of these clients, all fenced, is in the middle of an INSERT with this
    /// word; whether it did. A block of another client is read no further than its header.
    pub(crate) fn clear_left_by(
        &self,
        clients: &[u16],
        slot: (u64, SlotWord),
        (region, geometry): (&Region, &Geometry),
        budget: &mut ReadBudget,
    ) -> Result<bool, ChainError> {
        let read = async |block: BlockRef| {
            let is_theirs = |header: &BlockHeader| clients.contains(&header.writer());
            let words = read_block(region, block, budget, is_theirs)?;
            Ok(words.unwrap_or_default().as_bytes().to_vec())
        };
        match self {
            Self::Memory(own) => own.drive(clear_left_by(own, geometry, clients, slot, read)),
            Self::Device(own, _) => own.drive(clear_left_by(own, geometry, clients, slot, read)),
        }
    }

    /// Whether the slot held this word, which is replaced then.
    pub(crate) fn swap(&self, slot: u64, from: SlotWord, to: SlotWord) -> Result<bool, ChainError> {
        let (expected, desired) = (from.bits(), to.bits());
        let swap = Verb::CompareSwap { remote: slot, expected, desired };
        Ok(self.chain(&[swap], Nanos::MAX)? == expected)
    }

    /// Takes a LIVE slot out of service if it still holds this word, at the latest at `deadline`;
    /// false if it does not. The mark goes first (invariant I2). TOMB absorbs nobody: the key is
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
        match self {
            Self::Memory(endpoint) => endpoint.fabric().now(),
            Self::Device(endpoint, _) => endpoint.fabric().now(),
        }
    }

    fn chain(&self, chain: &[Verb], deadline: Nanos) -> Result<u64, ChainError> {
        match self {
            Self::Memory(own) => own.drive(own.chain(LANE, chain, deadline)),
            Self::Device(own, _) => own.drive(own.chain(LANE, chain, deadline)),
        }
    }

    /// Moves the entries of a subtable to two others and makes the directory, which is `depth`
    /// deep, lead there; returns how far that came, and the directory's depth afterwards.
    pub(crate) fn split(
        &self,
        split: &Split,
        format: &Format,
        depth: u8,
    ) -> Result<(SplitProgress, u8), ChainError> {
        match self {
            // The processor waits for nothing, so there is nothing to overlap.
            Self::Memory(own) => {
                own.drive(SubtableSplitter::new(own, LANES, format).run(split, depth))
            }
            Self::Device(own, _) => {
                own.drive_lanes(SubtableSplitter::new(own, LANES, format).run(split, depth))
            }
        }
    }

    /// Makes a place free that a split has emptied; false while somebody has not cleared what he
    /// left there.
    pub(crate) fn vacate(&self, place: u64, format: &Format) -> Result<bool, ChainError> {
        match self {
            Self::Memory(own) => own.drive(SubtableSplitter::new(own, LANES, format).vacate(place)),
            Self::Device(own, _) => {
                own.drive_lanes(SubtableSplitter::new(own, LANES, format).vacate(place))
            }
        }
    }
}
