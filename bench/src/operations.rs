//! The operations of a thread. They are generated in batches that fit in the first-level cache.
//! Generating one costs a fraction of the operation, and adds nothing to its latency.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rand::rngs::SmallRng;
use rand::{Rng, RngExt, SeedableRng};

use crate::pattern::Pattern;
use crate::records::{self, Key, RecordCounter, ValueSize};
use crate::workload::Kind;

/// The number of operations that are generated at once.
pub const BATCH: usize = 128;

/// An operation on a record.
#[derive(Clone, Copy, Debug)]
pub struct Operation {
    /// Its kind.
    pub kind: Kind,
    /// The number of the record.
    pub record: u64,
    /// Its key.
    pub key: Key,
    /// The length of its value.
    pub value_bytes: u32,
}

impl Operation {
    /// An operation of this kind on this record.
    #[inline]
    pub fn new(kind: Kind, record: u64, sizes: ValueSize) -> Self {
        Self { kind, record, key: records::key_of(record), value_bytes: sizes.of(record) }
    }
}

/// A source of operations.
pub trait Source {
    /// The next operation; `None` when there is no more.
    fn next(&mut self) -> Option<Operation>;

    /// Returns how many of `wanted` operations may be done. A source without a budget allows all.
    #[inline]
    fn claim(&mut self, wanted: usize) -> usize {
        wanted
    }
}

/// The number of operations that the threads may still claim, together.
#[derive(Debug)]
pub struct Budget(AtomicU64);

impl Budget {
    /// A budget of this number of operations.
    pub const fn new(operations: u64) -> Self {
        Self(AtomicU64::new(operations))
    }

    /// Claims `wanted` operations, or as many as are left. Returns how many.
    #[inline]
    pub fn claim(&self, wanted: usize) -> usize {
        let wanted = wanted as u64;
        let take = |left: u64| (left > 0).then(|| left.saturating_sub(wanted));
        let before = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
        before.map_or(0, |before| before.min(wanted) as usize)
    }
}

/// Operations that are generated and not used yet. They are kept from phase to phase.
#[derive(Default)]
pub struct Batch {
    operations: Vec<Operation>,
    /// The operations before this index were used.
    used: usize,
    /// The operations before this index were claimed.
    claimed: usize,
}

impl Batch {
    /// An empty batch, which never allocates again.
    pub fn new() -> Self {
        Self { operations: Vec::with_capacity(BATCH), used: 0, claimed: 0 }
    }

    /// The operations that were claimed and not used yet.
    #[inline]
    pub fn rest(&self) -> &[Operation] {
        &self.operations[self.used..self.claimed]
    }

    /// Returns claimed operations that were not started to the budget, because the next phase
    /// claims its own.
    pub fn unclaim(&mut self) {
        self.claimed = self.used;
    }

    /// Marks the first `count` operations of the rest as used.
    #[inline]
    pub fn consume(&mut self, count: usize) {
        self.used += count;
    }

    /// Generates operations once all are used, and claims them. Returns false if the source has no
    /// more, or allows no more.
    pub fn refill(&mut self, source: &mut impl Source) -> bool {
        if self.rest().is_empty() {
            if self.used == self.operations.len() {
                (self.used, self.claimed) = (0, 0);
                self.operations.clear();
                while self.operations.len() < BATCH
                    && let Some(operation) = source.next()
                {
                    self.operations.push(operation);
                }
            }
            self.claimed += source.claim(self.operations.len() - self.used);
        }
        !self.rest().is_empty()
    }
}

/// The source of the load phase: each record once.
pub struct Loader {
    kind: Kind,
    sizes: ValueSize,
    next: u64,
    end: u64,
}

impl Loader {
    /// The share of one of `threads` threads, stored by operations of this kind.
    pub fn new(kind: Kind, sizes: ValueSize, records: u64, (thread, threads): (u64, u64)) -> Self {
        let start =
            |thread| (u128::from(records) * u128::from(thread) / u128::from(threads)) as u64;
        Self { kind, sizes, next: start(thread), end: start(thread + 1) }
    }
}

impl Source for Loader {
    #[inline]
    fn next(&mut self) -> Option<Operation> {
        let record = self.next;
        self.next += 1;
        (record < self.end).then(|| Operation::new(self.kind, record, self.sizes))
    }
}

/// The source of the measured phase: a mix over a distribution. Endless without a budget.
pub struct Generator {
    random: SmallRng,
    /// Each kind with its cumulative share; the last one's is 1.
    kinds: Vec<(Kind, f64)>,
    pattern: Pattern,
    records: Arc<RecordCounter>,
    budget: Option<Arc<Budget>>,
}

impl Generator {
    /// The generator of one thread. The same seed gives the same operations, unless inserts of
    /// several threads interleave at [`RecordCounter`].
    pub fn new(pattern: Pattern, records: Arc<RecordCounter>, seed: u64) -> Self {
        let mut sum = 0.0;
        let kinds = pattern.mix.kinds().map(|(kind, share)| {
            sum += share;
            (kind, sum)
        });
        let (random, kinds) = (SmallRng::seed_from_u64(seed), kinds.collect());
        Self { random, kinds, pattern, records, budget: None }
    }

    /// Sets the budget; `None` removes it.
    pub fn limit(&mut self, budget: Option<Arc<Budget>>) {
        self.budget = budget;
    }

    #[inline]
    fn kind(&mut self) -> Kind {
        let [others @ .., (last, _)] = &self.kinds[..] else { return Kind::Get };
        if others.is_empty() {
            return *last;
        }
        let u: f64 = self.random.random();
        others.iter().find(|(_, end)| u < *end).map_or(*last, |(kind, _)| *kind)
    }
}

impl Source for Generator {
    #[inline]
    fn next(&mut self) -> Option<Operation> {
        let kind = self.kind();
        let record = match kind {
            Kind::Insert => self.records.claim(),
            _ => self.pattern.distribution.draw(&mut self.random, self.records.stored()),
        };
        Some(Operation::new(kind, record, self.pattern.sizes))
    }

    #[inline]
    fn claim(&mut self, wanted: usize) -> usize {
        self.budget.as_ref().map_or(wanted, |budget| budget.claim(wanted))
    }
}

/// Values that look random: slices of one random buffer.
pub struct Values {
    pool: Vec<u8>,
    start: usize,
}

/// The part of the buffer in which values start, at multiples of 8, in bytes.
const STARTS_BYTES: usize = 64 << 10;
/// The distance between the starts of two values: an odd number of 8-byte units, so that every
/// start comes up.
const STEP: usize = 8 * 1021;

impl Values {
    /// A buffer for values of up to this length.
    pub fn new(value_bytes_max: u32, seed: u64) -> Self {
        let mut pool = vec![0; STARTS_BYTES + value_bytes_max as usize];
        SmallRng::seed_from_u64(seed).fill_bytes(&mut pool);
        Self { pool, start: 0 }
    }

    /// The next value, of this length.
    #[inline]
    pub fn take(&mut self, value_bytes: u32) -> &[u8] {
        self.start = (self.start + STEP) % STARTS_BYTES;
        &self.pool[self.start..self.start + value_bytes as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::distribution::{Distribution, Shape, Skew};
    use crate::workload::Workload;

    fn pattern(workload: Workload) -> Pattern {
        let distribution = Distribution::new(Shape::Latest, &Skew::default(), 100);
        let sizes = ValueSize::Uniform(10, 20);
        Pattern { mix: workload.mix(), distribution: Arc::new(distribution), sizes }
    }

    #[test]
    fn threads_load_each_record_once() {
        let mut seen = [0; 10];
        for thread in 0..3 {
            let mut loader = Loader::new(Kind::Insert, ValueSize::Constant(1), 10, (thread, 3));
            while let Some(operation) = loader.next() {
                assert_eq!(operation.key, records::key_of(operation.record));
                seen[operation.record as usize] += 1;
            }
        }
        assert_eq!(seen, [1; 10]);
    }

    #[test]
    fn a_mix_has_its_shares_and_each_insert_is_a_new_record() {
        let records = Arc::new(RecordCounter::new(100));
        let mut generator = Generator::new(pattern(Workload::D), records.clone(), 3);
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
    fn threads_use_the_budget_exactly_also_with_operations_left_from_the_warm_up() {
        let records = Arc::new(RecordCounter::new(100));
        let budget = Arc::new(Budget::new(10_000));
        let done: usize = std::thread::scope(|scope| {
            let run = |seed| {
                let mut generator = Generator::new(pattern(Workload::A), records.clone(), seed);
                let mut batch = Batch::new();
                batch.refill(&mut generator);
                batch.consume(7);
                let before = batch.rest().to_vec();
                batch.unclaim();
                generator.limit(Some(budget.clone()));
                batch.refill(&mut generator);
                let same = batch.rest().iter().zip(&before).all(|(a, b)| a.record == b.record);
                assert!(same, "the operations left from the warm-up come first");
                let mut done = 0;
                while batch.refill(&mut generator) {
                    let count = batch.rest().len();
                    batch.consume(count);
                    done += count;
                }
                done
            };
            let threads: Vec<_> = (0..3).map(|seed| scope.spawn(move || run(seed))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!(done, 10_000);
        assert_eq!(budget.claim(1), 0);
    }

    #[test]
    fn values_have_their_length_and_differ() {
        let mut values = Values::new(40, 1);
        let first = values.take(40).to_vec();
        assert_eq!(first.len(), 40);
        assert_ne!(values.take(40), first);
        assert_eq!(values.take(7).len(), 7);
        assert_eq!(Values::new(0, 1).take(0), b"");
    }
}
