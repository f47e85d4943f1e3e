//! What threads measured, added up; and how processes tell each other.

use data_encoding::BASE64;
use farside::{CacheStatistics, Counters};
use hdrhistogram::Histogram;
use hdrhistogram::serialization::{Deserializer, Serializer as _, V2Serializer};
use serde::{Deserialize, Serialize};

use crate::recorder::{KindRecord, Recorder};
use crate::workload::{Kind, Mix};

/// What one thread measured, or several.
pub struct Worked {
    /// Operations.
    pub recorder: Recorder,
    /// When the first one started, by the clock of latencies.
    pub started_ns: u64,
    /// When the last one ended.
    pub ended_ns: u64,
    /// What the location caches did.
    pub cache: CacheStatistics,
    /// How often they allocated.
    pub allocations: u64,
    /// CPU time, in seconds.
    pub cpu_s: f64,
}

impl Worked {
    /// Adds up; `None` for nobody.
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

/// The same for a pipe. The clock is the same in all processes of a machine.
#[derive(Debug, Serialize, Deserialize)]
pub struct Told {
    kinds: Vec<KindTold>,
    unexpected: u64,
    driver_ns: u64,
    behind_ns: u64,
    started_ns: u64,
    ended_ns: u64,
    hits: u64,
    misses: u64,
    allocations: u64,
    cpu_s: f64,
}

#[derive(Debug, Serialize, Deserialize)]
struct KindTold {
    kind: usize,
    /// HdrHistogram's format V2, in base64.
    latencies: String,
    services: Option<String>,
    /// In the order in which [`Counters`] has them.
    counters: [u64; 7],
}

impl Told {
    /// For a pipe; `None` if a histogram cannot be written, which has fixed bounds and always can.
    pub fn of(worked: &Worked) -> Option<Self> {
        let Worked { recorder, started_ns, ended_ns, cache, allocations, cpu_s } = worked;
        let kind = |(kind, of): (Kind, &KindRecord)| {
            let services = match &of.services {
                Some(services) => Some(written(services)?),
                None => None,
            };
            let (kind, latencies) = (kind.index(), written(&of.latencies)?);
            Some(KindTold { kind, latencies, services, counters: numbers(&of.counters) })
        };
        Some(Self {
            kinds: recorder.kinds().map(kind).collect::<Option<_>>()?,
            unexpected: recorder.unexpected,
            driver_ns: recorder.driver_ns,
            behind_ns: recorder.behind_ns,
            started_ns: *started_ns,
            ended_ns: *ended_ns,
            hits: cache.hits,
            misses: cache.misses,
            allocations: *allocations,
            cpu_s: *cpu_s,
        })
    }

    /// From a pipe; `None` if it is not what [`Told::of`] makes.
    pub fn worked(&self) -> Option<Worked> {
        let mut recorder = Recorder::new(Mix::NOTHING);
        for told in &self.kinds {
            let services = match &told.services {
                Some(services) => Some(read(services)?),
                None => None,
            };
            let latencies = read(&told.latencies)?;
            let of = KindRecord { latencies, services, counters: counters(told.counters) };
            recorder.add(*Kind::ALL.get(told.kind)?, of);
        }
        recorder.unexpected = self.unexpected;
        recorder.driver_ns = self.driver_ns;
        recorder.behind_ns = self.behind_ns;
        Some(Worked {
            recorder,
            started_ns: self.started_ns,
            ended_ns: self.ended_ns,
            cache: CacheStatistics { hits: self.hits, misses: self.misses },
            allocations: self.allocations,
            cpu_s: self.cpu_s,
        })
    }
}

fn written(histogram: &Histogram<u64>) -> Option<String> {
    let mut bytes = Vec::new();
    V2Serializer::new().serialize(histogram, &mut bytes).ok()?;
    Some(BASE64.encode(&bytes))
}

fn read(text: &str) -> Option<Histogram<u64>> {
    Deserializer::new().deserialize(&mut &BASE64.decode(text.as_bytes()).ok()?[..]).ok()
}

fn numbers(of: &Counters) -> [u64; 7] {
    [
        of.round_trips,
        of.doorbells,
        of.reads,
        of.writes,
        of.compare_swaps,
        of.read_bytes,
        of.written_bytes,
    ]
}

fn counters(numbers: [u64; 7]) -> Counters {
    let [round_trips, doorbells, reads, writes, compare_swaps, rest @ ..] = numbers;
    let [read_bytes, written_bytes] = rest;
    Counters { round_trips, doorbells, reads, writes, compare_swaps, read_bytes, written_bytes }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::Workload;

    fn worked(latency_ns: u64) -> Worked {
        let mut recorder = Recorder::new(Workload::A.mix()).with_services();
        recorder.record(Kind::Get, latency_ns);
        recorder.record_service(Kind::Get, 50);
        recorder.attribute(Kind::Put, &counters([1, 2, 3, 4, 5, 6, 7]));
        recorder.unexpected = 1;
        recorder.driver_ns = 9;
        recorder.behind_ns = latency_ns;
        Worked {
            recorder,
            started_ns: latency_ns,
            ended_ns: 2 * latency_ns,
            cache: CacheStatistics { hits: 10, misses: 20 },
            allocations: 3,
            cpu_s: 0.5,
        }
    }

    #[test]
    fn processes_add_up_as_threads_do_and_nothing_is_lost_in_the_pipe() {
        let told = |latency_ns| {
            let told = Told::of(&worked(latency_ns)).unwrap();
            let line = serde_json::to_string(&told).unwrap();
            serde_json::from_str::<Told>(&line).unwrap().worked().unwrap()
        };
        let there = Worked::sum([told(100), told(30_000)]).unwrap();
        let here = Worked::sum([worked(100), worked(30_000)]).unwrap();
        for sum in [&there, &here] {
            assert_eq!((sum.started_ns, sum.ended_ns, sum.allocations), (100, 60_000, 6));
            assert_eq!((sum.cache, sum.cpu_s), (CacheStatistics { hits: 20, misses: 40 }, 1.0));
            let Recorder { unexpected, driver_ns, behind_ns, .. } = sum.recorder;
            assert_eq!((unexpected, driver_ns, behind_ns), (2, 18, 30_000));
        }
        for ((kind, a), (_, b)) in there.recorder.kinds().zip(here.recorder.kinds()) {
            assert!(a.latencies == b.latencies && a.services == b.services, "{kind:?}");
            assert_eq!(numbers(&a.counters), numbers(&b.counters));
        }
        assert_eq!(there.recorder.kinds().count(), 2);
        assert!(Worked::sum([]).is_none());
    }

    #[test]
    fn what_is_no_histogram_is_refused() {
        let mut told = Told::of(&worked(100)).unwrap();
        told.kinds[0].latencies = "AAAA".to_owned();
        assert!(told.worked().is_none());
    }
}
