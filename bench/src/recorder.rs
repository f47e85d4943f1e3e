//! The records of a thread's operations, their latencies, counted by the buckets of a
//! [`Histogram`], and the attribution of the fabric's counters to kinds of operations. The
//! measurement of a thread, and the sum over threads.

use farside::{CacheStatistics, Counters};
use hdrhistogram::Histogram;

use crate::accounting::ServerUsage;
use crate::store::MeasuredStore;
use crate::workload::{Kind, Mix};

/// The record of all operations of one kind.
#[derive(Clone, Default)]
pub struct KindRecord {
    /// The latencies of the operations, in nanoseconds.
    pub latencies: Latencies,
    /// The service times, in nanoseconds, which count from the start of an operation. Only for a
    /// run with a schedule, whose latencies count from when an operation was due.
    pub service_times: Option<Latencies>,
    /// The verbs, bytes and round trips that the operations took.
    pub counters: Counters,
}

/// The record of all operations of one thread, or of several threads.
#[derive(Clone)]
pub struct Recorder {
    /// The records, by [`Kind::index`]; `None` for kinds that the workload does not have.
    kinds: [Option<KindRecord>; Kind::COUNT],
    /// Operations that succeeded but did not find what the workload had left: the key was absent,
    /// the value had another length, or an inserted key was already there.
    pub unexpected: u64,
    /// The time spent on generating and recording operations, in nanoseconds.
    pub driver_ns: u64,
    /// How far the slowest thread was behind its schedule when it ended, in nanoseconds.
    pub behind_ns: u64,
}

impl Recorder {
    /// An empty recorder for the kinds of a mix. It allocates nothing later.
    pub fn new(mix: Mix) -> Self {
        let mut kinds: [Option<KindRecord>; Kind::COUNT] = Default::default();
        for (kind, _) in mix.kinds() {
            kinds[kind.index()] = Some(KindRecord::default());
        }
        Self { kinds, unexpected: 0, driver_ns: 0, behind_ns: 0 }
    }

    /// Records service times too, for a run with a schedule.
    pub fn with_service_times(mut self) -> Self {
        for record in self.kinds.iter_mut().flatten() {
            record.service_times = Some(Latencies::default());
        }
        self
    }

    /// Records how long a finished operation took: from when it was due, and from its start.
    #[inline]
    pub fn record(&mut self, kind: Kind, latency_ns: u64, service_ns: u64) {
        let Some(record) = &mut self.kinds[kind.index()] else { return };
        record.latencies.record(latency_ns);
        if let Some(service_times) = &mut record.service_times {
            service_times.record(service_ns);
        }
    }

    /// Adds the fabric's counts of operations of this kind.
    #[inline]
    pub fn attribute(&mut self, kind: Kind, counters: &Counters) {
        if let Some(record) = &mut self.kinds[kind.index()] {
            record.counters += *counters;
        }
    }

    /// Adds the records of another thread.
    pub fn merge(&mut self, other: &Self) {
        for (kind, added) in other.kinds() {
            let Some(own) = &mut self.kinds[kind.index()] else {
                self.kinds[kind.index()] = Some(added.clone());
                continue;
            };
            own.latencies.add(&added.latencies);
            if let (Some(own), Some(added)) = (&mut own.service_times, &added.service_times) {
                own.add(added);
            }
            own.counters += added.counters;
        }
        self.unexpected += other.unexpected;
        self.driver_ns += other.driver_ns;
        self.behind_ns = self.behind_ns.max(other.behind_ns);
    }

    /// The kinds that the workload has, each with its record.
    pub fn kinds(&self) -> impl Iterator<Item = (Kind, &KindRecord)> {
        Kind::ALL
            .into_iter()
            .zip(&self.kinds)
            .filter_map(|(kind, record)| record.as_ref().map(|record| (kind, record)))
    }

    /// The number of all operations.
    pub fn operations(&self) -> u64 {
        self.kinds().map(|(_, record)| record.latencies.count()).sum()
    }
}

/// Attributes the fabric's counters to kinds of operations, where operations run one at a time.
/// Reads the counters only when the kind changes.
pub struct Attribution {
    kind: Option<Kind>,
    /// The counters when the present kind began.
    since: Counters,
}

impl Attribution {
    /// Starts with the present counters.
    pub fn new(store: &impl MeasuredStore) -> Self {
        Self { kind: None, since: store.counters() }
    }

    /// Call it before an operation of this kind. If the kind changes, attributes the counts so far
    /// to the former kind.
    #[inline]
    pub fn enter(&mut self, kind: Kind, store: &impl MeasuredStore, recorder: &mut Recorder) {
        if self.kind != Some(kind) {
            self.leave(store, recorder);
            self.kind = Some(kind);
        }
    }

    /// Ends the present kind, because no more operations follow: attributes the counts so far to
    /// it.
    pub fn leave(&mut self, store: &impl MeasuredStore, recorder: &mut Recorder) {
        let now = store.counters();
        if now.round_trips < self.since.round_trips {
            // The session reconnected and counts from 0 again.
            self.since = Counters::default();
        }
        if let Some(kind) = self.kind {
            recorder.attribute(kind, &(now - self.since));
        }
        self.since = now;
    }
}

/// Limit on a recorded latency, in nanoseconds. A longer one is recorded as this.
pub const LATENCY_NS_MAX: u64 = 60_000_000_000;
/// The number of decimal digits to which percentiles are exact.
const LATENCY_DIGITS: u8 = 3;
/// Latencies below 2 to this power have buckets of their own. Then the buckets double with each
/// power of two, which leaves half as many for each. That is what [`LATENCY_DIGITS`] requires.
const EXACT_BITS: u32 = 11;
/// The number of buckets for each power of two.
const HALF: usize = 1 << (EXACT_BITS - 1);
const BUCKETS: usize = bucket(LATENCY_NS_MAX) + 1;

/// An empty histogram of latencies that never grows.
pub fn latency_histogram() -> Histogram<u64> {
    #[allow(clippy::expect_used, reason = "the bounds are constants that fit")]
    Histogram::new_with_bounds(1, LATENCY_NS_MAX, LATENCY_DIGITS).expect("constant bounds")
}

/// The counts of latencies that [`latency_histogram`] would have. A measured loop records into
/// these, because that takes a sixth of the instructions.
#[derive(Clone)]
pub struct Latencies(Box<[u64]>);

/// The bucket of a latency.
#[inline]
const fn bucket(latency_ns: u64) -> usize {
    let doublings = (latency_ns | ((1 << EXACT_BITS) - 1)).ilog2() - (EXACT_BITS - 1);
    doublings as usize * HALF + (latency_ns >> doublings) as usize
}

/// The shortest latency of a bucket.
const fn shortest(bucket: usize) -> u64 {
    let doublings = (bucket / HALF).saturating_sub(1);
    ((bucket - doublings * HALF) as u64) << doublings
}

impl Default for Latencies {
    fn default() -> Self {
        Self(vec![0; BUCKETS].into())
    }
}

impl Latencies {
    /// Counts a latency.
    #[inline]
    pub fn record(&mut self, latency_ns: u64) {
        // It is always there.
        if let Some(count) = self.0.get_mut(bucket(latency_ns.min(LATENCY_NS_MAX))) {
            *count += 1;
        }
    }

    /// Adds the counts of others.
    pub fn add(&mut self, others: &Self) {
        for (count, added) in self.0.iter_mut().zip(&others.0) {
            *count += added;
        }
    }

    /// The number of latencies.
    pub fn count(&self) -> u64 {
        self.0.iter().sum()
    }

    /// The histogram of the latencies.
    pub fn histogram(&self) -> Histogram<u64> {
        let mut histogram = latency_histogram();
        for (bucket, count) in self.0.iter().enumerate().filter(|(_, count)| **count > 0) {
            // This cannot fail, because the buckets are those of the histogram.
            let _ = histogram.record_n(shortest(bucket), *count);
        }
        histogram
    }
}

/// The measurement of one thread, or the sum over several.
pub struct ThreadMeasurement {
    /// Their operations.
    pub recorder: Recorder,
    /// The start of the first thread, by the clock of latencies.
    pub started_ns: u64,
    /// The end of the last thread.
    pub ended_ns: u64,
    /// Hits and misses of the location caches.
    pub cache: CacheStatistics,
    /// How often the threads allocated.
    pub allocations: u64,
    /// CPU time, in seconds: less than threads x seconds if the threads had to share cores.
    pub cpu_s: f64,
}

/// The facts that the supervising thread collects.
pub struct RunFacts {
    /// The server's CPU time and wake-ups during the measurement, if its process is known.
    pub server: Option<ServerUsage>,
    /// How long the load phase took, in seconds.
    pub load_seconds: f64,
    /// The chains that the emulated device of each shard executed during the measurement; empty
    /// without devices.
    pub chains: Vec<u64>,
}

impl ThreadMeasurement {
    /// From the first thread's start to the last one's end, in seconds.
    pub fn seconds(&self) -> f64 {
        (self.ended_ns - self.started_ns) as f64 / 1e9
    }

    /// Returns the sum; `None` if there are no threads.
    pub fn sum(all: impl IntoIterator<Item = Self>) -> Option<Self> {
        let mut all = all.into_iter();
        let mut sum = all.next()?;
        for one in all {
            sum.recorder.merge(&one.recorder);
            sum.started_ns = sum.started_ns.min(one.started_ns);
            sum.ended_ns = sum.ended_ns.max(one.ended_ns);
            sum.cache.hits += one.cache.hits;
            sum.cache.misses += one.cache.misses;
            sum.allocations += one.allocations;
            sum.cpu_s += one.cpu_s;
        }
        Some(sum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recorder::LATENCY_NS_MAX;
    use crate::workload::Workload;

    #[test]
    fn threads_add_up_and_long_latencies_saturate() {
        let mut all = Recorder::new(Mix::NOTHING);
        for latency_ns in [100, u64::MAX] {
            let mut thread = Recorder::new(Workload::A.mix()).with_service_times();
            thread.record(Kind::Get, latency_ns, 50);
            thread.attribute(Kind::Put, &Counters { reads: 3, ..Default::default() });
            thread.unexpected = 2;
            thread.behind_ns = latency_ns;
            all.merge(&thread);
        }
        assert_eq!((all.operations(), all.unexpected, all.behind_ns), (2, 4, u64::MAX));
        let kinds: Vec<(Kind, u64)> =
            all.kinds().map(|(kind, record)| (kind, record.counters.reads)).collect();
        assert_eq!(kinds, [(Kind::Get, 0), (Kind::Put, 6)]);
        let (_, gets) = all.kinds().next().unwrap();
        let latencies = gets.latencies.histogram();
        assert!(latencies.max() >= LATENCY_NS_MAX);
        assert_eq!(latencies.value_at_quantile(0.4), 100);
        let service_times = gets.service_times.as_ref().unwrap().histogram();
        assert_eq!((service_times.len(), service_times.max()), (2, 50));
    }

    #[test]
    fn the_histogram_is_the_one_that_records_the_latencies_itself() {
        let (mut own, mut others, mut expected) =
            (Latencies::default(), Latencies::default(), latency_histogram());
        let mut latency_ns = 1;
        while latency_ns < 4 * LATENCY_NS_MAX {
            for near in [0, latency_ns - 1, latency_ns, latency_ns + 1, latency_ns * 10 / 7] {
                own.record(near);
                others.record(near / 3);
                expected.saturating_record(near.min(LATENCY_NS_MAX));
                expected.saturating_record((near / 3).min(LATENCY_NS_MAX));
            }
            latency_ns += latency_ns / 5 + 1;
        }
        own.record(u64::MAX);
        expected.saturating_record(u64::MAX);
        own.add(&others);
        let histogram = own.histogram();
        assert_eq!(own.count(), expected.len());
        assert_eq!((histogram.min(), histogram.max()), (expected.min(), expected.max()));
        assert!(histogram.iter_all().eq(expected.iter_all()));
        assert_eq!(histogram, expected);
    }

    #[test]
    fn a_sum_spans_all_threads() {
        let measured = |start_ns| ThreadMeasurement {
            recorder: Recorder::new(Workload::A.mix()),
            started_ns: start_ns,
            ended_ns: 2 * start_ns,
            cache: CacheStatistics { hits: 10, misses: 20 },
            allocations: 3,
            cpu_s: 0.5,
        };
        let sum = ThreadMeasurement::sum([measured(100), measured(30_000)]).unwrap();
        assert_eq!((sum.started_ns, sum.ended_ns, sum.allocations), (100, 60_000, 6));
        assert_eq!((sum.cache, sum.cpu_s), (CacheStatistics { hits: 20, misses: 40 }, 1.0));
        assert!(ThreadMeasurement::sum([]).is_none());
    }
}
