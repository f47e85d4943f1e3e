//! Results for programs (JSON) and for people (tables).

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};

use farside::Counters;
use serde::Serialize;

use crate::accounting::ServerUsage;
use crate::args::Ycsb;
use crate::open_loop::{OpenLoopReport, ServiceReport};
use crate::pattern::PatternReport;
use crate::recorder::KindRecord;
use crate::run::Measured;

/// The result of `kv-bench ycsb`: totals over the measured phase.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs, reason = "the names are those of the JSON")]
pub struct YcsbReport {
    pub fabric: String,
    pub workload: String,
    pub threads: u32,
    pub depth: u16,
    pub records: u64,
    /// The mean.
    pub value_size: u32,
    pub pattern: PatternReport,
    pub seconds: f64,
    pub throughput_ops_s: f64,
    /// Null where threads start the next operation when one has ended.
    pub open_loop: Option<OpenLoopReport>,
    pub operations: BTreeMap<&'static str, OperationReport>,
    pub cache: CacheReport,
    /// Null when the server's process is not known.
    pub server: Option<ServerUsage>,
    /// By the threads that ran the operations.
    pub allocations: u64,
    /// Null where it was not measured.
    pub limit: Option<LimitReport>,
}

/// What one thread does with the same operations on a map in its own process.
#[derive(Clone, Copy, Debug, Serialize)]
#[allow(missing_docs, reason = "the names are those of the JSON")]
pub struct LimitReport {
    pub map_ops_s: f64,
    /// Of this run's throughput a thread to that.
    pub ratio: f64,
}

/// All operations of one kind.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs, reason = "the names are those of the JSON")]
pub struct OperationReport {
    pub count: u64,
    pub p50_ns: u64,
    pub p99_ns: u64,
    pub p999_ns: u64,
    /// From when operations were started, where the above is from when they were meant to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service: Option<ServiceReport>,
    pub round_trips: u64,
    pub verbs: VerbsReport,
    pub bytes: u64,
}

/// Verbs by kind.
#[derive(Clone, Copy, Debug, Serialize)]
#[allow(missing_docs, reason = "the names are those of the JSON")]
pub struct VerbsReport {
    pub read: u64,
    pub write: u64,
    pub cas: u64,
    pub faa: u64,
}

/// What the location caches did.
#[derive(Clone, Copy, Debug, Serialize)]
#[allow(missing_docs, reason = "the names are those of the JSON")]
pub struct CacheReport {
    pub hits: u64,
    pub misses: u64,
}

impl From<Counters> for VerbsReport {
    fn from(counters: Counters) -> Self {
        Self {
            read: counters.reads,
            write: counters.writes,
            cas: counters.compare_swaps,
            faa: counters.fetch_adds,
        }
    }
}

impl From<&KindRecord> for OperationReport {
    fn from(record: &KindRecord) -> Self {
        let quantile = |quantile| record.latencies.value_at_quantile(quantile);
        Self {
            count: record.latencies.len(),
            p50_ns: quantile(0.5),
            p99_ns: quantile(0.99),
            p999_ns: quantile(0.999),
            service: record.services.as_ref().map(ServiceReport::from),
            round_trips: record.counters.round_trips,
            verbs: record.counters.into(),
            bytes: record.counters.bytes(),
        }
    }
}

impl YcsbReport {
    /// The report of a run.
    pub fn new(args: &Ycsb, measured: &Measured, map_ops_s: Option<f64>) -> Self {
        let throughput_ops_s = measured.recorder.operations() as f64 / measured.seconds;
        let limit = |map_ops_s| {
            let per_thread = throughput_ops_s / f64::from(args.threads);
            LimitReport { map_ops_s, ratio: per_thread / map_ops_s }
        };
        let operations = measured.recorder.kinds().map(|(kind, of)| (kind.name(), of.into()));
        Self {
            fabric: measured.fabric.clone(),
            workload: args.workload_name(),
            threads: args.threads,
            depth: args.depth,
            records: args.records,
            value_size: args.value_size.mean().round() as u32,
            pattern: PatternReport::new(args),
            seconds: measured.seconds,
            throughput_ops_s,
            open_loop: OpenLoopReport::new(args, measured),
            operations: operations.collect(),
            cache: CacheReport { hits: measured.cache.hits, misses: measured.cache.misses },
            server: measured.server,
            allocations: measured.allocations,
            limit: map_ops_s.map(limit),
        }
    }

    /// The table for people.
    ///
    /// # Errors
    /// None: formatting into a text does not fail.
    pub fn table(&self, measured: &Measured) -> std::result::Result<String, fmt::Error> {
        let mut out = String::new();
        let total: u64 = self.operations.values().map(|of| of.count).sum();
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
            measured.load_seconds,
        )?;
        writeln!(out, "{}\n", measured.environment)?;
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
            per_op(measured.recorder.driver_ns as f64),
        )?;
        if let Some(LimitReport { map_ops_s, ratio }) = self.limit {
            let limit = grouped(map_ops_s as u64);
            writeln!(out, "limit: {limit} ops/s by a map in one thread; this is {ratio:.2} of it")?;
        }
        if let Some(gets) = self.operations.get("get") {
            let rate = gets.count as f64 / self.seconds / f64::from(self.threads);
            writeln!(out, "GET/s a thread: {}", grouped(rate as u64))?;
        }
        let per_cpu_s = total as f64 / measured.cpu_s.max(f64::MIN_POSITIVE);
        writeln!(
            out,
            "clients: {:.2} s CPU, {} ops a CPU second",
            measured.cpu_s,
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
        if measured.recorder.unexpected > 0 {
            let count = grouped(measured.recorder.unexpected);
            writeln!(out, "WARNING: {count} operations found another state than the load left")?;
        }
        Ok(out)
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
        for (name, of) in &self.operations {
            let per_op = |number: u64| number as f64 / of.count.max(1) as f64;
            writeln!(
                out,
                "{name:<7} {:>13} {:>12} {:>9} {:>10} {:>10} |         \
                 {:>6.3} {:>6.3} {:>6.3} {:>6.3} {:>11.1}",
                grouped(of.count),
                grouped((of.count as f64 / self.seconds) as u64),
                grouped(of.p50_ns),
                grouped(of.p99_ns),
                grouped(of.p999_ns),
                per_op(of.round_trips),
                per_op(of.verbs.read),
                per_op(of.verbs.write),
                per_op(of.verbs.cas),
                per_op(of.bytes),
            )?;
        }
        Ok(())
    }
}

/// 1234567 as 1,234,567.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::with_capacity(digits.len() * 4 / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
pub(crate) mod tests {
    use std::fs;

    use serde_json::Value;

    use super::*;
    use crate::args::tests::ycsb;
    use crate::environment::Environment;
    use crate::publish::publish;
    use crate::recorder::Recorder;
    use crate::workload::{Kind, Workload};

    fn sample() -> (YcsbReport, Measured) {
        let mut recorder = Recorder::new(Workload::F.mix());
        for latency_ns in 100..200 {
            recorder.record(Kind::Get, latency_ns);
            recorder.record(Kind::Rmw, 3 * latency_ns);
            let counters =
                Counters { round_trips: 1, reads: 1, read_bytes: 128, ..Default::default() };
            recorder.attribute(Kind::Get, &counters);
        }
        let measured = Measured {
            fabric: "shm".into(),
            recorder,
            seconds: 2.0,
            cache: farside::CacheStatistics { hits: 99, misses: 1 },
            allocations: 0,
            cpu_s: 2.0,
            server: Some(ServerUsage { cpu_s: 0.01, wakeups: 2 }),
            load_seconds: 1.0,
            environment: Environment::look(),
        };
        (YcsbReport::new(&args(), &measured, Some(200.0)), measured)
    }

    fn args() -> Ycsb {
        ycsb("ycsb --workload f --depth 1 --seconds 2")
    }

    #[test]
    fn the_json_has_every_field() {
        let (report, _) = sample();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("result.json");
        publish(&report, "", Some(&path)).unwrap();
        let json: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
        for (pointer, expected) in [
            ("/fabric", Value::from("shm")),
            ("/workload", "f".into()),
            ("/threads", 1.into()),
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
            ("/operations/get/verbs/faa", 0.into()),
            ("/operations/get/bytes", 12_800.into()),
            ("/operations/rmw/count", 100.into()),
            ("/cache/hits", 99.into()),
            ("/cache/misses", 1.into()),
            ("/server/cpu_s", 0.01.into()),
            ("/server/wakeups", 2.into()),
            ("/allocations", 0.into()),
            ("/limit/map_ops_s", 200.0.into()),
            ("/limit/ratio", 0.5.into()),
        ] {
            assert_eq!(json.pointer(pointer), Some(&expected), "{pointer}");
        }
        assert_eq!(json["operations"].as_object().unwrap().len(), 2);
    }

    #[test]
    fn an_unknown_server_is_null() {
        let (report, _) = sample();
        let json = serde_json::to_value(YcsbReport { server: None, ..report }).unwrap();
        assert_eq!(json["server"], Value::Null);
    }

    #[test]
    fn the_table_shows_what_matters() {
        let (report, measured) = sample();
        let table = report.table(&measured).unwrap();
        for text in [
            "1,000,000 records",
            "GET/s a thread: 50",
            "0.50 of it",
            "allocations_per_op: 0.0",
            "p99.9",
        ] {
            assert!(table.contains(text), "{table}");
        }
        assert!(!table.contains("WARNING"));
    }

    #[test]
    fn numbers_are_grouped() {
        for (number, text) in [(0, "0"), (999, "999"), (1000, "1,000"), (1_234_567, "1,234,567")] {
            assert_eq!(grouped(number), text);
        }
    }
}
