//! The result of `kv-compare`, as JSON for programs and as tables for people.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};

use farside::Counters;
use farside_bench::accounting::{Machine, Origin};
use farside_bench::publish::grouped;
use farside_bench::recorder::Recorder;
use farside_bench::report::OperationReport;
use farside_bench::verbs::{Rates, RawLimit};
use farside_bench::workload::{Mix, Workload};
use serde::Serialize;

use crate::args::{Compare, StoreName};

/// The result of `kv-compare`.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs, reason = "the names are those of the JSON")]
pub struct CompareReport {
    #[serde(flatten)]
    pub origin: Origin,
    pub fabric: String,
    /// The emulated network; null if none is emulated.
    pub network: Option<String>,
    pub records: u64,
    pub value_size: u32,
    pub depth: u16,
    pub rounds: u32,
    pub seed: u64,
    /// The name and the description of each store.
    pub stores: BTreeMap<&'static str, String>,
    /// The stores that were asked for and cannot take part, each with the reason.
    pub left_out: BTreeMap<&'static str, &'static str>,
    pub limit: Limit,
    pub workloads: Vec<WorkloadReport>,
}

/// The rates of raw verbs on the same fabric, with as many chains in flight as the stores have
/// operations.
#[derive(Clone, Copy, Debug, Serialize)]
#[allow(missing_docs, reason = "the names are those of the JSON")]
pub struct Limit {
    pub bytes: u32,
    #[serde(flatten)]
    pub rates: Rates,
}

/// The results of one workload.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs, reason = "the names are those of the JSON")]
pub struct WorkloadReport {
    pub workload: String,
    /// In the order asked for.
    pub stores: Vec<StoreReport>,
}

/// The result of one store with one workload.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs, reason = "the names are those of the JSON")]
pub struct StoreReport {
    pub store: &'static str,
    pub seconds: f64,
    pub throughput_ops_s: f64,
    /// The throughput divided by the rate of these operations as raw chains, if each takes as few
    /// chains as Farside needs at least. Null for a store that is not on the fabric.
    pub mix_ratio: Option<f64>,
    /// The CPU time of the client's thread.
    pub client_cpu_s: f64,
    /// The CPU time of the server's process.
    pub server_cpu_s: f64,
    /// Operations for each second of CPU time of client and server.
    pub ops_per_cpu_s: f64,
    /// Farside's throughput divided by this store's; null if Farside was not measured.
    pub farside_ratio: Option<f64>,
    /// The same ratio of `ops_per_cpu_s`.
    pub farside_ratio_cpu: Option<f64>,
    pub operations: BTreeMap<&'static str, OperationReport>,
    pub round_trips_per_op: f64,
    pub verbs_per_op: f64,
    pub bytes_per_op: f64,
    /// How many operations did not find the key or value that the operations before had left. An
    /// INSERT counts if the key was already there.
    pub unexpected: u64,
}

impl StoreReport {
    fn new(store: StoreName, done: &TurnResult, raw: &RawLimit) -> Self {
        let mut counters = Counters::default();
        done.recorder.kinds().for_each(|(_, record)| counters += record.counters);
        let operations = done.recorder.operations();
        let per_op = |count: u64| count as f64 / operations.max(1) as f64;
        let throughput_ops_s = operations as f64 / done.seconds;
        let mix_ratio = || throughput_ops_s / raw.mix_ops_s(&done.recorder);
        Self {
            store: store.name(),
            seconds: done.seconds,
            throughput_ops_s,
            mix_ratio: store.program().is_none().then(mix_ratio),
            client_cpu_s: done.client_cpu_s,
            server_cpu_s: done.server_cpu_s,
            ops_per_cpu_s: operations as f64 / (done.client_cpu_s + done.server_cpu_s),
            farside_ratio: None,
            farside_ratio_cpu: None,
            operations: done
                .recorder
                .kinds()
                .map(|(kind, record)| (kind.name(), record.into()))
                .collect(),
            round_trips_per_op: per_op(counters.round_trips),
            verbs_per_op: per_op(counters.verbs()),
            bytes_per_op: per_op(counters.bytes()),
            unexpected: done.recorder.unexpected,
        }
    }
}

impl WorkloadReport {
    /// The report on a workload, from what each store did.
    pub(crate) fn new<'d>(
        workload: Workload,
        stores: impl Iterator<Item = (StoreName, &'d TurnResult)>,
        raw: &RawLimit,
    ) -> Self {
        let mut stores: Vec<_> =
            stores.map(|(store, done)| StoreReport::new(store, done, raw)).collect();
        let farside = stores.iter().find(|result| result.store == StoreName::Farside.name());
        if let Some((ops_s, cpu)) =
            farside.map(|result| (result.throughput_ops_s, result.ops_per_cpu_s))
        {
            for result in &mut stores {
                result.farside_ratio = Some(ops_s / result.throughput_ops_s);
                result.farside_ratio_cpu = Some(cpu / result.ops_per_cpu_s);
            }
        }
        Self { workload: workload.to_string(), stores }
    }

    fn write(&self, out: &mut String) -> fmt::Result {
        let kinds: Vec<&str> = match self.stores.first() {
            Some(result) => result.operations.keys().copied().collect(),
            None => return Ok(()),
        };
        let title = format!("YCSB {}", self.workload);
        write!(out, "\n{title:<9} {:>6} {:>11} {:>8}", "of raw", "ops/s", "farside")?;
        write!(out, " {:>11} {:>8}", "ops/CPU s", "farside")?;
        for kind in &kinds {
            write!(out, " {:>12} {:>9}", format!("{kind} p50 ns"), "p99 ns")?;
        }
        writeln!(out, " | per op: {:>6} {:>6} {:>7}", "trips", "verbs", "bytes")?;
        for result in &self.stores {
            let of_raw = result.mix_ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.2}"));
            write!(out, "{:<9} {of_raw:>6}", result.store)?;
            let rates = [
                (result.throughput_ops_s, result.farside_ratio),
                (result.ops_per_cpu_s, result.farside_ratio_cpu),
            ];
            for (rate, ratio) in rates {
                let ratio = ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.2} x"));
                write!(out, " {:>11} {ratio:>8}", grouped(rate as u64))?;
            }
            for kind in &kinds {
                let (p50, p99) = result
                    .operations
                    .get(kind)
                    .map_or((0, 0), |report| (report.p50_ns, report.p99_ns));
                write!(out, " {:>12} {:>9}", grouped(p50), grouped(p99))?;
            }
            let StoreReport { round_trips_per_op, verbs_per_op, bytes_per_op, .. } = result;
            writeln!(
                out,
                " |         {round_trips_per_op:>6.2} {verbs_per_op:>6.2} {bytes_per_op:>7.1}"
            )?;
        }
        for result in self.stores.iter().filter(|result| result.unexpected > 0) {
            let count = grouped(result.unexpected);
            writeln!(
                out,
                "WARNING: {count} operations of {} had unexpected results: see docs/benchmarks.md",
                result.store
            )?;
        }
        Ok(())
    }
}

impl CompareReport {
    /// The report of a run. `stores` took part; `left_out` were asked for and could not.
    pub(crate) fn new(
        args: &Compare,
        stores: &[StoreName],
        left_out: &[(StoreName, &'static str)],
        (fabric, machine): (&str, Machine),
        limit: Limit,
        workloads: Vec<WorkloadReport>,
    ) -> Self {
        Self {
            origin: Origin::of("kv-compare", machine),
            fabric: fabric.to_owned(),
            network: args.network_label(),
            records: args.records,
            value_size: args.value_size,
            depth: args.depth,
            rounds: args.rounds,
            seed: args.seed,
            stores: stores.iter().map(|store| (store.name(), store.description())).collect(),
            left_out: left_out.iter().map(|(store, why)| (store.name(), *why)).collect(),
            limit,
            workloads,
        }
    }

    /// The tables for people.
    pub fn table(&self) -> std::result::Result<String, fmt::Error> {
        let mut out = String::new();
        let (fabric, depth, rounds) = (&self.fabric, self.depth, self.rounds);
        let network = self.network.as_ref().map(|label| format!(", {label}")).unwrap_or_default();
        let (records, bytes) = (grouped(self.records), self.value_size);
        writeln!(out, "Stores on {fabric}{network}: {records} records x {bytes} B, one thread,")?;
        writeln!(out, "depth {depth}, {rounds} rounds in turns")?;
        writeln!(out, "{}", self.origin.machine)?;
        let Limit { bytes, rates } = self.limit;
        let [read, write, cas, update] = rates.all().map(|rate| grouped(rate.rate_per_s as u64));
        writeln!(
            out,
            "limit, raw verbs of {bytes} B: READ {read} /s, WRITE {write} /s, CAS {cas} /s, \
             a PUT's chain {update} /s"
        )?;
        self.workloads.iter().try_for_each(|workload| workload.write(&mut out))?;
        writeln!(out)?;
        for (store, label) in &self.stores {
            writeln!(out, "{store:<9} {label}")?;
        }
        for (store, why) in &self.left_out {
            writeln!(out, "{store:<9} left out: {why}")?;
        }
        Ok(out)
    }
}

/// The result of a store's turn, or of several.
pub(crate) struct TurnResult {
    /// The operations of these turns.
    pub(crate) recorder: Recorder,
    /// How long the turns took, in seconds.
    pub(crate) seconds: f64,
    /// The CPU time of the store's thread, in seconds.
    pub(crate) client_cpu_s: f64,
    /// The CPU time of the store's server, in seconds; 0 if its process is not known.
    pub(crate) server_cpu_s: f64,
}

impl TurnResult {
    /// An empty result, before the first turn.
    pub(crate) fn nothing(mix: Mix) -> Self {
        let recorder = Recorder::new(mix);
        Self { recorder, seconds: 0.0, client_cpu_s: 0.0, server_cpu_s: 0.0 }
    }

    /// Adds the result of another turn.
    pub(crate) fn add(&mut self, more: &Self) {
        self.recorder.merge(&more.recorder);
        self.seconds += more.seconds;
        self.client_cpu_s += more.client_cpu_s;
        self.server_cpu_s += more.server_cpu_s;
    }
}
