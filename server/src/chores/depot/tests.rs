//! Checks that the depot never gives two clients the same block or overlapping blocks, and gives no
//! linked block. It gives returned blocks again. It refuses blocks that a client cannot have.

use std::cell::RefCell;
use std::collections::HashMap;

use farside_config::ServerConfig;
use farside_layout::{BLOCK_BYTES_MAX, CHUNK_BYTES, Mark};
use proptest::prelude::*;

use super::*;

const GRACE: Nanos = 100;

/// A chunk table and block headers without a region.
#[derive(Default)]
pub(super) struct FakeMemory {
    entries: RefCell<HashMap<u32, ChunkEntry>>,
    headers: RefCell<HashMap<BlockAddress, HeaderWord>>,
}

impl RegionAccess for FakeMemory {
    fn entry(&self, chunk: u32) -> Result<ChunkEntry, ChainError> {
        let entry = self.entries.borrow().get(&chunk).copied();
        Ok(entry.unwrap_or(ChunkEntry::new(ChunkUse::Free)))
    }

    fn set_entry(&self, chunk: u32, entry: ChunkEntry) -> Result<(), ChainError> {
        self.entries.borrow_mut().insert(chunk, entry);
        Ok(())
    }

    fn header(&self, block: BlockRef) -> Result<HeaderWord, ChainError> {
        let header = self.headers.borrow().get(&block.address).copied();
        Ok(header.unwrap_or(HeaderWord::from_bits(0)))
    }

    fn set_header(&self, block: BlockRef, header: HeaderWord) -> Result<(), ChainError> {
        self.headers.borrow_mut().insert(block.address, header);
        Ok(())
    }

    fn clear(&self, _: u32) -> Result<(), ChainError> {
        self.headers.borrow_mut().clear();
        Ok(())
    }
}

impl FakeMemory {
    pub(super) fn write(&self, block: FreeBlock, superseded: bool) {
        let mark = if superseded { Mark::SUPERSEDED } else { Mark::CLEAR };
        let header = HeaderWord { mark, generation: block.generation };
        self.headers.borrow_mut().insert(block.address, header);
    }
}

fn geometry(bytes: u64) -> Geometry {
    ServerConfig::default().format(bytes, [0; 16], [0; 16]).geometry()
}

pub(super) fn depot(bytes: u64) -> Depot {
    depot_with(bytes, |_| ChunkUse::Free)
}

/// A depot of a region whose chunks have these uses.
fn depot_with(bytes: u64, chunk_use: impl Fn(u32) -> ChunkUse) -> Depot {
    let geometry = geometry(bytes);
    let uses: Vec<_> = (0..geometry.chunks()).map(chunk_use).collect();
    Depot::new(geometry, &uses, DepotOptions::new(GRACE, 0), 0)
}

pub(super) fn class(bytes: u64) -> SizeClass {
    SizeClass::for_bytes(bytes).unwrap()
}

fn take(depot: &mut Depot, class: SizeClass, count: u32, now: Nanos) -> Vec<FreeBlock> {
    depot.take(class, count, now, &FakeMemory::default()).unwrap()
}

/// Takes blocks in this many requests for one block each.
fn take_each(
    depot: &mut Depot,
    class: SizeClass,
    requests: u32,
    now: Nanos,
    memory: &FakeMemory,
) -> Vec<FreeBlock> {
    (0..requests).flat_map(|_| depot.take(class, 1, now, memory).unwrap()).collect()
}

/// Takes blocks until the class has none left.
pub(super) fn take_all(depot: &mut Depot, class: SizeClass, now: Nanos) -> Vec<FreeBlock> {
    let mut all = Vec::new();
    loop {
        let taken = take(depot, class, u32::MAX, now);
        if taken.is_empty() {
            return all;
        }
        all.extend(taken);
    }
}

fn assert_disjoint(mut spans: Vec<(u64, u64)>) {
    spans.sort_unstable();
    for pair in spans.windows(2) {
        assert!(pair[0].1 <= pair[1].0, "{:#x?} overlap", pair);
    }
}

#[test]
fn every_class_can_use_all_memory_to_the_last_block() {
    for class in SizeClass::all() {
        let mut depot = depot(16 << 20);
        let blocks = take_all(&mut depot, class, 0);
        let spans = u64::from(geometry(16 << 20).chunks()) / class.chunks_per_span();
        assert_eq!(blocks.len() as u64, spans * class.blocks_per_span(), "{class:?}");
        let bytes = class.block_bytes();
        let span = |block: &FreeBlock| {
            (block.address.claimed_offset(), block.address.claimed_offset() + bytes)
        };
        assert_disjoint(blocks.iter().map(span).collect());
        for block in &blocks {
            let block = NamedBlock {
                address: block.address,
                class,
                generation_low: block.generation as u8,
            };
            geometry(16 << 20).check_block(block).unwrap();
        }
        let found = depot.classes();
        assert_eq!((found[0].blocks, found[0].blocks_free), (blocks.len() as u64, 0));
        depot.give(class, blocks.clone(), true, 0).unwrap();
        assert_eq!(take_all(&mut depot, class, 0).len(), blocks.len());
    }
}

#[test]
fn a_large_block_takes_two_chunks_and_the_chunk_table_has_both() {
    let memory = FakeMemory::default();
    let mut depot = depot(16 << 20);
    let class = class(BLOCK_BYTES_MAX);
    let blocks = depot.take(class, 1, 0, &memory).unwrap();
    let chunk = geometry(16 << 20).chunk_of(blocks[0].address.claimed_offset()).unwrap();
    let entries = memory.entries.borrow();
    assert_eq!(entries.len(), 2);
    assert_eq!(entries[&chunk], ChunkEntry::new(ChunkUse::Blocks(class)));
    assert_eq!(entries[&(chunk + 1)], ChunkEntry::new(ChunkUse::Continued));
    // No block starts in the second chunk, although its start is aligned.
    let inside =
        BlockAddress::from_offset(blocks[0].address.claimed_offset() + CHUNK_BYTES).unwrap();
    let lie = FreeBlock { address: inside, generation: 1 };
    let error = depot.give(class, vec![lie], true, 0).unwrap_err();
    assert!(matches!(error, BlockError::NoSuchBlock { .. }), "{error}");
}

#[test]
fn a_large_block_needs_two_neighbouring_free_chunks() {
    let every_other = |chunk: u32| [ChunkUse::Subtables, ChunkUse::Free][chunk as usize % 2];
    let mut depot = depot_with(16 << 20, every_other);
    assert!(take(&mut depot, class(3 << 20), 1, 0).is_empty());
    assert!(!take(&mut depot, class(2 << 20), 1, 0).is_empty());
}

#[test]
fn a_request_gets_at_most_a_quarter_of_the_available_blocks() {
    let mut depot = depot(16 << 20);
    let class = class(1 << 20);
    let all = u64::from(geometry(16 << 20).chunks()) * 2;
    let mut left = all;
    for _ in 0..all {
        let taken = take(&mut depot, class, 4096, 0).len() as u64;
        assert_eq!(taken, (left / 4).max(u64::from(left > 0)));
        left -= taken;
    }
    assert_eq!(left, 0);
    assert_eq!(take(&mut depot, class, 0, 0), []);
}

#[test]
fn a_block_that_has_not_rested_rests_for_grace() {
    let mut depot = depot(8 << 20);
    let class = class(2 << 20);
    let blocks = take_all(&mut depot, class, 0);
    depot.give(class, vec![blocks[0]], false, 1000).unwrap();
    assert!(take(&mut depot, class, 1, 1000 + GRACE - 1).is_empty());
    assert_eq!(take(&mut depot, class, 1, 1000 + GRACE), [blocks[0]]);
    let newer = FreeBlock { generation: 77, ..blocks[1] };
    depot.give(class, vec![newer], true, 1000).unwrap();
    assert_eq!(take(&mut depot, class, 1, 1000), [newer]);
}

#[test]
fn rested_blocks_are_available_and_a_request_gets_at_least_one() {
    let mut depot = depot(8 << 20);
    let class = class(256 << 10);
    let mut blocks = take_all(&mut depot, class, 0);
    let resting = blocks.split_off(blocks.len() - 16);
    let (early, late) = resting.split_at(8);
    depot.give(class, early.to_vec(), false, 0).unwrap();
    depot.give(class, late.to_vec(), false, 50).unwrap();
    assert!(take(&mut depot, class, 4096, GRACE - 1).is_empty(), "nothing is ready");
    let grants = |depot: &mut Depot, now| take(depot, class, 4096, now).len();
    // A quarter of the available blocks: rested ones count, those that still rest do not.
    assert_eq!(grants(&mut depot, GRACE), 2);
    assert_eq!(grants(&mut depot, GRACE), 1);
    assert_eq!(grants(&mut depot, GRACE + 50), 3);
    while grants(&mut depot, GRACE + 50) > 0 {}
    assert_eq!(depot.classes()[0].blocks_free, 0, "to the last block");
}

#[test]
fn blocks_that_a_client_cannot_have_are_refused_and_change_nothing() {
    let mut depot = depot(8 << 20);
    let class_taken = class(64 << 10);
    let blocks = take(&mut depot, class_taken, 2, 0);
    let block_at = |offset: u64| FreeBlock {
        address: BlockAddress::from_offset(offset).unwrap(),
        generation: 1,
    };
    let start = blocks[0].address.claimed_offset();
    let free_chunk = start / CHUNK_BYTES * CHUNK_BYTES + CHUNK_BYTES;
    for (lie, what) in [
        (block_at(0), "the superblock"),
        (block_at(8 << 20), "after the region"),
        (block_at(u64::from(u32::MAX) * 64), "the last address"),
        (block_at(start + 64), "the middle of a block"),
        (block_at(free_chunk), "a chunk without a use"),
    ] {
        assert!(depot.give(class_taken, vec![lie], true, 0).is_err(), "{what}");
    }
    let error = depot.give(class(64), vec![blocks[0]], true, 0).unwrap_err();
    assert!(matches!(error, BlockError::NoSuchBlock { .. }), "{error}");
    // The client has the first of these, so the depot takes it. The second is wrong.
    let twice = vec![blocks[0], blocks[0]];
    let error = depot.give(class_taken, twice, true, 0).unwrap_err();
    assert_eq!(error, BlockError::InDepot { offset: start });
    let all = take_all(&mut depot, class_taken, 0);
    assert_eq!(all.iter().filter(|block| block.address == blocks[0].address).count(), 1);
    assert_eq!(all.iter().filter(|block| block.address == blocks[1].address).count(), 0);
    // No client ever had this block.
    let mut fresh = self::depot(8 << 20);
    let first = take(&mut fresh, class_taken, 1, 0)[0];
    let next = block_at(first.address.claimed_offset() + (64 << 10));
    assert!(matches!(
        fresh.give(class_taken, vec![next], true, 0),
        Err(BlockError::InDepot { .. })
    ));
}

#[test]
fn linked_blocks_are_unavailable_until_they_are_given() {
    let geometry = geometry(8 << 20);
    let class = class(512 << 10);
    let mut depot = depot_with(8 << 20, |chunk| match chunk {
        1 => ChunkUse::Blocks(class),
        _ => ChunkUse::Subtables,
    });
    let start = geometry.chunk_offset(1).unwrap();
    let address = |n: u64| BlockAddress::from_offset(start + n * class.block_bytes()).unwrap();
    let linked = NamedBlock { address: address(2), class, generation_low: 0 };
    depot.note_linked(linked, 0).unwrap();
    assert!(matches!(depot.note_linked(linked, 0), Err(BlockError::LinkedTwice { .. })));
    // A client has unlinked the block and gives it back, before the depot has read its header.
    let block = FreeBlock { address: address(2), generation: 9 };
    depot.give(class, vec![block], false, 0).unwrap();
    let memory = FakeMemory::default();
    memory.write(FreeBlock { address: address(0), generation: 41 }, false);
    memory.write(FreeBlock { address: address(1), generation: u32::MAX }, false);
    let taken = take_each(&mut depot, class, 4, GRACE - 1, &memory);
    let generations: Vec<_> = taken.iter().map(|block| (block.address, block.generation)).collect();
    // Each generation is one more than that in the header.
    assert_eq!(generations, [(address(0), 42), (address(1), 0), (address(3), 1)]);
    assert_eq!(depot.take(class, 1, GRACE, &memory).unwrap(), [block]);
}

proptest! {
    /// Takes and gives blocks in any order. Blocks of clients never overlap, and in the end all
    /// blocks are available again.
    #[test]
    fn blocks_of_clients_are_disjoint_and_none_is_lost(
        steps in prop::collection::vec((any::<bool>(), 0usize..5, 1u32..200, any::<bool>()), 1..200)
    ) {
        let classes = [64, 512, 20_000, 1 << 20, 3 << 20].map(class);
        let mut depot = depot(32 << 20);
        let mut out: HashMap<SizeClass, Vec<FreeBlock>> = HashMap::new();
        let mut now = 0;
        for (takes, which, count, rested) in steps {
            now += 7;
            let class = classes[which];
            let held = out.entry(class).or_default();
            if takes {
                held.extend(take(&mut depot, class, count, now));
            } else {
                let keep = held.len().saturating_sub(count as usize);
                let back = held.split_off(keep);
                depot.give(class, back.clone(), rested, now).unwrap();
                if let Some(block) = back.first() {
                    prop_assert!(depot.give(class, vec![*block], rested, now).is_err());
                }
            }
        }
        let span = |class: SizeClass, block: &FreeBlock| {
            (block.address.claimed_offset(), block.address.claimed_offset() + class.block_bytes())
        };
        let spans = |class: &SizeClass, blocks: &Vec<FreeBlock>| {
            blocks.iter().map(|block| span(*class, block)).collect::<Vec<_>>()
        };
        assert_disjoint(out.iter().flat_map(|(class, blocks)| spans(class, blocks)).collect());
        now += GRACE;
        for (class, blocks) in &mut out {
            blocks.extend(take_all(&mut depot, *class, now));
        }
        assert_disjoint(out.iter().flat_map(|(class, blocks)| spans(class, blocks)).collect());
        for found in depot.classes() {
            let all = out[&found.class].len() as u64;
            prop_assert_eq!((found.blocks, found.blocks_free), (all, 0));
        }
    }
}

/// The order in which chunks fill and empty, and the search for lost blocks.
mod movement {
    use super::*;

    #[test]
    fn a_chunk_changes_its_class_only_after_its_rest() {
        let memory = FakeMemory::default();
        let mut depot = depot(8 << 20);
        let rest = depot.options.chunk_rest;
        assert!(rest > 256 * GRACE);
        let (small, large) = (class(64 << 10), class(2 << 20));
        let chunks = u64::from(geometry(8 << 20).chunks());
        let mut blocks = take_all(&mut depot, small, 0);
        assert_eq!(blocks.len() as u64, chunks * 32);
        // As if every block had been written seven times.
        for block in &mut blocks {
            memory.write(FreeBlock { generation: 7, ..*block }, true);
            block.generation = 8;
        }
        let last = blocks.pop().unwrap();
        depot.give(small, blocks, false, 1000).unwrap();
        depot.give(small, vec![last], true, 5000).unwrap();
        let from = 1000 + GRACE;
        assert!(depot.take(large, 1, from + rest - 1, &memory).unwrap().is_empty());
        assert!(!depot.may_have_free_by(Some(large), from + rest - 1));
        // From here on all chunks have rested, except that of the last block, complete since 5000.
        assert_eq!(depot.chunks_free(), 0);
        let first = depot.take(large, 1, from + rest.max(5000), &memory).unwrap();
        assert_eq!(first.len(), 1);
        assert!(depot.chunks_emptied >= chunks - 1);
        // More than every generation that was in the chunk.
        assert_eq!(first[0].generation, 8);
        let block = NamedBlock { address: first[0].address, class: large, generation_low: 0 };
        let header = memory.header(depot.geometry.check_block(block).unwrap()).unwrap();
        assert_eq!(header, HeaderWord { mark: Mark::SUPERSEDED, generation: 7 });
    }

    #[test]
    fn blocks_are_taken_from_the_fullest_chunk_so_that_others_empty() {
        let mut depot = depot(32 << 20);
        let class = class(512 << 10);
        let blocks = take_each(&mut depot, class, 8, 0, &FakeMemory::default());
        let chunk = |block: &FreeBlock| block.address.claimed_offset() / CHUNK_BYTES;
        let (first, second) = (chunk(&blocks[0]), chunk(&blocks[7]));
        assert!(first != second && blocks.iter().filter(|b| chunk(b) == first).count() == 4);
        // Three blocks of the first chunk are free, and one of the second.
        depot.give(class, vec![blocks[0], blocks[1], blocks[2], blocks[7]], true, 0).unwrap();
        assert_eq!(chunk(&take(&mut depot, class, 1, 0)[0]), second);
        assert_eq!(chunk(&take(&mut depot, class, 1, 0)[0]), first);
    }

    #[test]
    fn lost_blocks_are_recovered_and_no_others() {
        let memory = FakeMemory::default();
        let mut depot = depot(8 << 20);
        let class = class(128);
        let blocks = take_each(&mut depot, class, 8, 0, &memory);
        blocks.iter().for_each(|block| memory.write(*block, false));
        let chunks = depot.chunks();
        depot.suspect(0..chunks);
        let [linked, held, given, changed, lost, ..] = blocks[..] else { panic!() };
        depot.clear_suspicion(linked.address);
        depot.clear_suspicion(held.address);
        let chunk = geometry(8 << 20).chunk_of(lost.address.claimed_offset()).unwrap();
        let noted = depot.note(chunk, &memory).unwrap().unwrap();
        assert_eq!(noted.count(), 6);
        depot.give(class, vec![given], true, 0).unwrap();
        // Its header has changed since it was noted: it was unlinked or rewritten.
        memory.write(changed, true);
        // Addresses of no block are ignored.
        depot.clear_suspicion(BlockAddress(lost.address.0 + 1));
        depot.clear_suspicion(BlockAddress(u32::MAX));
        depot.clear_suspicion(BlockAddress(0));
        let late = depot.take(class, 1, 0, &memory).unwrap();
        assert_eq!(late, [given]);
        assert_eq!(depot.recover(&noted, 50, &memory).unwrap(), 4);
        assert_eq!(depot.recover(&noted, 50, &memory).unwrap(), 0, "once");
        depot.clear_suspicions(0..chunks);
        assert_eq!(depot.classes()[0].blocks_resting, 4);
        let back = take_each(&mut depot, class, 4, 50 + GRACE, &memory);
        let found = back.iter().find(|block| block.address == lost.address).unwrap();
        assert_eq!(found.generation, lost.generation + 1);
        for block in [linked, held, given, changed] {
            assert!(back.iter().all(|found| found.address != block.address));
        }
    }
}
