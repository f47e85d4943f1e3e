//! The blocks that a session holds: free ones in lists, and those that its lanes work with.
//!
//! The session's thread takes and retires blocks. When the server asks for a report, the control
//! thread reads them, at any moment of the session's work: `docs/protocol.md` ("Lost blocks").

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use farside_fabric::{LaneId, Nanos};
use farside_layout::{BlockAddress, FreeBlock, SizeClass};

use crate::shared_word::SharedWord;

/// The maximum number of blocks in one request or one return: they have to fit into a message.
pub(crate) const BLOCKS_PER_REQUEST_MAX: usize = 4096;
/// The number of bytes that a session with a surplus gives back in one message.
pub(crate) const GIVE_BYTES: u64 = 256 << 10;

/// A session's free blocks of one class, and its requests for more.
#[derive(Default, Hash)]
pub struct ClassList {
    /// Blocks that can be written at once.
    pub ready: Vec<FreeBlock>,
    /// Unlinked blocks with the time from which they may be written (invariant I3), in the order of
    /// these times.
    pub resting: VecDeque<(Nanos, FreeBlock)>,
    /// The number of blocks that a session with a surplus gives back in one message.
    pub surplus: u32,
    /// Whether a request to the server is outstanding.
    pub requested: bool,
    /// The number of blocks in the latest request; 0 if the next one should be the smallest.
    pub request_blocks: u32,
    /// How many blocks the operation under way needs.
    pub wanted: u32,
    /// Whether blocks were given to the server since the request. An answer without blocks may
    /// have been sent before the server got them, so the session asks again.
    pub recalled: bool,
    /// When the server answered that it has no blocks.
    pub denied_at: Option<Nanos>,
    /// Whether the server answered that the values which it could evict are pinned.
    pub all_pinned: bool,
    /// The class whose blocks to take instead, as the server answered: larger than this one.
    pub larger: Option<SizeClass>,
    /// When the server expects to have blocks, if that is not soon.
    pub room_at: Option<Nanos>,
    /// The earliest time of the next request, if the server may have blocks then.
    pub ask_again_at: Option<Nanos>,
}

/// The blocks that a session holds between operations.
pub struct Lists {
    /// The free blocks, by size class.
    pub classes: Box<[ClassList]>,
    /// Blocks of operations with an unknown outcome. No list has them until the session ends.
    indeterminate: Vec<BlockAddress>,
    /// By lane.
    pub(crate) lane_extents: Box<[LaneExtents]>,
}

/// The extents that the operation on a lane holds.
#[derive(Default)]
pub(crate) struct LaneExtents {
    /// Those of the head that the operation is about to link.
    pub(crate) new: Vec<FreeBlock>,
    /// Those of the head that the operation is about to unlink, or has just unlinked.
    pub(crate) old: Vec<FreeBlock>,
}

impl Lists {
    /// The list of this class.
    pub fn class(&mut self, class: SizeClass) -> &mut ClassList {
        &mut self.classes[usize::from(class.index())]
    }

    /// The addresses of all blocks in the lists, of indeterminate ones, and of the extents of
    /// operations under way.
    pub fn addresses(&self) -> impl Iterator<Item = BlockAddress> {
        let listed = self
            .classes
            .iter()
            .flat_map(|list| list.ready.iter().chain(list.resting.iter().map(|(_, block)| block)));
        let extents = self.lane_extents.iter().flat_map(|lane| lane.new.iter().chain(&lane.old));
        listed.chain(extents).map(|block| block.address).chain(self.indeterminate.iter().copied())
    }

    /// Takes all free blocks, by class: those that are ready, and those that still have to rest.
    /// The next requests are small again.
    pub fn drain(&mut self) -> impl Iterator<Item = (SizeClass, Vec<FreeBlock>, Vec<FreeBlock>)> {
        SizeClass::all().zip(&mut self.classes).filter_map(|(class, list)| {
            (list.request_blocks, list.denied_at) = (0, None);
            if list.ready.is_empty() && list.resting.is_empty() {
                return None;
            }
            list.recalled = true;
            let resting = list.resting.drain(..).map(|(_, block)| block).collect();
            Some((class, std::mem::take(&mut list.ready), resting))
        })
    }
}

/// Notes that a lane holds a block, before the lane removes the block from its list or slot.
/// Release: a thread that sees the removal also sees this note.
#[inline]
fn hold(held_address: &impl SharedWord, block: u32) {
    held_address.store(block, Ordering::Release);
}

/// Notes that a lane no longer holds its block. By now the block is linked or in a list.
#[inline]
fn release(held_address: &impl SharedWord) {
    held_address.store(0, Ordering::Release);
}

fn held(held_address: &impl SharedWord) -> u32 {
    held_address.load(Ordering::Acquire)
}

/// Returns how many blocks of a class fill this many bytes: at least one, and at most as many as
/// fit into a message.
pub(crate) fn blocks_in(bytes: u64, class: SizeClass) -> u32 {
    (bytes / class.block_bytes()).clamp(1, BLOCKS_PER_REQUEST_MAX as u64) as u32
}

/// The blocks that the operation on a lane holds; 0 is no block's address.
#[derive(Default)]
struct LaneBlocks {
    /// The block that the operation is about to link or put back.
    new: AtomicU32,
    /// The block that the operation is about to unlink, or has just unlinked.
    old: AtomicU32,
}

/// The blocks that a session holds, shared with the control thread.
pub struct HeldBlocks {
    lists: Mutex<Lists>,
    /// By lane. Only the session's thread writes them.
    lane_blocks: Box<[LaneBlocks]>,
}

impl HeldBlocks {
    /// The state of a new session with this many lanes, which holds no block.
    pub fn new(lanes: u16) -> Self {
        let surplus = |class| blocks_in(GIVE_BYTES, class);
        let list = |class| ClassList { surplus: surplus(class), ..ClassList::default() };
        let classes = SizeClass::all().map(list).collect();
        Self {
            lists: Mutex::new(Lists {
                classes,
                indeterminate: Vec::new(),
                lane_extents: (0..lanes).map(|_| LaneExtents::default()).collect(),
            }),
            lane_blocks: (0..lanes).map(|_| LaneBlocks::default()).collect(),
        }
    }

    /// Locks the lists. A thread that moves a block between a list, a lane and a message to the
    /// server holds this lock, so a reporting thread that holds it misses no block.
    #[inline]
    pub fn lists(&self) -> MutexGuard<'_, Lists> {
        // A panic leaves the lists valid: every critical section moves whole blocks.
        self.lists.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    fn lane_blocks(&self, lane: LaneId) -> &LaneBlocks {
        &self.lane_blocks[usize::from(lane.0)]
    }

    /// Notes that the lane has this new block. The caller holds the lock of the list with which it
    /// took the block.
    #[inline]
    pub fn hold_new(&self, lane: LaneId, block: BlockAddress) {
        hold(&self.lane_blocks(lane).new, block.0);
    }

    /// Notes that the lane's new block is linked, or in a list again.
    #[inline]
    pub fn drop_new(&self, lane: LaneId) {
        release(&self.lane_blocks(lane).new);
    }

    /// Notes that the lane is about to unlink this block. To be called before the compare-and-swap.
    #[inline]
    pub fn hold_old(&self, lane: LaneId, block: BlockAddress) {
        hold(&self.lane_blocks(lane).old, block.0);
    }

    /// Notes that the lane did not unlink its old block, or that the block is in a list.
    #[inline]
    pub fn drop_old(&self, lane: LaneId) {
        release(&self.lane_blocks(lane).old);
    }

    /// Sets the lane's old block aside: it may or may not be unlinked.
    pub fn set_aside_old(&self, lane: LaneId) {
        self.set_aside(&self.lane_blocks(lane).old);
    }

    /// Sets the lane's new block aside: it may or may not be linked.
    pub fn set_aside_new(&self, lane: LaneId) {
        self.set_aside(&self.lane_blocks(lane).new);
    }

    fn set_aside(&self, held_address: &AtomicU32) {
        let mut lists = self.lists();
        let address = held(held_address);
        if address != 0 {
            lists.indeterminate.push(BlockAddress(address));
        }
        release(held_address);
    }

    /// Notes that the lane's new extents are linked.
    pub fn drop_new_extents(&self, lane: LaneId) {
        self.lists().lane_extents[usize::from(lane.0)].new.clear();
    }

    /// Notes that the lane did not unlink its old extents.
    pub fn drop_old_extents(&self, lane: LaneId) {
        self.lists().lane_extents[usize::from(lane.0)].old.clear();
    }

    /// Sets the lane's new extents aside: they may or may not be linked.
    pub fn set_aside_new_extents(&self, lane: LaneId) {
        let Lists { lane_extents, indeterminate, .. } = &mut *self.lists();
        let extents = lane_extents[usize::from(lane.0)].new.drain(..);
        indeterminate.extend(extents.map(|block| block.address));
    }

    /// Sets the lane's old extents aside: they may or may not be unlinked.
    pub fn set_aside_old_extents(&self, lane: LaneId) {
        let Lists { lane_extents, indeterminate, .. } = &mut *self.lists();
        let extents = lane_extents[usize::from(lane.0)].old.drain(..);
        indeterminate.extend(extents.map(|block| block.address));
    }

    /// The blocks that lanes hold. The caller holds the lock of the lists, so that no block is
    /// between a lane and a list.
    pub fn held_by_lanes(&self) -> impl Iterator<Item = BlockAddress> {
        let addresses = self.lane_blocks.iter().flat_map(|blocks| [&blocks.new, &blocks.old]);
        addresses.map(held).filter(|address| *address != 0).map(BlockAddress)
    }
}

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;

    use loom::sync::atomic::{AtomicU32 as LoomAddress, AtomicU64 as LoomWord};
    use loom::sync::{Arc, Mutex};
    use loom::thread;

    use super::*;

    const BLOCK: u32 = 7;

    /// A session with one block, and a slot of the region.
    struct Model {
        list: Mutex<bool>,
        new: LoomAddress,
        old: LoomAddress,
        slot: LoomWord,
    }

    /// A version of the code: the correct one, or a mutant with one error.
    #[derive(Clone, Copy, PartialEq, Eq)]
    enum Mutant {
        Correct,
        /// The lane holds the old block only after it is unlinked.
        HeldLate,
        /// The lane releases the old block before the block is in the list.
        ReleasedEarly,
        /// The server asks for a report only before it reads the slot, and not after it.
        OneReport,
    }

    impl Model {
        fn swap(&self, expected: u32, desired: u32) {
            let (success, failure) = (Ordering::AcqRel, Ordering::Acquire);
            self.slot.compare_exchange(expected.into(), desired.into(), success, failure).unwrap();
        }

        /// Links the block with one PUT, and unlinks it with another.
        fn work(&self, mutant: Mutant) {
            let mut list = self.list.lock().unwrap();
            *list = false;
            hold(&self.new, BLOCK);
            drop(list);
            self.swap(0, BLOCK);
            release(&self.new);
            if mutant != Mutant::HeldLate {
                hold(&self.old, BLOCK);
            }
            self.swap(BLOCK, 0);
            if mutant == Mutant::HeldLate {
                hold(&self.old, BLOCK);
            }
            if mutant == Mutant::ReleasedEarly {
                release(&self.old);
            }
            *self.list.lock().unwrap() = true;
            release(&self.old);
        }

        /// Whether the session reports the block as held.
        fn report(&self) -> bool {
            let list = self.list.lock().unwrap();
            *list || held(&self.new) == BLOCK || held(&self.old) == BLOCK
        }

        fn is_linked(&self) -> bool {
            self.slot.load(Ordering::Acquire) == u64::from(BLOCK)
        }
    }

    /// Explores a collection beside a session at work: report, walk, report.
    fn collection(mutant: Mutant) {
        loom::model(move || {
            let model = Arc::new(Model {
                list: Mutex::new(true),
                new: LoomAddress::new(0),
                old: LoomAddress::new(0),
                slot: LoomWord::new(0),
            });
            let session = model.clone();
            let session = thread::spawn(move || session.work(mutant));
            let found = model.report()
                || model.is_linked()
                || mutant != Mutant::OneReport && model.report();
            assert!(found, "a block in use is taken for lost");
            session.join().unwrap();
        });
    }

    #[test]
    fn a_block_in_use_is_found_by_a_report_or_the_walk() {
        collection(Mutant::Correct);
    }

    #[test]
    fn mutants_whose_reports_miss_a_block_are_caught() {
        for mutant in [Mutant::HeldLate, Mutant::ReleasedEarly, Mutant::OneReport] {
            assert!(catch_unwind(|| collection(mutant)).is_err(), "a mutant was not caught");
        }
    }
}
