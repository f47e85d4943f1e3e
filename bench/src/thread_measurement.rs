//! The measurement of a thread, and the sum over threads.

use farside::CacheStatistics;

use crate::accounting::ServerUsage;
use crate::recorder::Recorder;

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
    use crate::workload::Workload;

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
