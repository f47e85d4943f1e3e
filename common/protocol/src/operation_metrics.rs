//! What a session counts for the metrics of its client: operations by kind and result, how long
//! they took, what they transferred, and why they were tried again.
//!
//! Most operations are GETs and PUTs at cached locations, which take a few hundred nanoseconds. The
//! protocol counts them where it has read the clock anyway, and behind a check that it makes
//! anyway. So they take no more instructions without metrics, and about a dozen with them:
//!
//! | operation | the check | without metrics | with metrics |
//! |---|---|---|---|
//! | GET | Is the READ fresh? | 7/8 GRACE is the limit | the limit is 0, and then 7/8 GRACE |
//! | PUT | Is the store watched? | only by a server that evicts | always |
//!
//! What such an operation transfers follows from its count, except for the bytes. All others are
//! counted around the whole operation ([`Measurement`]).
//!
//! The session's thread is the only one that changes the counts. Other threads may read them.

mod kinds;
mod latencies;
mod totals;

use std::array;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

use farside_fabric::{Counters, Nanos};

use latencies::LatencyCounts;

pub use kinds::{OperationKind, RetryReason};
pub use latencies::Latencies;
pub use totals::{KindTotals, OperationTotals};

/// Adds to a count. Not atomic, because a count has one writer.
#[inline(always)]
fn add_to(count: &AtomicU64, more: u64) {
    count.store(count.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
}

fn read(count: &AtomicU64) -> u64 {
    count.load(Ordering::Relaxed)
}

/// The operations of a kind at cached locations that their first chain completed.
#[derive(Default)]
struct CachedOperations {
    latencies: LatencyCounts,
    /// What their chains transferred, except for marks and words.
    bytes: AtomicU64,
}

impl CachedOperations {
    #[inline(always)]
    fn add(&self, latency: Nanos, bytes: u64) {
        self.latencies.add(latency);
        add_to(&self.bytes, bytes);
    }
}

/// The other operations of a kind.
#[derive(Default)]
struct KindCounts {
    latencies: LatencyCounts,
    positive: AtomicU64,
    negative: AtomicU64,
    errors: AtomicU64,
}

/// What verbs transferred, except for the operations in [`CachedOperations`].
#[derive(Default)]
struct Traffic {
    round_trips: AtomicU64,
    reads: AtomicU64,
    writes: AtomicU64,
    compare_swaps: AtomicU64,
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
}

/// The counts of one session.
pub struct OperationMetrics {
    cached_gets: CachedOperations,
    /// Those of `cached_gets` that found an expired value.
    expired: AtomicU64,
    cached_puts: CachedOperations,
    kinds: [KindCounts; OperationKind::ALL.len()],
    retries: [AtomicU64; RetryReason::ALL.len()],
    traffic: Traffic,
}

impl Default for OperationMetrics {
    fn default() -> Self {
        Self {
            cached_gets: CachedOperations::default(),
            expired: AtomicU64::default(),
            cached_puts: CachedOperations::default(),
            kinds: array::from_fn(|_| KindCounts::default()),
            retries: array::from_fn(|_| AtomicU64::default()),
            traffic: Traffic::default(),
        }
    }
}

/// The bytes of a cached PUT's chain beside its block: a mark of 4 bytes and a word of 8.
const PUT_BYTES: u64 = 12;

/// What the chain of a PUT at a cached location transfers, if its block has this many bytes.
pub(crate) fn cached_put_traffic(block_bytes: u64) -> Counters {
    let written_bytes = block_bytes + PUT_BYTES;
    Counters { round_trips: 1, writes: 2, compare_swaps: 1, written_bytes, ..Counters::default() }
}

/// What a READ of so many bytes transfers.
pub(crate) fn read_traffic(round_trips: u64, read_bytes: u64) -> Counters {
    Counters { round_trips, reads: 1, read_bytes, ..Counters::default() }
}

impl OperationMetrics {
    /// Counts that all sessions without metrics share, and none changes.
    pub(crate) fn unused() -> Arc<Self> {
        static UNUSED: LazyLock<Arc<OperationMetrics>> = LazyLock::new(Arc::default);
        UNUSED.clone()
    }

    /// Counts a GET that the READ of its cached location answered.
    #[inline(always)]
    pub(crate) fn add_cached_get(&self, latency: Nanos, bytes: u64) {
        self.cached_gets.add(latency, bytes);
    }

    /// Corrects the counts after [`OperationMetrics::add_cached_get`]: the value had expired.
    #[cold]
    pub(crate) fn correct_expired(&self) {
        add_to(&self.expired, 1);
    }

    /// Counts a PUT that its chain at the cached location completed.
    #[inline(always)]
    pub(crate) fn add_cached_put(&self, latency: Nanos, block_bytes: u64) {
        self.cached_puts.add(latency, block_bytes);
    }

    /// Counts an operation that succeeded. It is positive if it found the key, or if its change was
    /// made.
    pub fn add(&self, kind: OperationKind, is_positive: bool, latency: Nanos) {
        let counts = &self.kinds[kind as usize];
        add_to(if is_positive { &counts.positive } else { &counts.negative }, 1);
        counts.latencies.add(latency);
    }

    /// Counts an operation that failed.
    pub fn add_error(&self, kind: OperationKind) {
        add_to(&self.kinds[kind as usize].errors, 1);
    }

    /// Counts another attempt of an operation.
    pub fn add_retry(&self, reason: RetryReason) {
        add_to(&self.retries[reason as usize], 1);
    }

    /// Adds what verbs transferred.
    pub fn add_traffic(&self, more: &Counters) {
        let Traffic { round_trips, reads, writes, compare_swaps, read_bytes, written_bytes } =
            &self.traffic;
        add_to(round_trips, more.round_trips);
        add_to(reads, more.reads);
        add_to(writes, more.writes);
        add_to(compare_swaps, more.compare_swaps);
        add_to(read_bytes, more.read_bytes);
        add_to(written_bytes, more.written_bytes);
    }

    /// What all verbs transferred, without doorbells.
    pub fn traffic(&self) -> Counters {
        let Traffic { round_trips, reads, writes, compare_swaps, read_bytes, written_bytes } =
            &self.traffic;
        let gets = self.cached_gets.latencies.count();
        let puts = self.cached_puts.latencies.count();
        Counters {
            round_trips: read(round_trips) + gets + puts,
            doorbells: 0,
            reads: read(reads) + gets,
            writes: read(writes) + 2 * puts,
            compare_swaps: read(compare_swaps) + puts,
            read_bytes: read(read_bytes) + read(&self.cached_gets.bytes),
            written_bytes: read(written_bytes) + read(&self.cached_puts.bytes) + puts * PUT_BYTES,
        }
    }

    /// All counts so far.
    pub fn totals(&self) -> OperationTotals {
        let mut totals = OperationTotals::default();
        for (counts, kind) in self.kinds.iter().zip(&mut totals.kinds) {
            kind.positive = read(&counts.positive);
            kind.negative = read(&counts.negative);
            kind.errors = read(&counts.errors);
            counts.latencies.add_to(&mut kind.latencies);
        }
        let gets = &mut totals.kinds[OperationKind::Get as usize];
        let expired = read(&self.expired);
        gets.positive += self.cached_gets.latencies.add_to(&mut gets.latencies).max(expired);
        gets.positive -= expired;
        gets.negative += expired;
        let puts = &mut totals.kinds[OperationKind::Put as usize];
        puts.positive += self.cached_puts.latencies.add_to(&mut puts.latencies);
        totals.retries = array::from_fn(|reason| read(&self.retries[reason]));
        totals.traffic = self.traffic();
        totals
    }
}

/// The beginning of an operation that is counted as a whole.
#[derive(Clone, Copy, Debug, Default)]
pub struct Measurement {
    /// When it began.
    pub since: Nanos,
    /// What its lanes had transferred by then.
    pub(crate) before: Counters,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_operation_counts_once_with_what_it_transferred() {
        let metrics = OperationMetrics::default();
        (0..5).for_each(|_| metrics.add_cached_get(200, 112));
        metrics.correct_expired();
        metrics.add_cached_put(300, 104);
        metrics.add(OperationKind::Get, false, 500);
        metrics.add_traffic(&read_traffic(1, 256));
        metrics.add(OperationKind::Take, true, 900);
        metrics.add_error(OperationKind::Take);
        metrics.add_retry(RetryReason::Split);
        let mut totals = metrics.totals();
        totals += &metrics.totals();
        let counts = |kind: OperationKind| {
            let KindTotals { positive, negative, errors, latencies } = &totals.kinds[kind as usize];
            (*positive, *negative, *errors, latencies.count(), latencies.sum_ns)
        };
        assert_eq!(counts(OperationKind::Get), (8, 4, 0, 12, 3000));
        assert_eq!(counts(OperationKind::Put), (2, 0, 0, 2, 600));
        assert_eq!(counts(OperationKind::Take), (2, 0, 2, 2, 1800));
        assert_eq!(totals.retries[RetryReason::Split as usize], 2);
        let expected = Counters {
            round_trips: 14,
            doorbells: 0,
            reads: 12,
            writes: 4,
            compare_swaps: 2,
            read_bytes: 2 * (5 * 112 + 256),
            written_bytes: 2 * 116,
        };
        assert_eq!(totals.traffic, expected);
    }
}
