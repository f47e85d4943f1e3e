//! Splits with a rule broken, and clients that break one when they meet a split.

use farside_simulator::{Bounds, Mutant, Scenario, client};

use crate::core_seconds;
use crate::twins::{all, name, report};

fn split(twin: Mutant) -> Scenario {
    name(twin).splits(0, 1).slots(1)
}

#[test]
fn moved_before_copy() {
    let twin = Mutant::MovedBeforeCopy;
    all(twin, split(twin).stored(0).client(client().get(0)));
}

#[test]
fn hint_after_live() {
    let twin = Mutant::HintAfterLive;
    all(twin, split(twin).stored(0).client(client().get(0)));
}

#[test]
fn new_before_old() {
    let twin = Mutant::NewBeforeOld;
    all(twin, split(twin).stored(0).client(client().get(0)));
}

#[test]
fn not_frozen() {
    let twin = Mutant::NotFrozen;
    all(twin, split(twin).stored(0).client(client().put(0)));
}

#[test]
fn live_before_moved() {
    let twin = Mutant::LiveBeforeMoved;
    all(twin, split(twin).stored(0).restarts(1).client(client().put(0)));
}

/// A client that the mover aborted leaves EMPTY behind, which another one has seen before it saw that
/// a split has begun. It takes two preemptions; to try all with one takes minutes.
#[test]
fn forward_ignored() {
    let twin = Mutant::ForwardIgnored;
    // No more chains than it takes: neither waits for the end of the split.
    let scenario =
        split(twin).used(1).chains(4).client(client().insert(0)).client(client().insert(1));
    let bounds = |executions| Bounds { preemptions: Some(2), executions };
    let started = core_seconds();
    let caught = scenario.clone().all_twins(twin).explore(bounds(100_000));
    let failure = caught.expect_err("a key is inserted into the old subtable");
    println!("{failure}");
    report(&failure, core_seconds() - started);
    scenario.explore(bounds(2_000)).unwrap_or_else(|failure| panic!("without its twin: {failure}"));
}

#[test]
fn never_filling() {
    let twin = Mutant::NeverFilling;
    all(twin, split(twin).stored(0).client(client().get(1).get(0)));
}

#[test]
fn fills_again() {
    let twin = Mutant::FillsAgain;
    let scenario = split(twin).stored(2).restarts(1).chains(64);
    all(twin, scenario.client(client().get(2).insert(2)));
}
