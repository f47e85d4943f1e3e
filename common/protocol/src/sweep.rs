//! Clears slots of unfinished INSERTs whose clients are gone.
//!
//! kv-server does this through an endpoint of its own, after a client's death, and for all clients
//! after a restart. By then no verb of the slot's owner can take effect any more.

use farside_fabric::{Buffer, ChainError, Endpoint, Fabric, LaneId, Nanos, RegionIndex, Verb};
use farside_layout::hash::NO_HINT;
use farside_layout::{Block, BlockRef, Geometry, HINT_OFFSET, SlotState, SlotWord};

/// The lane of all chains, which are executed one at a time.
const LANE: LaneId = LaneId(0);

/// Clears a slot if its word is that of an unfinished INSERT of one of these clients, which are all
/// fenced. Returns whether it did. `block_of` READs a block.
///
/// The block is READ after the word. The owner of the word wrote the block before the word. Until
/// the READ no fenced client can have written it again, and a client that got the block later is
/// not one of these clients. So the block's writer is the word's owner if it is one of these
/// clients.
///
/// # Errors
/// [`ChainError`] when the endpoint does not reach the region any more.
pub async fn clear_left_by<F: Fabric>(
    (endpoint, region): (&Endpoint<F>, RegionIndex),
    geometry: &Geometry,
    clients: &[u16],
    (slot, word): (u64, SlotWord),
    block_of: impl AsyncFnOnce(BlockRef) -> Result<Vec<u8>, ChainError>,
) -> Result<bool, ChainError> {
    if !matches!(word.state(), SlotState::Pending | SlotState::Aborted) {
        return Ok(false);
    }
    let Ok(block) = geometry.block_of(word) else { return Ok(false) };
    let bytes = block_of(block).await?;
    match Block::decode(&bytes, block.address) {
        Ok(found) if clients.contains(&found.writer()) => clear(endpoint, region, slot, word).await,
        _ => Ok(false),
    }
}

/// Clears a slot whose owner is gone. Returns false if another session changed it meanwhile.
///
/// The hint is cleared first, so that it is never beside another incarnation (invariant I6). The
/// chain needs no deadline: without its owner only the server ends PENDING and ABORTED.
///
/// # Errors
/// [`ChainError`] when the endpoint does not reach the region any more.
pub async fn clear<F: Fabric>(
    endpoint: &Endpoint<F>,
    region: RegionIndex,
    slot: u64,
    word: SlotWord,
) -> Result<bool, ChainError> {
    if clear_once(endpoint, region, slot, word).await? {
        return Ok(true);
    }
    // Another INSERT with the fingerprint may have aborted it. Nothing follows ABORTED.
    match word.state() {
        SlotState::Pending => {
            clear_once(endpoint, region, slot, word.with_state(SlotState::Aborted)).await
        }
        _ => Ok(false),
    }
}

async fn clear_once<F: Fabric>(
    endpoint: &Endpoint<F>,
    region: RegionIndex,
    slot: u64,
    word: SlotWord,
) -> Result<bool, ChainError> {
    // Only the owner changes the hint (invariant I6).
    let hint = slot + HINT_OFFSET;
    let read = [Verb::Read { remote: hint, into: Buffer::Window, bytes: 8 }];
    endpoint.chain(LANE, region, &read, Nanos::MAX).await?;
    let before = match endpoint.buffer(LANE, Buffer::Window).first_chunk() {
        Some(hint) => u64::from_le_bytes(*hint),
        None => NO_HINT,
    };
    let chain = [
        Verb::CompareSwap { remote: hint, expected: before, desired: NO_HINT },
        Verb::CompareSwap { remote: slot, expected: word.bits(), desired: word.emptied().bits() },
    ];
    Ok(endpoint.chain(LANE, region, &chain, Nanos::MAX).await? == word.bits())
}
