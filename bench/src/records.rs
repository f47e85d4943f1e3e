//! The records that exist while threads insert new ones.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Counts the records that exist while threads insert new ones: all below
/// [`RecordCounter::stored`], as in YCSB's `AcknowledgedCounterGenerator`.
///
/// It counts the loaded records and the inserts of this process. Each process inserts records of
/// its own, so no record is inserted twice.
pub struct RecordCounter {
    loaded: u64,
    process: u64,
    processes: u64,
    next: AtomicU64,
    stored: AtomicU64,
    /// By record modulo [`AHEAD_MAX`]: the record is stored, and one before it is not yet.
    ahead: Box<[AtomicBool]>,
    advancing: AtomicBool,
}

/// Limit on the inserts that are claimed and not stored yet. With more, two would share a mark.
const AHEAD_MAX: usize = 1 << 20;

impl RecordCounter {
    /// The counter of one of several processes, after so many records were loaded.
    pub fn new(records: u64, (process, processes): (u64, u64)) -> Self {
        Self {
            loaded: records,
            process,
            processes,
            next: AtomicU64::new(records),
            stored: AtomicU64::new(records),
            ahead: (0..AHEAD_MAX).map(|_| AtomicBool::new(false)).collect(),
            advancing: AtomicBool::new(false),
        }
    }

    /// Returns a new record, which the caller inserts.
    pub fn claim(&self) -> u64 {
        self.record(self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// The number of the record that this process counts as number `counted`.
    #[inline]
    pub fn record(&self, counted: u64) -> u64 {
        match counted.checked_sub(self.loaded) {
            Some(inserted) => self.loaded + inserted * self.processes + self.process,
            None => counted,
        }
    }

    /// The number of records that exist, as this process counts them.
    #[inline]
    pub fn stored(&self) -> u64 {
        self.stored.load(Ordering::Acquire)
    }

    fn mark(&self, record: u64) -> &AtomicBool {
        &self.ahead[record as usize % AHEAD_MAX]
    }

    /// Tells that a record is stored. Loaded records are counted already.
    pub fn acknowledge(&self, record: u64) {
        let Some(inserted) = record.checked_sub(self.loaded) else { return };
        self.mark(self.loaded + inserted / self.processes).store(true, Ordering::SeqCst);
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
        let counter = RecordCounter::new(5, (0, 1));
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
        let counter = RecordCounter::new(0, (0, 1));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..50_000).for_each(|_| counter.acknowledge(counter.claim())));
            }
        });
        assert_eq!(counter.stored(), 200_000);
    }

    #[test]
    fn processes_insert_records_of_their_own() {
        let counters = [0, 1, 2].map(|process| RecordCounter::new(10, (process, 3)));
        let mut claimed: Vec<u64> = counters.iter().map(RecordCounter::claim).collect();
        claimed.extend(counters.iter().map(RecordCounter::claim));
        assert_eq!(claimed, (10..16).collect::<Vec<_>>());
        counters[1].acknowledge(11);
        counters[1].acknowledge(14);
        assert_eq!(counters[1].stored(), 12);
        assert_eq!([9, 10, 11].map(|counted| counters[1].record(counted)), [9, 11, 14]);
    }
}
