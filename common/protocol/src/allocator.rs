//! A session's free blocks: private lists for each size class, blocks that rest for GRACE, and the
//! messages to and from the server's depot.
//!
//! The session that unlinks a block owns it. So a session that only updates reuses its own blocks
//! and sends no message.

use std::sync::Arc;

use farside_fabric::{LaneId, Nanos};
use farside_layout::{BlockAddress, FreeBlock, SizeClass, SplitOutcome};

use crate::held_blocks::{BLOCKS_PER_REQUEST_MAX, ClassList, HeldBlocks, Lists, blocks_in};
use crate::split_requests::{Prefix, SplitRequests};

/// The messages between a session and the server's depot. No method waits for the server.
pub trait BlockSource {
    /// Registers the session's blocks, which are reported whenever the server asks.
    fn watch(&mut self, _held_blocks: &Arc<HeldBlocks>) {}

    /// Requests blocks. A later [`BlockSource::receive`] returns the answer.
    fn request(&mut self, class: SizeClass, count: u32);

    /// Requests a split of a subtable. A later [`BlockSource::receive`] returns the answer.
    fn request_split(&mut self, prefix: Prefix);

    /// Returns the next answer, if one has arrived.
    fn receive(&mut self) -> Option<Delivery>;

    /// Gives blocks to the server. `rested` if they were unlinked GRACE ago or earlier.
    fn give(&mut self, class: SizeClass, rested: bool, blocks: Vec<FreeBlock>);

    /// Gives heads to the server that were just unlinked, and whose extents this session did not
    /// write. The server finds out which blocks are theirs.
    fn give_heads(&mut self, class: SizeClass, heads: Vec<FreeBlock>) {
        self.give(class, false, heads);
    }

    /// Tells the server that values with an expiry are about to be stored, which it has to remove.
    fn announce_expiry(&mut self) {}

    /// Whether the connection is lost, so that no answer will arrive any more.
    fn is_lost(&self) -> bool;
}

/// An answer of the server to a session.
pub enum Delivery {
    /// The answer to a request for blocks.
    Blocks(BlockDelivery),
    /// The answer to a request for blocks of this class: the server has none, and the values that
    /// it could evict for it are pinned.
    AllPinned(SizeClass),
    /// The answer to a request for blocks of this class: a cache has none, but of the second class.
    Larger(SizeClass, SizeClass),
    /// The answer to a request for blocks of this class: the server has none, and expects some only
    /// in so many milliseconds.
    RoomLater(SizeClass, u32),
    /// The answer to a request for a split.
    Split(Prefix, SplitOutcome),
}

/// The server's answer to a request for blocks.
pub struct BlockDelivery {
    /// The size class of the blocks.
    pub class: SizeClass,
    /// Whether the blocks were unlinked GRACE ago. If not, they have to rest in the session.
    pub rested: bool,
    /// The server has no blocks now, but may have some soon: ask again.
    pub soon: bool,
    /// The blocks; empty if the server has none.
    pub blocks: Vec<FreeBlock>,
}

/// The result of an attempt to take a block. The time in a variant is when to try again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TakeResult {
    /// A block, which belongs to the caller now.
    Block(FreeBlock),
    /// A request to the server is outstanding.
    Asked(Nanos),
    /// The server has no block, but may have some at that time.
    Soon(Nanos),
    /// The server has no block, but one of the session's own will have rested by that time.
    Resting(Nanos),
    /// Neither the session nor the server has a block.
    Exhausted,
    /// The same, because the values that the server could evict are pinned.
    AllPinned,
    /// The same, but there may be blocks of this larger class.
    Larger(SizeClass),
    /// The same, but the server expects to have blocks at that time.
    RoomAt(Nanos),
}

/// The size of the first request for a class. Each further request is twice as large.
const REQUEST_BYTES_MIN: u64 = 8 << 10;
/// The maximum size of a request.
const REQUEST_BYTES_MAX: u64 = 2 << 20;
/// The same in blocks, for classes of which fewer have this size. With one, each PUT would wait for
/// an answer.
const REQUEST_LARGE_BLOCKS_MAX: u32 = 4;
/// How many times GRACE a block is ready before it counts as surplus. A session that pauses for
/// less keeps its blocks: it would soon need them again, and requests take longer.
const SURPLUS_GRACES: Nanos = 4;
/// How long a session sends no new request after the server had no blocks.
const DENIED_NS: Nanos = 20_000_000;
/// The delay before the next request if the server may have blocks soon.
const SOON_NS: Nanos = 1_000_000;
/// The interval at which a session without blocks checks for an answer.
const ANSWER_POLL_NS: Nanos = 60_000;

/// The free blocks of a session, and its requests for more.
pub struct Allocator {
    pub(crate) held_blocks: Arc<HeldBlocks>,
    source: Box<dyn BlockSource + Send>,
    grace_ns: Nanos,
    /// The number of requests without an answer, for blocks and for splits.
    outstanding: u32,
    expiry_announced: bool,
    splits: SplitRequests,
    /// The likely next block of the class that was taken last.
    upcoming: Option<BlockAddress>,
}

impl Allocator {
    /// The allocator of a session with this many lanes.
    pub fn new(mut source: Box<dyn BlockSource + Send>, grace_ns: Nanos, lanes: u16) -> Self {
        let held_blocks = Arc::new(HeldBlocks::new(lanes));
        source.watch(&held_blocks);
        let splits = SplitRequests::default();
        let (outstanding, expiry_announced, upcoming) = (0, false, None);
        Self { held_blocks, source, grace_ns, outstanding, expiry_announced, splits, upcoming }
    }

    /// Takes a block of the class for a lane. Requests more from the server when few are left.
    #[inline(always)]
    pub fn take(&mut self, lane: LaneId, class: SizeClass, now: Nanos) -> TakeResult {
        let Self { held_blocks, source, outstanding, upcoming, .. } = self;
        let mut lists = held_blocks.lists();
        let list = lists.class(class);
        let block = match list.resting.pop_front_if(|(ready_at, _)| *ready_at <= now) {
            Some((_, block)) => Some(block),
            None => {
                let block = list.ready.pop();
                let is_low = list.ready.len() < list.request_blocks as usize / 2;
                if (is_low || block.is_none())
                    && let Some(count) = begin_request(list, class, now)
                {
                    source.request(class, count);
                    *outstanding += 1;
                }
                block
            }
        };
        match block {
            Some(block) => {
                held_blocks.hold_new(lane, block.address);
                let resting = list.resting.front().filter(|(ready_at, _)| *ready_at <= now);
                let next = resting.map(|(_, block)| block).or(list.ready.last());
                *upcoming = next.map(|block| block.address);
                TakeResult::Block(block)
            }
            None => without_block(list, now),
        }
    }

    /// The address of the block that is likely to be taken next, if it is of the class of the
    /// latest one.
    #[inline]
    pub fn upcoming(&self) -> Option<BlockAddress> {
        self.upcoming
    }

    /// Adds a lane to those that wait for the split of this subtable. The first one requests it.
    pub fn join_split(&mut self, prefix: Prefix) {
        if self.splits.join(prefix) {
            self.outstanding += 1;
            self.source.request_split(prefix);
        }
    }

    /// Returns the server's answer to the request for this split, if the answer was received.
    pub fn split_outcome(&mut self, prefix: Prefix) -> Option<SplitOutcome> {
        self.splits.answer(prefix)
    }

    /// Removes a lane from those that wait for this split.
    pub fn leave_split(&mut self, prefix: Prefix) {
        self.splits.leave(prefix);
    }

    /// Receives the server's answers. The clock is read after each of them, because its blocks may
    /// have been unlinked just before it arrived.
    #[inline(always)]
    pub fn receive(&mut self, clock: impl Fn() -> Nanos) {
        if self.outstanding > 0 {
            self.receive_answers(clock);
        }
    }

    #[inline(never)]
    fn receive_answers(&mut self, clock: impl Fn() -> Nanos) {
        let mut lists = self.held_blocks.lists();
        while let Some(delivery) = self.source.receive() {
            self.outstanding = self.outstanding.saturating_sub(1);
            match delivery {
                Delivery::Blocks(blocks) => {
                    add_delivered(&mut lists, blocks, self.grace_ns, clock())
                }
                Delivery::AllPinned(class) => {
                    let none = BlockDelivery { class, rested: true, soon: false, blocks: vec![] };
                    add_delivered(&mut lists, none, self.grace_ns, clock());
                    lists.class(class).all_pinned = true;
                }
                Delivery::Larger(class, larger) => {
                    let none = BlockDelivery { class, rested: true, soon: false, blocks: vec![] };
                    add_delivered(&mut lists, none, self.grace_ns, clock());
                    lists.class(class).larger = Some(larger).filter(|larger| class < *larger);
                }
                Delivery::RoomLater(class, in_ms) => {
                    let now = clock();
                    let none = BlockDelivery { class, rested: true, soon: false, blocks: vec![] };
                    add_delivered(&mut lists, none, self.grace_ns, now);
                    lists.class(class).room_at = Some(now + Nanos::from(in_ms) * 1_000_000);
                }
                Delivery::Split(prefix, outcome) => self.splits.answered(prefix, outcome),
            }
        }
    }

    /// Puts the lane's new block back, which was never linked: it can be written again at once,
    /// with the same generation.
    #[inline]
    pub fn put_back(&mut self, lane: LaneId, class: SizeClass, block: FreeBlock) {
        let mut lists = self.held_blocks.lists();
        lists.class(class).ready.push(block);
        self.held_blocks.drop_new(lane);
    }

    /// Notes that an operation needs this many blocks of the class, so that one request asks for
    /// all.
    pub fn want(&mut self, class: SizeClass, count: u32) {
        let mut lists = self.held_blocks.lists();
        let list = lists.class(class);
        list.wanted = count;
        // A session that stores such values keeps enough for the next one.
        list.surplus = list.surplus.max(count);
    }

    /// Notes that the block that the lane has just taken is one of its new extents.
    pub(crate) fn hold_extent(&mut self, lane: LaneId, block: FreeBlock) {
        let mut lists = self.held_blocks.lists();
        lists.lane_extents[usize::from(lane.0)].new.push(block);
        self.held_blocks.drop_new(lane);
    }

    /// The lane's new extent with this number.
    pub(crate) fn held_extent(&self, lane: LaneId, number: usize) -> FreeBlock {
        self.held_blocks.lists().lane_extents[usize::from(lane.0)].new[number]
    }

    /// Puts the lane's new extents back, as [`Allocator::put_back`].
    pub(crate) fn put_back_extents(&mut self, lane: LaneId) {
        let Lists { lane_extents, classes, .. } = &mut *self.held_blocks.lists();
        let list = &mut classes[usize::from(SizeClass::EXTENT.index())];
        list.ready.append(&mut lane_extents[usize::from(lane.0)].new);
    }

    /// Notes the extents that the lane is about to unlink. To be called before the
    /// compare-and-swap.
    pub(crate) fn hold_old_extents(
        &mut self,
        lane: LaneId,
        extents: impl Iterator<Item = FreeBlock>,
    ) {
        let mut lists = self.held_blocks.lists();
        let old = &mut lists.lane_extents[usize::from(lane.0)].old;
        old.clear();
        old.extend(extents);
    }

    /// Adds the extents that the lane unlinked at `now` to the resting blocks. They rest for GRACE,
    /// as their head does (invariant I26).
    pub(crate) fn retire_old_extents(&mut self, lane: LaneId, now: Nanos) {
        let Self { held_blocks, source, grace_ns, .. } = self;
        let Lists { lane_extents, classes, .. } = &mut *held_blocks.lists();
        let list = &mut classes[usize::from(SizeClass::EXTENT.index())];
        let last_ready_at = list.resting.back().map_or(0, |(ready_at, _)| *ready_at);
        let ready_at = last_ready_at.max(now + *grace_ns);
        let old = lane_extents[usize::from(lane.0)].old.drain(..);
        list.resting.extend(old.map(|block| (ready_at, block)));
        give_surplus(list, &mut **source, SizeClass::EXTENT, (now, *grace_ns));
    }

    /// Gives the head that the lane has just unlinked to the server, which frees the extents that
    /// are its. Without the head, which may have been returned since, a collection finds them.
    pub(crate) fn give_old_head(&mut self, lane: LaneId, class: SizeClass, head: BlockAddress) {
        let Self { held_blocks, source, .. } = self;
        let Lists { lane_extents, classes, .. } = &mut *held_blocks.lists();
        let resting = &mut classes[usize::from(class.index())].resting;
        if let Some((_, head)) = resting.pop_back_if(|(_, block)| block.address == head) {
            source.give_heads(class, vec![head]);
        }
        lane_extents[usize::from(lane.0)].old.clear();
    }

    /// Adds a block that the lane unlinked at `now` to the resting blocks. Its next content has
    /// `block.generation`.
    #[inline(always)]
    pub fn retire(&mut self, lane: LaneId, class: SizeClass, block: FreeBlock, now: Nanos) {
        let mut lists = self.held_blocks.lists();
        let list = lists.class(class);
        // The list has to stay in the order of the times (invariant I3). The block before this one
        // may have a later time, because `now` may be an older reading of the clock.
        let last_ready_at = list.resting.back().map_or(0, |(ready_at, _)| *ready_at);
        list.resting.push_back((last_ready_at.max(now + self.grace_ns), block));
        self.held_blocks.drop_old(lane);
        give_surplus(list, &mut *self.source, class, (now, self.grace_ns));
    }

    /// Tells the server, once, that values with an expiry are about to be stored.
    pub fn announce_expiry(&mut self) {
        if !std::mem::replace(&mut self.expiry_announced, true) {
            self.source.announce_expiry();
        }
    }

    /// Whether the connection to the server is lost.
    pub fn is_lost(&self) -> bool {
        self.source.is_lost()
    }

    /// Mixes all lists that are in use into a hash.
    pub fn hash_state(&self, hasher: &mut impl std::hash::Hasher) {
        use std::hash::Hash;
        let lists = self.held_blocks.lists();
        let used = lists.classes.iter().filter(|list| list.request_blocks > 0);
        used.for_each(|list| list.hash(hasher));
    }

    /// Gives all free blocks back, because the session ends.
    pub fn give_all(&mut self) {
        let Self { held_blocks, source, .. } = self;
        let mut lists = held_blocks.lists();
        give_drained(&mut lists, |class, rested, blocks| source.give(class, rested, blocks));
    }
}

/// Gives rested blocks away if there are too many that were not needed for a while.
#[inline(always)]
fn give_surplus(
    list: &mut ClassList,
    source: &mut dyn BlockSource,
    class: SizeClass,
    (now, grace_ns): (Nanos, Nanos),
) {
    let surplus = list.surplus as usize;
    let is_unneeded = |at: usize| {
        let block = list.resting.get(at);
        block.is_some_and(|(ready_at, _)| *ready_at + SURPLUS_GRACES * grace_ns <= now)
    };
    if is_unneeded(2 * surplus) {
        let blocks = list.resting.drain(..surplus).map(|(_, block)| block).collect();
        source.give(class, true, blocks);
    }
}

/// Drains the lists, and gives the blocks away in batches that fit into a message.
pub fn give_drained(lists: &mut Lists, mut give: impl FnMut(SizeClass, bool, Vec<FreeBlock>)) {
    for (class, ready, resting) in lists.drain() {
        for (rested, blocks) in [(true, ready), (false, resting)] {
            for batch in blocks.chunks(BLOCKS_PER_REQUEST_MAX) {
                give(class, rested, batch.to_vec());
            }
        }
    }
}

/// Returns what a lane should do if the list has no block for it.
fn without_block(list: &ClassList, now: Nanos) -> TakeResult {
    if list.requested {
        return TakeResult::Asked(now + ANSWER_POLL_NS);
    }
    match (list.resting.front(), list.ask_again_at) {
        (Some((ready_at, _)), at) if at.is_none_or(|at| *ready_at <= at) => {
            TakeResult::Resting(*ready_at)
        }
        (_, Some(at)) => TakeResult::Soon(at),
        (_, None) if list.all_pinned => TakeResult::AllPinned,
        (_, None) => match (list.larger, list.room_at) {
            (Some(larger), _) => TakeResult::Larger(larger),
            (None, Some(at)) => TakeResult::RoomAt(at),
            (None, None) => TakeResult::Exhausted,
        },
    }
}

/// Notes a request of blocks in the list. Returns how many to request; `None` if a request is
/// outstanding or too early.
fn begin_request(list: &mut ClassList, class: SizeClass, now: Nanos) -> Option<u32> {
    let is_denied = list.denied_at.is_some_and(|at| now.saturating_sub(at) < DENIED_NS);
    let is_early = list.ask_again_at.is_some_and(|at| now < at);
    if list.requested || is_denied || is_early {
        return None;
    }
    let doubled = list.request_blocks.saturating_mul(2);
    let max = blocks_in(REQUEST_BYTES_MAX, class).max(REQUEST_LARGE_BLOCKS_MAX);
    let wanted = list.wanted.min(BLOCKS_PER_REQUEST_MAX as u32);
    let count = doubled.clamp(blocks_in(REQUEST_BYTES_MIN, class), max).max(wanted);
    list.request_blocks = count;
    (list.requested, list.recalled) = (true, false);
    Some(count)
}

/// Adds delivered blocks to the lists, or notes when to ask again if there are none.
fn add_delivered(lists: &mut Lists, delivered: BlockDelivery, grace_ns: Nanos, now: Nanos) {
    let BlockDelivery { class, rested, soon, blocks } = delivered;
    let list = lists.class(class);
    (list.requested, list.all_pinned) = (false, false);
    (list.larger, list.room_at) = (None, None);
    let soon = soon || list.recalled;
    list.denied_at = (blocks.is_empty() && !soon).then_some(now);
    list.ask_again_at = soon.then_some(now + SOON_NS);
    if rested {
        list.ready.extend(blocks);
    } else if !blocks.is_empty() {
        let ready_at = now + grace_ns;
        // The server has no blocks that have rested, so another request is useless before then.
        list.ask_again_at = Some(ready_at);
        list.resting.extend(blocks.into_iter().map(|block| (ready_at, block)));
    }
}

#[cfg(test)]
mod tests;
