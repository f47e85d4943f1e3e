//! `verify`: checks a region and prints what is damaged in it.

use std::io::Write;
use std::path::Path;

use farside_cli::check::{Problem, Report, Scope};
use farside_config::command_line::exit_code;
use farside_layout::SlotState;

use crate::args::Args;
use crate::connect;
use crate::output::{self, ExitStatus, bytes, count};
use crate::raw::{self, BarObserver, RawRegion};

/// `verify`: prints the report on stdout; the exit code tells whether there is damage.
pub(crate) fn verify(args: &Args, region_file: Option<&Path>) -> anyhow::Result<ExitStatus> {
    let bar = output::progress("verifying");
    if let Some(path) = region_file {
        let report = raw::check_file(path, &mut BarObserver(&bar))?;
        bar.finish_and_clear();
        return conclude(&report, true);
    }
    let regions = RawRegion::open_all(&connect::config(args)?)?;
    let (shards, mut status) = (regions.len(), ExitStatus::Done);
    for (shard, region) in regions.into_iter().enumerate() {
        if shards > 1 {
            print(&format!("shard       {shard}\n"))?;
        }
        let available = output::available(region, (shard, shards), &mut status)?;
        let Some(mut region) = available else { continue };
        let report = region.check(Scope::Blocks, &bar)?;
        bar.finish_and_clear();
        if let ExitStatus::Failed(code) = conclude(&report, false)? {
            status = status.or_failed(code);
        }
    }
    Ok(status)
}

fn print(text: &str) -> anyhow::Result<ExitStatus> {
    let mut stdout = output::stdout();
    stdout.write_all(text.as_bytes())?;
    output::finish(stdout)
}

/// Prints the report of one region.
fn conclude(report: &Report, is_offline: bool) -> anyhow::Result<ExitStatus> {
    print(&describe(report))?;
    if !report.is_clean() {
        output::print_message(advice(report, is_offline));
    }
    Ok(if report.is_clean() { ExitStatus::Done } else { ExitStatus::Failed(exit_code::DAMAGE) })
}

/// Returns advice on repairing the damage.
fn advice(report: &Report, is_offline: bool) -> &'static str {
    let in_blocks_only = report.problems.len() as u64 == report.problem_count
        && report.problems.iter().all(|problem| matches!(problem, Problem::Block { .. }));
    match (in_blocks_only, is_offline) {
        (true, false) => {
            "values are damaged: store or delete their keys; all other values are intact"
        }
        (true, true) => {
            "values are damaged: start a server on this region, then store or delete their keys"
        }
        (false, false) => {
            "the index is damaged: save what can be read with `kv-cli snapshot FILE`, then start a \
             server with `--restore FILE` and another region file"
        }
        (false, true) => {
            "the index is damaged, and a server may refuse this region: start one with another \
             region file and your last snapshot (`--restore`), and keep this one for a report"
        }
    }
}

fn describe(report: &Report) -> String {
    let region = bytes(report.format.region_bytes);
    let mut lines = vec![
        format!("region      {region}, incarnation {}", report.incarnation),
        format!(
            "index       {}, {}, load {:.3}",
            count(report.subtables, "subtable"),
            count(report.slots_total(), "slot"),
            report.load_factor()
        ),
        format!(
            "keys        {}, {} of keys, {} of values, in {} of blocks",
            report.keys,
            bytes(report.key_bytes),
            bytes(report.value_bytes),
            bytes(report.block_bytes)
        ),
    ];
    lines.extend(unusual_states(report).map(|line| format!("            {line}")));
    lines.extend(report.problems.iter().map(|problem| format!("DAMAGE      {problem}")));
    let unprinted = report.problem_count - report.problems.len() as u64;
    if unprinted > 0 {
        lines.push(format!("DAMAGE      ... and {unprinted} more"));
    }
    lines.push(match report.problem_count {
        0 => "verdict     no damage".into(),
        problems => format!("verdict     {} found", count(problems, "problem")),
    });
    lines.join("\n") + "\n"
}

/// Counts the slots and subtables in states that most regions do not have, and that are no damage.
fn unusual_states(report: &Report) -> impl Iterator<Item = String> {
    let slots = |state| report.slots(state);
    let counts = [
        (slots(SlotState::Pending), "slot", "that an insert owns (PENDING)"),
        (slots(SlotState::Aborted), "slot", "that an insert lost (ABORTED)"),
        (slots(SlotState::Tomb), "slot", "removed and waiting for GRACE (TOMB)"),
        (slots(SlotState::Frozen), "slot", "that a split is moving (FROZEN)"),
        (slots(SlotState::Copy), "slot", "that a split is filling (COPY)"),
        (slots(SlotState::Moved), "slot", "that a split has moved (MOVED)"),
        (report.subtables_splitting, "subtable", "being split"),
        (
            report.stale_marks,
            "key",
            "marked but still linked: one more round trip until the next put",
        ),
        (report.unsettled, "slot", "that changed at every read"),
    ];
    counts
        .into_iter()
        .filter(|(number, ..)| *number > 0)
        .map(|(number, noun, state)| format!("{} {state}", count(number, noun)))
}
