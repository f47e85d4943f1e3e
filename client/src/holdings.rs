//! What a session has of the region: free blocks in lists, and blocks in its hands. Its own thread
//! takes and retires them; the control thread looks at them when the server asks, whatever the
//! session's thread is doing.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use farside_common::control::FreeBlock;
use farside_common::fabric::{LaneId, Nanos};
use farside_common::layout::{BlockAddress, SizeClass};

/// The blocks of one class.
#[derive(Default)]
#[cfg_attr(feature = "testing", derive(Hash))]
pub(crate) struct ClassList {
    pub(crate) ready: Vec<FreeBlock>,
    /// Unlinked, oldest first, with the time from which they may be written again (invariant I3).
    pub(crate) resting: VecDeque<(Nanos, FreeBlock)>,
    pub(crate) requested: bool,
    pub(crate) request_blocks: u32,
    /// Blocks went to the server since it was asked: what it answers may be older than that.
    pub(crate) recalled: bool,
    /// The server said then that it has none.
    pub(crate) denied_at: Option<Nanos>,
    /// The server said that it may have some then.
    pub(crate) ask_again_at: Option<Nanos>,
}

/// What a session keeps between operations.
pub(crate) struct Lists {
    pub(crate) classes: Box<[ClassList]>,
    /// Blocks of operations nobody knows the outcome of: in no list, until the session ends.
    limbo: Vec<BlockAddress>,
}

impl Lists {
    pub(crate) fn class(&mut self, class: SizeClass) -> &mut ClassList {
        &mut self.classes[usize::from(class.index())]
    }

    /// Every block in a list.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = BlockAddress> {
        let listed = self
            .classes
            .iter()
            .flat_map(|list| list.ready.iter().chain(list.resting.iter().map(|(_, block)| block)));
        listed.map(|block| block.address).chain(self.limbo.iter().copied())
    }

    /// Takes every block that can be spared, by class: those that rested and those that still have
    /// to. Requests begin small again.
    pub(crate) fn drain(
        &mut self,
    ) -> impl Iterator<Item = (SizeClass, Vec<FreeBlock>, Vec<FreeBlock>)> {
        SizeClass::all().zip(&mut self.classes).map(|(class, list)| {
            (list.request_blocks, list.denied_at) = (0, None);
            list.recalled |= !list.ready.is_empty() || !list.resting.is_empty();
            let resting = list.resting.drain(..).map(|(_, block)| block).collect();
            (class, std::mem::take(&mut list.ready), resting)
        })
    }
}

/// What an operation on a lane has in its hands; 0 is no block's address.
#[derive(Default)]
struct Hands {
    /// A block of the session's own, to be linked or put back.
    new: AtomicU32,
    /// A block that the operation may just have unlinked.
    old: AtomicU32,
}

/// What a session has, shared with the control thread.
pub(crate) struct Holdings {
    lists: Mutex<Lists>,
    /// By lane. Written by the session's thread alone.
    hands: Box<[Hands]>,
}

impl Holdings {
    pub(crate) fn new(lanes: u16) -> Self {
        let classes = SizeClass::all().map(|_| ClassList::default()).collect();
        Self {
            lists: Mutex::new(Lists { classes, limbo: Vec::new() }),
            hands: (0..lanes).map(|_| Hands::default()).collect(),
        }
    }

    /// Everything that moves blocks between lists, hands and the way to the server happens under
    /// this lock, so that whoever holds it sees each block in one of them.
    #[inline]
    pub(crate) fn lists(&self) -> MutexGuard<'_, Lists> {
        // Every critical section is a few moves of whole blocks.
        self.lists.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    fn hands(&self, lane: LaneId) -> &Hands {
        &self.hands[usize::from(lane.0)]
    }

    /// The lane has this block now. Under the lock that it was taken out of a list with.
    #[inline]
    pub(crate) fn hold_new(&self, lane: LaneId, block: BlockAddress) {
        self.hands(lane).new.store(block.0, Ordering::Release);
    }

    /// The lane's block is linked, or in a list again.
    #[inline]
    pub(crate) fn drop_new(&self, lane: LaneId) {
        self.hands(lane).new.store(0, Ordering::Release);
    }

    /// The lane is about to unlink this block. Before the compare-and-swap: whoever sees what that
    /// did sees this.
    #[inline]
    pub(crate) fn hold_old(&self, lane: LaneId, block: BlockAddress) {
        self.hands(lane).old.store(block.0, Ordering::Release);
    }

    /// The lane did not unlink it, or it is in a list.
    #[inline]
    pub(crate) fn drop_old(&self, lane: LaneId) {
        self.hands(lane).old.store(0, Ordering::Release);
    }

    /// Nobody knows whether the lane unlinked its old block.
    pub(crate) fn lose_old(&self, lane: LaneId) {
        self.lose(&self.hands(lane).old);
    }

    /// Nobody knows whether the lane's new block is linked.
    pub(crate) fn lose_new(&self, lane: LaneId) {
        self.lose(&self.hands(lane).new);
    }

    fn lose(&self, hand: &AtomicU32) {
        let mut lists = self.lists();
        let address = hand.swap(0, Ordering::AcqRel);
        if address != 0 {
            lists.limbo.push(BlockAddress(address));
        }
    }

    /// Every block in a hand. To be looked at under the lock, so that none is between a hand and a
    /// list.
    pub(crate) fn in_hands(&self) -> impl Iterator<Item = BlockAddress> {
        let each = self.hands.iter().flat_map(|hands| [&hands.new, &hands.old]);
        let held = each.map(|hand| hand.load(Ordering::Acquire));
        held.filter(|address| *address != 0).map(BlockAddress)
    }
}
