//! Mutants of the split, and of clients beside a split.

use farside_simulator::{Bounds, Mutant, Scenario, Script, client};

use crate::mutants::{assert_caught_for_all, assert_fails};

fn split() -> Scenario {
    Scenario::new().splits(0, 1).slots(1)
}

/// Checks that the mutant is caught beside this client. Key 0 is stored.
fn assert_caught_beside(mutant: Mutant, script: Script) {
    assert_caught_for_all(mutant, split().stored(0).client(script));
}

#[test]
fn moved_before_copy_is_caught() {
    assert_caught_beside(Mutant::MovedBeforeCopy, client().get(0));
}

#[test]
fn hint_after_live_is_caught() {
    assert_caught_beside(Mutant::HintAfterLive, client().get(0));
}

#[test]
fn new_before_old_is_caught() {
    assert_caught_beside(Mutant::NewBeforeOld, client().get(0));
}

#[test]
fn not_frozen_is_caught() {
    assert_caught_beside(Mutant::NotFrozen, client().put(0));
}

#[test]
fn never_filling_is_caught() {
    assert_caught_beside(Mutant::NeverFilling, client().get(1).get(0));
}

#[test]
fn live_before_moved_is_caught() {
    let scenario = split().stored(0).split_restarts(1).client(client().put(0));
    assert_caught_for_all(Mutant::LiveBeforeMoved, scenario);
}

#[test]
fn fills_again_is_caught() {
    let scenario = split().stored(2).split_restarts(1).chains(64).client(client().get(2).insert(2));
    assert_caught_for_all(Mutant::FillsAgain, scenario);
}

/// The splitter aborts an INSERT, which leaves its slot EMPTY. Another INSERT saw that slot before
/// it saw the split. The failure takes two preemptions. The search begins with a bound of two,
/// because exploring all executions with one takes minutes.
#[test]
fn forward_ignored_is_caught() {
    // As few chains as this takes, so that no INSERT waits for the end of the split.
    let scenario = split().used(1).chains(4).client(client().insert(0)).client(client().insert(1));
    let bounds = |executions| Bounds { preemptions: Some(2), executions };
    let mutant = scenario.clone().mutant_for_all(Mutant::ForwardIgnored);
    assert_fails(|| mutant.explore(bounds(100_000)));
    let honest = scenario.explore(bounds(2_000));
    honest.unwrap_or_else(|failure| panic!("without the mutant: {failure}"));
}
