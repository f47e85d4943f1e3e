use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard};

use farside_fabric::LaneId;

use super::*;
use crate::held_blocks::GIVE_BYTES;

/// A depot with a number of blocks. It answers a request when the allocator receives.
#[derive(Default)]
struct TestDepot {
    blocks_left: u32,
    next_address: u32,
    requests: Vec<(SizeClass, u32)>,
    given: Vec<(bool, usize)>,
    gives_unrested: bool,
}

impl BlockSource for Arc<Mutex<TestDepot>> {
    fn request(&mut self, class: SizeClass, count: u32) {
        lock(self).requests.push((class, count));
    }

    fn request_split(&mut self, _: Prefix) {}

    fn receive(&mut self) -> Option<Delivery> {
        let mut depot = lock(self);
        let (class, count) = depot.requests.pop()?;
        let count = count.min(depot.blocks_left);
        depot.blocks_left -= count;
        let first = depot.next_address;
        depot.next_address += count;
        let block = |n| FreeBlock { address: BlockAddress(n), generation: 1 };
        let blocks = (first..depot.next_address).map(block).collect();
        let rested = !depot.gives_unrested;
        Some(Delivery::Blocks(BlockDelivery { class, rested, soon: false, blocks }))
    }

    fn give(&mut self, _: SizeClass, rested: bool, blocks: Vec<FreeBlock>) {
        lock(self).given.push((rested, blocks.len()));
    }

    fn is_lost(&self) -> bool {
        false
    }
}

const GRACE: Nanos = 100;
const LANE: LaneId = LaneId(0);

fn lock(depot: &Mutex<TestDepot>) -> MutexGuard<'_, TestDepot> {
    depot.lock().unwrap()
}

/// An allocator and its depot.
struct AllocatorWithDepot {
    allocator: Allocator,
    depot: Arc<Mutex<TestDepot>>,
}

impl AllocatorWithDepot {
    fn depot(&self) -> MutexGuard<'_, TestDepot> {
        lock(&self.depot)
    }
}

impl Deref for AllocatorWithDepot {
    type Target = Allocator;

    fn deref(&self) -> &Allocator {
        &self.allocator
    }
}

impl DerefMut for AllocatorWithDepot {
    fn deref_mut(&mut self) -> &mut Allocator {
        &mut self.allocator
    }
}

fn allocator(blocks: u32) -> AllocatorWithDepot {
    let depot = TestDepot { blocks_left: blocks, ..Default::default() };
    let depot = Arc::new(Mutex::new(depot));
    AllocatorWithDepot { allocator: Allocator::new(Box::new(depot.clone()), GRACE, 1), depot }
}

fn class() -> SizeClass {
    SizeClass::for_bytes(128).unwrap()
}

fn receive_and_take(allocator: &mut Allocator, now: Nanos) -> TakeResult {
    allocator.receive(|| now);
    allocator.take(LANE, class(), now)
}

fn take(allocator: &mut Allocator, now: Nanos) -> Option<FreeBlock> {
    for _ in 0..3 {
        match receive_and_take(allocator, now) {
            TakeResult::Block(block) => return Some(block),
            TakeResult::Asked(_) => {}
            _ => return None,
        }
    }
    None
}

#[test]
fn every_block_of_the_depot_is_taken_once() {
    let mut allocator = allocator(1000);
    let mut seen = std::collections::HashSet::new();
    while let Some(block) = take(&mut allocator, 0) {
        assert!(seen.insert(block.address));
    }
    assert_eq!(seen.len(), 1000);
    assert_eq!(allocator.take(LANE, class(), 0), TakeResult::Exhausted);
}

#[test]
fn an_unlinked_block_rests_for_grace() {
    let mut allocator = allocator(1);
    let block = take(&mut allocator, 0).unwrap();
    assert_eq!(take(&mut allocator, 0), None);
    allocator.retire(LANE, class(), FreeBlock { generation: 2, ..block }, 7);
    assert_eq!(allocator.take(LANE, class(), 7 + GRACE - 1), TakeResult::Resting(7 + GRACE));
    let again = FreeBlock { generation: 2, ..block };
    assert_eq!(allocator.take(LANE, class(), 7 + GRACE), TakeResult::Block(again));
}

#[test]
fn a_block_that_was_never_linked_is_ready_at_once() {
    let mut allocator = allocator(1);
    let block = take(&mut allocator, 0).unwrap();
    allocator.put_back(LANE, class(), block);
    assert_eq!(allocator.take(LANE, class(), 0), TakeResult::Block(block));
}

#[test]
fn the_upcoming_block_is_the_next_one() {
    let mut allocator = allocator(8);
    // First the blocks from the server, then the same ones after they rested.
    for now in [0, GRACE] {
        let first = take(&mut allocator, now).unwrap();
        let mut blocks = vec![first];
        while let Some(next) = allocator.upcoming() {
            blocks.push(take(&mut allocator, now).unwrap());
            assert_eq!(blocks.last().map(|block| block.address), Some(next));
        }
        assert_eq!((blocks.len(), take(&mut allocator, now)), (8, None));
        blocks.into_iter().for_each(|block| allocator.retire(LANE, class(), block, now));
    }
}

#[test]
fn requests_grow_and_are_sent_before_the_list_is_empty() {
    let mut allocator = allocator(100_000);
    let mut requests = Vec::new();
    for _ in 0..20_000 {
        take(&mut allocator, 0).unwrap();
        requests.extend(allocator.depot().requests.last());
    }
    let counts: Vec<u32> = requests.iter().map(|(_, count)| *count).collect();
    assert!(counts.is_sorted() && counts.contains(&4096), "{counts:?}");
}

#[test]
fn delivered_blocks_that_have_to_rest_are_awaited_without_another_request() {
    let mut allocator = allocator(1000);
    allocator.depot().gives_unrested = true;
    assert!(matches!(receive_and_take(&mut allocator, 0), TakeResult::Asked(_)));
    assert_eq!(receive_and_take(&mut allocator, 5), TakeResult::Resting(5 + GRACE));
    assert_eq!(receive_and_take(&mut allocator, 6), TakeResult::Resting(5 + GRACE));
    let left = allocator.depot().blocks_left;
    let granted = 1000 - left;
    // Once rested, they can be taken. No request is sent while half of them are left.
    for _ in 0..granted / 2 - 1 {
        assert!(take(&mut allocator, 5 + GRACE).is_some());
    }
    let depot = allocator.depot();
    assert_eq!((depot.blocks_left, depot.requests.len()), (left, 0));
    drop(depot);
}

/// The blocks may have been unlinked just before they arrived, long after the operation began.
#[test]
fn delivered_blocks_rest_from_their_arrival() {
    let mut allocator = allocator(1000);
    allocator.depot().gives_unrested = true;
    assert!(matches!(receive_and_take(&mut allocator, 0), TakeResult::Asked(_)));
    allocator.receive(|| 60);
    assert_eq!(allocator.take(LANE, class(), 1), TakeResult::Resting(60 + GRACE));
}

/// A pipeline's operations may share a reading of the clock that is older than the delivered
/// blocks.
#[test]
fn blocks_are_given_back_only_when_they_have_rested() {
    let class = SizeClass::for_bytes(256 << 10).unwrap();
    let mut allocator = allocator(1);
    allocator.depot().gives_unrested = true;
    assert!(matches!(allocator.take(LANE, class, 0), TakeResult::Asked(_)));
    allocator.receive(|| 50);
    let block = |n| FreeBlock { address: BlockAddress(n), generation: 1 };
    (10..13).for_each(|n| allocator.retire(LANE, class, block(n), 0));
    allocator.retire(LANE, class, block(13), GRACE);
    assert!(allocator.depot().given.is_empty(), "the first rests until 50 + GRACE");
    allocator.retire(LANE, class, block(14), 49 + (1 + SURPLUS_GRACES) * GRACE);
    assert!(allocator.depot().given.is_empty(), "the first was ready for a short time only");
    allocator.retire(LANE, class, block(15), 50 + (1 + SURPLUS_GRACES) * GRACE);
    assert!(!allocator.depot().given.is_empty());
}

#[test]
fn a_session_with_a_surplus_gives_back_rested_blocks() {
    let mut allocator = allocator(0);
    let surplus = blocks_in(GIVE_BYTES, class());
    for n in 0..4 * surplus {
        let block = FreeBlock { address: BlockAddress(n), generation: 1 };
        allocator.retire(LANE, class(), block, Nanos::from(n) * GRACE);
    }
    assert!(!allocator.depot().given.is_empty());
    assert!(allocator.depot().given.iter().all(|given| *given == (true, surplus as usize)));
    allocator.give_all();
    let given: usize = allocator.depot().given.iter().map(|(_, blocks)| blocks).sum();
    assert_eq!(given, 4 * surplus as usize);
}
