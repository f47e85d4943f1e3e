//! The result of `kv-bench ycsb` as a table for people.

use std::fmt::{self, Write as _};

use super::{SocketsLimit, VerbsLimit, YcsbReport};
use crate::accounting::ServerUsage;
use crate::publish::grouped;
use crate::run::Measured;

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
