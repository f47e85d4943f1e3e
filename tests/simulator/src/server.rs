//! The server: its answers to the requests of sessions, and its chores beside clients that operate.
//! The chores are production code over an endpoint of the server. So are the chains that remove
//! keys which a cache evicts, or whose values have expired. The READs before them are those of
//! `server/src/chores/eviction.rs` and `server/src/chores/expiry.rs`, and so is their order.

use std::cell::RefCell;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use farside_fabric::{Buffer, LaneId, Nanos, RegionIndex, Verb};
use farside_layout::hash::KeyHash;
use farside_layout::{
    Block, BlockAddress, BlockRef, FreeBlock, NamedBlock, ROW_BYTES, Row, STATE_OFFSET, SizeClass,
    Slot, SlotState, SlotWord, SplitOutcome, slot_in_subtable,
};
use farside_linearizability::HistoryOperation;
use farside_protocol::Prefix;
use farside_protocol::allocator::{BlockDelivery, BlockSource, Delivery};
use farside_protocol::held_blocks::HeldBlocks;
use farside_protocol::removal::{clear_tomb, unlink_to_tombstone};
use farside_protocol::split::{SplitProgress, SubtableSplitter};
use farside_protocol::sweep::clear_left_by;
use send_wrapper::SendWrapper;
use zerocopy::FromBytes;

use crate::fabric::{PAUSE_NS_MAX, WatchedBlocks};
use crate::memory::{EXPIRES_AT_MS, mix};
use crate::monitor::{ExpectedContent, RequestedOperation};
use crate::mutant::Mutant;
use crate::process::{Event, Events, begin};
use crate::region::{Key, hash, keys};
use crate::scenario::Chore;
use crate::session::{Reply, TestSession};
use crate::world::{SimDepot, Tomb, World};

type Shared<T> = Rc<RefCell<T>>;

/// The server's answers to the requests of one session. It answers at once.
pub(crate) struct ServerAnswers {
    /// The blocks that the session gets at first, and its heads and extents.
    free_blocks: Vec<FreeBlock>,
    free_extents: [Vec<FreeBlock>; 2],
    /// The simulator has one thread.
    world: SendWrapper<Weak<RefCell<World>>>,
    held_blocks: SendWrapper<WatchedBlocks>,
    /// Whether the session also uses the depot, once the scenario has begun.
    uses_depot: bool,
    answers: Vec<Delivery>,
    /// The requested splits that await their outcome.
    splits: Vec<Prefix>,
}

impl ServerAnswers {
    pub(crate) fn new(
        (free_blocks, free_extents): (Vec<FreeBlock>, [Vec<FreeBlock>; 2]),
        world: &Rc<RefCell<World>>,
        held_blocks: WatchedBlocks,
        uses_depot: bool,
    ) -> Self {
        let world = SendWrapper::new(Rc::downgrade(world));
        let held_blocks = SendWrapper::new(held_blocks);
        let (answers, splits) = (Vec::new(), Vec::new());
        Self { free_blocks, free_extents, world, held_blocks, uses_depot, answers, splits }
    }

    fn depot(&self) -> Option<(Shared<World>, Shared<SimDepot>)> {
        let world = self.world.upgrade().filter(|world| self.uses_depot && world.borrow().began)?;
        let depot = world.borrow().depot.clone()?;
        Some((world, depot))
    }

    /// Returns the outcome of a requested split of a subtable with this depth, once it is known.
    fn split_outcome(&self, local_depth: u8) -> Option<SplitOutcome> {
        let world = self.world.upgrade()?;
        let world = world.borrow();
        match world.split {
            // The subtable is split only once.
            _ if !world.region.has_splits() || local_depth > 0 => Some(SplitOutcome::Impossible),
            Some(SplitProgress::Done) => Some(SplitOutcome::Done),
            Some(SplitProgress::Busy) => Some(SplitOutcome::Later),
            Some(SplitProgress::Stuck { .. }) => Some(SplitOutcome::Impossible),
            None => None,
        }
    }
}

impl BlockSource for ServerAnswers {
    fn watch(&mut self, held_blocks: &Arc<HeldBlocks>) {
        let _ = self.held_blocks.set(held_blocks.clone());
    }

    fn request(&mut self, class: SizeClass, count: u32) {
        let [heads, extents] = &mut self.free_extents;
        let large = match class {
            SizeClass::EXTENT => Some(extents),
            _ => class.is_head().then_some(heads),
        };
        if let Some(blocks) = large {
            let blocks = blocks.split_off(blocks.len().saturating_sub(count as usize));
            let delivered = BlockDelivery { class, rested: true, soon: false, blocks };
            return self.answers.push(Delivery::Blocks(delivered));
        }
        let blocks = match self.depot().filter(|_| self.free_blocks.is_empty()) {
            Some((world, depot)) => depot.borrow_mut().take(class, &world),
            None => {
                let rest = self.free_blocks.len().saturating_sub(count as usize);
                self.free_blocks.split_off(rest)
            }
        };
        let delivered = BlockDelivery { class, rested: true, soon: false, blocks };
        self.answers.push(Delivery::Blocks(delivered));
    }

    fn request_split(&mut self, prefix: Prefix) {
        self.splits.push(prefix);
    }

    fn receive(&mut self) -> Option<Delivery> {
        for prefix in std::mem::take(&mut self.splits) {
            match self.split_outcome(prefix.local_depth) {
                Some(outcome) => self.answers.push(Delivery::Split(prefix, outcome)),
                None => self.splits.push(prefix),
            }
        }
        self.answers.pop()
    }

    fn give(&mut self, class: SizeClass, rested: bool, blocks: Vec<FreeBlock>) {
        if let Some((world, depot)) = self.depot() {
            depot.borrow_mut().give((class, rested), blocks, &world);
        }
    }

    fn is_lost(&self) -> bool {
        false
    }
}

/// Does the server's chores one after another. Before each one it waits to be polled.
pub(crate) async fn run_chores(
    session: Rc<TestSession>,
    world: Rc<RefCell<World>>,
    (chores, lanes): (Vec<Chore>, u16),
    events: Events,
) {
    for chore in chores {
        begin().await;
        let event = match chore {
            Chore::Split => split(&session, &world, lanes, None).await,
            Chore::Reuse { key_0_returns } => {
                split(&session, &world, lanes, Some(key_0_returns)).await
            }
            Chore::Sweep => sweep(&session, &world).await,
            Chore::Evict(key) => evict(&session, &world, key, &events).await,
            Chore::Expire => expire(&session, &world, &events).await,
            Chore::ClearTombs => clear_tombs(&session, &world).await,
        };
        events.borrow_mut().extend([event, Event::Skip]);
    }
    events.borrow_mut().push_back(Event::Finished);
}

/// Makes the first split. With `reuse`, waits until no client believes a READ from before that
/// split, and makes the next one, into the emptied place. `reuse` says whether key 0 returns to
/// that place.
async fn split(
    session: &TestSession,
    world: &RefCell<World>,
    lanes: u16,
    reuse: Option<bool>,
) -> Event {
    let (region, depth, rests) = {
        let world = world.borrow();
        let depth = world.memory.word_at_offset(STATE_OFFSET) >> 32;
        (world.region.clone(), depth as u8, world.places_rest)
    };
    let (endpoint, lane) = (session.endpoint(), LaneId(0));
    let splitter = SubtableSplitter::new(endpoint, RegionIndex::FIRST, lanes, &region.format);
    let splitter = splitter.with_part(region.rows(), region.usable());
    let reach = "the fabric reaches all of it";
    let mut split = region.split();
    if let Some(key_0_returns) = reuse {
        splitter.disown(&split).await.expect(reach);
        if rests {
            endpoint.sleep_until(lane, endpoint.now() + session.region.constants.grace_ns).await;
        } else {
            world.borrow_mut().note_fired(Mutant::ReusedAtOnce);
        }
        while !splitter.vacate(split.old).await.expect(reach) {
            endpoint.sleep_until(lane, endpoint.now() + PAUSE_NS_MAX).await;
        }
        split = region.next_split(key_0_returns);
    }
    let progress = splitter.split(&split).await.expect(reach);
    if progress == SplitProgress::Done {
        splitter.publish(&split, depth).await.expect("there is a directory that deep");
    }
    Event::Split(progress)
}

/// Clears the slots that fenced clients left unfinished in the rows of the keys' windows.
async fn sweep(session: &TestSession, world: &RefCell<World>) -> Event {
    let (region, clients) = {
        let mut world = world.borrow_mut();
        (world.region.clone(), std::mem::take(&mut world.fenced))
    };
    let endpoint = session.endpoint();
    let read = async |remote: u64, bytes: u64| {
        let read = [Verb::Read { remote, into: Buffer::ReadBlock, bytes: bytes as u32 }];
        endpoint.chain(LaneId(0), RegionIndex::FIRST, &read, Nanos::MAX).await?;
        Ok(endpoint.buffer(LaneId(0), Buffer::ReadBlock)[..bytes as usize].to_vec())
    };
    let rows = region.rows();
    for place in region.places() {
        let bytes = rows.len() as u64 * ROW_BYTES;
        let image = read(place + rows.start as u64 * ROW_BYTES, bytes).await;
        let image = image.expect("the fabric reaches all of it");
        let image = <[Row]>::ref_from_bytes(&image).expect("whole rows");
        let mut slots: Vec<(u64, SlotWord)> = Vec::new();
        for (number, row) in rows.clone().zip(image) {
            let offset = |at| place + slot_in_subtable(number, at);
            slots.extend(row.slots.iter().enumerate().map(|(at, slot)| (offset(at), slot.word())));
        }
        for slot in slots {
            let block_of = async |block: BlockRef| {
                read(block.address.claimed_offset(), block.class.block_bytes()).await
            };
            clear_left_by(
                (endpoint, RegionIndex::FIRST),
                &region.geometry,
                &clients,
                slot,
                block_of,
            )
            .await
            .expect("the fabric reaches all of it");
        }
    }
    Event::Swept(clients)
}

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
async fn evict(session: &TestSession, world: &RefCell<World>, key: Key, events: &Events) -> Event {
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
async fn expire(session: &TestSession, world: &RefCell<World>, events: &Events) -> Event {
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
async fn clear_tombs(session: &TestSession, world: &RefCell<World>) -> Event {
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
