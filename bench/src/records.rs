//! The records that exist while threads insert new ones.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Counts the records that exist while threads insert new ones: all below
/// [`RecordCounter::stored`], as in YCSB's `AcknowledgedCounterGenerator`.
pub struct RecordCounter {
    loaded: u64,
    next: AtomicU64,
    stored: AtomicU64,
    /// By record modulo [`AHEAD_MAX`]: the record is stored, and one before it is not yet.
    ahead: Box<[AtomicBool]>,
    advancing: AtomicBool,
}

/// Limit on the inserts that are claimed and not stored yet. With more, two would share a mark.
const AHEAD_MAX: usize = 1 << 20;

impl RecordCounter {
    /// A counter after so many records were loaded.
    pub fn new(records: u64) -> Self {
        Self {
            loaded: records,
            next: AtomicU64::new(records),
            stored: AtomicU64::new(records),
            ahead: (0..AHEAD_MAX).map(|_| AtomicBool::new(false)).collect(),
            advancing: AtomicBool::new(false),
        }
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

    fn mark(&self, record: u64) -> &AtomicBool {
        &self.ahead[record as usize % AHEAD_MAX]
    }

    /// Tells that a record is stored. Loaded records are counted already.
    pub fn acknowledge(&self, record: u64) {
        if record < self.loaded {
            return;
        }
        self.mark(record).store(true, Ordering::SeqCst);
        // The holder of the lock checks the next mark again after it unlocks, so no mark is missed.
        while !self.advancing.swap(true, Ordering::SeqCst) {
            let mut stored = self.stored.load(Ordering::Relaxed);
            while self.mark(stored).swap(false, Ordering::SeqCst) {
                stored += 1;
                self.stored.store(stored, Ordering::Release);
            }
            self.advancing.store(false, Ordering::SeqCst);
            if !self.mark(stored).load(Ordering::SeqCst) {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_exist_once_all_before_them_do() {
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
