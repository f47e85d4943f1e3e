//! The page around the charts: figures of merit, tables, what was not there.

use super::chart::Chart;
use super::figures::Figures;
use super::inputs::Inputs;
use super::markup::Markup;
use super::scale::{duration, short};
use super::setting::{Setting, curve, machine, threads};
use crate::environment::Origin;
use crate::report::{YcsbReport, grouped};
use crate::verbs::VerbsReport;

const STYLE: &str = include_str!("style.css");

/// A whole document.
pub(crate) fn page(inputs: &Inputs) -> String {
    let figures = Figures::new(inputs.ycsb.iter().map(|(_, run)| run));
    let mut out = Markup::default();
    out.raw("<!DOCTYPE html>\n");
    out.element("html", &[("lang", &"en")], |out| {
        out.element("head", &[], |out| {
            out.leaf("meta", &[("charset", &"utf-8")], "");
            let wide = "width=device-width, initial-scale=1";
            out.leaf("meta", &[("name", &"viewport"), ("content", &wide)], "");
            out.leaf("title", &[], "kv-bench report");
            out.element("style", &[], |out| out.raw(STYLE));
        });
        out.element("body", &[], |out| {
            out.leaf("h1", &[], "Farside, measured");
            out.leaf("p", &[], &summary(inputs));
            cards(out, inputs);
            charts(out, &figures);
            runs(out, &inputs.ycsb);
            verbs(out, &inputs.verbs);
        });
    });
    out.raw("\n");
    out.finish()
}

/// Why a run can be faster than its limits, which seem to allow no ratio above 1.
const ABOVE_ONE: &str = "A ratio above 1 is no mistake. \u{201c}Of raw verbs\u{201d} is the \
    throughput by that of the chains that the operations take at least, each executed alone: \
    operations on one key that are in flight together share a chain, so where keys are popular a \
    run takes fewer chains than it has operations. The verbs also go to other memory than the \
    run's keys, and are measured after it.";

/// What was read, from when and where.
fn summary(inputs: &Inputs) -> String {
    let of_ycsb = inputs.ycsb.iter().map(|(_, run)| &run.origin);
    let origins: Vec<&Origin> =
        of_ycsb.chain(inputs.verbs.iter().map(|(_, report)| &report.origin)).collect();
    let mut days: Vec<&str> = origins.iter().filter_map(|origin| origin.date.get(..10)).collect();
    days.sort_unstable();
    let span = match (days.first(), days.last()) {
        (Some(first), Some(last)) if first == last => format!(", {first}"),
        (Some(first), Some(last)) => format!(", {first} to {last}"),
        _ => String::new(),
    };
    let mut machines: Vec<String> = origins.iter().filter_map(|origin| machine(origin)).collect();
    machines.sort();
    machines.dedup();
    let on =
        if machines.is_empty() { String::new() } else { format!(", on {}", machines.join("; ")) };
    format!("{} result(s){span}{on}", origins.len())
}

/// A run in a few words.
fn run_name(run: &YcsbReport) -> String {
    let of = threads(run.threads);
    format!("workload {} on {}, {of}, depth {}", curve(run), run.fabric, run.depth)
}

/// The figures of merit.
fn cards(out: &mut Markup, inputs: &Inputs) {
    let runs = || inputs.ycsb.iter().map(|(_, run)| run);
    let best = |value: &dyn Fn(&YcsbReport) -> Option<f64>| {
        let known = runs().filter_map(|run| Some((value(run)?, run)));
        known.max_by(|(a, _), (b, _)| a.total_cmp(b))
    };
    out.element("div", &[("class", &"cards")], |out| {
        if let Some((ops_s, run)) = best(&|run| Some(run.throughput_ops_s)) {
            card(out, &short(ops_s), "operations/s at most", &run_name(run));
        }
        // The least, as the largest of what is below 0.
        if let Some((ns, run)) = best(&|run| Some(-(run.operations.get("get")?.p50_ns as f64))) {
            card(out, &duration(-ns), "p50 of a GET at least", &run_name(run));
        }
        if let Some((ratio, run)) = best(&|run| Some(run.limit?.verbs?.mix_ratio)) {
            card(out, &format!("{ratio:.2}"), "of the raw verbs at most", &run_name(run));
        }
        if let Some((per_s, run)) = best(&per_cpu_s) {
            card(
                out,
                &short(per_s),
                "operations a CPU second at most, of client and server",
                &run_name(run),
            );
        }
        let gets = || runs().filter_map(|run| run.operations.get("get"));
        let (count, trips) =
            gets().fold((0, 0), |sum, of| (sum.0 + of.count, sum.1 + of.round_trips));
        if count > 0 {
            let mean = format!("{:.3}", trips as f64 / count as f64);
            card(
                out,
                &mean,
                "round trips a GET",
                &format!("of {} in all runs", short(count as f64)),
            );
        }
        let (count, allocations) =
            runs().fold((0, 0), |sum, run| (sum.0 + run.count(), sum.1 + run.allocations));
        if count > 0 {
            let name = "allocations of the client";
            card(
                out,
                &grouped(allocations),
                name,
                &format!("in {} operations", short(count as f64)),
            );
        }
    });
}

fn card(out: &mut Markup, number: &str, name: &str, of: &str) {
    out.element("div", &[("class", &"card")], |out| {
        out.leaf("strong", &[], number);
        out.leaf("span", &[], name);
        out.leaf("span", &[("class", &"of")], of);
    });
}

/// Operations a second of CPU time, clients' and server's; not known for results without both.
fn per_cpu_s(run: &YcsbReport) -> Option<f64> {
    let cpu_s = run.cpu_s + run.server?.cpu_s;
    (run.cpu_s > 0.0).then(|| run.count() as f64 / cpu_s)
}

fn charts(out: &mut Markup, figures: &Figures<'_>) {
    let section = |out: &mut Markup, name: &str, charts: Vec<Chart>| {
        if charts.is_empty() {
            return;
        }
        out.leaf("h2", &[], name);
        out.element("div", &[("class", &"charts")], |out| {
            charts.iter().for_each(|chart| out.element("figure", &[], |out| chart.draw(out)));
        });
    };
    section(out, "Throughput", figures.throughput());
    section(out, "Growth", figures.by_records());
    section(out, "Latency", figures.against_load());
    section(out, "Latency distributions", figures.distributions());
    let bars = figures.limits().into_iter().chain(figures.costs());
    let bars: Vec<_> = bars.collect();
    if bars.is_empty() {
        return;
    }
    out.leaf("h2", &[], "Cost, and the limit");
    out.element("div", &[("class", &"charts")], |out| {
        bars.iter().for_each(|chart| out.element("figure", &[], |out| chart.draw(out)));
    });
}

/// A table whose first columns are texts.
fn table(out: &mut Markup, texts: usize, heads: &[&str], rows: impl FnOnce(&mut Markup)) {
    out.element("div", &[("class", &"wide")], |out| {
        out.element("table", &[], |out| {
            out.element("tr", &[], |out| {
                for (index, head) in heads.iter().enumerate() {
                    let class = if index < texts { "text" } else { "" };
                    out.leaf("th", &[("class", &class)], head);
                }
            });
            rows(out);
        });
    });
}

/// Every run: its numbers, and below them where they come from.
fn runs(out: &mut Markup, runs: &[(String, YcsbReport)]) {
    if runs.is_empty() {
        return;
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
    out.leaf("h2", &[], "Every run");
    table(out, 3, &heads, |out| {
        for (file, run) in runs {
            let latency = |(kind, of): (&String, &crate::report::OperationReport)| {
                format!("{kind} {} / {}", duration(of.p50_ns as f64), duration(of.p99_ns as f64))
            };
            let latencies: Vec<String> = run.operations.iter().map(latency).collect();
            let ratio =
                |ratio: Option<f64>| ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.2}"));
            out.element("tr", &[("class", &"run")], |out| {
                for text in [curve(run), Setting::of(run).to_string(), latencies.join(", ")] {
                    out.leaf("td", &[("class", &"text")], &text);
                }
                for number in [
                    run.threads.to_string(),
                    run.depth.to_string(),
                    grouped(run.throughput_ops_s as u64),
                    ratio(run.limit.and_then(|limit| limit.verbs).map(|verbs| verbs.mix_ratio)),
                    per_cpu_s(run).map_or("-".to_owned(), short),
                ] {
                    out.leaf("td", &[], &number);
                }
            });
            origin(out, heads.len(), file, &run.origin);
        }
    });
    let ratio = |run: &YcsbReport| run.limit?.verbs.map(|verbs| verbs.mix_ratio);
    if runs.iter().filter_map(|(_, run)| ratio(run)).any(|ratio| ratio > 1.0) {
        out.leaf("p", &[("class", &"note")], ABOVE_ONE);
    }
}

/// Where a result comes from, below its numbers.
fn origin(out: &mut Markup, columns: usize, file: &str, origin: &Origin) {
    let commit = origin.commit.as_ref().map(|commit| format!("commit {commit}"));
    let date = (!origin.date.is_empty()).then(|| origin.date.clone());
    let whole = machine(origin).map(|_| origin.machine.to_string());
    let known: Vec<String> =
        [Some(file.to_owned()), date, commit, whole].into_iter().flatten().collect();
    out.element("tr", &[], |out| {
        out.element("td", &[("class", &"from"), ("colspan", &columns)], |out| {
            if !origin.command.is_empty() {
                out.leaf("code", &[], &origin.command);
                out.leaf("br", &[], "");
            }
            out.text(&known.join(" \u{b7} "));
        });
    });
}

/// What raw verbs do, of `kv-bench verbs`.
fn verbs(out: &mut Markup, reports: &[(String, VerbsReport)]) {
    if reports.is_empty() {
        return;
    }
    out.leaf("h2", &[], "Raw verbs");
    let heads =
        ["fabric", "bytes", "depth", "READ/s", "WRITE/s", "CAS/s", "PUT's chain/s", "READ p50"];
    table(out, 1, &heads, |out| {
        for (file, report) in reports {
            out.element("tr", &[("class", &"run")], |out| {
                out.leaf("td", &[("class", &"text")], &report.fabric);
                out.leaf("td", &[], &report.bytes.to_string());
                out.leaf("td", &[], &report.depth.to_string());
                for (_, rate) in report.rates() {
                    out.leaf("td", &[], &grouped(rate.rate_per_s as u64));
                }
                out.leaf("td", &[], &duration(report.read.p50_ns as f64));
            });
            origin(out, heads.len(), file, &report.origin);
        }
    });
}
