//! `kv-bench report`: a self-contained HTML page of results, with charts as SVG and with tables.

pub(crate) mod chart;
mod figures;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use chart::{duration, short};
use figures::{Figures, Setting, curve, machine};
use maud::{DOCTYPE, Markup, PreEscaped, html};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::accounting::Origin;
use crate::args::Report;
use crate::publish::{check_file, grouped, is_same_file, write_whole};
use crate::report::{OperationReport, YcsbReport};
use crate::verbs::VerbsReport;
use crate::workload::{Kind, Price};
use crate::{Error, Result};

/// Reads all results, then writes the page. Returns the message for stdout. Passes a line about
/// each skipped file to `tell`.
///
/// # Errors
/// [`Error::Input`] as [`Inputs::read`]. [`Error::Usage`] and [`Error::Output`] if the page cannot
/// be written.
pub fn report(args: &Report, tell: impl Fn(&str)) -> Result<String> {
    check_file(&args.output)?;
    let inputs = Inputs::read(&args.results)?;
    if inputs.files.iter().any(|file| is_same_file(file, &args.output)) {
        let output = args.output.display();
        return Err(Error::Usage(format!(
            "the page would replace the result {output}: name another file with -o"
        )));
    }
    for file in &inputs.skipped {
        tell(&format!("skipped {}: not a result of ycsb or verbs", file.display()));
    }
    write_whole(&args.output, page(&inputs).as_bytes())?;
    let results = inputs.files.len();
    Ok(format!("{}: a page of {results} result(s)\n", args.output.display()))
}

const NO_RESULT: &str = "neither a result of `kv-bench ycsb --json` nor of `kv-bench verbs --json`";

/// All results, each with the name of its file.
#[derive(Default)]
pub struct Inputs {
    /// Results of `kv-bench ycsb`.
    pub ycsb: Vec<(String, YcsbReport)>,
    /// Results of `kv-bench verbs`.
    pub verbs: Vec<(String, VerbsReport)>,
    /// The files of all these results.
    pub files: Vec<PathBuf>,
    /// Files in folders that are other JSON, such as what `kv-compare` writes.
    pub skipped: Vec<PathBuf>,
}

impl Inputs {
    /// Reads files, and every `.json` in folders and their subfolders.
    ///
    /// # Errors
    /// [`Error::Input`] with the first file that cannot be read, the first named file that is no
    /// result, or the first folder that contains no result.
    pub fn read(paths: &[PathBuf]) -> Result<Self> {
        let mut inputs = Self::default();
        for path in paths {
            let (mut files, count_before) = (Vec::new(), inputs.files.len());
            find(path, &mut files)?;
            for file in files {
                if inputs.add(&file)? {
                    inputs.files.push(file);
                } else if file == *path {
                    return Err(Error::input(path)(NO_RESULT));
                } else {
                    inputs.skipped.push(file);
                }
            }
            if inputs.files.len() == count_before {
                return Err(Error::input(path)("no .json in this folder is a result"));
            }
        }
        Ok(inputs)
    }

    /// Reads a file. Returns whether it is a result.
    fn add(&mut self, path: &Path) -> Result<bool> {
        let bytes = fs::read(path).map_err(Error::input(path))?;
        let json: Value = serde_json::from_slice(&bytes).map_err(Error::input(path))?;
        let name = path.display().to_string();
        if json.get("workload").is_some() {
            let report: YcsbReport = parsed(path, json)?;
            let is_whole = report.seconds > 0.0 && report.throughput_ops_s > 0.0;
            if !is_whole || report.count() == 0 {
                return Err(Error::input(path)("this run has no operations"));
            }
            self.ycsb.push((name, report));
        } else if json.get("update").is_some() {
            self.verbs.push((name, parsed(path, json)?));
        } else {
            return Ok(false);
        }
        Ok(true)
    }
}

fn parsed<T: DeserializeOwned>(path: &Path, json: Value) -> Result<T> {
    serde_json::from_value(json).map_err(Error::input(path))
}

/// Finds the file itself, or the files in the folder, sorted by name.
fn find(path: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    if !path.is_dir() {
        files.push(path.to_owned());
        return Ok(());
    }
    let entries = fs::read_dir(path).map_err(Error::input(path))?;
    let entries: std::io::Result<Vec<_>> = entries.map(|entry| Ok(entry?.path())).collect();
    let mut entries = entries.map_err(Error::input(path))?;
    entries.sort();
    for entry in entries {
        // Links to folders are skipped, because one may lead back here.
        let is_folder = entry.is_dir() && !entry.is_symlink();
        if is_folder || entry.extension().is_some_and(|extension| extension == "json") {
            find(&entry, files)?;
        }
    }
    Ok(())
}

const STYLE: &str = include_str!("html/style.css");

/// Elements without an end tag, in the form of XML, which is valid HTML too.
const BREAK: PreEscaped<&str> = PreEscaped("<br/>");
const META: PreEscaped<&str> = PreEscaped(concat!(
    r#"<meta charset="utf-8"/>"#,
    r#"<meta name="viewport" content="width=device-width, initial-scale=1"/>"#,
));

/// The whole document.
pub(crate) fn page(inputs: &Inputs) -> String {
    let figures = Figures::new(inputs.ycsb.iter().map(|(_, run)| run));
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                (META)
                title { "kv-bench report" }
                style { (PreEscaped(STYLE)) }
            }
            body {
                h1 { "Farside, measured" }
                p { (summary(inputs)) }
                (charts(&figures))
                (costs(&inputs.ycsb))
                (runs(&inputs.ycsb))
                (verbs(&inputs.verbs))
            }
        }
    };
    // XML forbids these characters, and results may contain any character.
    let is_forbidden = |c: char| match c {
        '\t' | '\n' | '\r' => false,
        c => c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}'),
    };
    page.into_string().replace(is_forbidden, "\u{fffd}") + "\n"
}

/// The explanation of a ratio to the raw verbs above 1, which looks impossible.
const ABOVE_ONE: &str = "A ratio above 1 is no mistake. \u{201c}Of raw verbs\u{201d} is the \
    throughput divided by the rate of the chains that the operations need at least, each executed \
    alone. Operations on one key that are in flight together share a chain, so with popular keys a \
    run needs fewer chains than it has operations. Also, the verbs access other memory than the \
    run's keys, and are measured after the run.";

/// The number of results, their days and their machines.
fn summary(inputs: &Inputs) -> String {
    let of_ycsb = inputs.ycsb.iter().map(|(_, run)| &run.origin);
    let origins: Vec<&Origin> =
        of_ycsb.chain(inputs.verbs.iter().map(|(_, report)| &report.origin)).collect();
    let days: BTreeSet<&str> = origins.iter().filter_map(|origin| origin.date.get(..10)).collect();
    let machines: BTreeSet<String> = origins.iter().map(|origin| machine(origin)).collect();
    let [days, machines] = [
        days.into_iter().collect::<Vec<_>>().join(", "),
        machines.into_iter().collect::<Vec<_>>().join("; "),
    ];
    format!("{} result(s), {days}, on {machines}", origins.len())
}

/// Operations for each second of CPU time, of clients and server. `None` for a result that lacks
/// one of the two times.
fn per_cpu_s(run: &YcsbReport) -> Option<f64> {
    let cpu_s = run.cpu_s + run.server?.cpu_s;
    (run.cpu_s > 0.0).then(|| run.count() as f64 / cpu_s)
}

fn charts(figures: &Figures<'_>) -> Markup {
    let sections = [
        ("Throughput", figures.throughput()),
        ("Servers", figures.by_servers()),
        ("Growth", figures.by_records()),
        ("Latency", figures.against_load()),
        ("Latency distributions", figures.distributions()),
    ];
    // A workload with one point has no line.
    let sections = sections.map(|(name, charts)| {
        (name, charts.into_iter().filter(|chart| !chart.lines.is_empty()).collect::<Vec<_>>())
    });
    html! {
        @for (name, charts) in sections.iter().filter(|(_, charts)| !charts.is_empty()) {
            h2 { (name) }
            div class="charts" { @for chart in charts { figure { (chart.draw()) } } }
        }
    }
}

/// A table of the costs of an operation, beside the least that it can cost: README's price list.
fn costs(runs: &[(String, YcsbReport)]) -> Markup {
    let mut sums = BTreeMap::<(Setting, String, &str), [u64; 6]>::new();
    for (_, run) in runs {
        for (kind, operation) in &run.operations {
            let OperationReport { count, round_trips, verbs, bytes, .. } = *operation;
            let more = [count, round_trips, verbs.read, verbs.write, verbs.cas, bytes];
            let sum = sums.entry((Setting::of(run), curve(run), kind)).or_default();
            *sum = std::array::from_fn(|index| sum[index] + more[index]);
        }
    }
    let heads = ["operation", "setting", "round trips", "READs", "WRITEs", "CASs", "bytes"];
    let rows = html! {
        @for ((setting, curve, kind), [count, costs @ ..]) in &sums {
            tr class="run" {
                td class="text" { (curve) " " (kind) }
                td class="text" { (setting.subtitle("")) }
                @for (cost, least) in costs.iter().zip(least(kind, setting)) {
                    td {
                        (short(*cost as f64 / *count as f64))
                        @if let Some(least) = least { " / " (least) }
                    }
                }
            }
        }
    };
    html! {
        @if !sums.is_empty() {
            h2 { "Cost of an operation / lowest possible cost" }
            (table(2, &heads, &rows))
        }
    }
}

/// The least that an operation costs, as far as it is known.
fn least(kind: &str, setting: &Setting) -> [Option<u64>; 5] {
    let Some(kind) = Kind::ALL.into_iter().find(|known| known.name() == kind) else {
        return [None; 5];
    };
    let Price { round_trips, reads, writes, swaps, bytes } =
        Price::of(kind, setting.value_size as usize);
    let bytes = setting.is_of_one_length().then_some(bytes);
    [Some(round_trips), Some(reads), Some(writes), Some(swaps), bytes]
}

/// A table whose first `texts` columns are texts.
fn table(texts: usize, heads: &[&str], rows: &Markup) -> Markup {
    html! {
        div class="wide" {
            table {
                tr {
                    @for (index, head) in heads.iter().enumerate() {
                        th class=[(index < texts).then_some("text")] { (head) }
                    }
                }
                (rows)
            }
        }
    }
}

/// A table of every run: its numbers, and its origin below them.
fn runs(runs: &[(String, YcsbReport)]) -> Markup {
    if runs.is_empty() {
        return Markup::default();
    }
    let heads = [
        "workload",
        "setting",
        "p50 / p99",
        "threads",
        "depth",
        "operations/s",
        "of raw verbs",
        "ops a CPU s",
    ];
    let latency = |(kind, operation): (&String, &OperationReport)| {
        let [p50, p99] = [operation.p50_ns, operation.p99_ns].map(|ns| duration(ns as f64));
        format!("{kind} {p50} / {p99}")
    };
    let ratio = |run: &YcsbReport| Some(run.limit?.mix_ratio);
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let rows = html! {
        @for (file, run) in runs {
            @let latencies: Vec<String> = run.operations.iter().map(latency).collect();
            tr class="run" {
                td class="text" { (curve(run)) }
                td class="text" { (Setting::of(run).to_string()) }
                td class="text" { (latencies.join(", ")) }
                td { (run.threads) }
                td { (run.depth) }
                td { (grouped(run.throughput_ops_s as u64)) }
                td { (or_dash(ratio(run).map(|ratio| format!("{ratio:.2}")))) }
                td { (or_dash(per_cpu_s(run).map(short))) }
            }
            (origin(heads.len(), file, &run.origin))
        }
    };
    html! {
        h2 { "Every run" }
        (table(3, &heads, &rows))
        @if runs.iter().filter_map(|(_, run)| ratio(run)).any(|ratio| ratio > 1.0) {
            p class="note" { (ABOVE_ONE) }
        }
    }
}

/// The row below a result's numbers, with its file, command, date, commit and machine.
fn origin(columns: usize, file: &str, origin: &Origin) -> Markup {
    let Origin { command, commit, date, machine } = origin;
    let commit = commit.as_deref().unwrap_or("unknown");
    html! {
        tr {
            td class="from" colspan=(columns) {
                code { (command) } (BREAK)
                (format!("{file} \u{b7} {date} \u{b7} commit {commit} \u{b7} {machine}"))
            }
        }
    }
}

/// A table of the rates of raw verbs, from `kv-bench verbs`.
fn verbs(reports: &[(String, VerbsReport)]) -> Markup {
    if reports.is_empty() {
        return Markup::default();
    }
    let heads =
        ["fabric", "bytes", "depth", "READ/s", "WRITE/s", "CAS/s", "PUT's chain/s", "READ p50"];
    let rows = html! {
        @for (file, report) in reports {
            tr class="run" {
                td class="text" { (report.fabric) }
                td { (report.bytes) }
                td { (report.depth) }
                @for rate in report.rates.all() { td { (grouped(rate.rate_per_s as u64)) } }
                td { (duration(report.rates.read.p50_ns as f64)) }
            }
            (origin(heads.len(), file, &report.origin))
        }
    };
    html! {
        h2 { "Raw verbs" }
        (table(1, &heads, &rows))
    }
}
