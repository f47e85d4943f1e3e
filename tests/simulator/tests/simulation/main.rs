//! The protocol under every interleaving: scenarios for the simulator, and mutants of the protocol
//! that it must catch.
//!
//! With `--nocapture` each scenario prints a line: `scenario`, the scenario, preemptions, states,
//! executions, seconds of processor time. Each mutant prints `mutant`, its scenario, steps,
//! executions, seconds.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod clusters;
mod lost;
mod mutants;
mod operations;
mod random;
mod reuse;
mod splits;
mod time;

use farside_simulator::{Bounds, GRACE_MS, Op, Scenario, Script};
use rustix::time::{ClockId, clock_gettime};

const GRACE_NS: u64 = GRACE_MS as u64 * 1_000_000;
/// Every operation, on one key.
const OPS: [Op; 6] =
    [Op::Get(0), Op::Put(0), Op::Insert(0), Op::Update(0), Op::Delete(0), Op::Exchange(0, "i0")];

/// Returns the processor time of this thread, in seconds.
fn core_seconds() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// The client has key 0's location in its cache, or not.
fn knowing(known: bool, script: Script) -> Script {
    if known { script.knows(0) } else { script }
}

/// Checks that every execution of the scenario is right: with up to this many preemptions, or with
/// any number.
fn passes(scenario: Scenario, preemptions: impl Into<Option<u8>>) {
    let started = core_seconds();
    let bounds = Bounds { preemptions: preemptions.into(), ..Bounds::default() };
    let explored = scenario.explore(bounds).unwrap_or_else(|failure| panic!("{failure}"));
    assert!(explored.exhausted && explored.complete > 0);
    assert!(explored.unfired.is_empty(), "these mutants changed nothing: {:?}", explored.unfired);
    let bound = bounds.preemptions.map_or("any".to_owned(), |bound| bound.to_string());
    let seconds = core_seconds() - started;
    let (states, executions) = (explored.states, explored.executions);
    println!("scenario | {scenario} | {bound} | {states} | {executions} | {seconds:.1}");
}
