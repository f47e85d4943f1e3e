//! The records that exist while threads insert new ones.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Counts the records that exist while threads insert new ones: all below
/// [`RecordCounter::stored`], as in YCSB's `AcknowledgedCounterGenerator`.
pub struct RecordCounter {
    loaded: u64,
    next: AtomicU64,
    stored: AtomicU64,
    /// The records that are stored, while one before them is not yet.
    ahead: Mutex<BinaryHeap<Reverse<u64>>>,
}

/// The number of records ahead for which there is memory from the start.
const AHEAD: usize = 1 << 16;

impl RecordCounter {
    /// A counter for a store into which this number of records was loaded.
    pub fn new(records: u64) -> Self {
        let [next, stored] = [records; 2].map(AtomicU64::new);
        Self { loaded: records, next, stored, ahead: Mutex::new(BinaryHeap::with_capacity(AHEAD)) }
    }

    /// Returns a new record, which the caller inserts.
    pub fn claim(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// The number of records that exist.
    #[inline]
    pub fn stored(&self) -> u64 {
        self.stored.load(Ordering::Acquire)
    }

    /// Counts a record as stored. Loaded records are counted already.
    pub fn acknowledge(&self, record: u64) {
        if record < self.loaded {
            return;
        }
        let mut ahead = self.ahead.lock().unwrap_or_else(PoisonError::into_inner);
        ahead.push(Reverse(record));
        let mut stored = self.stored.load(Ordering::Relaxed);
        while ahead.peek() == Some(&Reverse(stored)) {
            ahead.pop();
            stored += 1;
        }
        self.stored.store(stored, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_exists_as_soon_as_all_before_it_do() {
        let counter = RecordCounter::new(5);
        let claimed: Vec<u64> = (0..3).map(|_| counter.claim()).collect();
        assert_eq!(claimed, [5, 6, 7]);
        counter.acknowledge(7);
        counter.acknowledge(6);
        assert_eq!(counter.stored(), 5);
        counter.acknowledge(5);
        assert_eq!(counter.stored(), 8);
    }

    #[test]
    fn threads_that_insert_side_by_side_lose_no_record() {
        let counter = RecordCounter::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..50_000).for_each(|_| counter.acknowledge(counter.claim())));
            }
        });
        assert_eq!(counter.stored(), 200_000);
    }
}
