//! A session's free blocks: private lists per size class, the GRACE quarantine, and the traffic
//! with the server's depot.
//!
//! Whoever unlinks a block owns it, so a workload of updates lives on its own blocks and sends no
//! message at all.

use std::collections::VecDeque;

use farside_common::control::{BLOCKS_PER_MESSAGE_MAX, FreeBlock};
use farside_common::fabric::Nanos;
use farside_common::layout::SizeClass;

/// Blocks from the depot.
pub(crate) struct Delivery {
    pub(crate) class: SizeClass,
    /// They were unlinked GRACE ago; else they have to rest here.
    pub(crate) rested: bool,
    pub(crate) blocks: Vec<FreeBlock>,
}

/// Where blocks come from and go to: the server's depot, asynchronously.
pub(crate) trait Depot {
    /// Asks for blocks; they come, or not, with a later [`Depot::receive`].
    fn request(&mut self, class: SizeClass, count: u32);

    /// The answer to a request, if one has come.
    fn receive(&mut self) -> Option<Delivery>;

    /// Gives blocks away. `rested`: unlinked for GRACE already.
    fn give(&mut self, class: SizeClass, rested: bool, blocks: Vec<FreeBlock>);

    /// Values with an end are about to be stored: the server has to remove them.
    fn announce_ends(&mut self) {}

    /// Nobody will answer any more.
    fn is_lost(&self) -> bool;
}

/// How an attempt to take a block went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    /// It belongs to the caller.
    Block(FreeBlock),
    /// The server was asked: look again then.
    Asked(Nanos),
    /// The server has none, but a block of this session's own will have rested then.
    Resting(Nanos),
    /// None here and none with the server.
    Exhausted,
}

/// What the first request for a class asks for; each further one twice as much.
const REQUEST_BYTES_MIN: u64 = 8 << 10;
/// What a request asks for at most.
const REQUEST_BYTES_MAX: u64 = 2 << 20;
/// What a session gives back at once.
const GIVE_BYTES: u64 = 256 << 10;
/// How long a session believes that the server has no more.
const DENIED_NS: Nanos = 20_000_000;
/// How often a session without blocks looks whether its request was answered.
const ANSWER_POLL_NS: Nanos = 60_000;

#[derive(Default)]
struct ClassList {
    ready: Vec<FreeBlock>,
    /// Unlinked, oldest first, with the time from which they may be written again (invariant I3).
    resting: VecDeque<(Nanos, FreeBlock)>,
    requested: bool,
    request_blocks: u32,
    /// What came last had not rested: the server has none in store, and removes keys for what is
    /// asked for. So no more is asked for than is used.
    is_scarce: bool,
    /// The server had none that rested: no use asking again before that.
    ask_again_at: Nanos,
}

pub(crate) struct Allocator<D> {
    classes: Box<[ClassList]>,
    depot: D,
    grace_ns: Nanos,
    outstanding: u32,
    ends_announced: bool,
}

/// How many blocks of a class fill this many bytes, at least one, at most a message's worth.
fn blocks_in(bytes: u64, class: SizeClass) -> u32 {
    (bytes / class.block_bytes()).clamp(1, BLOCKS_PER_MESSAGE_MAX as u64) as u32
}

impl<D: Depot> Allocator<D> {
    pub(crate) fn new(depot: D, grace_ns: Nanos) -> Self {
        let classes = SizeClass::all().map(|_| ClassList::default()).collect();
        Self { classes, depot, grace_ns, outstanding: 0, ends_announced: false }
    }

    fn list(&mut self, class: SizeClass) -> &mut ClassList {
        &mut self.classes[usize::from(class.index())]
    }

    /// A block of the class, from this session's own if there is one.
    #[inline]
    pub(crate) fn take(&mut self, class: SizeClass, now: Nanos) -> Taken {
        if self.outstanding > 0 {
            self.receive(now);
        }
        let list = self.list(class);
        let rested = list.resting.pop_front_if(|(ready_at, _)| *ready_at <= now);
        if let Some((_, block)) = rested {
            return Taken::Block(block);
        }
        let block = list.ready.pop();
        let few = list.request_blocks as usize / 2;
        let has_rested = || list.resting.get(few).is_some_and(|(ready_at, _)| *ready_at <= now);
        if block.is_none() || list.ready.len() < few && !(list.is_scarce && has_rested()) {
            self.request(class, now);
        }
        match block {
            Some(block) => Taken::Block(block),
            None => self.wait(class, now),
        }
    }

    fn wait(&mut self, class: SizeClass, now: Nanos) -> Taken {
        let list = self.list(class);
        if list.requested {
            return Taken::Asked(now + ANSWER_POLL_NS);
        }
        match list.resting.front() {
            Some((ready_at, _)) => Taken::Resting(*ready_at),
            None => Taken::Exhausted,
        }
    }

    fn request(&mut self, class: SizeClass, now: Nanos) {
        let list = self.list(class);
        if list.requested || now < list.ask_again_at {
            return;
        }
        let doubled = list.request_blocks.saturating_mul(2);
        let most = blocks_in(REQUEST_BYTES_MAX, class);
        let count = doubled.clamp(blocks_in(REQUEST_BYTES_MIN, class), most);
        list.request_blocks = count;
        list.requested = true;
        self.outstanding += 1;
        self.depot.request(class, count);
    }

    fn receive(&mut self, now: Nanos) {
        while let Some(Delivery { class, rested, blocks }) = self.depot.receive() {
            self.outstanding = self.outstanding.saturating_sub(1);
            let ready_at = now + self.grace_ns;
            let list = self.list(class);
            list.requested = false;
            list.is_scarce = !rested;
            if blocks.is_empty() {
                list.ask_again_at = now + DENIED_NS;
            } else if rested {
                list.ready.extend(blocks);
            } else {
                list.ask_again_at = ready_at;
                list.resting.extend(blocks.into_iter().map(|block| (ready_at, block)));
            }
        }
    }

    /// A block that never got linked: it can be written again at once and keeps its generation.
    #[inline]
    pub(crate) fn put_back(&mut self, class: SizeClass, block: FreeBlock) {
        self.list(class).ready.push(block);
    }

    /// A block that this session unlinked at `now`; its next content gets `block.generation`.
    #[inline]
    pub(crate) fn retire(&mut self, class: SizeClass, block: FreeBlock, now: Nanos) {
        let ready_at = now + self.grace_ns;
        let list = self.list(class);
        list.resting.push_back((ready_at, block));
        let surplus = blocks_in(GIVE_BYTES, class) as usize;
        let rested = |at: usize| list.resting.get(at).is_some_and(|(ready_at, _)| *ready_at <= now);
        if rested(2 * surplus) {
            let blocks = list.resting.drain(..surplus).map(|(_, block)| block).collect();
            self.depot.give(class, true, blocks);
        }
    }

    /// Values with an end are about to be stored. Tells the server, once.
    pub(crate) fn announce_ends(&mut self) {
        if !std::mem::replace(&mut self.ends_announced, true) {
            self.depot.announce_ends();
        }
    }

    /// Whether the server is gone.
    pub(crate) fn is_lost(&self) -> bool {
        self.depot.is_lost()
    }

    /// Gives everything to the depot: the session ends.
    pub(crate) fn give_all(&mut self) {
        for class in SizeClass::all() {
            let list = &mut self.classes[usize::from(class.index())];
            let resting: Vec<FreeBlock> = list.resting.drain(..).map(|(_, block)| block).collect();
            for (rested, blocks) in [(true, std::mem::take(&mut list.ready)), (false, resting)] {
                for some in blocks.chunks(BLOCKS_PER_MESSAGE_MAX) {
                    self.depot.give(class, rested, some.to_vec());
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use farside_common::layout::BlockAddress;

    use super::*;

    /// A depot with a number of blocks that answers when told to.
    #[derive(Default)]
    struct TestDepot {
        left: u32,
        next: u32,
        asked: Vec<(SizeClass, u32)>,
        given: Vec<(bool, usize)>,
        unrested: bool,
    }

    impl Depot for TestDepot {
        fn request(&mut self, class: SizeClass, count: u32) {
            self.asked.push((class, count));
        }

        fn receive(&mut self) -> Option<Delivery> {
            let (class, count) = self.asked.pop()?;
            let count = count.min(self.left);
            self.left -= count;
            let first = self.next;
            self.next += count;
            let block = |n| FreeBlock { address: BlockAddress(n), generation: 1 };
            let blocks = (first..self.next).map(block).collect();
            Some(Delivery { class, rested: !self.unrested, blocks })
        }

        fn give(&mut self, _: SizeClass, rested: bool, blocks: Vec<FreeBlock>) {
            self.given.push((rested, blocks.len()));
        }

        fn is_lost(&self) -> bool {
            false
        }
    }

    const GRACE: Nanos = 100;

    fn allocator(blocks: u32) -> Allocator<TestDepot> {
        Allocator::new(TestDepot { left: blocks, ..Default::default() }, GRACE)
    }

    fn class() -> SizeClass {
        SizeClass::for_bytes(128).unwrap()
    }

    fn take(allocator: &mut Allocator<TestDepot>, now: Nanos) -> Option<FreeBlock> {
        for _ in 0..3 {
            match allocator.take(class(), now) {
                Taken::Block(block) => return Some(block),
                Taken::Asked(_) => {}
                Taken::Resting(_) | Taken::Exhausted => return None,
            }
        }
        None
    }

    #[test]
    fn no_block_is_handed_out_twice_and_all_are() {
        let mut allocator = allocator(1000);
        let mut seen = std::collections::HashSet::new();
        while let Some(block) = take(&mut allocator, 0) {
            assert!(seen.insert(block.address));
        }
        assert_eq!(seen.len(), 1000);
        assert_eq!(allocator.take(class(), 0), Taken::Exhausted);
    }

    #[test]
    fn an_unlinked_block_rests_for_grace() {
        let mut allocator = allocator(1);
        let block = take(&mut allocator, 0).unwrap();
        assert_eq!(take(&mut allocator, 0), None);
        allocator.retire(class(), FreeBlock { generation: 2, ..block }, 7);
        assert_eq!(allocator.take(class(), 7 + GRACE - 1), Taken::Resting(7 + GRACE));
        let again = FreeBlock { generation: 2, ..block };
        assert_eq!(allocator.take(class(), 7 + GRACE), Taken::Block(again));
    }

    #[test]
    fn a_block_that_was_never_linked_is_ready_at_once() {
        let mut allocator = allocator(1);
        let block = take(&mut allocator, 0).unwrap();
        allocator.put_back(class(), block);
        assert_eq!(allocator.take(class(), 0), Taken::Block(block));
    }

    #[test]
    fn requests_grow_and_come_before_the_list_runs_dry() {
        let mut allocator = allocator(100_000);
        let mut requests = Vec::new();
        for _ in 0..20_000 {
            take(&mut allocator, 0).unwrap();
            requests.extend(allocator.depot.asked.last());
        }
        let counts: Vec<u32> = requests.iter().map(|(_, count)| *count).collect();
        assert!(counts.is_sorted() && counts.contains(&4096), "{counts:?}");
    }

    #[test]
    fn blocks_that_have_not_rested_are_waited_for_and_not_asked_for_twice() {
        let mut allocator = allocator(1000);
        allocator.depot.unrested = true;
        assert!(matches!(allocator.take(class(), 0), Taken::Asked(_)));
        assert_eq!(allocator.take(class(), 5), Taken::Resting(5 + GRACE));
        assert_eq!(allocator.take(class(), 6), Taken::Resting(5 + GRACE));
        let left = allocator.depot.left;
        let granted = 1000 - left;
        // Once they rested they serve, and while half of them are left nobody asks for more.
        for _ in 0..granted / 2 - 1 {
            assert!(take(&mut allocator, 5 + GRACE).is_some());
        }
        assert_eq!((allocator.depot.left, allocator.depot.asked.len()), (left, 0));
    }

    #[test]
    fn a_consumer_gives_back_what_rested() {
        let mut allocator = allocator(0);
        let surplus = blocks_in(GIVE_BYTES, class());
        for n in 0..4 * surplus {
            let block = FreeBlock { address: BlockAddress(n), generation: 1 };
            allocator.retire(class(), block, Nanos::from(n) * GRACE);
        }
        assert!(!allocator.depot.given.is_empty());
        assert!(allocator.depot.given.iter().all(|given| *given == (true, surplus as usize)));
        allocator.give_all();
        let given: usize = allocator.depot.given.iter().map(|(_, blocks)| blocks).sum();
        assert_eq!(given, 4 * surplus as usize);
    }
}
