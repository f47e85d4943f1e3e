//! The server removes keys: those that a cache evicts, and those whose values have expired. The
//! chains are production code. The READs before them are those of `server/src/eviction.rs` and
//! `server/src/expiry.rs`, and so is their order.

use std::cell::RefCell;

use farside_fabric::{Buffer, LaneId, Nanos, RegionIndex, Verb};
use farside_layout::hash::KeyHash;
use farside_layout::{
    Block, BlockAddress, BlockRef, FreeBlock, NamedBlock, ROW_BYTES, Row, Slot, SlotState,
    SlotWord, slot_in_subtable,
};
use farside_linearizability::HistoryOperation;
use farside_protocol::removal::{clear_tomb, unlink_to_tombstone};
use zerocopy::FromBytes;

use crate::clock::EXPIRES_AT_MS;
use crate::memory::mix;
use crate::monitor::{ExpectedContent, RequestedOperation};
use crate::mutant::Mutant;
use crate::region::{Key, hash, keys};
use crate::session::{Reply, TestSession};
use crate::task::{Event, Events};
use crate::world::{Tomb, World};

const REACHES: &str = "the fabric reaches all of it";

/// The content of a block that was READ.
struct Content {
    key: Key,
    hash: KeyHash,
    value: String,
    generation: u32,
    expires_at_ms: u64,
}

async fn read(session: &TestSession, remote: u64, bytes: u64) -> Vec<u8> {
    let read = [Verb::Read { remote, into: Buffer::ReadBlock, bytes: bytes as u32 }];
    let endpoint = session.endpoint();
    let chain = endpoint.chain(LaneId(0), RegionIndex::FIRST, &read, Nanos::MAX);
    chain.await.expect(REACHES);
    endpoint.buffer(LaneId(0), Buffer::ReadBlock)[..bytes as usize].to_vec()
}

/// READs a block. `None` if no whole block with one of the keys is there.
async fn read_content(session: &TestSession, block: NamedBlock) -> Option<Content> {
    let bytes = read(session, block.address.claimed_offset(), block.class.block_bytes()).await;
    let found = Block::decode(&bytes, block.address).ok()?;
    Some(Content {
        key: keys().iter().position(|key| key == found.key())?,
        hash: hash(found.key()),
        value: String::from_utf8_lossy(found.value()).into_owned(),
        generation: found.header_word().generation,
        expires_at_ms: found.expires_at_ms(),
    })
}

/// READs the rows of the keys' windows in the subtable at this place, and returns the slots.
async fn read_slots(session: &TestSession, world: &RefCell<World>, place: u64) -> Vec<(u64, Slot)> {
    let rows = world.borrow().region.rows();
    let image =
        read(session, place + rows.start as u64 * ROW_BYTES, rows.len() as u64 * ROW_BYTES).await;
    let image = <[Row]>::ref_from_bytes(&image).expect("whole rows");
    let slots = rows.zip(image).flat_map(|(number, row)| {
        let offset = move |at| place + slot_in_subtable(number, at);
        row.slots.iter().enumerate().map(move |(at, slot)| (offset(at), *slot))
    });
    slots.collect()
}

fn live_block(slot: &Slot) -> Option<NamedBlock> {
    let word = slot.word();
    word.block().ok().filter(|_| word.state() == SlotState::Live)
}

/// Returns by when a chain has to be executed that expects a word READ from now on.
fn deadline(session: &TestSession) -> Nanos {
    session.endpoint().now().saturating_add(session.region.constants.proof_age_ns_max)
}

/// Evicts the key that is in the block which key `key` has now, if it has one. Otherwise that of
/// the first block, which may be linked or not. The block is READ first, then the slot that its key
/// leads to.
pub(super) async fn evict(
    session: &TestSession,
    world: &RefCell<World>,
    key: Key,
    events: &Events,
) -> Event {
    // The policy is free to choose any block.
    let (first, places) = {
        let world = world.borrow();
        let offset = world.region.block_of(&world.memory, key);
        let chosen = BlockAddress::from_offset(offset).filter(|_| offset > 0);
        let mut block = world.region.first_block();
        block.address = chosen.unwrap_or(block.address);
        (block, world.region.places())
    };
    {
        let mut fabric = session.endpoint().fabric_mut();
        fabric.observed = mix(fabric.observed, first.address.claimed_offset());
    }
    let deadline = deadline(session);
    let Some(content) = read_content(session, first).await else { return Event::Skip };
    let block = NamedBlock { generation_low: content.generation as u8, ..first };
    for place in places {
        let slots = read_slots(session, world, place).await;
        let is_linked = |slot: &Slot| live_block(slot) == Some(block) && slot.is_of(content.hash);
        if let Some((offset, slot)) = slots.iter().find(|(_, slot)| is_linked(slot)) {
            let removal = Removal { slot: *offset, word: slot.word(), block, deadline, content };
            return remove(session, world, HistoryOperation::Evict, removal, events).await;
        }
    }
    Event::Skip
}

/// Removes the first expired value that a walk through the index finds.
pub(super) async fn expire(
    session: &TestSession,
    world: &RefCell<World>,
    events: &Events,
) -> Event {
    let places = world.borrow().region.places();
    for place in places {
        let deadline = deadline(session);
        for (offset, slot) in read_slots(session, world, place).await {
            let Some(block) = live_block(&slot).filter(|_| slot.word().is_conditional()) else {
                continue;
            };
            let Some(content) = read_content(session, block).await else { continue };
            let is_its = block.has_generation(content.generation) && slot.is_of(content.hash);
            if is_its && has_expired(session, content.expires_at_ms) {
                let removal = Removal { slot: offset, word: slot.word(), block, deadline, content };
                return remove(session, world, HistoryOperation::Expire, removal, events).await;
            }
        }
    }
    Event::Skip
}

/// The server waits for two more seconds, because clocks differ. In the simulator they do not.
fn has_expired(session: &TestSession, expires_at_ms: u64) -> bool {
    let fabric = session.endpoint().fabric();
    let is_past = expires_at_ms <= fabric.clock_shows() / 1_000_000;
    expires_at_ms != 0 && (is_past || fabric.has_mutant(Mutant::ExpiresEarly))
}

/// The slot of a key that the server removes.
struct Removal {
    slot: u64,
    word: SlotWord,
    block: NamedBlock,
    deadline: Nanos,
    content: Content,
}

/// Unlinks the block, and gives it to the depot.
async fn remove(
    session: &TestSession,
    world: &RefCell<World>,
    operation: HistoryOperation,
    Removal { slot, word, block, deadline, content }: Removal,
    events: &Events,
) -> Event {
    let Content { key, value, expires_at_ms, generation, .. } = content;
    // A block that was written after its value's expiry has an earlier one.
    let was_late = expires_at_ms != 0 && expires_at_ms < EXPIRES_AT_MS;
    let expiry = if was_late { EXPIRES_AT_MS } else { expires_at_ms };
    let expected = Some(ExpectedContent::Removed(value, expiry));
    let requested =
        RequestedOperation { operation, key, value: String::new(), expiry: 0, expected };
    events.borrow_mut().push_back(Event::Invoke(requested));
    let endpoint = session.endpoint();
    let ignores_age = endpoint.fabric().follows(Mutant::RemovedByOldProof);
    let until = if ignores_age { Nanos::MAX } else { deadline };
    let at = (endpoint, RegionIndex::FIRST);
    let unlinked = unlink_to_tombstone(at, (slot, word), BlockRef::unpacked(block), until)
        .await
        .expect(REACHES);
    let now = endpoint.now();
    if !unlinked {
        return Event::Removed(key, Err(None));
    }
    if now > deadline {
        world.borrow_mut().note_fired(Mutant::RemovedByOldProof);
    }
    let raised = u32::from(!endpoint.fabric().has_mutant(Mutant::RemovedGenerationKept));
    let ready_at = now + session.region.constants.grace_ns;
    let tomb = Tomb { slot, word: word.with_state(SlotState::Tomb), ready_at };
    world.borrow_mut().tombs.push(tomb);
    let depot = world.borrow().depot.clone();
    if let Some(depot) = depot {
        let free = FreeBlock { address: block.address, generation: generation + raised };
        depot.borrow_mut().give((block.class, false), vec![free], world);
    }
    Event::Removed(key, Ok(Reply { done: true, found: None }))
}

/// Clears all tombstones, GRACE after they were made.
pub(super) async fn clear_tombs(session: &TestSession, world: &RefCell<World>) -> Event {
    let endpoint = session.endpoint();
    loop {
        let next = world.borrow().tombs.first().copied();
        let Some(Tomb { slot, word, ready_at }) = next else { return Event::Skip };
        let rests = ready_at > endpoint.now();
        if rests && !endpoint.fabric().has_mutant(Mutant::TombClearedAtOnce) {
            endpoint.sleep_until(LaneId(0), ready_at).await;
        }
        clear_tomb((endpoint, RegionIndex::FIRST), slot, word).await.expect(REACHES);
        world.borrow_mut().tombs.remove(0);
    }
}
