//! The operations of a thread, made in batches that stay in the processor's first cache. Making one
//! costs a fraction of the operation, and none of its latency.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rand::rngs::SmallRng;
use rand::{Rng, RngExt, SeedableRng};

use crate::keys::{self, Key};
use crate::pattern::Pattern;
use crate::records::RecordCounter;
use crate::value_size::ValueSize;
use crate::workload::Kind;

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
    /// The length of its value.
    pub value_bytes: u32,
}

impl Operation {
    /// On this record.
    #[inline]
    pub fn new(kind: Kind, record: u64, sizes: ValueSize) -> Self {
        Self { kind, record, key: keys::encode(record), value_bytes: sizes.of(record) }
    }
}

/// Where operations come from.
pub trait Source {
    /// The next operation; `None` when there is no more.
    fn next(&mut self) -> Option<Operation>;

    /// How many of so many operations may be done, as far as the source decides.
    #[inline]
    fn claim(&mut self, wanted: usize) -> usize {
        wanted
    }
}

/// How many operations all threads may do together.
#[derive(Debug)]
pub struct Budget(AtomicU64);

impl Budget {
    /// Exactly so many.
    pub const fn new(operations: u64) -> Self {
        Self(AtomicU64::new(operations))
    }

    /// Takes so many, or those that are left.
    #[inline]
    pub fn claim(&self, wanted: usize) -> usize {
        let wanted = wanted as u64;
        let take = |left: u64| (left > 0).then(|| left.saturating_sub(wanted));
        let before = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
        before.map_or(0, |before| before.min(wanted) as usize)
    }
}

/// Operations made and not used yet; kept from phase to phase.
#[derive(Default)]
pub struct Batch {
    operations: Vec<Operation>,
    used: usize,
    /// Those before this one were claimed.
    claimed: usize,
}

impl Batch {
    /// An empty one that never allocates again.
    pub fn new() -> Self {
        Self { operations: Vec::with_capacity(BATCH), used: 0, claimed: 0 }
    }

    /// Those that were claimed and not used yet.
    #[inline]
    pub fn rest(&self) -> &[Operation] {
        &self.operations[self.used..self.claimed]
    }

    /// Leaves what is not used yet to be claimed again, in a phase that counts for itself.
    pub fn unclaim(&mut self) {
        self.claimed = self.used;
    }

    /// Takes this many of the rest away.
    #[inline]
    pub fn consume(&mut self, count: usize) {
        self.used += count;
    }

    /// Makes and claims new ones once all are used. False when the source has no more.
    pub fn refill(&mut self, source: &mut impl Source) -> bool {
        if self.rest().is_empty() {
            if self.used == self.operations.len() {
                (self.used, self.claimed) = (0, 0);
                self.operations.clear();
                self.operations.extend(std::iter::from_fn(|| source.next()).take(BATCH));
            }
            self.claimed += source.claim(self.operations.len() - self.used);
        }
        !self.rest().is_empty()
    }
}

/// The load phase: each record once.
pub struct Loader {
    kind: Kind,
    sizes: ValueSize,
    next: u64,
    end: u64,
}

impl Loader {
    /// The share of one thread of `threads`, stored by operations of this kind.
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

/// The measured phase: a mix over a distribution, without end unless there is a budget.
pub struct Generator {
    random: SmallRng,
    /// Each with the shares up to it, so that the last one has 1.
    kinds: Vec<(Kind, f64)>,
    pattern: Pattern,
    records: Arc<RecordCounter>,
    budget: Option<Arc<Budget>>,
}

impl Generator {
    /// The generator of one thread; the same seed gives the same operations, as far as threads do
    /// not meet at [`RecordCounter`].
    pub fn new(pattern: Pattern, records: Arc<RecordCounter>, seed: u64) -> Self {
        let mut sum = 0.0;
        let kinds = pattern.mix.kinds().map(|(kind, share)| {
            sum += share;
            (kind, sum)
        });
        let (random, kinds) = (SmallRng::seed_from_u64(seed), kinds.collect());
        Self { random, kinds, pattern, records, budget: None }
    }

    /// From now on no more than the budget allows.
    pub fn limit(&mut self, budget: Option<Arc<Budget>>) {
        self.budget = budget;
    }

    #[inline]
    fn kind(&mut self) -> Kind {
        let [before @ .., (last, _)] = &self.kinds[..] else { return Kind::Get };
        if before.is_empty() {
            return *last;
        }
        let u: f64 = self.random.random();
        before.iter().find(|(_, end)| u < *end).map_or(*last, |(kind, _)| *kind)
    }
}

impl Source for Generator {
    #[inline]
    fn next(&mut self) -> Option<Operation> {
        let kind = self.kind();
        let record = match kind {
            Kind::Insert => self.records.claim(),
            _ => {
                let stored = self.records.stored();
                self.records.record(self.pattern.distribution.draw(&mut self.random, stored))
            }
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
    at: usize,
}

/// How many places of the buffer a value may start at, in bytes.
const PLACES: usize = 64 << 10;
/// From one value to the next: odd in units of eight bytes, so that every place comes.
const STEP: usize = 8 * 1021;

impl Values {
    /// Values of up to this length.
    pub fn new(value_bytes_max: u32, seed: u64) -> Self {
        let mut pool = vec![0; PLACES + value_bytes_max as usize];
        SmallRng::seed_from_u64(seed).fill_bytes(&mut pool);
        Self { pool, at: 0 }
    }

    /// The next value, of this length.
    #[inline]
    pub fn take(&mut self, value_bytes: u32) -> &[u8] {
        self.at = (self.at + STEP) % PLACES;
        &self.pool[self.at..self.at + value_bytes as usize]
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
                assert_eq!(operation.key, keys::encode(operation.record));
                seen[operation.record as usize] += 1;
            }
        }
        assert_eq!(seen, [1; 10]);
    }

    #[test]
    fn a_mix_comes_in_its_shares_and_inserts_are_new() {
        let records = Arc::new(RecordCounter::new(100, (0, 1)));
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
    fn threads_do_exactly_what_the_budget_allows_whatever_the_warm_up_left() {
        let records = Arc::new(RecordCounter::new(100, (0, 1)));
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
                assert!(same, "the warm-up's rest comes first");
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
