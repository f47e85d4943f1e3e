//! The operations of a thread, made in batches that stay in the processor's first cache: making
//! them costs a fraction of the operation, and none of its latency.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::distribution::{Distribution, below};
use crate::keys::{self, Key};
use crate::workload::{Kind, Mix};

/// How many operations are made at once.
pub const BATCH: usize = 128;

/// What to do with which key.
#[derive(Clone, Copy, Debug)]
pub struct Operation {
    /// What.
    pub kind: Kind,
    /// The number of the record.
    pub record: u64,
    /// Its key.
    pub key: Key,
}

impl Operation {
    fn new(kind: Kind, record: u64) -> Self {
        Self { kind, record, key: keys::encode(record) }
    }
}

/// Where operations come from.
pub trait Source {
    /// The next operation; `None` when there is no more.
    fn next(&mut self) -> Option<Operation>;
}

/// Operations made and not used yet; kept from phase to phase.
#[derive(Default)]
pub struct Batch {
    operations: Vec<Operation>,
    used: usize,
}

impl Batch {
    /// An empty one that never allocates again.
    pub fn new() -> Self {
        Self { operations: Vec::with_capacity(BATCH), used: 0 }
    }

    /// Those not used yet.
    #[inline]
    pub fn rest(&self) -> &[Operation] {
        &self.operations[self.used..]
    }

    /// Takes this many of the rest away.
    #[inline]
    pub fn consume(&mut self, count: usize) {
        self.used += count;
    }

    /// Makes new ones once all are used. False when the source has no more.
    pub fn refill(&mut self, source: &mut impl Source) -> bool {
        if self.rest().is_empty() {
            self.used = 0;
            self.operations.clear();
            self.operations.extend(std::iter::from_fn(|| source.next()).take(BATCH));
        }
        !self.rest().is_empty()
    }
}

/// The load phase: each record once.
pub struct Loader {
    kind: Kind,
    next: u64,
    end: u64,
}

impl Loader {
    /// The share of one thread of `threads`, stored by operations of this kind.
    pub fn new(kind: Kind, records: u64, thread: u64, threads: u64) -> Self {
        let start =
            |thread| (u128::from(records) * u128::from(thread) / u128::from(threads)) as u64;
        Self { kind, next: start(thread), end: start(thread + 1) }
    }
}

impl Source for Loader {
    #[inline]
    fn next(&mut self) -> Option<Operation> {
        let record = self.next;
        self.next += 1;
        (record < self.end).then(|| Operation::new(self.kind, record))
    }
}

/// The measured phase: a mix over a distribution, without end.
pub struct Generator {
    random: SmallRng,
    mix: Mix,
    distribution: Arc<Distribution>,
    records: Arc<RecordCounter>,
}

impl Generator {
    /// The generator of one thread; the same seed gives the same operations, as far as threads do
    /// not meet at [`RecordCounter`].
    pub fn new(
        mix: Mix,
        distribution: Arc<Distribution>,
        records: Arc<RecordCounter>,
        seed: u64,
    ) -> Self {
        Self { random: SmallRng::seed_from_u64(seed), mix, distribution, records }
    }

    #[inline]
    fn kind(&mut self) -> Kind {
        let [before @ .., (last, _)] = self.mix else { return Kind::Get };
        if before.is_empty() {
            return *last;
        }
        let mut number = below(&mut self.random, 100) as u32;
        for (kind, percent) in before {
            if number < *percent {
                return *kind;
            }
            number -= percent;
        }
        *last
    }
}

impl Source for Generator {
    #[inline]
    fn next(&mut self) -> Option<Operation> {
        let kind = self.kind();
        let record = match kind {
            Kind::Insert => self.records.claim(),
            _ => self.distribution.draw(&mut self.random, self.records.stored()),
        };
        Some(Operation::new(kind, record))
    }
}

/// Which records exist while threads insert new ones: those below [`RecordCounter::stored`], as in
/// YCSB's `AcknowledgedCounterGenerator`.
pub struct RecordCounter {
    loaded: u64,
    next: AtomicU64,
    stored: AtomicU64,
    /// By record modulo its length: stored, though one before it is not yet.
    ahead: Box<[AtomicBool]>,
    advancing: AtomicBool,
}

/// More inserts than this are never claimed and not stored yet.
const AHEAD_MAX: usize = 1 << 20;

impl RecordCounter {
    /// After the load of this many records.
    pub fn new(records: u64) -> Self {
        Self {
            loaded: records,
            next: AtomicU64::new(records),
            stored: AtomicU64::new(records),
            ahead: (0..AHEAD_MAX).map(|_| AtomicBool::new(false)).collect(),
            advancing: AtomicBool::new(false),
        }
    }

    /// A new record, for the caller to insert.
    pub fn claim(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// How many records there are.
    #[inline]
    pub fn stored(&self) -> u64 {
        self.stored.load(Ordering::Acquire)
    }

    fn mark(&self, record: u64) -> &AtomicBool {
        &self.ahead[record as usize % AHEAD_MAX]
    }

    /// The record is stored; nothing new for those of the load.
    pub fn acknowledge(&self, record: u64) {
        if record < self.loaded {
            return;
        }
        self.mark(record).store(true, Ordering::SeqCst);
        // Whoever holds the lock looks at the marks again after giving it up, so none is forgotten.
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

/// Values that look random: slices of one random buffer.
pub struct Values {
    pool: Vec<u8>,
    value_bytes: usize,
    at: usize,
}

/// How many places of the buffer a value may start at, in bytes.
const PLACES: usize = 64 << 10;
/// From one value to the next: odd in units of eight bytes, so that every place comes.
const STEP: usize = 8 * 1021;

impl Values {
    /// Values of exactly this length.
    pub fn new(value_bytes: usize, seed: u64) -> Self {
        let mut pool = vec![0; PLACES + value_bytes];
        SmallRng::seed_from_u64(seed).fill_bytes(&mut pool);
        Self { pool, value_bytes, at: 0 }
    }

    /// The next value.
    #[inline]
    pub fn take(&mut self) -> &[u8] {
        self.at = (self.at + STEP) % PLACES;
        &self.pool[self.at..self.at + self.value_bytes]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::distribution::Shape;
    use crate::workload::Workload;

    #[test]
    fn threads_load_each_record_once() {
        let mut seen = [0; 10];
        for thread in 0..3 {
            let mut loader = Loader::new(Kind::Insert, 10, thread, 3);
            while let Some(operation) = loader.next() {
                assert_eq!(operation.key, keys::encode(operation.record));
                seen[operation.record as usize] += 1;
            }
        }
        assert_eq!(seen, [1; 10]);
    }

    #[test]
    fn a_mix_comes_in_its_shares_and_inserts_are_new() {
        let records = Arc::new(RecordCounter::new(100));
        let distribution = Arc::new(Distribution::new(Shape::Latest, 100));
        let mix = Workload::D.mix();
        let mut generator = Generator::new(mix, distribution, records.clone(), 3);
        let mut batch = Batch::new();
        let (mut inserts, mut expected) = (0, 100);
        for _ in 0..1000 {
            assert!(batch.refill(&mut generator));
            let count = batch.rest().len();
            for operation in batch.rest() {
                if operation.kind == Kind::Insert {
                    assert_eq!(operation.record, expected);
                    records.acknowledge(expected);
                    (inserts, expected) = (inserts + 1, expected + 1);
                } else {
                    assert!(operation.record < records.stored());
                }
            }
            batch.consume(count);
        }
        let share = f64::from(inserts) / (1000.0 * BATCH as f64);
        assert!((share - 0.05).abs() < 0.005, "{share}");
    }

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

    #[test]
    fn values_have_their_length_and_differ() {
        let mut values = Values::new(40, 1);
        let first = values.take().to_vec();
        assert_eq!(first.len(), 40);
        assert_ne!(values.take(), first);
        assert_eq!(Values::new(0, 1).take(), b"");
    }
}
