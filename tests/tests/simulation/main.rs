//! The protocol under every interleaving: scenarios for the simulator, and twins of the protocol
//! that it has to catch. Run with `--nocapture` for how much was explored: lines of `scenario`, name,
//! preemptions, states, executions and seconds, and of `twin`, name, steps, executions and seconds.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod crash;
mod full;
mod lost;
mod pairs;
mod places;
mod random;
mod reuse;
mod split_twins;
mod splits;
mod sweep;
mod time;
mod triples;
mod twins;

use farside_tests::simulator::{Bounds, Scenario};

/// That nothing goes wrong with so many preemptions, or any number.
fn passes(scenario: Scenario, preemptions: impl Into<Option<u8>>) {
    let started = std::time::Instant::now();
    let bounds = Bounds { preemptions: preemptions.into(), ..Bounds::default() };
    let explored = scenario.explore(bounds).unwrap_or_else(|failure| panic!("{failure}"));
    assert!(explored.exhausted && explored.complete > 0);
    let bound = bounds.preemptions.map_or("any".to_owned(), |most| most.to_string());
    println!(
        "scenario | {} | {bound} | {} | {} | {:.1}",
        scenario.name().replace(" | ", ", "),
        explored.states,
        explored.executions,
        started.elapsed().as_secs_f32()
    );
}
