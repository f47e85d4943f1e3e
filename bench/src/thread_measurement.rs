//! What threads measured, the sum over threads, and the form in which a process sends it to its
//! parent.

use farside::CacheStatistics;
use serde::{Deserialize, Serialize};

use crate::accounting::ServerUsage;
use crate::environment::Machine;
use crate::recorder::Recorder;

/// What one thread measured, or the sum over several. Times are comparable between processes: the
/// clock is the same in all processes of a machine.
#[derive(Serialize, Deserialize)]
pub struct ThreadMeasurement {
    /// Their operations.
    pub recorder: Recorder,
    /// When the first thread started to measure, by the clock of latencies.
    pub started_ns: u64,
    /// When the last thread ended.
    pub ended_ns: u64,
    /// Hits and misses of the location caches.
    #[serde(with = "CacheForm")]
    pub cache: CacheStatistics,
    /// How often the threads allocated.
    pub allocations: u64,
    /// CPU time, in seconds: less than threads x seconds if the threads had to share cores.
    pub cpu_s: f64,
}

/// What the supervising thread saw.
pub struct RunFacts {
    /// What the server spent during the measurement, if its process is known.
    pub server: Option<ServerUsage>,
    /// How long the load phase took, in seconds.
    pub load_seconds: f64,
    /// The machine.
    pub machine: Machine,
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

/// The serialized form of [`CacheStatistics`].
#[derive(Serialize, Deserialize)]
#[serde(remote = "CacheStatistics")]
struct CacheForm {
    hits: u64,
    misses: u64,
}

#[cfg(test)]
mod tests {
    use farside::Counters;

    use super::*;
    use crate::workload::{Kind, Workload};

    fn measured(latency_ns: u64) -> ThreadMeasurement {
        let mut recorder = Recorder::new(Workload::A.mix()).with_services();
        recorder.record(Kind::Get, latency_ns);
        recorder.record_service(Kind::Get, 50);
        let counters = Counters { round_trips: 1, written_bytes: 7, ..Counters::default() };
        recorder.attribute(Kind::Put, &counters);
        recorder.unexpected = 1;
        recorder.driver_ns = 9;
        recorder.behind_ns = latency_ns;
        ThreadMeasurement {
            recorder,
            started_ns: latency_ns,
            ended_ns: 2 * latency_ns,
            cache: CacheStatistics { hits: 10, misses: 20 },
            allocations: 3,
            cpu_s: 0.5,
        }
    }

    #[test]
    fn measurements_survive_the_pipe_and_add_up_as_without_it() {
        let sent = |latency_ns| -> ThreadMeasurement {
            let line = serde_json::to_string(&measured(latency_ns)).unwrap();
            serde_json::from_str(&line).unwrap()
        };
        let received = ThreadMeasurement::sum([sent(100), sent(30_000)]).unwrap();
        let local = ThreadMeasurement::sum([measured(100), measured(30_000)]).unwrap();
        for sum in [&received, &local] {
            assert_eq!((sum.started_ns, sum.ended_ns, sum.allocations), (100, 60_000, 6));
            assert_eq!((sum.cache, sum.cpu_s), (CacheStatistics { hits: 20, misses: 40 }, 1.0));
            let Recorder { unexpected, driver_ns, behind_ns, .. } = sum.recorder;
            assert_eq!((unexpected, driver_ns, behind_ns), (2, 18, 30_000));
        }
        for ((kind, a), (_, b)) in received.recorder.kinds().zip(local.recorder.kinds()) {
            assert!(a.latencies == b.latencies && a.services == b.services, "{kind:?}");
            assert_eq!(a.counters, b.counters);
        }
        assert_eq!(received.recorder.kinds().count(), 2);
        assert!(ThreadMeasurement::sum([]).is_none());
    }

    #[test]
    fn a_text_that_encodes_no_histogram_is_refused() {
        let mut json = serde_json::to_value(measured(100)).unwrap();
        json["recorder"]["kinds"][0]["latencies"] = "AAAA".into();
        assert!(serde_json::from_value::<ThreadMeasurement>(json).is_err());
    }
}
