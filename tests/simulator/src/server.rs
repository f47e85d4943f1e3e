//! The server: its answers to the requests of sessions, and its chores beside clients that operate.
//! The chores are production code over an endpoint of the server.

use std::cell::RefCell;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use farside_fabric::{Buffer, LaneId, Nanos, RegionIndex, Verb};
use farside_layout::{
    BlockRef, FreeBlock, ROW_BYTES, Row, STATE_OFFSET, SizeClass, SlotWord, SplitOutcome,
    slot_in_subtable,
};
use farside_protocol::Prefix;
use farside_protocol::allocator::{BlockDelivery, BlockSource, Delivery};
use farside_protocol::held_blocks::HeldBlocks;
use farside_protocol::split::{SplitProgress, SubtableSplitter};
use farside_protocol::sweep::clear_left_by;
use send_wrapper::SendWrapper;
use zerocopy::FromBytes;

use crate::fabric::{PAUSE_NS_MAX, WatchedBlocks};
use crate::mutant::Mutant;
use crate::scenario::Chore;
use crate::session::TestSession;
use crate::task::{Event, Events, begin};
use crate::world::World;
use crate::world::depot::SimDepot;

mod removal;

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
            Chore::Evict(key) => removal::evict(&session, &world, key, &events).await,
            Chore::Expire => removal::expire(&session, &world, &events).await,
            Chore::ClearTombs => removal::clear_tombs(&session, &world).await,
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
