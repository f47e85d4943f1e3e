//! A session's free blocks: private lists per size class, the GRACE quarantine, and the traffic
//! with the server's depot.
//!
//! The session that unlinks a block owns it, so a workload of updates lives on its own blocks and
//! sends no message at all.

use std::sync::Arc;

use farside_fabric::{LaneId, Nanos};
use farside_layout::{BlockAddress, FreeBlock, SizeClass, SplitOutcome};

use crate::held_blocks::{ClassList, HeldBlocks, Lists};
use crate::split_requests::{Prefix, SplitRequests};

/// Where blocks come from and go to: the server's depot, asynchronously.
pub trait BlockSource {
    /// Whose blocks these are: to be looked at whenever the server asks.
    fn watch(&mut self, _holdings: &Arc<HeldBlocks>) {}

    /// Asks for blocks; they come, or not, with a later [`BlockSource::receive`].
    fn request(&mut self, class: SizeClass, count: u32);

    /// Asks for a subtable to be split; the answer comes with a later [`BlockSource::receive`].
    fn request_split(&mut self, prefix: Prefix);

    /// The answer to a request, if one has come.
    fn receive(&mut self) -> Option<Delivery>;

    /// Gives blocks away. `rested`: unlinked for GRACE already.
    fn give(&mut self, class: SizeClass, rested: bool, blocks: Vec<FreeBlock>);

    /// Values with an end are about to be stored: the server has to remove them.
    fn announce_ends(&mut self) {}

    /// No answer will come any more.
    fn is_lost(&self) -> bool;
}

/// What the server answers a session.
pub enum Delivery {
    /// To a request for blocks.
    Blocks(BlockDelivery),
    /// To a request for a split.
    Split(Prefix, SplitOutcome),
}

/// What it said to a request for blocks.
pub struct BlockDelivery {
    /// Of which class.
    pub class: SizeClass,
    /// They were unlinked GRACE ago; else they have to rest here.
    pub rested: bool,
    /// There are none just now; ask again.
    pub soon: bool,
    /// Which; none when there are none.
    pub blocks: Vec<FreeBlock>,
}

/// How an attempt to take a block went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TakeResult {
    /// It belongs to the caller.
    Block(FreeBlock),
    /// The server was asked: look again then.
    Asked(Nanos),
    /// The server has none, but may have some then.
    Soon(Nanos),
    /// The server has none, but a block of this session's own will have rested then.
    Resting(Nanos),
    /// None here and none with the server.
    Exhausted,
}

/// The most blocks that a session asks for, or gives back, in one request.
pub const BLOCKS_PER_REQUEST_MAX: usize = 4096;
/// What the first request for a class asks for; each further one twice as much.
const REQUEST_BYTES_MIN: u64 = 8 << 10;
/// What a request asks for at most.
const REQUEST_BYTES_MAX: u64 = 2 << 20;
/// What a session gives back at once.
const GIVE_BYTES: u64 = 256 << 10;
/// How long a session believes that the server has no more.
const DENIED_NS: Nanos = 20_000_000;
/// How long it waits where the server may have some soon.
const SOON_NS: Nanos = 1_000_000;
/// How often a session without blocks looks whether its request was answered.
const ANSWER_POLL_NS: Nanos = 60_000;

/// The free blocks of a session, and its requests for more.
pub struct Allocator {
    holdings: Arc<HeldBlocks>,
    source: Box<dyn BlockSource + Send>,
    grace_ns: Nanos,
    outstanding: u32,
    ends_announced: bool,
    growth: SplitRequests,
    /// Where the next block of the class that was asked for last comes from, as it seems.
    upcoming: Option<BlockAddress>,
}

/// How many blocks of a class fill this many bytes, at least one, at most a message's worth.
fn blocks_in(bytes: u64, class: SizeClass) -> u32 {
    (bytes / class.block_bytes()).clamp(1, BLOCKS_PER_REQUEST_MAX as u64) as u32
}

impl Allocator {
    /// For a session with this many lanes.
    pub fn new(mut source: Box<dyn BlockSource + Send>, grace_ns: Nanos, lanes: u16) -> Self {
        let holdings = Arc::new(HeldBlocks::new(lanes));
        source.watch(&holdings);
        let growth = SplitRequests::default();
        let (outstanding, ends_announced, upcoming) = (0, false, None);
        Self { holdings, source, grace_ns, outstanding, ends_announced, growth, upcoming }
    }

    /// A block of the class for a lane, from this session's own if there is one.
    #[inline]
    pub fn take(&mut self, lane: LaneId, class: SizeClass, now: Nanos) -> TakeResult {
        let Self { holdings, source, outstanding, upcoming, .. } = self;
        let mut lists = holdings.lists();
        let list = lists.class(class);
        let block = match list.resting.pop_front_if(|(ready_at, _)| *ready_at <= now) {
            Some((_, block)) => Some(block),
            None => {
                let block = list.ready.pop();
                let is_low = list.ready.len() < list.request_blocks as usize / 2;
                if (is_low || block.is_none())
                    && let Some(count) = request(list, class, now)
                {
                    source.request(class, count);
                    *outstanding += 1;
                }
                block
            }
        };
        match block {
            Some(block) => {
                holdings.hold_new(lane, block.address);
                let resting = list.resting.front().filter(|(ready_at, _)| *ready_at <= now);
                let next = resting.map(|(_, block)| block).or(list.ready.last());
                *upcoming = next.map(|block| block.address);
                TakeResult::Block(block)
            }
            None => wait(list, now),
        }
    }

    /// Where the block that is taken next, of the class of the last one, will be, as it seems.
    #[inline]
    pub fn upcoming(&self) -> Option<BlockAddress> {
        self.upcoming
    }

    /// A lane waits until the server has split this subtable.
    pub fn join_split(&mut self, prefix: Prefix) {
        if self.growth.join(prefix) {
            self.outstanding += 1;
            self.source.request_split(prefix);
        }
    }

    /// What the server answered, if that was received.
    pub fn split_outcome(&mut self, prefix: Prefix) -> Option<SplitOutcome> {
        self.growth.answer(prefix)
    }

    /// The lane does not wait for that any more.
    pub fn leave_split(&mut self, prefix: Prefix) {
        self.growth.leave(prefix);
    }

    /// Receives what the server answered. The clock is looked at behind each answer: its blocks may
    /// have been unlinked just before.
    #[inline]
    pub fn receive(&mut self, clock: impl Fn() -> Nanos) {
        if self.outstanding == 0 {
            return;
        }
        let mut lists = self.holdings.lists();
        while let Some(delivery) = self.source.receive() {
            self.outstanding = self.outstanding.saturating_sub(1);
            match delivery {
                Delivery::Blocks(blocks) => take_in(&mut lists, blocks, self.grace_ns, clock()),
                Delivery::Split(prefix, outcome) => self.growth.answered(prefix, outcome),
            }
        }
    }

    /// The lane's new block never got linked: it can be written again at once and keeps its
    /// generation.
    #[inline]
    pub fn put_back(&mut self, lane: LaneId, class: SizeClass, block: FreeBlock) {
        let mut lists = self.holdings.lists();
        lists.class(class).ready.push(block);
        self.holdings.drop_new(lane);
    }

    /// The lane's new block is linked.
    #[inline]
    pub fn let_go(&self, lane: LaneId) {
        self.holdings.drop_new(lane);
    }

    /// It is unknown whether the lane's new block is linked.
    pub fn set_aside_new(&self, lane: LaneId) {
        self.holdings.set_aside_new(lane);
    }

    /// The lane is about to unlink a block.
    #[inline]
    pub fn begin_unlink(&self, lane: LaneId, old: BlockAddress) {
        self.holdings.hold_old(lane, old);
    }

    /// The lane did not unlink what it reached for.
    #[inline]
    pub fn cancel_unlink(&self, lane: LaneId) {
        self.holdings.drop_old(lane);
    }

    /// It is unknown whether the lane unlinked its old block.
    pub fn set_aside_old(&self, lane: LaneId) {
        self.holdings.set_aside_old(lane);
    }

    /// A block that the lane unlinked at `now`; its next content gets `block.generation`.
    #[inline]
    pub fn retire(&mut self, lane: LaneId, class: SizeClass, block: FreeBlock, now: Nanos) {
        let mut lists = self.holdings.lists();
        let list = lists.class(class);
        // Not before the last one, which may have been told by a later look at the clock: in order
        // of when they are ready (invariant I3).
        let last = list.resting.back().map_or(0, |(ready_at, _)| *ready_at);
        list.resting.push_back((last.max(now + self.grace_ns), block));
        self.holdings.drop_old(lane);
        let surplus = blocks_in(GIVE_BYTES, class) as usize;
        let rested = |at: usize| list.resting.get(at).is_some_and(|(ready_at, _)| *ready_at <= now);
        if rested(2 * surplus) {
            let blocks = list.resting.drain(..surplus).map(|(_, block)| block).collect();
            self.source.give(class, true, blocks);
        }
    }

    /// Values with an end are about to be stored. Tells the server, once.
    pub fn announce_ends(&mut self) {
        if !std::mem::replace(&mut self.ends_announced, true) {
            self.source.announce_ends();
        }
    }

    /// Whether the server is gone.
    pub fn is_lost(&self) -> bool {
        self.source.is_lost()
    }

    /// Mixes all lists that are in use into a hash.
    pub fn hash_state(&self, hasher: &mut impl std::hash::Hasher) {
        use std::hash::Hash;
        let lists = self.holdings.lists();
        let used = lists.classes.iter().filter(|list| list.request_blocks > 0);
        used.for_each(|list| list.hash(hasher));
    }

    /// Gives everything to the source: the session ends.
    pub fn give_all(&mut self) {
        let Self { holdings, source, .. } = self;
        let mut lists = holdings.lists();
        give_drained(&mut lists, |class, rested, blocks| source.give(class, rested, blocks));
    }
}

/// Gives all that lists can spare, in messages' worths.
pub fn give_drained(lists: &mut Lists, mut give: impl FnMut(SizeClass, bool, Vec<FreeBlock>)) {
    for (class, ready, resting) in lists.drain() {
        for (rested, blocks) in [(true, ready), (false, resting)] {
            for some in blocks.chunks(BLOCKS_PER_REQUEST_MAX) {
                give(class, rested, some.to_vec());
            }
        }
    }
}

/// What to do while there is no block.
fn wait(list: &ClassList, now: Nanos) -> TakeResult {
    if list.requested {
        return TakeResult::Asked(now + ANSWER_POLL_NS);
    }
    match (list.resting.front(), list.ask_again_at) {
        (Some((ready_at, _)), at) if at.is_none_or(|at| *ready_at <= at) => {
            TakeResult::Resting(*ready_at)
        }
        (_, Some(at)) => TakeResult::Soon(at),
        (_, None) => TakeResult::Exhausted,
    }
}

/// How many blocks to ask for, if it is time to.
fn request(list: &mut ClassList, class: SizeClass, now: Nanos) -> Option<u32> {
    let denied = list.denied_at.is_some_and(|at| now.saturating_sub(at) < DENIED_NS);
    let waits = list.ask_again_at.is_some_and(|at| now < at);
    if list.requested || denied || waits {
        return None;
    }
    let doubled = list.request_blocks.saturating_mul(2);
    let most = blocks_in(REQUEST_BYTES_MAX, class);
    let count = doubled.clamp(blocks_in(REQUEST_BYTES_MIN, class), most);
    list.request_blocks = count;
    (list.requested, list.recalled) = (true, false);
    Some(count)
}

/// Takes in blocks that have come, or that there are none.
fn take_in(lists: &mut Lists, delivered: BlockDelivery, grace_ns: Nanos, now: Nanos) {
    let BlockDelivery { class, rested, soon, blocks } = delivered;
    let list = lists.class(class);
    list.requested = false;
    let soon = soon || list.recalled;
    list.denied_at = (blocks.is_empty() && !soon).then_some(now);
    list.ask_again_at = soon.then_some(now + SOON_NS);
    if rested {
        list.ready.extend(blocks);
    } else if !blocks.is_empty() {
        let ready_at = now + grace_ns;
        // The server has none that rested: no use asking again before these have.
        list.ask_again_at = Some(ready_at);
        list.resting.extend(blocks.into_iter().map(|block| (ready_at, block)));
    }
}

#[cfg(test)]
mod tests;
