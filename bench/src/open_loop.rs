//! What a report says of a run that offered a rate.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use crate::args::Ycsb;
use crate::report::{OperationReport, grouped};
use crate::run::Measured;

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
        let behind_s = measured.recorder.behind_ns as f64 / 1e9;
        let reached = behind_s <= BEHIND_MAX * measured.seconds;
        Some(Self { target_ops_s, arrivals: args.arrivals.name().to_owned(), behind_s, reached })
    }

    /// The lines for people.
    ///
    /// # Errors
    /// None: formatting into a text does not fail.
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
