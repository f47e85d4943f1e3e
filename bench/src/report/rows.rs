//! The result as CSV: a line for each kind of operation.

use serde::Serialize;

use super::YcsbReport;

/// One kind of operation of a run. Columns are only ever added, at the end.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs, reason = "the names are those of the columns")]
pub struct Row<'a> {
    pub date: &'a str,
    pub commit: Option<&'a str>,
    pub fabric: &'a str,
    pub workload: &'a str,
    pub distribution: &'a str,
    pub threads: u32,
    pub depth: u16,
    pub records: u64,
    pub value_size: u32,
    pub seconds: f64,
    pub throughput_ops_s: f64,
    pub map_ops_s: Option<f64>,
    pub map_ratio: Option<f64>,
    pub mix_ops_s: Option<f64>,
    pub mix_ratio: Option<f64>,
    pub operation: &'a str,
    pub count: u64,
    pub ops_s: f64,
    pub p50_ns: u64,
    pub p99_ns: u64,
    pub p999_ns: u64,
    pub max_ns: u64,
    pub round_trips: u64,
    pub reads: u64,
    pub writes: u64,
    pub cas: u64,
    pub faa: u64,
    pub bytes: u64,
    /// Of all kinds.
    pub unexpected: u64,
    pub processes: u32,
    pub theta: Option<f64>,
    pub target_ops_s: Option<f64>,
    pub arrivals: Option<&'a str>,
    pub reached: Option<bool>,
    pub cache_hits: u64,
    pub cache_misses: u64,
}

impl YcsbReport {
    /// The lines.
    pub fn rows(&self) -> impl Iterator<Item = Row<'_>> {
        let verbs = self.limit.and_then(|limit| limit.verbs);
        let open_loop = self.open_loop.as_ref();
        self.operations.iter().map(move |(name, of)| Row {
            date: &self.origin.date,
            commit: self.origin.commit.as_deref(),
            fabric: &self.fabric,
            workload: &self.workload,
            distribution: &self.pattern.distribution.name,
            threads: self.threads,
            depth: self.depth,
            records: self.records,
            value_size: self.value_size,
            seconds: self.seconds,
            throughput_ops_s: self.throughput_ops_s,
            map_ops_s: self.limit.and_then(|limit| limit.map_ops_s),
            map_ratio: self.limit.and_then(|limit| limit.ratio),
            mix_ops_s: verbs.map(|verbs| verbs.mix_ops_s),
            mix_ratio: verbs.map(|verbs| verbs.mix_ratio),
            operation: name,
            count: of.count,
            ops_s: of.count as f64 / self.seconds,
            p50_ns: of.p50_ns,
            p99_ns: of.p99_ns,
            p999_ns: of.p999_ns,
            max_ns: of.max_ns,
            round_trips: of.round_trips,
            reads: of.verbs.read,
            writes: of.verbs.write,
            cas: of.verbs.cas,
            faa: of.verbs.faa,
            bytes: of.bytes,
            unexpected: self.unexpected,
            processes: self.processes,
            theta: self.pattern.distribution.theta,
            target_ops_s: open_loop.map(|of| of.target_ops_s),
            arrivals: open_loop.map(|of| &*of.arrivals),
            reached: open_loop.map(|of| of.reached),
            cache_hits: self.cache.hits,
            cache_misses: self.cache.misses,
        })
    }
}
