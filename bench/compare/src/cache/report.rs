//! The result of `kv-compare cache`, as JSON and as tables.

use std::fmt::{self, Write as _};

use farside_bench::environment::{Machine, Origin};
use farside_bench::publish::grouped;
use serde::Serialize;

use super::CacheMemory;
use super::policies::ExactHits;
use super::traces::Trace;
use crate::args::Cache;

/// The result of `kv-compare cache`.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs, reason = "the names are those of the JSON")]
pub struct CacheReport {
    #[serde(flatten)]
    pub origin: Origin,
    pub region_bytes: u64,
    pub value_size: u32,
    pub threads: u16,
    pub seed: u64,
    /// The memory that each store has for values.
    pub values_mib: u64,
    /// Whether memcached is installed.
    pub memcached: bool,
    pub traces: Vec<TraceReport>,
}

/// The results with one trace and one size.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs, reason = "the names are those of the JSON")]
pub struct TraceReport {
    pub name: String,
    /// The size of the cache that was asked for, in percent of the data.
    pub cache_percent: f64,
    pub keys: u64,
    pub requests: u64,
    pub stores: Vec<StoreReport>,
}

/// The result of one store.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs, reason = "the names are those of the JSON")]
pub struct StoreReport {
    pub store: &'static str,
    /// The mean number of values that it held in the second half of the requests. That of Farside
    /// includes the free blocks of its clients.
    pub items: u64,
    pub hit_percent: f64,
    /// The hits of exact policies on the same requests, with as many items.
    pub exact: ExactHits,
    /// GETs a second. A miss is followed by a PUT, which is not counted.
    pub requests_s: f64,
    /// Requests for each second of CPU time of clients and server.
    pub requests_per_cpu_s: f64,
    /// PUTs that the store refused.
    pub refused: u64,
}

impl TraceReport {
    pub(super) fn new(trace: &Trace, cache_percent: f64, stores: Vec<StoreReport>) -> Self {
        let (name, requests) = (trace.name.clone(), trace.requests.len() as u64);
        Self { name, cache_percent, keys: trace.data_keys, requests, stores }
    }
}

impl CacheReport {
    pub(super) fn new(
        args: &Cache,
        memory: &CacheMemory,
        machine: Machine,
        memcached: bool,
        traces: Vec<TraceReport>,
    ) -> Self {
        Self {
            origin: Origin::of("kv-compare", machine),
            region_bytes: args.memory.0,
            value_size: args.value_size,
            threads: args.threads,
            seed: args.seed,
            values_mib: memory.values_mib,
            memcached,
            traces,
        }
    }

    /// A table for each trace and size.
    pub fn table(&self) -> Result<String, fmt::Error> {
        let mut out = String::new();
        let Self { values_mib, value_size, threads, .. } = self;
        writeln!(
            out,
            "{threads} threads, values of {value_size} bytes, {values_mib} MiB for them"
        )?;
        if !self.memcached {
            writeln!(out, "memcached is left out: it is not installed")?;
        }
        for TraceReport { name, cache_percent, keys, requests, stores } in &self.traces {
            let [keys, requests] = [keys, requests].map(|count| grouped(*count));
            writeln!(out, "\n{name}: {requests} requests, {keys} keys, cache {cache_percent} %\n")?;
            write!(
                out,
                "| store | items | bytes an item | hits | LRU | FIFO | S3-FIFO | Belady |"
            )?;
            writeln!(out, " requests/s | requests/CPU s | refused |")?;
            writeln!(out, "|---|{}", "---|".repeat(10))?;
            for row in stores {
                let bytes = (values_mib << 20) / row.items.max(1);
                let ExactHits { lru, fifo, s3_fifo, belady } = row.exact;
                let [rate, per_cpu] =
                    [row.requests_s, row.requests_per_cpu_s].map(|rate| grouped(rate as u64));
                write!(out, "| {} | {} | {bytes} |", row.store, grouped(row.items))?;
                write!(out, " {:.2} | {lru:.2} | {fifo:.2} |", row.hit_percent)?;
                write!(out, " {s3_fifo:.2} | {belady:.2} |")?;
                writeln!(out, " {rate} | {per_cpu} | {} |", grouped(row.refused))?;
            }
        }
        Ok(out)
    }
}
