//! What a session has of the region: free blocks in lists, and blocks in its hands. Its own thread
//! takes and retires them; the control thread looks at them when the server asks, whatever the
//! session's thread is doing.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use farside_fabric::{LaneId, Nanos};
use farside_layout::{BlockAddress, FreeBlock, SizeClass};

/// The blocks of one class.
#[derive(Default, Hash)]
pub struct ClassList {
    /// Free, to be used at once.
    pub ready: Vec<FreeBlock>,
    /// Unlinked, oldest first, with the time from which they may be written again (invariant I3).
    pub resting: VecDeque<(Nanos, FreeBlock)>,
    /// The server was asked, and has not answered.
    pub requested: bool,
    /// How many the next request asks for; 0 for the smallest request.
    pub request_blocks: u32,
    /// Blocks went to the server since it was asked: what it answers may be older than that.
    pub recalled: bool,
    /// The server said then that it has none.
    pub denied_at: Option<Nanos>,
    /// The server said that it may have some then.
    pub ask_again_at: Option<Nanos>,
}

/// What a session keeps between operations.
pub struct Lists {
    /// By size class.
    pub classes: Box<[ClassList]>,
    /// Blocks of operations with an unknown outcome: in no list, until the session ends.
    indeterminate: Vec<BlockAddress>,
}

impl Lists {
    /// The blocks of this class.
    pub fn class(&mut self, class: SizeClass) -> &mut ClassList {
        &mut self.classes[usize::from(class.index())]
    }

    /// Every block in a list.
    pub fn addresses(&self) -> impl Iterator<Item = BlockAddress> {
        let listed = self
            .classes
            .iter()
            .flat_map(|list| list.ready.iter().chain(list.resting.iter().map(|(_, block)| block)));
        listed.map(|block| block.address).chain(self.indeterminate.iter().copied())
    }

    /// Takes every block that can be spared, by class: those that rested and those that still have
    /// to. Requests begin small again.
    pub fn drain(&mut self) -> impl Iterator<Item = (SizeClass, Vec<FreeBlock>, Vec<FreeBlock>)> {
        SizeClass::all().zip(&mut self.classes).map(|(class, list)| {
            (list.request_blocks, list.denied_at) = (0, None);
            list.recalled |= !list.ready.is_empty() || !list.resting.is_empty();
            let resting = list.resting.drain(..).map(|(_, block)| block).collect();
            (class, std::mem::take(&mut list.ready), resting)
        })
    }
}

/// The word of a hand, generic so that loom runs the same code on its own.
trait Hand {
    fn load(&self, order: Ordering) -> u32;
    fn store(&self, address: u32, order: Ordering);
}

impl Hand for AtomicU32 {
    #[inline]
    fn load(&self, order: Ordering) -> u32 {
        self.load(order)
    }

    #[inline]
    fn store(&self, address: u32, order: Ordering) {
        self.store(address, order);
    }
}

/// From now on a report finds the block here. Before whatever takes it from where it was: a thread
/// that sees what that did sees this.
#[inline]
fn hold(hand: &impl Hand, address: u32) {
    hand.store(address, Ordering::Release);
}

/// The block can be found elsewhere by now.
#[inline]
fn let_go(hand: &impl Hand) {
    hand.store(0, Ordering::Release);
}

fn held(hand: &impl Hand) -> u32 {
    hand.load(Ordering::Acquire)
}

/// What an operation on a lane has in its hands; 0 is no block's address.
#[derive(Default)]
struct LaneBlocks {
    /// A block of the session's own, to be linked or put back.
    new: AtomicU32,
    /// A block that the operation may just have unlinked.
    old: AtomicU32,
}

/// What a session has, shared with the control thread.
pub struct HeldBlocks {
    lists: Mutex<Lists>,
    /// By lane. Written by the session's thread alone.
    hands: Box<[LaneBlocks]>,
}

impl HeldBlocks {
    /// None, for a session with so many lanes.
    pub fn new(lanes: u16) -> Self {
        let classes = SizeClass::all().map(|_| ClassList::default()).collect();
        Self {
            lists: Mutex::new(Lists { classes, indeterminate: Vec::new() }),
            hands: (0..lanes).map(|_| LaneBlocks::default()).collect(),
        }
    }

    /// Everything that moves blocks between lists, hands and the way to the server happens under
    /// this lock, so that its holder sees each block in one of them.
    #[inline]
    pub fn lists(&self) -> MutexGuard<'_, Lists> {
        // Every critical section is a few moves of whole blocks.
        self.lists.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    fn hands(&self, lane: LaneId) -> &LaneBlocks {
        &self.hands[usize::from(lane.0)]
    }

    /// The lane has this block now. Under the lock that it was taken out of a list with.
    #[inline]
    pub fn hold_new(&self, lane: LaneId, block: BlockAddress) {
        hold(&self.hands(lane).new, block.0);
    }

    /// The lane's block is linked, or in a list again.
    #[inline]
    pub fn drop_new(&self, lane: LaneId) {
        let_go(&self.hands(lane).new);
    }

    /// The lane is about to unlink this block: before the compare-and-swap.
    #[inline]
    pub fn hold_old(&self, lane: LaneId, block: BlockAddress) {
        hold(&self.hands(lane).old, block.0);
    }

    /// The lane did not unlink it, or it is in a list.
    #[inline]
    pub fn drop_old(&self, lane: LaneId) {
        let_go(&self.hands(lane).old);
    }

    /// It is unknown whether the lane unlinked its old block.
    pub fn set_aside_old(&self, lane: LaneId) {
        self.lose(&self.hands(lane).old);
    }

    /// It is unknown whether the lane's new block is linked.
    pub fn set_aside_new(&self, lane: LaneId) {
        self.lose(&self.hands(lane).new);
    }

    fn lose(&self, hand: &AtomicU32) {
        let mut lists = self.lists();
        let address = held(hand);
        if address != 0 {
            lists.indeterminate.push(BlockAddress(address));
        }
        let_go(hand);
    }

    /// Every block in a hand. To be looked at under the lock, so that none is between a hand and a
    /// list.
    pub fn in_hands(&self) -> impl Iterator<Item = BlockAddress> {
        let each = self.hands.iter().flat_map(|hands| [&hands.new, &hands.old]);
        each.map(held).filter(|address| *address != 0).map(BlockAddress)
    }
}

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;

    use loom::sync::atomic::{AtomicU32 as LoomHand, AtomicU64 as LoomWord};
    use loom::sync::{Arc, Mutex};
    use loom::thread;

    use super::*;

    impl Hand for LoomHand {
        fn load(&self, order: Ordering) -> u32 {
            self.load(order)
        }

        fn store(&self, address: u32, order: Ordering) {
            self.store(address, order);
        }
    }

    const BLOCK: u32 = 7;

    /// A session with one block, and a slot of the region.
    struct Model {
        list: Mutex<bool>,
        new: LoomHand,
        old: LoomHand,
        slot: LoomWord,
    }

    /// What is wrong with a twin.
    #[derive(Clone, Copy, PartialEq, Eq)]
    enum Wrong {
        Nothing,
        /// The block is in the hand only once it is unlinked.
        HeldLate,
        /// The hand is empty before the block is in the list.
        LetGoEarly,
        /// The server asks only before it looks at the slot.
        OneReport,
    }

    impl Model {
        fn swap(&self, expected: u32, desired: u32) {
            let (acquired, lost) = (Ordering::AcqRel, Ordering::Acquire);
            self.slot.compare_exchange(expected.into(), desired.into(), acquired, lost).unwrap();
        }

        /// A PUT that links the block, another one that unlinks it.
        fn work(&self, wrong: Wrong) {
            let mut list = self.list.lock().unwrap();
            *list = false;
            hold(&self.new, BLOCK);
            drop(list);
            self.swap(0, BLOCK);
            let_go(&self.new);
            if wrong != Wrong::HeldLate {
                hold(&self.old, BLOCK);
            }
            self.swap(BLOCK, 0);
            if wrong == Wrong::HeldLate {
                hold(&self.old, BLOCK);
            }
            if wrong == Wrong::LetGoEarly {
                let_go(&self.old);
            }
            *self.list.lock().unwrap() = true;
            let_go(&self.old);
        }

        /// Whether the session says that it has the block.
        fn report(&self) -> bool {
            let list = self.list.lock().unwrap();
            *list || held(&self.new) == BLOCK || held(&self.old) == BLOCK
        }

        fn is_linked(&self) -> bool {
            self.slot.load(Ordering::Acquire) == u64::from(BLOCK)
        }
    }

    /// A collection beside a session at work: report, walk, report.
    fn collection(wrong: Wrong) {
        loom::model(move || {
            let model = Arc::new(Model {
                list: Mutex::new(true),
                new: LoomHand::new(0),
                old: LoomHand::new(0),
                slot: LoomWord::new(0),
            });
            let session = model.clone();
            let session = thread::spawn(move || session.work(wrong));
            let found =
                model.report() || model.is_linked() || wrong != Wrong::OneReport && model.report();
            assert!(found, "a block in use is taken for lost");
            session.join().unwrap();
        });
    }

    #[test]
    fn a_block_in_use_is_found_by_a_report_or_the_walk() {
        collection(Wrong::Nothing);
    }

    #[test]
    fn twins_that_lose_sight_of_a_block_are_caught() {
        for wrong in [Wrong::HeldLate, Wrong::LetGoEarly, Wrong::OneReport] {
            assert!(catch_unwind(|| collection(wrong)).is_err(), "a twin was not caught");
        }
    }
}
