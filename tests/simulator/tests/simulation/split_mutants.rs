//! Mutants of the split, and of clients beside a split.

use farside_simulator::{Bounds, Mutant, Scenario, client};

use crate::core_seconds;
use crate::mutants::{assert_caught_for_all, named, report};

fn split(mutant: Mutant) -> Scenario {
    named(mutant).splits(0, 1).slots(1)
}

#[test]
fn moved_before_copy_is_caught() {
    let mutant = Mutant::MovedBeforeCopy;
    assert_caught_for_all(mutant, split(mutant).stored(0).client(client().get(0)));
}

#[test]
fn hint_after_live_is_caught() {
    let mutant = Mutant::HintAfterLive;
    assert_caught_for_all(mutant, split(mutant).stored(0).client(client().get(0)));
}

#[test]
fn new_before_old_is_caught() {
    let mutant = Mutant::NewBeforeOld;
    assert_caught_for_all(mutant, split(mutant).stored(0).client(client().get(0)));
}

#[test]
fn not_frozen_is_caught() {
    let mutant = Mutant::NotFrozen;
    assert_caught_for_all(mutant, split(mutant).stored(0).client(client().put(0)));
}

#[test]
fn live_before_moved_is_caught() {
    let mutant = Mutant::LiveBeforeMoved;
    assert_caught_for_all(mutant, split(mutant).stored(0).restarts(1).client(client().put(0)));
}

/// The splitter aborts an INSERT, which leaves its slot EMPTY. Another INSERT saw that slot before
/// it saw the split. This takes two preemptions; exploring all executions with one takes minutes.
#[test]
fn forward_ignored_is_caught() {
    let mutant = Mutant::ForwardIgnored;
    // As few chains as this takes, so that no INSERT waits for the end of the split.
    let scenario =
        split(mutant).used(1).chains(4).client(client().insert(0)).client(client().insert(1));
    let bounds = |executions| Bounds { preemptions: Some(2), executions };
    let started = core_seconds();
    let caught = scenario.clone().mutant_for_all(mutant).explore(bounds(100_000));
    let failure = caught.expect_err("a key is inserted into the old subtable");
    println!("{failure}");
    report(&failure, core_seconds() - started);
    scenario
        .explore(bounds(2_000))
        .unwrap_or_else(|failure| panic!("without the mutant: {failure}"));
}

#[test]
fn never_filling_is_caught() {
    let mutant = Mutant::NeverFilling;
    assert_caught_for_all(mutant, split(mutant).stored(0).client(client().get(1).get(0)));
}

#[test]
fn fills_again_is_caught() {
    let mutant = Mutant::FillsAgain;
    let scenario = split(mutant).stored(2).restarts(1).chains(64);
    assert_caught_for_all(mutant, scenario.client(client().get(2).insert(2)));
}
