//! The result of `kv-bench ycsb`: JSON, and what is made of it. Read again by `kv-bench report`,
//! from older versions too: what they did not write yet has a default.

mod table;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};

use farside::Counters;
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use crate::accounting::ServerUsage;
use crate::args::Ycsb;
use crate::environment::Origin;
use crate::pattern::PatternReport;
use crate::publish::grouped;
use crate::recorder::KindRecord;
use crate::run::Measured;
use crate::verbs::RawLimit;
use crate::workload::Kind;

/// Totals over the measured phase.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names are those of the JSON")]
pub struct YcsbReport {
    #[serde(flatten)]
    pub origin: Origin,
    pub fabric: String,
    pub workload: String,
    /// Of all processes.
    pub threads: u32,
    #[serde(default = "one")]
    pub processes: u32,
    pub depth: u16,
    pub records: u64,
    /// The mean.
    pub value_size: u32,
    #[serde(default)]
    pub pattern: PatternReport,
    pub seconds: f64,
    pub throughput_ops_s: f64,
    /// Null where threads start the next operation when one has ended.
    #[serde(default)]
    pub open_loop: Option<OpenLoopReport>,
    pub operations: BTreeMap<String, OperationReport>,
    pub cache: CacheReport,
    /// Of the threads that ran the operations.
    #[serde(default)]
    pub cpu_s: f64,
    /// Null when the server's process is not known.
    pub server: Option<ServerUsage>,
    /// By the threads that ran the operations.
    pub allocations: u64,
    /// How many operations found another state than the load left.
    #[serde(default)]
    pub unexpected: u64,
    /// Null where nothing of it was measured.
    #[serde(default)]
    pub limit: Option<VerbsLimit>,
}

fn one() -> u32 {
    1
}

/// Raw chains of the same fabric: as many threads, as many in flight, as long as a record's block.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names are those of the JSON")]
pub struct VerbsLimit {
    pub read_ops_s: f64,
    pub write_ops_s: f64,
    pub cas_ops_s: f64,
    /// A cached PUT's chain.
    pub update_ops_s: f64,
    /// This run's operations, each the chains it takes at least.
    pub mix_ops_s: f64,
    /// Of this run's throughput to that.
    pub mix_ratio: f64,
}

/// All operations of one kind.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names are those of the JSON")]
pub struct OperationReport {
    pub count: u64,
    pub p50_ns: u64,
    pub p99_ns: u64,
    pub p999_ns: u64,
    #[serde(default)]
    pub max_ns: u64,
    /// From when operations were started, where the above is from when they were meant to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service: Option<ServiceReport>,
    pub round_trips: u64,
    pub verbs: VerbCounts,
    pub bytes: u64,
    /// Percentiles with the latency below which so many are: what a plot needs.
    #[serde(default)]
    pub latencies: Vec<(f64, u64)>,
}

/// Verbs by kind.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names are those of the JSON")]
pub struct VerbCounts {
    pub read: u64,
    pub write: u64,
    pub cas: u64,
}

/// What the location caches did.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names are those of the JSON")]
pub struct CacheReport {
    pub hits: u64,
    pub misses: u64,
}

impl From<Counters> for VerbCounts {
    fn from(counters: Counters) -> Self {
        Self { read: counters.reads, write: counters.writes, cas: counters.compare_swaps }
    }
}

/// Dense where latencies differ: around the middle, and towards the end.
const PERCENTILES: &[f64] = &[
    0.0, 0.1, 1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0, 35.0, 40.0, 45.0, 50.0, 55.0, 60.0,
    65.0, 70.0, 75.0, 80.0, 85.0, 90.0, 92.5, 95.0, 97.0, 98.0, 99.0, 99.5, 99.7, 99.8, 99.9,
    99.95, 99.97, 99.98, 99.99, 99.995, 99.998, 99.999, 99.9999, 100.0,
];

/// The distribution of latencies, in points. A percentile that says the same as the next one is
/// left out.
fn points(latencies: &Histogram<u64>) -> Vec<(f64, u64)> {
    let mut points: Vec<(f64, u64)> = Vec::with_capacity(PERCENTILES.len());
    for percentile in PERCENTILES {
        let latency_ns = latencies.value_at_percentile(*percentile);
        match points.last_mut() {
            Some(last) if last.1 == latency_ns => last.0 = *percentile,
            _ => points.push((*percentile, latency_ns)),
        }
    }
    points
}

impl From<&KindRecord> for OperationReport {
    fn from(record: &KindRecord) -> Self {
        let quantile = |quantile| record.latencies.value_at_quantile(quantile);
        Self {
            count: record.latencies.len(),
            p50_ns: quantile(0.5),
            p99_ns: quantile(0.99),
            p999_ns: quantile(0.999),
            max_ns: record.latencies.max(),
            service: record.services.as_ref().map(ServiceReport::from),
            round_trips: record.counters.round_trips,
            verbs: record.counters.into(),
            bytes: record.counters.bytes(),
            latencies: points(&record.latencies),
        }
    }
}

impl VerbsLimit {
    fn new(raw: &RawLimit, measured: &Measured) -> Self {
        let (operations, seconds) =
            (measured.threads.recorder.operations() as f64, measured.threads.seconds());
        let mix_ops_s = raw.mix_ops_s(&measured.threads.recorder);
        Self {
            read_ops_s: raw.read,
            write_ops_s: raw.write,
            cas_ops_s: raw.cas,
            update_ops_s: raw.update,
            mix_ops_s,
            mix_ratio: operations / seconds / mix_ops_s,
        }
    }
}

impl YcsbReport {
    /// The report of a run.
    pub fn new(args: &Ycsb, measured: &Measured) -> Self {
        let throughput_ops_s =
            measured.threads.recorder.operations() as f64 / measured.threads.seconds();
        let operation = |(kind, of): (Kind, &KindRecord)| (kind.name().to_owned(), of.into());
        Self {
            origin: Origin::of("kv-bench", measured.facts.machine.clone()),
            fabric: measured.fabric.clone(),
            workload: args.workload_name(),
            threads: args.all_threads(),
            processes: args.processes,
            depth: args.depth,
            records: args.records,
            value_size: args.value_size.mean().round() as u32,
            pattern: PatternReport::new(args),
            seconds: measured.threads.seconds(),
            throughput_ops_s,
            open_loop: OpenLoopReport::new(args, measured),
            operations: measured.threads.recorder.kinds().map(operation).collect(),
            cache: CacheReport {
                hits: measured.threads.cache.hits,
                misses: measured.threads.cache.misses,
            },
            cpu_s: measured.threads.cpu_s,
            server: measured.facts.server,
            allocations: measured.threads.allocations,
            unexpected: measured.threads.recorder.unexpected,
            limit: measured.raw.as_ref().map(|raw| VerbsLimit::new(raw, measured)),
        }
    }

    /// All operations.
    pub fn count(&self) -> u64 {
        self.operations.values().map(|of| of.count).sum()
    }
}

/// The rate, and what became of it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names are those of the JSON")]
pub struct OpenLoopReport {
    pub target_ops_s: f64,
    pub arrivals: String,
    /// How far behind its schedule the latest thread was at its end.
    pub behind_s: f64,
    /// Whether that is next to nothing: else latencies only tell for how long the queue grew.
    pub reached: bool,
}

/// From when operations were started.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names are those of the JSON")]
pub struct ServiceReport {
    pub p50_ns: u64,
    pub p99_ns: u64,
    pub p999_ns: u64,
}

/// A schedule that a thread is further behind than this share of the run was not kept.
const BEHIND_MAX: f64 = 0.01;

impl OpenLoopReport {
    /// That of a run, unless it offered none.
    pub fn new(args: &Ycsb, measured: &Measured) -> Option<Self> {
        let target_ops_s = args.target_rate?;
        let behind_s = measured.threads.recorder.behind_ns as f64 / 1e9;
        let reached = behind_s <= BEHIND_MAX * measured.threads.seconds();
        Some(Self { target_ops_s, arrivals: args.arrivals.name().to_owned(), behind_s, reached })
    }

    /// The lines for people.
    pub fn write(
        &self,
        operations: &BTreeMap<String, OperationReport>,
        out: &mut String,
    ) -> fmt::Result {
        let Self { target_ops_s, arrivals, behind_s, reached } = self;
        writeln!(
            out,
            "\nopen loop: {target_ops_s} ops/s, {arrivals}; latencies from their arrival"
        )?;
        let services = operations.iter().filter_map(|(name, of)| Some((name, of.service?)));
        for (name, ServiceReport { p50_ns, p99_ns, p999_ns }) in services {
            let [p50, p99, p999] = [p50_ns, p99_ns, p999_ns].map(grouped);
            writeln!(out, "{name:<7} service time: p50 {p50} ns, p99 {p99} ns, p99.9 {p999} ns")?;
        }
        if !reached {
            let advice = "latencies tell how long the queue grew";
            writeln!(out, "WARNING: the rate was not reached, {behind_s:.3} s behind; {advice}")?;
        }
        Ok(())
    }
}

impl From<&Histogram<u64>> for ServiceReport {
    fn from(services: &Histogram<u64>) -> Self {
        let quantile = |quantile| services.value_at_quantile(quantile);
        Self { p50_ns: quantile(0.5), p99_ns: quantile(0.99), p999_ns: quantile(0.999) }
    }
}
