//! Removes a key on behalf of the server: because its value has expired, or to make room in a
//! cache.
//!
//! kv-server does this through an endpoint of its own, while clients go on.

use farside_fabric::{ChainError, Endpoint, Fabric, LaneId, Nanos, RegionIndex, Verb};
use farside_layout::{BlockRef, Mark, SlotState, SlotWord};

/// The lane of all chains, which are executed one at a time.
const LANE: LaneId = LaneId(0);

/// Makes a LIVE slot a tombstone if it still has this word, at the latest at `deadline`. Returns
/// false if the word has changed, or if the deadline has passed. Writes the mark first (I2).
///
/// A PUT that loses to this removal must not count as overwritten, because the key is removed for
/// its old value. So the state becomes TOMB, which absorbs no PUT.
///
/// # Errors
/// [`ChainError`] when the endpoint does not reach the region any more.
pub async fn unlink_to_tombstone<F: Fabric>(
    (endpoint, region): (&Endpoint<F>, RegionIndex),
    (slot, word): (u64, SlotWord),
    block: BlockRef,
    deadline: Nanos,
) -> Result<bool, ChainError> {
    let tomb = word.with_state(SlotState::Tomb);
    let chain = [
        Verb::WriteU32 { remote: block.offset(), value: Mark::SUPERSEDED.bits() },
        Verb::CompareSwap { remote: slot, expected: word.bits(), desired: tomb.bits() },
    ];
    match endpoint.chain(LANE, region, &chain, deadline).await {
        Ok(found) => Ok(found == word.bits()),
        Err(ChainError::Late) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Empties a slot that became a tombstone GRACE ago. Its hint may stay (invariant I6). Does nothing
/// if a split has moved the slot meanwhile.
///
/// # Errors
/// As [`unlink_to_tombstone`].
pub async fn clear_tomb<F: Fabric>(
    (endpoint, region): (&Endpoint<F>, RegionIndex),
    slot: u64,
    tomb: SlotWord,
) -> Result<(), ChainError> {
    let (expected, desired) = (tomb.bits(), tomb.emptied().bits());
    let swap = Verb::CompareSwap { remote: slot, expected, desired };
    endpoint.chain(LANE, region, &[swap], Nanos::MAX).await.map(drop)
}
