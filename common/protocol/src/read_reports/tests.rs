use std::panic::catch_unwind;

use loom::sync::Arc;
use loom::sync::atomic::AtomicU32 as LoomWord;
use loom::thread;

use super::*;

/// A word whose stores do not publish what was stored before them.
struct Unordered(LoomWord);

impl SharedWord for Unordered {
    fn load(&self, order: Ordering) -> u32 {
        self.0.load(order)
    }

    fn store(&self, value: u32, _order: Ordering) {
        self.0.store(value, Ordering::Relaxed);
    }
}

fn taken(reports: &ReadReports, max: usize) -> Vec<u32> {
    let mut blocks = Vec::new();
    reports.take(max, &mut blocks);
    blocks.into_iter().map(|block| block.0).collect()
}

fn add(reports: &ReadReports, blocks: std::ops::Range<u32>) {
    blocks.for_each(|block| reports.add(BlockAddress(block)));
}

#[test]
fn reads_are_noted_from_the_first_question_on() {
    let reports = ReadReports::default();
    add(&reports, 1..10);
    assert!(reports.0.get().is_none(), "no memory before the server asks");
    assert!(taken(&reports, 100).is_empty());
    add(&reports, 10..13);
    assert_eq!(taken(&reports, 100), [10, 11, 12]);
    assert!(taken(&reports, 100).is_empty());
    add(&reports, 13..14);
    assert_eq!(taken(&reports, 100), [13]);
}

#[test]
fn a_full_ring_keeps_the_newest() {
    let reports = ReadReports::default();
    assert!(taken(&reports, 1).is_empty());
    let max = REPORTS_MAX as u32;
    for first in [1, 10 * max + 5] {
        add(&reports, first..first + 2 * max + 3);
        assert_eq!(
            taken(&reports, 2 * REPORTS_MAX),
            Vec::from_iter(first + max + 3..first + 2 * max + 3)
        );
    }
    // Those that a limit leaves out are lost as well.
    add(&reports, 1..100);
    assert_eq!(taken(&reports, 3), [97, 98, 99]);
    assert!(taken(&reports, REPORTS_MAX).is_empty());
}

#[test]
fn the_count_of_addresses_may_wrap() {
    let reports = ReadReports::default();
    assert!(taken(&reports, 1).is_empty());
    let ring = reports.0.get().unwrap();
    ring.added.store(u32::MAX - 2, Ordering::Relaxed);
    ring.taken.store(u32::MAX - 2, Ordering::Relaxed);
    add(&reports, 1..7);
    assert_eq!(taken(&reports, REPORTS_MAX), [1, 2, 3, 4, 5, 6]);
    add(&reports, 7..9);
    assert_eq!(taken(&reports, REPORTS_MAX), [7, 8]);
}

/// Explores a thread that adds addresses to a ring of two, beside one that takes them twice. Only
/// those that were added are taken, and the newest two are not lost.
fn one_adds_and_one_takes<W: SharedWord + Send + Sync + 'static>(word: fn() -> W) {
    loom::model(move || {
        let ring = Arc::new(Ring::new(2, word));
        let taking = ring.clone();
        // The other thread takes: loom does not see that a load of a count depends on the store of
        // a thread that has loaded the count since.
        let taking = thread::spawn(move || Vec::from_iter(taking.take(2)));
        (1..=3).for_each(|address| ring.add(address));
        let mut taken = taking.join().unwrap();
        taken.extend(ring.take(2));
        assert!([2, 3].iter().all(|newest| taken.contains(newest)), "{taken:?}");
        assert!(taken.iter().all(|address| (1..=3).contains(address)), "{taken:?}");
    });
}

#[test]
fn only_what_was_added_is_taken_and_the_newest_are_not_lost() {
    one_adds_and_one_takes(|| LoomWord::new(0));
}

#[test]
fn a_count_that_does_not_publish_its_addresses_is_caught() {
    let mutant = || one_adds_and_one_takes(|| Unordered(LoomWord::new(0)));
    assert!(catch_unwind(mutant).is_err(), "a mutant was not caught");
}
