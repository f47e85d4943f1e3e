//! Proves that the checker reports no problem in a valid region, finds every flipped bit that
//! matters, and neither panics nor runs without end on any bytes. Guards against a checker that
//! trusts an offset from the region, or that accepts everything.

use std::sync::Arc;

use farside_cli::check::*;
use farside_fabric::Endpoint;
use farside_fabric::memory::Region;
use farside_fabric::shm::ShmFabric;
use farside_fuzz::sample::{DEPTH, KEYS, LANE, LARGE_BYTES, REGION_BYTES, Sample, check_region};
use farside_layout::{
    BLOCK_HEADER_BYTES, BlockRef, CHUNK_BYTES, ROW_BYTES, ROWS_PER_SUBTABLE, RowHeader,
    SLOTS_PER_ROW, STATE_OFFSET, SUBTABLE_BYTES, SlotState, SlotWord, slot_in_subtable,
};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

/// The length of the superblock's part that the checksum covers.
const CONSTANT_BYTES: u64 = farside_layout::INCARNATION_OFFSET;

#[test]
fn a_valid_region_is_clean() {
    let sample = Sample::with_large_block();
    let report = sample.check().unwrap();
    assert_eq!(report.problems, []);
    assert_eq!((report.keys, report.slots(SlotState::Live)), (KEYS, KEYS));
    assert_eq!((report.subtables, report.slots_total()), (3, 3 * 64 * 7));
    let small: u64 = (0..KEYS).filter(|n| *n != 7).sum();
    assert_eq!(report.value_bytes, small + LARGE_BYTES);
    assert_eq!(report.classes.iter().map(|class| class.blocks_linked).sum::<u64>(), KEYS);
    let chunks = ChunkCounts { free: 0, subtables: 1, blocks: 4, unknown: 0 };
    assert_eq!(report.chunks, chunks);
    assert_eq!((report.stale_marks, report.unsettled), (0, 0));
}

#[test]
fn the_observer_gets_every_block_and_the_index_alone_is_enough_for_statistics() {
    #[derive(Default)]
    struct Counts {
        linked: u64,
        last: (u64, u64),
    }
    impl Observer for Counts {
        fn progress(&mut self, done: u64, total: u64) {
            self.last = (done, total);
        }
        fn linked(&mut self, _: BlockRef) {
            self.linked += 1;
        }
    }
    let sample = Sample::small();
    let endpoint = Endpoint::new(ShmFabric::new(Arc::clone(&sample.region), None, 1), 1);
    let mut counts = Counts::default();
    let report = check(&endpoint, LANE, REGION_BYTES, (Scope::Index, false), &mut counts).unwrap();
    assert_eq!((counts.linked, counts.last), (KEYS, (4, 4)));
    assert_eq!((report.keys, report.value_bytes, report.problem_count), (KEYS, 0, 0));
    let whole = sample.check().unwrap();
    assert_eq!((report.block_bytes, report.classes), (whole.block_bytes, whole.classes));
}

#[test]
fn slots_of_unfinished_operations_are_counted_and_are_no_problem() {
    let sample = Sample::small();
    let states = [SlotState::Pending, SlotState::Aborted, SlotState::Copy, SlotState::Tomb];
    for (used, state) in sample.used.iter().zip(states) {
        let word = SlotWord::from_bits(sample.region.load(used.slot).unwrap());
        sample.region.store(used.slot, word.with_state(state).bits()).unwrap();
    }
    sample.region.store_half(sample.used[10].block, 1).unwrap();
    let report = sample.check().unwrap();
    assert_eq!(report.problems, []);
    assert_eq!((report.keys, report.stale_marks), (KEYS - 4, 1));
    for state in states {
        assert_eq!(report.slots(state), 1, "{state:?}");
    }
}

#[test]
fn a_split_under_way_is_followed() {
    let sample = Sample::small();
    let (old, new) = sample.begin_split();
    let report = sample.check().unwrap();
    assert_eq!(report.problems, []);
    assert_eq!((report.keys, report.subtables, report.subtables_splitting), (KEYS, 5, 1));
    // The entry is checked in its new slot, and must not be LIVE in both.
    sample.flip(new, 64);
    assert_eq!(sample.problems(), [Problem::Hint { offset: new }]);
    sample.flip(new, 64);
    let live = SlotWord::from_bits(sample.region.load(new).unwrap());
    let hint = sample.region.load(new + 8).unwrap();
    sample.region.write(old, &[live.bits(), hint]).unwrap();
    let block = live.block().unwrap().address.claimed_offset();
    let twice = Problem::BlockTwice { first: old.min(new), second: old.max(new), block };
    assert!(sample.problems().contains(&twice), "{:?}", sample.problems());
}

#[test]
fn a_split_with_wrong_row_headers_is_damage() {
    let sample = Sample::small();
    let (old, new) = sample.begin_split();
    let [rows, others] = [old, new].map(|slot| slot / SUBTABLE_BYTES * SUBTABLE_BYTES);
    let whole = RowHeader::new(0, 1).words();
    (0..ROWS_PER_SUBTABLE as u64).for_each(|row| {
        sample.region.write(rows + row * ROW_BYTES, &whole).unwrap();
    });
    let row = old / ROW_BYTES * ROW_BYTES;
    assert_eq!(sample.problems(), [Problem::MovedNowhere { offset: row }]);
    let sample = Sample::small();
    sample.begin_split();
    sample.region.write(others, &RowHeader::new(3, 2).words()).unwrap();
    let astray = Problem::RowPrefix { offset: others, prefix: 3, local_depth: 2 };
    assert_eq!(sample.problems(), [astray]);
}

#[test]
fn a_problem_is_reported_in_one_line() {
    let sample = Sample::small();
    let row = sample.subtables[0];
    let header = RowHeader::new(0, 1).with_forward([SUBTABLE_BYTES, 0]).words();
    sample.region.write(row, &header).unwrap();
    let text = sample.problems()[0].to_string();
    assert!(text.contains("readers to 0x2000 and 0x0, where") && !text.contains('\n'), "{text}");
}

#[test]
fn every_flipped_bit_of_the_superblock_and_the_tables_is_found() {
    let sample = Sample::small();
    sample.flip_each(0, 0..CONSTANT_BYTES * 8, |_| true);
    // Except for the two lowest bits: whether the last server shut down cleanly is no problem.
    sample.flip_each(STATE_OFFSET, 0..64, |bit| bit >= 2);
    let directory = sample.geometry.directory_offset(DEPTH).unwrap();
    sample.flip_each(directory, 0..4 * 64, |_| true);
    let chunks = sample.geometry.chunk_entry(0).unwrap();
    // Except for the age in the upper half of an entry, which may have any value.
    sample.flip_each(chunks, 0..2 * 64, |bit| bit % 64 < 32);
    assert_eq!(sample.problems(), []);
}

#[test]
fn every_flipped_bit_of_row_headers_is_found() {
    let sample = Sample::small();
    for subtable in sample.subtables {
        for row in 0..ROWS_PER_SUBTABLE as u64 {
            sample.flip_each(subtable + row * ROW_BYTES, 0..128, |_| true);
        }
    }
}

#[test]
fn every_flipped_bit_of_slots_that_matters_is_found() {
    let sample = Sample::small();
    for used in &sample.used {
        // Except for the state and for bit 60 (stored by a conditional operation). One flipped bit
        // makes a LIVE word PENDING, ABORTED or TOMB, which is valid, too.
        sample.flip_each(used.slot, 0..128, |bit| !(60..64).contains(&bit));
    }
    for slot in 0..SLOTS_PER_ROW {
        let offset = sample.subtables[1] + slot_in_subtable(5, slot);
        if sample.region.load(offset).unwrap() == 0 {
            // Except for the incarnation, the states without a block, and the hint.
            sample.flip_each(offset, 0..128, |bit| bit < 46 || (52..61).contains(&bit));
        }
    }
}

#[test]
fn every_flipped_bit_of_block_headers_except_the_mark_is_found() {
    let sample = Sample::small();
    for used in &sample.used {
        sample.flip_each(used.block, 0..BLOCK_HEADER_BYTES * 8, |bit| bit >= 32);
    }
}

#[test]
fn a_key_in_two_slots_and_a_block_in_two_slots_are_found() {
    let sample = Sample::small();
    let (key, block) = ("key 1", sample.store_block("key 1", b"another", 50));
    let slot = sample.free_slot(key);
    sample.link(slot, sample.hash(key), block, 9);
    let problems = sample.problems();
    assert!(matches!(problems[..], [Problem::KeyTwice { .. }]), "{problems:?}");
    let first = sample.region.load(sample.used[1].slot).unwrap();
    let same = SlotWord::from_bits(first).block().unwrap();
    sample.link(slot, sample.hash(key), same, 9);
    let problems = sample.problems();
    let both = matches!(problems[..], [Problem::KeyTwice { .. }, Problem::BlockTwice { .. }]);
    assert!(both, "{problems:?}");
}

#[test]
fn a_key_outside_its_window_is_found() {
    let sample = Sample::small();
    let hash = sample.hash("key 3");
    let block = sample.store_block("key 3", b"", 60);
    let far = (hash.window_offset() / ROW_BYTES) as usize + 32;
    let slot = sample.subtables[1] + slot_in_subtable(far % ROWS_PER_SUBTABLE, 6);
    sample.link(slot, hash, block, 1);
    assert_eq!(sample.problems(), [Problem::Window { offset: slot }]);
    let text = sample.problems()[0].to_string();
    assert!(text.contains(&format!("{slot:#x}")), "{text}");
}

#[test]
fn random_bytes_are_damage_and_never_a_panic() {
    let sample = Sample::small();
    let parts = [
        (sample.geometry.directory_offset(DEPTH).unwrap(), 4 * 8),
        (sample.geometry.chunk_entry(0).unwrap(), 5 * 8),
        (sample.subtables[0], 3 * SUBTABLE_BYTES),
        (sample.used[1].block & !(CHUNK_BYTES - 1), CHUNK_BYTES),
        (64, REGION_BYTES - 64),
        (0, REGION_BYTES),
    ];
    let mut random = SmallRng::seed_from_u64(7);
    for (offset, bytes) in parts {
        let noise: Vec<u64> = (0..bytes / 8).map(|_| random.random()).collect();
        sample.region.write(offset, &noise).unwrap();
        let damaged = sample.check().map_or(true, |report| {
            assert!(report.problems.len() <= PROBLEMS_KEPT_MAX);
            !report.is_clean()
        });
        assert!(damaged, "noise at {offset:#x}");
    }
}

#[test]
fn random_slots_under_sound_headers_are_damage_and_never_a_panic() {
    let sample = Sample::small();
    let mut random = SmallRng::seed_from_u64(1);
    for n in 0..ROWS_PER_SUBTABLE * SLOTS_PER_ROW {
        let slot = sample.subtables[0] + slot_in_subtable(n / SLOTS_PER_ROW, n % SLOTS_PER_ROW);
        // Every second word leads into the heap.
        let bits: u64 = random.random();
        let word = if n % 2 == 0 { bits } else { bits & !0xffff_0000 | 0x1_0000 };
        sample.region.store(slot, word).unwrap();
    }
    let report = sample.check().unwrap();
    assert!(report.problem_count > 50, "{}", report.problem_count);
}

#[test]
fn a_truncated_region_is_an_error() {
    let sample = Sample::small();
    for bytes in [8, 4096, CHUNK_BYTES, REGION_BYTES - CHUNK_BYTES, REGION_BYTES - 8] {
        let file = tempfile::tempfile().unwrap();
        file.set_len(bytes).unwrap();
        let short = Arc::new(Region::map(&file).unwrap());
        let mut content = vec![0; (bytes / 8) as usize];
        sample.region.read(0, &mut content).unwrap();
        short.write(0, &content).unwrap();
        assert!(check_region(Arc::clone(&short), bytes).is_err(), "{bytes}");
        assert!(check_region(short, REGION_BYTES).is_err(), "{bytes}");
    }
}

/// The checker must not report a slot that changes between the READs of the slot and its block.
#[test]
fn a_slot_that_changes_during_the_check_is_checked_again() {
    let sample = Sample::small();
    let (slot, block) = (sample.used[2].slot, sample.used[2].block);
    let whole = sample.region.load(block + 16).unwrap();
    assert_ne!(whole, 0, "the length of the value");
    let stop = std::sync::atomic::AtomicBool::new(false);
    let word = SlotWord::from_bits(sample.region.load(slot).unwrap());
    std::thread::scope(|scope| {
        // A client that empties the slot before it damages the block, and repairs the block before
        // it fills the slot.
        scope.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                sample.region.store(slot, word.emptied().bits()).unwrap();
                sample.region.store(block + 16, 0).unwrap();
                sample.region.store(block + 16, whole).unwrap();
                sample.region.store(slot, word.bits()).unwrap();
            }
        });
        for _ in 0..200 {
            let report = sample.check().unwrap();
            let real = report.problems.iter().filter(|problem| {
                // The checker may see the damaged block, because the same word recurs at once.
                // In a real region it cannot.
                !matches!(problem, Problem::Block { offset, .. } if *offset == slot)
            });
            assert_eq!(real.count(), 0, "{:?}", report.problems);
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    assert_eq!(sample.problems(), []);
}
