//! The protocol under every interleaving: scenarios for the simulator, and twins of the protocol
//! that it has to catch. Run with `--nocapture` for how much was explored. Lines of `scenario` have
//! its name, preemptions, states, executions and seconds of a core; lines of `twin` its name, steps,
//! executions and seconds.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod clocks;
mod crash;
mod depot;
mod full;
mod lost;
mod pairs;
mod places;
mod random;
mod reuse;
mod sessions;
mod split_twins;
mod splits;
mod sweep;
mod time;
mod triples;
mod turns;
mod twins;
mod unseen;

use farside_simulator::{Bounds, GRACE_MS, Op, Scenario};
use rustix::time::{ClockId, clock_gettime};

const GRACE_NS: u64 = GRACE_MS as u64 * 1_000_000;
/// Every operation, on one key.
const OPS: [Op; 6] =
    [Op::Get(0), Op::Put(0), Op::Insert(0), Op::Update(0), Op::Delete(0), Op::Exchange(0, "i0")];

/// How long this thread has had a core, in seconds.
fn core_seconds() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// That nothing goes wrong with so many preemptions, or any number.
fn passes(scenario: Scenario, preemptions: impl Into<Option<u8>>) {
    let started = core_seconds();
    let bounds = Bounds { preemptions: preemptions.into(), ..Bounds::default() };
    let explored = scenario.explore(bounds).unwrap_or_else(|failure| panic!("{failure}"));
    assert!(explored.exhausted && explored.complete > 0);
    assert!(explored.unfired.is_empty(), "what did {:?} do?", explored.unfired);
    let bound = bounds.preemptions.map_or("any".to_owned(), |most| most.to_string());
    println!(
        "scenario | {} | {bound} | {} | {} | {:.1}",
        scenario.name().replace(" | ", ", "),
        explored.states,
        explored.executions,
        core_seconds() - started
    );
}
