//! `kv-bench policies`: which keys should a full cache evict? Replays the same requests with each
//! policy, and counts hits. It needs no server, and its results depend on no machine.
//!
//! `exact`, `sampled_lru`, `tiny_lfu` and `belady` have policies that see every request. `farside`
//! has those that Farside's server can follow. A miss stores the key.

mod belady;
mod exact;
mod farside;
mod lrfu;
mod queues;
mod report;
mod reports;
mod sampled_lru;
#[cfg(test)]
mod tests;
mod tiny_lfu;
mod traces;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use serde::Serialize;

use self::belady::Belady;
use self::exact::{OneQueue, S3Fifo};
use self::farside::{Farside, Rule};
use self::reports::{Rate, Reporting};
use self::sampled_lru::SampledLru;
use self::tiny_lfu::WTinyLfu;
use crate::args::Policies;
use crate::command::Interrupt;
use crate::{Error, Result};

pub use self::report::PoliciesReport;
pub use self::traces::{Extent, Trace, WORKLOADS, Workload};

/// A request for a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The number of the key.
    pub key: u32,
    /// The length of its object; 1 if all objects have the same length.
    pub bytes: u32,
}

/// A cache with its policy.
pub(crate) trait Policy {
    /// Serves a request. Returns whether it is a hit. After a miss the key is stored, if the policy
    /// admits it.
    fn request(&mut self, request: Request) -> bool;

    /// What it has cost so far; `None` for a policy that sees every request.
    fn costs(&self) -> Option<Costs> {
        None
    }
}

/// What a policy of Farside's server costs.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Costs {
    /// Hits that clients reported.
    pub reports: u64,
    /// How often the server pulled the reports of all clients.
    pub pulls: u64,
    /// Keys that the hand visited.
    pub visits: u64,
    /// Keys that were evicted.
    pub evictions: u64,
}

/// Scrambles a key, as its hash does.
pub(crate) fn mix(key: u32) -> u64 {
    let mut hash = (u64::from(key) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    hash ^ (hash >> 31)
}

/// The policies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    Belady,
    Lru,
    Fifo,
    Clock,
    SampledLru(usize),
    Sieve,
    S3Fifo,
    WTinyLfu,
    Farside(Rule, Reporting),
}

/// The rule that Farside's server follows.
const SIEVE: Rule = Rule::Sieve { most: 2 };
/// The reports of its clients.
const REPORTING: Reporting = Reporting { clients: 4, rate: Rate::OncePerGap(2.0) };

/// What Farside's server could do, by name. The first one is what it does.
const FARSIDE: [(&str, Rule, Reporting); 9] = [
    ("Farside", SIEVE, REPORTING),
    ("Farside, one client", SIEVE, Reporting { clients: 1, ..REPORTING }),
    ("Farside, gap of 8 %", SIEVE, Reporting { rate: Rate::OncePerGap(8.0), ..REPORTING }),
    ("Farside, 1 of 64 hits", SIEVE, Reporting { rate: Rate::OneOf(64), ..REPORTING }),
    ("Farside, limit 1", Rule::Sieve { most: 1 }, REPORTING),
    ("Farside, limit 3", Rule::Sieve { most: 3 }, REPORTING),
    ("LRU by reports", Rule::Lru, REPORTING),
    ("LRFU by reports", Rule::Lrfu { memory: 2.0 }, REPORTING),
    ("S3-FIFO by reports", Rule::S3Fifo, REPORTING),
];

impl Kind {
    /// All that are compared.
    pub(crate) fn all() -> Vec<Self> {
        let mut kinds = vec![
            Self::Belady,
            Self::Lru,
            Self::Fifo,
            Self::Clock,
            Self::SampledLru(5),
            Self::SampledLru(16),
            Self::Sieve,
            Self::S3Fifo,
            Self::WTinyLfu,
        ];
        kinds.extend(FARSIDE.map(|(_, rule, reporting)| Self::Farside(rule, reporting)));
        kinds
    }

    pub(crate) fn name(self) -> String {
        match self {
            Self::Belady => "Belady".to_owned(),
            Self::Lru => "LRU".to_owned(),
            Self::Fifo => "FIFO".to_owned(),
            Self::Clock => "CLOCK".to_owned(),
            Self::SampledLru(samples) => format!("LRU of {samples} samples"),
            Self::Sieve => "SIEVE".to_owned(),
            Self::S3Fifo => "S3-FIFO".to_owned(),
            Self::WTinyLfu => "W-TinyLFU".to_owned(),
            Self::Farside(rule, reporting) => {
                let named =
                    FARSIDE.into_iter().find(|known| (known.1, known.2) == (rule, reporting));
                named.map_or(format!("{rule:?}, {reporting:?}"), |(name, ..)| name.to_owned())
            }
        }
    }

    /// A cache of this many bytes for the requests of this trace.
    pub(crate) fn cache(self, trace: &Trace, capacity: u64) -> Box<dyn Policy> {
        let (keys, (count, bytes)) = (trace.keys, trace.data);
        let objects = ((capacity * count / bytes.max(1)) as usize).max(1);
        match self {
            Self::Belady => Box::new(Belady::new(&trace.requests, keys, capacity)),
            Self::Lru => Box::new(OneQueue::lru(keys, capacity)),
            Self::Fifo => Box::new(OneQueue::fifo(keys, capacity)),
            Self::Clock => Box::new(OneQueue::clock(keys, capacity)),
            Self::SampledLru(samples) => Box::new(SampledLru::new(samples, keys, capacity)),
            Self::Sieve => Box::new(OneQueue::sieve(keys, capacity)),
            Self::S3Fifo => Box::new(S3Fifo::new(keys, capacity)),
            Self::WTinyLfu => Box::new(WTinyLfu::new(keys, capacity, objects)),
            Self::Farside(rule, reporting) => {
                Box::new(Farside::new(rule, reporting, (keys, count), (capacity, objects)))
            }
        }
    }
}

/// Replays a trace. Returns the number of hits, and what they cost.
pub(crate) fn replay(kind: Kind, trace: &Trace, capacity: u64) -> (u64, Option<Costs>) {
    let mut cache = kind.cache(trace, capacity);
    let hits = trace.requests.iter().filter(|request| cache.request(**request)).count();
    (hits as u64, cache.costs())
}

/// Hits in percent of the requests.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct ExactHits {
    /// With LRU.
    pub lru: f64,
    /// With FIFO.
    pub fifo: f64,
    /// With Belady's optimum.
    pub belady: f64,
}

impl ExactHits {
    /// Replays the trace with caches of so many objects, which all have the length 1.
    pub fn of(trace: &Trace, objects: u64) -> Self {
        let percent = |kind| percent(replay(kind, trace, objects.max(1)).0, trace);
        let [lru, fifo, belady] = [Kind::Lru, Kind::Fifo, Kind::Belady].map(percent);
        Self { lru, fifo, belady }
    }
}

fn percent(hits: u64, trace: &Trace) -> f64 {
    100.0 * hits as f64 / trace.requests.len().max(1) as f64
}

/// The result of a policy with one size of the cache.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Point {
    /// The size of the cache in percent of the data.
    pub(crate) cache_percent: f64,
    /// Hits in percent of the requests.
    pub(crate) hit_percent: f64,
    pub(crate) costs: Option<Costs>,
}

/// Replays all traces with all policies.
///
/// # Errors
/// [`Error::Input`] if the trace file is malformed, and [`Error::Interrupted`].
pub fn run(args: &Policies, interrupt: &Interrupt) -> Result<PoliciesReport> {
    let &Policies { keys, requests, seed, .. } = args;
    let mut report = PoliciesReport::new();
    if let Some(path) = &args.trace {
        let trace = Trace::read(path)?;
        report.add(&trace, compared(args, &trace, interrupt)?);
        return Ok(report);
    }
    for workload in WORKLOADS {
        let trace = workload.trace(Extent { keys, requests, seed });
        let points = compared(args, &trace, interrupt)?;
        report.add(&trace, points);
    }
    Ok(report)
}

/// Replays one trace with all policies that were asked for and all sizes, on all cores.
fn compared(
    args: &Policies,
    trace: &Trace,
    interrupt: &Interrupt,
) -> Result<Vec<(String, Vec<Point>)>> {
    let mut kinds = Kind::all();
    let wanted = |kind: &Kind| args.only.iter().any(|part| kind.name().contains(part));
    kinds.retain(|kind| args.only.is_empty() || wanted(kind));
    let sizes = &args.sizes;
    let tasks: Vec<(Kind, f64)> =
        kinds.iter().flat_map(|kind| sizes.iter().map(|size| (*kind, *size))).collect();
    let (next, points) = (AtomicUsize::new(0), Mutex::new(vec![None; tasks.len()]));
    let work = || {
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let Some(&(kind, cache_percent)) = tasks.get(number) else { break };
            if interrupt.check().is_err() {
                break;
            }
            let capacity = ((trace.data.1 as f64 * cache_percent / 100.0) as u64).max(1);
            let (hits, costs) = replay(kind, trace, capacity);
            let hit_percent = percent(hits, trace);
            let point = Point { cache_percent, hit_percent, costs };
            points.lock().unwrap_or_else(PoisonError::into_inner)[number] = Some(point);
        }
    };
    let threads = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work))));
    interrupt.check()?;
    let points = points.into_inner().unwrap_or_else(PoisonError::into_inner);
    let points: Option<Vec<Point>> = points.into_iter().collect();
    let points = points.ok_or(Error::Panicked)?;
    let of_kinds = points.chunks(sizes.len().max(1)).map(<[Point]>::to_vec);
    Ok(kinds.iter().map(|kind| kind.name()).zip(of_kinds).collect())
}
