//! `verify`.

use std::io::Write;

use farside_config::command_line::exit_code;
use farside_layout::SlotState;
use farside_tools::check::{Problem, Report, Scope};

use crate::args::{self, Args};
use crate::connect;
use crate::output::{self, ExitStatus, bytes, count};
use crate::raw::{self, OnBar, RawRegion};

/// `verify`: the report on stdout, the verdict in the exit code.
pub(crate) fn verify(args: &Args, what: &args::Verify) -> anyhow::Result<ExitStatus> {
    let bar = output::progress("verifying");
    let report = match &what.region {
        Some(path) => raw::check_file(path, &mut OnBar(&bar))?,
        None => RawRegion::open(&connect::config(args)?)?.check(Scope::Blocks, &bar)?,
    };
    bar.finish_and_clear();
    let mut stdout = output::stdout();
    stdout.write_all(describe(&report).as_bytes())?;
    output::finish(stdout)?;
    if !report.is_clean() {
        output::tell(advice(&report, what.region.is_some()));
    }
    Ok(if report.is_clean() { ExitStatus::Done } else { ExitStatus::Failed(exit_code::DAMAGE) })
}

/// What to do about damage.
fn advice(report: &Report, is_offline: bool) -> &'static str {
    let in_blocks_only = report.problems.len() as u64 == report.problem_count
        && report.problems.iter().all(|problem| matches!(problem, Problem::Block { .. }));
    match (in_blocks_only, is_offline) {
        (true, false) => "values are damaged: store or delete their keys; the others are whole",
        (true, true) => {
            "values are damaged: a server takes this region; then store or delete their keys"
        }
        (false, false) => {
            "the index is damaged: take what can be read with `kv-cli snapshot FILE`, then start a \
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
    lines.extend(unusual(report).map(|line| format!("            {line}")));
    lines.extend(report.problems.iter().map(|problem| format!("DAMAGE      {problem}")));
    let untold = report.problem_count - report.problems.len() as u64;
    if untold > 0 {
        lines.push(format!("DAMAGE      ... and {untold} more"));
    }
    lines.push(match report.problem_count {
        0 => "verdict     no damage".into(),
        problems => format!("verdict     {} found", count(problems, "problem")),
    });
    lines.join("\n") + "\n"
}

/// What is no damage, but not every region has.
fn unusual(report: &Report) -> impl Iterator<Item = String> {
    let state = |state| report.slots(state);
    let counts = [
        (state(SlotState::Pending), "slot", "an insert owns (PENDING)"),
        (state(SlotState::Aborted), "slot", "an insert lost (ABORTED)"),
        (state(SlotState::Tomb), "slot", "removed and waiting for GRACE (TOMB)"),
        (state(SlotState::Frozen), "slot", "a split is moving (FROZEN)"),
        (state(SlotState::Copy), "slot", "a split is filling (COPY)"),
        (state(SlotState::Moved), "slot", "a split has moved (MOVED)"),
        (report.subtables_splitting, "subtable", "being split"),
        (report.poisoned, "key", "marked but still linked: one more round trip until the next put"),
        (report.unsettled, "slot", "in use at every look"),
    ];
    counts
        .into_iter()
        .filter(|(number, ..)| *number > 0)
        .map(|(number, noun, what)| format!("{} {what}", count(number, noun)))
}
