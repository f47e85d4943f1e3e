//! The result of `kv-bench ycsb` as JSON and as a table for people. `kv-bench report` reads this
//! JSON, and also the JSON of older versions in `bench/results`.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};

use farside::Counters;
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use crate::accounting::{Origin, ServerUsage};
use crate::args::Ycsb;
use crate::pattern::PatternReport;
use crate::publish::grouped;
use crate::recorder::{KindRecord, Latencies};
use crate::run::Measured;
use crate::shares::EmulatedReport;
use crate::verbs::{RawLimit, SocketRates};
use crate::workload::Kind;

/// The result of a run: totals over the measured phase.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names are those of the JSON")]
pub struct YcsbReport {
    #[serde(flatten)]
    pub origin: Origin,
    pub fabric: String,
    pub workload: String,
    /// The threads of all clients together.
    pub threads: u32,
    /// Older versions had processes instead.
    #[serde(alias = "processes")]
    pub clients: u32,
    /// The servers of its cluster; 1 without a cluster.
    #[serde(default = "one")]
    pub servers: u16,
    pub depth: u16,
    pub records: u64,
    /// The mean length of the values, in bytes.
    pub value_size: u32,
    pub pattern: PatternReport,
    pub seconds: f64,
    pub throughput_ops_s: f64,
    /// Null if the run had no target rate.
    pub open_loop: Option<OpenLoopReport>,
    pub operations: BTreeMap<String, OperationReport>,
    pub cache: CacheReport,
    /// CPU time of the threads that ran the operations.
    pub cpu_s: f64,
    /// Null if the server's process is not known.
    pub server: Option<ServerUsage>,
    /// How often the threads that ran the operations allocated.
    pub allocations: u64,
    /// How many operations did not find the key or value that the operations before had left. An
    /// INSERT counts if the key was already there.
    #[serde(default)]
    pub unexpected: u64,
    /// Null if the raw verbs were not measured.
    pub limit: Option<VerbsLimit>,
    /// Null except over TCP on one host.
    #[serde(default)]
    pub sockets: Option<SocketsLimit>,
    /// Null if the network was not emulated.
    #[serde(default)]
    pub emulated: Option<EmulatedReport>,
}

fn one() -> u16 {
    1
}

/// The rates of raw chains on the same fabric, with as many threads and chains in flight as the
/// run. Their READs and WRITEs are as long as a record's block.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names are those of the JSON")]
pub struct VerbsLimit {
    #[serde(flatten)]
    pub raw: RawLimit,
    /// The rate that this run's operations would have if each took only the fewest raw chains that
    /// it can take.
    pub mix_ops_s: f64,
    /// This run's throughput divided by `mix_ops_s`.
    pub mix_ratio: f64,
}

/// The rates of plain sockets of the same host, with as many threads and messages in flight as the
/// run. Their messages are as long as a record's block.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names are those of the JSON")]
pub struct SocketsLimit {
    #[serde(flatten)]
    pub sockets: SocketRates,
    /// The rate that this run's operations would have if each were one message.
    pub mix_ops_s: f64,
    /// This run's throughput divided by `mix_ops_s`.
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
    pub max_ns: u64,
    /// Service times: latencies from an operation's start, while the percentiles above count from
    /// when it was due. Only with a target rate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service: Option<ServiceReport>,
    pub round_trips: u64,
    pub verbs: VerbCounts,
    pub bytes: u64,
    /// Percentiles, each with its latency in nanoseconds, for a plot.
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

/// Lookups in the location caches.
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

/// The percentiles of [`OperationReport::latencies`]: denser towards the end, where latencies
/// differ most.
const PERCENTILES: &[f64] = &[
    0.0, 0.1, 1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0, 35.0, 40.0, 45.0, 50.0, 55.0, 60.0,
    65.0, 70.0, 75.0, 80.0, 85.0, 90.0, 92.5, 95.0, 97.0, 98.0, 99.0, 99.5, 99.7, 99.8, 99.9,
    99.95, 99.97, 99.98, 99.99, 99.995, 99.998, 99.999, 99.9999, 100.0,
];

/// The distribution of latencies, in points. If several percentiles have the same latency, only the
/// highest is kept.
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
        let latencies = record.latencies.histogram();
        let quantile = |quantile| latencies.value_at_quantile(quantile);
        Self {
            count: latencies.len(),
            p50_ns: quantile(0.5),
            p99_ns: quantile(0.99),
            p999_ns: quantile(0.999),
            max_ns: latencies.max(),
            service: record.service_times.as_ref().map(ServiceReport::from),
            round_trips: record.counters.round_trips,
            verbs: record.counters.into(),
            bytes: record.counters.bytes(),
            latencies: points(&latencies),
        }
    }
}

impl YcsbReport {
    /// The report of a run.
    pub fn new(args: &Ycsb, measured: &Measured) -> Self {
        let Measured { threads, facts, .. } = measured;
        let throughput_ops_s = threads.recorder.operations() as f64 / threads.seconds();
        let operation =
            |(kind, record): (Kind, &KindRecord)| (kind.name().to_owned(), record.into());
        Self {
            origin: Origin::of("kv-bench", measured.machine.clone()),
            fabric: measured.fabric.clone(),
            workload: args.workload_name(),
            threads: args.all_threads(),
            clients: args.clients,
            servers: measured.servers,
            depth: args.depth,
            records: args.records,
            value_size: args.value_size.mean().round() as u32,
            pattern: PatternReport::new(args),
            seconds: threads.seconds(),
            throughput_ops_s,
            open_loop: OpenLoopReport::new(args, measured),
            operations: threads.recorder.kinds().map(operation).collect(),
            cache: CacheReport { hits: threads.cache.hits, misses: threads.cache.misses },
            cpu_s: threads.cpu_s,
            server: facts.server,
            allocations: threads.allocations,
            unexpected: threads.recorder.unexpected,
            limit: measured.raw.map(|raw| {
                let mix_ops_s = raw.mix_ops_s(&threads.recorder);
                VerbsLimit { raw, mix_ops_s, mix_ratio: throughput_ops_s / mix_ops_s }
            }),
            sockets: measured.sockets.map(|sockets| {
                let mix_ops_s = sockets.mix_ops_s(&threads.recorder);
                SocketsLimit { sockets, mix_ops_s, mix_ratio: throughput_ops_s / mix_ops_s }
            }),
            emulated: measured.emulated.clone(),
        }
    }

    /// The number of all operations.
    pub fn count(&self) -> u64 {
        self.operations.values().map(|operation| operation.count).sum()
    }
}

/// The part of a report that a target rate adds.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names are those of the JSON")]
pub struct OpenLoopReport {
    pub target_ops_s: f64,
    pub arrivals: String,
    /// How far the slowest thread was behind its schedule when it ended.
    pub behind_s: f64,
    /// Whether `behind_s` is negligible. If not, latencies mostly measure the wait in the queue.
    pub reached: bool,
}

/// Service times: latencies from an operation's start instead of when it was due.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names are those of the JSON")]
pub struct ServiceReport {
    pub p50_ns: u64,
    pub p99_ns: u64,
    pub p999_ns: u64,
}

/// If a thread is behind by more than this share of the run, the rate was not reached.
const BEHIND_MAX: f64 = 0.01;

impl OpenLoopReport {
    /// The report of a run; `None` if it had no target rate.
    pub fn new(args: &Ycsb, measured: &Measured) -> Option<Self> {
        let target_ops_s = args.target_rate?;
        let behind_s = measured.threads.recorder.behind_ns as f64 / 1e9;
        let reached = behind_s <= BEHIND_MAX * measured.threads.seconds();
        Some(Self { target_ops_s, arrivals: args.arrivals.name().to_owned(), behind_s, reached })
    }

    /// Writes the lines of the table.
    pub fn write(
        &self,
        operations: &BTreeMap<String, OperationReport>,
        out: &mut String,
    ) -> fmt::Result {
        let Self { target_ops_s, arrivals, behind_s, reached } = self;
        writeln!(
            out,
            "\nopen loop: {target_ops_s} ops/s, {arrivals}; latencies from when operations were due"
        )?;
        let services =
            operations.iter().filter_map(|(name, operation)| Some((name, operation.service?)));
        for (name, ServiceReport { p50_ns, p99_ns, p999_ns }) in services {
            let [p50, p99, p999] = [p50_ns, p99_ns, p999_ns].map(grouped);
            writeln!(out, "{name:<7} service time: p50 {p50} ns, p99 {p99} ns, p99.9 {p999} ns")?;
        }
        if !reached {
            let advice = "latencies mostly measure the wait in the queue";
            writeln!(out, "WARNING: the rate was not reached, {behind_s:.3} s behind; {advice}")?;
        }
        Ok(())
    }
}

impl From<&Latencies> for ServiceReport {
    fn from(services: &Latencies) -> Self {
        let services = services.histogram();
        let quantile = |quantile| services.value_at_quantile(quantile);
        Self { p50_ns: quantile(0.5), p99_ns: quantile(0.99), p999_ns: quantile(0.999) }
    }
}

impl YcsbReport {
    /// The table for people.
    pub fn table(&self, measured: &Measured) -> std::result::Result<String, fmt::Error> {
        let mut out = String::new();
        let total = self.count();
        let per_op = |number: f64| number / total.max(1) as f64;
        writeln!(
            out,
            "YCSB {} on {}: {} records x {} B, {}, {} thread(s), depth {}, {:.2} s (load {:.2} s)",
            self.workload,
            self.fabric,
            grouped(self.records),
            self.pattern.value_size.name,
            self.pattern.distribution.name,
            self.threads,
            self.depth,
            self.seconds,
            measured.facts.load_seconds,
        )?;
        match self.servers {
            1 => writeln!(out, "{}\n", measured.machine)?,
            servers => writeln!(out, "{}; {servers} servers\n", measured.machine)?,
        }
        self.write_operations(&mut out)?;
        if let Some(open_loop) = &self.open_loop {
            open_loop.write(&self.operations, &mut out)?;
        }
        let per_thread = self.throughput_ops_s / f64::from(self.threads);
        writeln!(
            out,
            "\nall: {} ops/s, {} a thread; of each operation {:.0} ns are kv-bench's own",
            grouped(self.throughput_ops_s as u64),
            grouped(per_thread as u64),
            per_op(measured.threads.recorder.driver_ns as f64),
        )?;
        self.write_limit(&mut out)?;
        if let Some(emulated) = &self.emulated {
            emulated.write(self.seconds, &mut out)?;
        }
        if let Some(why) = &measured.raw_missing {
            writeln!(out, "limit: raw verbs were not measured: {why}")?;
        }
        let per_cpu_s = total as f64 / measured.threads.cpu_s.max(f64::MIN_POSITIVE);
        writeln!(
            out,
            "clients: {:.2} s CPU, {} ops a CPU second",
            measured.threads.cpu_s,
            grouped(per_cpu_s as u64),
        )?;
        let lookups = self.cache.hits + self.cache.misses;
        writeln!(
            out,
            "location cache: {} hits, {} misses ({:.2} % hits)",
            grouped(self.cache.hits),
            grouped(self.cache.misses),
            self.cache.hits as f64 * 100.0 / lookups.max(1) as f64,
        )?;
        writeln!(
            out,
            "allocations_per_op: {:.6} ({} in all)",
            per_op(self.allocations as f64),
            grouped(self.allocations),
        )?;
        match self.server {
            Some(ServerUsage { cpu_s, wakeups }) => {
                writeln!(out, "server: {cpu_s:.2} s CPU, {} wake-ups", grouped(wakeups))?;
            }
            None => writeln!(out, "server: its process is not known")?,
        }
        if self.unexpected > 0 {
            let count = grouped(self.unexpected);
            writeln!(
                out,
                "WARNING: {count} operations had an unexpected result: see docs/benchmarks.md"
            )?;
        }
        Ok(out)
    }

    fn write_limit(&self, out: &mut String) -> fmt::Result {
        let limits = [
            self.limit.map(|VerbsLimit { mix_ops_s, mix_ratio, .. }| {
                ("raw verbs alone", mix_ops_s, mix_ratio)
            }),
            self.sockets.map(|SocketsLimit { mix_ops_s, mix_ratio, .. }| {
                ("plain sockets", mix_ops_s, mix_ratio)
            }),
        ];
        for (means, mix_ops_s, mix_ratio) in limits.into_iter().flatten() {
            let mix = grouped(mix_ops_s as u64);
            writeln!(out, "limit: {mix} ops/s by {means}; the run reached {mix_ratio:.2} of it")?;
        }
        Ok(())
    }

    fn write_operations(&self, out: &mut String) -> fmt::Result {
        writeln!(
            out,
            "{:<7} {:>13} {:>12} {:>9} {:>10} {:>10} | per op: {:>6} {:>6} {:>6} {:>6} {:>11}",
            "",
            "count",
            "ops/s",
            "p50 ns",
            "p99 ns",
            "p99.9 ns",
            "trips",
            "read",
            "write",
            "cas",
            "bytes",
        )?;
        for (name, operation) in &self.operations {
            let per_op = |number: u64| number as f64 / operation.count.max(1) as f64;
            writeln!(
                out,
                "{name:<7} {:>13} {:>12} {:>9} {:>10} {:>10} |         \
                 {:>6.3} {:>6.3} {:>6.3} {:>6.3} {:>11.1}",
                grouped(operation.count),
                grouped((operation.count as f64 / self.seconds) as u64),
                grouped(operation.p50_ns),
                grouped(operation.p99_ns),
                grouped(operation.p999_ns),
                per_op(operation.round_trips),
                per_op(operation.verbs.read),
                per_op(operation.verbs.write),
                per_op(operation.verbs.cas),
                per_op(operation.bytes),
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::accounting::Machine;
    use crate::args::tests::ycsb;
    use crate::recorder::{Recorder, RunFacts, ThreadMeasurement};
    use crate::workload::{Kind, Workload};

    fn sample() -> (YcsbReport, Measured) {
        let mut recorder = Recorder::new(Workload::F.mix());
        for latency_ns in 100..200 {
            recorder.record(Kind::Get, latency_ns, latency_ns);
            recorder.record(Kind::Rmw, 3 * latency_ns, 3 * latency_ns);
            let counters =
                Counters { round_trips: 1, reads: 1, read_bytes: 128, ..Default::default() };
            recorder.attribute(Kind::Get, &counters);
        }
        recorder.unexpected = 3;
        let threads = ThreadMeasurement {
            recorder,
            started_ns: 0,
            ended_ns: 2_000_000_000,
            cache: farside::CacheStatistics { hits: 99, misses: 1 },
            allocations: 0,
            cpu_s: 2.0,
        };
        let server = Some(ServerUsage { cpu_s: 0.01, wakeups: 2 });
        let measured = Measured {
            fabric: "shm".into(),
            servers: 3,
            emulated: None,
            threads,
            facts: RunFacts { server, load_seconds: 1.0, chains: Vec::new() },
            machine: Machine::detect(0),
            ended: std::time::SystemTime::now(),
            raw: Some(RawLimit { read: 400.0, write: 300.0, cas: 250.0, update: 200.0 }),
            raw_missing: None,
            sockets: Some(SocketRates { read: 400.0, write: 200.0 }),
        };
        (YcsbReport::new(&args(), &measured), measured)
    }

    fn args() -> Ycsb {
        ycsb("ycsb --workload f --depth 1 --seconds 2")
    }

    #[test]
    fn the_json_has_every_field() {
        let (report, _) = sample();
        let json = serde_json::to_value(&report).unwrap();
        for (pointer, expected) in [
            ("/fabric", Value::from("shm")),
            ("/workload", "f".into()),
            ("/threads", 1.into()),
            ("/servers", 3.into()),
            ("/emulated", Value::Null),
            ("/depth", 1.into()),
            ("/records", 1_000_000.into()),
            ("/value_size", 64.into()),
            ("/seconds", 2.0.into()),
            ("/throughput_ops_s", 100.0.into()),
            ("/operations/get/count", 100.into()),
            ("/operations/get/p50_ns", 149.into()),
            ("/operations/get/p99_ns", 198.into()),
            ("/operations/get/p999_ns", 199.into()),
            ("/operations/get/round_trips", 100.into()),
            ("/operations/get/verbs/read", 100.into()),
            ("/operations/get/verbs/write", 0.into()),
            ("/operations/get/verbs/cas", 0.into()),
            ("/operations/get/bytes", 12_800.into()),
            ("/operations/rmw/count", 100.into()),
            ("/cache/hits", 99.into()),
            ("/cache/misses", 1.into()),
            ("/server/cpu_s", 0.01.into()),
            ("/server/wakeups", 2.into()),
            ("/allocations", 0.into()),
            ("/unexpected", 3.into()),
            ("/limit/read_ops_s", 400.0.into()),
            ("/limit/update_ops_s", 200.0.into()),
            // 100 GETs and 100 read-modify-writes: 1 s. They took 2 s.
            ("/limit/mix_ops_s", 200.0.into()),
            ("/limit/mix_ratio", 0.5.into()),
            ("/sockets/socket_write_ops_s", 200.0.into()),
            // 100 long replies, and 100 of both.
            ("/sockets/mix_ops_s", 200.0.into()),
            ("/sockets/mix_ratio", 0.5.into()),
            ("/operations/get/max_ns", 199.into()),
            ("/machine/cores", report.origin.machine.cores.into()),
        ] {
            assert_eq!(json.pointer(pointer), Some(&expected), "{pointer}");
        }
        assert_eq!(json["operations"].as_object().unwrap().len(), 2);
    }

    #[test]
    fn the_table_shows_rates_costs_and_warnings() {
        let (report, measured) = sample();
        let table = report.table(&measured).unwrap();
        for text in [
            "1,000,000 records",
            "; 3 servers",
            "200 ops/s by raw verbs alone; the run reached 0.50 of it",
            "200 ops/s by plain sockets; the run reached 0.50 of it",
            "allocations_per_op: 0.0",
            "p99.9",
            "WARNING: 3 operations had an unexpected result",
        ] {
            assert!(table.contains(text), "{table}");
        }
        let as_expected = YcsbReport { unexpected: 0, ..report };
        assert!(!as_expected.table(&measured).unwrap().contains("WARNING"));
    }
}
