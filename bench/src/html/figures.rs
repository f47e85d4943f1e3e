//! The charts of a set of results. The runs of a chart differ only in the quantity on its axis.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::chart::{COLOURS, Chart, Line, PERCENTILE_MAX, Scale, duration, short};
use crate::accounting::Origin;
use crate::distribution::THETA;
use crate::pattern::DistributionReport;
use crate::publish::grouped;
use crate::report::{OperationReport, YcsbReport};
use crate::workload::{Kind, Workload};

/// The target rate of a run, in operations a second.
fn offered(run: &YcsbReport) -> Option<u64> {
    Some(run.open_loop.as_ref()?.target_ops_s as u64)
}

/// The arrivals of a run with a target rate.
fn arrivals(run: &YcsbReport) -> Option<String> {
    Some(run.open_loop.as_ref()?.arrivals.clone())
}

/// Groups runs by a key, in the order of the keys.
fn group_by<'a, K: Ord>(
    runs: &[&'a YcsbReport],
    key: impl Fn(&YcsbReport) -> K,
) -> BTreeMap<K, Vec<&'a YcsbReport>> {
    let mut groups = BTreeMap::<K, Vec<_>>::new();
    for run in runs {
        groups.entry(key(run)).or_default().push(*run);
    }
    groups
}

/// All results, and a colour for each workload, the same in every chart.
pub(crate) struct Figures<'a> {
    runs: Vec<&'a YcsbReport>,
    /// The runs without a target rate.
    closed: Vec<&'a YcsbReport>,
    curves: BTreeSet<String>,
}

impl<'a> Figures<'a> {
    pub(crate) fn new(runs: impl Iterator<Item = &'a YcsbReport>) -> Self {
        let runs: Vec<_> = runs.collect();
        let closed = runs.iter().copied().filter(|run| run.open_loop.is_none()).collect();
        Self { curves: runs.iter().map(|run| curve(run)).collect(), closed, runs }
    }

    fn colour(&self, curve: &str) -> usize {
        self.curves.iter().position(|known| known == curve).unwrap_or(0) % COLOURS
    }

    /// Throughput against threads, for each depth, then against depth, for each count of threads.
    pub(crate) fn throughput(&self) -> Vec<Chart> {
        let mut charts = Vec::new();
        let mut sweep = |title: &str, subtitle, unit, lines: Vec<Line>| {
            let x = (unit, Scale::log(xs(&lines), short));
            let y = ("operations/s", Scale::linear(ys(&lines), short));
            charts.push(Chart { title: title.to_owned(), subtitle, x, y, lines, dots: true });
        };
        for ((setting, depth), runs) in group_by(&self.closed, |run| (Setting::of(run), run.depth))
        {
            let lines = self.lines(&runs, |run| run.threads.into(), median);
            let subtitle = setting.subtitle(&format!(", depth {depth}"));
            sweep("Throughput by threads", subtitle, "threads", lines);
        }
        for ((setting, count), runs) in
            group_by(&self.closed, |run| (Setting::of(run), run.threads))
        {
            let lines = self.lines(&runs, |run| run.depth.into(), median);
            let subtitle = setting.subtitle(&format!(", {}", threads(count)));
            let unit = "depth: operations in flight a thread";
            sweep("Throughput by operations in flight", subtitle, unit, lines);
        }
        charts
    }

    /// Throughput against the number of servers, beside linear scaling from the fewest.
    pub(crate) fn by_servers(&self) -> Vec<Chart> {
        let any = |run: &YcsbReport| Setting { servers: 0, ..Setting::of(run) };
        let groups = group_by(&self.closed, |run| (any(run), run.threads, run.depth));
        let mut charts = Vec::new();
        for ((setting, count, depth), runs) in groups {
            let mut lines = self.lines(&runs, |run| run.servers.into(), median);
            let linear: Vec<Line> = lines.iter().filter_map(linear).collect();
            lines.extend(linear);
            charts.push(Chart {
                title: "Throughput by servers".to_owned(),
                subtitle: setting.subtitle(&format!(", {}, depth {depth}", threads(count))),
                x: ("servers", Scale::linear(xs(&lines), short)),
                y: ("operations/s", Scale::linear(ys(&lines), short)),
                lines,
                dots: true,
            });
        }
        charts
    }

    /// A line for each workload that has two values on the axis.
    fn lines(
        &self,
        runs: &[&YcsbReport],
        x: impl Fn(&YcsbReport) -> u64,
        y: impl Fn(&[&YcsbReport]) -> f64,
    ) -> Vec<Line> {
        let line = |(name, runs): (String, Vec<&YcsbReport>)| {
            let groups = group_by(&runs, &x);
            let points = groups.iter().map(|(x, runs)| (*x as f64, y(runs))).collect();
            Line { colour: self.colour(&name), name, dashed: false, points }
        };
        let lines = group_by(runs, curve).into_iter().map(line);
        lines.filter(|line| line.points.len() > 1).collect()
    }

    /// The time that a thread needs for an operation, against the number of records.
    pub(crate) fn by_records(&self) -> Vec<Chart> {
        let any = |run: &YcsbReport| Setting { records: 0, ..Setting::of(run) };
        let groups = group_by(&self.closed, |run| (any(run), run.threads, run.depth));
        let mut charts = Vec::new();
        for ((setting, count, depth), runs) in groups {
            let ns = |runs: &[&YcsbReport]| 1e9 * f64::from(count) / median(runs);
            let lines = self.lines(&runs, |run| run.records, ns);
            charts.push(Chart {
                title: "Time of an operation by records".to_owned(),
                subtitle: setting.subtitle(&format!(", {}, depth {depth}", threads(count))),
                x: ("records", Scale::log(xs(&lines), short)),
                y: ("time of an operation", Scale::linear(ys(&lines), duration)),
                lines,
                dots: true,
            });
        }
        charts
    }

    /// The distribution of latencies of each kind of operation.
    pub(crate) fn distributions(&self) -> Vec<Chart> {
        let key = |run: &YcsbReport| {
            (Setting::of(run), run.threads, run.depth, offered(run).zip(arrivals(run)))
        };
        let mut charts = Vec::new();
        for ((setting, count, depth, open), runs) in group_by(&self.runs, key) {
            let load = open.map_or(String::new(), |(rate, arrivals)| {
                format!(", {} operations/s offered, {arrivals}", grouped(rate))
            });
            let mut lines = Vec::new();
            for (name, runs) in group_by(&runs, curve) {
                // Of several runs, the latest one is drawn.
                let Some(run) = runs.iter().max_by_key(|run| &run.origin.date) else { continue };
                for (kind, operation) in &run.operations {
                    lines.push(Line {
                        name: format!("{name} {kind}"),
                        colour: self.colour(&name),
                        dashed: kind != Kind::Get.name(),
                        points: distribution(operation),
                    });
                }
            }
            charts.push(Chart {
                title: "Latency distribution".to_owned(),
                subtitle: setting.subtitle(&format!(", {}, depth {depth}{load}", threads(count))),
                x: ("latency", Scale::log(xs(&lines), duration)),
                y: ("operations that took at most this long", Scale::percentiles()),
                lines,
                dots: false,
            });
        }
        charts
    }

    /// p50 and p99 against operations a second, of runs with different target rates or different
    /// depths.
    pub(crate) fn against_load(&self) -> Vec<Chart> {
        let key = |run: &YcsbReport| (Setting::of(run), curve(run), run.threads, arrivals(run));
        let mut charts = Vec::new();
        for ((setting, curve, count, arrivals), mut runs) in group_by(&self.runs, key) {
            // Of several runs with the same load, the latest one is drawn.
            runs.sort_by_key(|run| (offered(run), run.depth, Reverse(&run.origin.date)));
            runs.dedup_by_key(|run| (offered(run), run.depth));
            if runs.len() < 2 {
                continue;
            }
            let mut lines = Vec::new();
            let kinds: BTreeSet<&String> =
                runs.iter().flat_map(|run| run.operations.keys()).collect();
            for (colour, kind) in kinds.into_iter().enumerate() {
                for (name, is_tail) in [("p50", false), ("p99", true)] {
                    let latency = |operation: &OperationReport| {
                        if is_tail { operation.p99_ns } else { operation.p50_ns }
                    };
                    let point = |run: &&YcsbReport| {
                        let operation = run.operations.get(kind)?;
                        Some((run.throughput_ops_s, latency(operation) as f64))
                    };
                    let points = runs.iter().filter_map(point).collect();
                    let name = format!("{kind} {name}");
                    lines.push(Line { name, colour: colour % COLOURS, dashed: is_tail, points });
                }
            }
            let load = match arrivals {
                Some(arrivals) => format!("at offered rates, {arrivals}"),
                None => "at growing depths".to_owned(),
            };
            charts.push(Chart {
                title: format!("Latency against load: workload {curve}"),
                subtitle: setting.subtitle(&format!(", {}, {load}", threads(count))),
                x: ("operations/s", Scale::linear(xs(&lines), short)),
                y: ("latency", Scale::log(ys(&lines), duration)),
                lines,
                dots: true,
            });
        }
        charts
    }
}

/// What a throughput would be if it were proportional to the number of servers, from the fewest on.
fn linear(of: &Line) -> Option<Line> {
    let ((x, y), (end, _)) = (*of.points.first()?, *of.points.last()?);
    let points = vec![(x, y), (end, y / x * end)];
    Some(Line { name: format!("{} linear", of.name), colour: of.colour, dashed: true, points })
}

/// The horizontal positions of all points.
fn xs(lines: &[Line]) -> impl Iterator<Item = f64> + Clone {
    lines.iter().flat_map(|line| &line.points).map(|(x, _)| *x)
}

/// The vertical positions of all points.
fn ys(lines: &[Line]) -> impl Iterator<Item = f64> + Clone {
    lines.iter().flat_map(|line| &line.points).map(|(_, y)| *y)
}

/// The points of a distribution: latency and percentile, from left to right.
fn distribution(operation: &OperationReport) -> Vec<(f64, f64)> {
    let drawn = operation.latencies.iter().filter(|(percentile, _)| *percentile <= PERCENTILE_MAX);
    drawn.map(|(percentile, ns)| (*ns as f64, *percentile)).collect()
}

/// The median of the runs' throughputs.
fn median(runs: &[&YcsbReport]) -> f64 {
    let mut rates: Vec<f64> = runs.iter().map(|run| run.throughput_ops_s).collect();
    rates.sort_by(f64::total_cmp);
    rates.get(rates.len() / 2).copied().unwrap_or_default()
}

/// The settings that all runs of a chart have in common.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Setting {
    fabric: String,
    /// 0 if the runs differ in their number of records.
    records: u64,
    pub(super) value_size: u32,
    /// The name of the values' lengths.
    sizes: String,
    /// The mix of operations; empty for a standard workload.
    mix: String,
    clients: u32,
    /// 0 if the runs differ in their number of servers.
    servers: u16,
    /// The machine and the commit.
    origin: String,
}

impl Setting {
    pub(crate) fn of(run: &YcsbReport) -> Self {
        let YcsbReport { fabric, records, value_size, clients, servers, origin, .. } = run;
        let is_custom = run.workload.parse::<Workload>().is_err();
        let mix = run.pattern.mix.iter().filter(|_| is_custom);
        let mix: Vec<String> =
            mix.map(|(kind, share)| format!("{} % {kind}", percent(*share))).collect();
        let commit = origin.commit.as_deref().unwrap_or("unknown");
        Self {
            fabric: fabric.clone(),
            records: *records,
            value_size: *value_size,
            sizes: run.pattern.value_size.name.clone(),
            mix: mix.join(" "),
            clients: *clients,
            servers: *servers,
            origin: format!("{}, commit {commit}", machine(origin)),
        }
    }

    pub(super) fn is_of_one_length(&self) -> bool {
        self.sizes == self.value_size.to_string()
    }

    /// The subtitle of a chart: this setting and `rest`, and in a second line the origin.
    pub(crate) fn subtitle(&self, rest: &str) -> String {
        format!("{self}{rest}\n{}", self.origin)
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { fabric, records, value_size, sizes, mix, clients, servers, origin: _ } = self;
        match records {
            0 => write!(f, "{fabric}, records of ")?,
            _ => write!(f, "{fabric}, {} records of ", grouped(*records))?,
        }
        if self.is_of_one_length() {
            write!(f, "{value_size} B")?
        } else {
            write!(f, "{sizes}")?
        }
        if !mix.is_empty() {
            write!(f, ", {mix}")?;
        }
        if *servers > 1 {
            write!(f, ", {servers} servers")?;
        }
        if *clients > 1 { write!(f, ", {clients} clients") } else { Ok(()) }
    }
}

/// A share in percent, rounded to a hundredth.
fn percent(share: f64) -> f64 {
    (share * 1e4).round() / 1e2
}

/// The name of a run's curve: the workload, and its distribution if that is not YCSB's.
pub(crate) fn curve(run: &YcsbReport) -> String {
    let DistributionReport { name, theta, hot_set, hot_operations } = &run.pattern.distribution;
    let usual = run.workload.parse::<Workload>().map(|workload| workload.default_shape().name());
    let theta = theta.filter(|theta| *theta != THETA);
    let mut curve = run.workload.clone();
    if theta.is_some() || usual != Ok(name.as_str()) {
        curve = format!("{curve} {name}");
    }
    for number in [theta, *hot_set, *hot_operations].into_iter().flatten() {
        curve = format!("{curve} {number}");
    }
    curve
}

fn threads(count: u32) -> String {
    format!("{count} thread{}", if count == 1 { "" } else { "s" })
}

/// The machine of a run, in a few words.
pub(crate) fn machine(Origin { machine, .. }: &Origin) -> String {
    format!("{}, {} cores", machine.processor, machine.cores)
}
