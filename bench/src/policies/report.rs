//! The result as JSON, as tables in Markdown and as charts.

use std::fmt::Write as _;
use std::path::Path;

use serde::Serialize;

use super::traces::Trace;
use super::{Costs, Point};
use crate::environment::{Machine, Origin};
use crate::html::chart::{Chart, Line};
use crate::html::scale::Scale;
use crate::publish::{grouped, write_whole};
use crate::{Error, Result};

/// The hit ratios of all policies.
#[derive(Debug, Serialize)]
pub struct PoliciesReport {
    #[serde(flatten)]
    origin: Origin,
    traces: Vec<TraceReport>,
}

/// The hit ratios with one trace.
#[derive(Debug, Serialize)]
struct TraceReport {
    name: String,
    requests: u64,
    /// The keys of the data.
    keys: u64,
    policies: Vec<PolicyReport>,
}

#[derive(Debug, Serialize)]
struct PolicyReport {
    name: String,
    points: Vec<Point>,
}

/// The policies of the charts, from the top, each with its name there and a colour of the style
/// sheet.
const DRAWN: [(&str, &str, usize, bool); 8] = [
    ("Belady", "Belady", 5, true),
    ("W-TinyLFU", "W-TinyLFU", 3, true),
    ("S3-FIFO", "S3-FIFO", 2, true),
    ("SIEVE", "SIEVE", 6, true),
    ("Farside", "Farside", 1, false),
    ("Farside, 1 of 64 hits", "Farside, 1 of 64 hits", 1, true),
    ("LRU", "LRU", 0, false),
    ("FIFO", "FIFO", 4, false),
];

impl PoliciesReport {
    pub(super) fn new() -> Self {
        Self { origin: Origin::of("kv-bench", Machine::detect(0)), traces: Vec::new() }
    }

    pub(super) fn add(&mut self, trace: &Trace, policies: Vec<(String, Vec<Point>)>) {
        let policies = policies.into_iter().map(|(name, points)| PolicyReport { name, points });
        self.traces.push(TraceReport {
            name: trace.name.clone(),
            requests: trace.requests.len() as u64,
            keys: trace.data.0,
            policies: policies.collect(),
        });
    }

    /// A table for each trace: hits in percent. The last columns are what a policy of Farside costs
    /// with each cache: reports a hit, and keys visited for an eviction.
    pub fn table(&self) -> std::result::Result<String, std::fmt::Error> {
        let mut out = String::new();
        for TraceReport { name, requests, keys, policies } in &self.traces {
            let Some(first) = policies.first() else { continue };
            writeln!(out, "\n{name}: {} requests, {} keys\n", grouped(*requests), grouped(*keys))?;
            write!(out, "| policy |")?;
            for point in &first.points {
                write!(out, " {} % |", point.cache_percent)?;
            }
            writeln!(out, " reports a hit | visits an eviction |")?;
            writeln!(out, "|---|{}", "---|".repeat(first.points.len() + 2))?;
            for PolicyReport { name, points } in policies {
                write!(out, "| {name} |")?;
                for point in points {
                    write!(out, " {:.2} |", point.hit_percent)?;
                }
                let costs = points.iter().filter_map(|point| Some((point, point.costs?)));
                let reports = |(point, costs): (&Point, Costs)| {
                    let hits = point.hit_percent / 100.0 * *requests as f64;
                    format!("{:.2}", costs.reports as f64 / hits.max(1.0))
                };
                let visits = |(_, costs): (&Point, Costs)| {
                    format!("{:.1}", costs.visits as f64 / costs.evictions.max(1) as f64)
                };
                let reports: Vec<String> = costs.clone().map(reports).collect();
                let visits: Vec<String> = costs.map(visits).collect();
                writeln!(out, " {} | {} |", reports.join(" "), visits.join(" "))?;
            }
        }
        self.table_of_differences(&mut out)?;
        Ok(out)
    }

    /// A table of all traces: how many points each policy is above LRU.
    fn table_of_differences(&self, out: &mut String) -> std::fmt::Result {
        let differences = |policies: &[PolicyReport], name: &str| -> Option<Vec<f64>> {
            let points = |name| Some(&policies.iter().find(|policy| policy.name == name)?.points);
            let pairs = points(name)?.iter().zip(points("LRU")?);
            Some(pairs.map(|(point, lru)| point.hit_percent - lru.hit_percent).collect())
        };
        let Some(TraceReport { policies, .. }) = self.traces.first() else { return Ok(()) };
        let sizes = policies.iter().flat_map(|policy| &policy.points);
        let sizes: Vec<_> = sizes.map(|point| format!("{} %", point.cache_percent)).collect();
        if !policies.iter().any(|policy| policy.name == "LRU") {
            return Ok(());
        }
        let sizes = sizes[..sizes.len() / policies.len()].join(", ");
        writeln!(out, "\nPoints above LRU, with caches of {sizes} of the data\n")?;
        let names = self.traces.iter().map(|trace| format!(" {} |", trace.name));
        writeln!(out, "| policy |{} least |", names.collect::<String>())?;
        writeln!(out, "|---|{}", "---|".repeat(self.traces.len() + 1))?;
        for PolicyReport { name, .. } in policies {
            write!(out, "| {name} |")?;
            let mut least = f64::INFINITY;
            for trace in &self.traces {
                for difference in differences(&trace.policies, name).unwrap_or_default() {
                    write!(out, " {difference:+.2}")?;
                    least = least.min(difference);
                }
                write!(out, " |")?;
            }
            writeln!(out, " {least:+.2} |")?;
        }
        Ok(())
    }

    /// Writes a chart of each trace to the folder, as SVG.
    ///
    /// # Errors
    /// [`Error::Output`] if a file cannot be written.
    pub fn draw(&self, folder: &Path) -> Result<()> {
        std::fs::create_dir_all(folder).map_err(Error::output(folder))?;
        for trace in &self.traces {
            let path = folder.join(format!("{}.svg", trace.name));
            write_whole(&path, chart(trace).file().as_bytes())?;
        }
        Ok(())
    }
}

fn chart(TraceReport { name, requests, keys, policies }: &TraceReport) -> Chart {
    let line = |(policy, name, colour, dashed): (&str, &str, usize, bool)| {
        let policy = policies.iter().find(|found| found.name == policy)?;
        let point = |point: &Point| (point.cache_percent, point.hit_percent);
        let points = policy.points.iter().map(point).collect();
        Some(Line { name: name.to_owned(), colour, dashed, points })
    };
    let lines: Vec<Line> = DRAWN.into_iter().filter_map(line).collect();
    let points = || lines.iter().flat_map(|line| line.points.iter().copied());
    let label = |percent: f64| format!("{percent} %");
    Chart {
        title: format!("Hits by cache size: {name}"),
        subtitle: format!("{} requests, {} keys", grouped(*requests), grouped(*keys)),
        x: ("cache, of the data", Scale::log(points().map(|(x, _)| x), label)),
        y: ("hits", Scale::linear(points().map(|(_, y)| y), label)),
        lines,
        dots: true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Args, Command};
    use crate::command::Interrupt;
    use crate::policies::{Kind, run};

    #[test]
    fn each_policy_has_a_row_in_each_table_and_the_best_ones_a_line() {
        let folder = tempfile::tempdir().unwrap();
        let line = "kv-bench policies --keys 100 --requests 1000 --sizes 5,50";
        let Ok(Args { command: Command::Policies(args) }) = Args::read(line.split(' ')) else {
            panic!("{line}")
        };
        let report = run(&args, &Interrupt::default()).unwrap();
        let table = report.table().unwrap();
        for kind in Kind::all() {
            assert_eq!(table.matches(&format!("\n| {} |", kind.name())).count(), 7 + 1);
        }
        report.draw(folder.path()).unwrap();
        let svg = std::fs::read_to_string(folder.path().join("scans.svg")).unwrap();
        let document = roxmltree::Document::parse(&svg).unwrap();
        let lines = document.descendants().filter(|node| node.has_tag_name("polyline"));
        assert_eq!(lines.count(), DRAWN.len());
    }
}
