//! Twins of the protocol, each with one rule broken: the simulator has to catch them all. And the
//! same scenarios without a twin: it must not cry wolf.

use farside_layout::INCARNATIONS;
use farside_simulator::{Bounds, Failure, Mutant, Scenario, Violation, client};

use crate::{GRACE_NS, core_seconds};

/// Enough for every twin, and what the honest protocol is tried with.
const BOUNDS: Bounds = Bounds { preemptions: Some(4), executions: 200_000 };

/// That the scenario goes wrong, and not without its twins.
pub(crate) fn assert_caught(scenario: Scenario, honest: Scenario) -> Box<Failure> {
    let started = core_seconds();
    let failure = match scenario.explore_deeper(BOUNDS) {
        Err(failure) => failure,
        Ok(explored) => panic!("{} is not caught: {explored:?}", scenario.name()),
    };
    println!("{failure}");
    report(&failure, core_seconds() - started);
    let bounds = Bounds { preemptions: Some(2), executions: 2_000 };
    let explored = honest.explore(bounds);
    let explored = explored.unwrap_or_else(|failure| panic!("without its twin: {failure}"));
    assert!(explored.unfired.is_empty(), "what did {:?} do?", explored.unfired);
    failure
}

/// A line for each twin that was caught.
pub(crate) fn report(failure: &Failure, took: f64) {
    let name = failure.scenario().replace(" | ", ", ");
    assert!(failure.unfired.is_empty(), "{name}: what did {:?} do?", failure.unfired);
    println!("twin | {name} | {} | {} | {took:.1}", failure.steps(), failure.executions);
}

/// All clients follow the twin's protocol.
pub(crate) fn all(twin: Mutant, scenario: Scenario) -> Box<Failure> {
    assert_caught(scenario.clone().all_twins(twin), scenario)
}

pub(crate) fn name(twin: Mutant) -> Scenario {
    Scenario::new(format!("{twin:?}"))
}

/// A PUT, a client that looks it up, and one that knows where the key was.
fn cached_get(twin: Mutant) -> Scenario {
    let reader = client().knows(0).get(0);
    name(twin).stored(0).client(client().knows(0).put(0)).client(client().get(0)).client(reader)
}

#[test]
fn mark_after_swap() {
    all(Mutant::MarkAfterSwap, cached_get(Mutant::MarkAfterSwap));
}

#[test]
fn no_mark() {
    all(Mutant::NoMark, cached_get(Mutant::NoMark));
}

#[test]
fn mark_ignored() {
    all(Mutant::MarkIgnored, cached_get(Mutant::MarkIgnored));
}

/// The late mark of a PUT that lost hits the block after it was used again.
#[test]
fn mark_of_eight_bytes() {
    let twin = Mutant::MarkOfEightBytes;
    let again = client().blocks(1).knows(0).put(0).put(0);
    all(twin, name(twin).stored(0).client(client().knows(0).put(0)).client(again));
}

/// A block that is being written for its next use, seen by a client that knows its last.
#[test]
fn generation_ignored() {
    let twin = Mutant::GenerationIgnored;
    let again = client().blocks(1).knows(0).put(0).put(0);
    let reader = client().knows(0).get(0);
    all(twin, name(twin).stored(0).client(again).client(reader).client(client().get(0)));
}

/// Without its net, only GRACE keeps a GET from a block that is half its next use.
#[test]
fn reuse_before_grace() {
    let scenario = |clock: Option<Mutant>| {
        let again = client().blocks(1).knows(0).put(0).put(0);
        let again = clock.into_iter().fold(again, |script, twin| script.twin(twin));
        let reader = client().knows(0).get(0).twin(Mutant::NoChecksum);
        name(Mutant::FastClock).stored(0).client(again).client(reader)
    };
    assert_caught(scenario(Some(Mutant::FastClock)), scenario(None));
}

#[test]
fn belief_beyond_grace() {
    let scenario = |clock| {
        let again = client().blocks(1).knows(0).put(0).put(0);
        name(clock).stored(0).client(again).client(client().knows(0).get(0).twin(clock))
    };
    assert_caught(scenario(Mutant::StoppedClock), scenario(Mutant::NoChecksum));
}

/// 256 generations later the same word stands for another key.
#[test]
fn proofs_that_do_not_age() {
    let scenario = |clock: Option<Mutant>| {
        // Each of two blocks is used 256 times, in as many incarnations as there are.
        let mut again = client().swift().blocks(1).knows(0).delete(0);
        for n in 1..INCARNATIONS {
            again = again.insert(1);
            for _ in 0..450 * n / (INCARNATIONS - 1) - 450 * (n - 1) / (INCARNATIONS - 1) {
                again = again.put(1);
            }
            again = again.delete(1);
        }
        let again = again.insert(1);
        let late = client().knows(0).put(0);
        let late = clock.into_iter().fold(late, |script, twin| script.twin(twin));
        name(Mutant::StoppedClockOnly).slots(1).used(1).stored(0).client(again).client(late)
    };
    let twin = scenario(Some(Mutant::StoppedClockOnly));
    let none = Bounds { preemptions: Some(0), executions: 20 };
    let started = core_seconds();
    let failure = twin.explore(none).expect_err("a proof of 25 seconds ago is relied on");
    report(&failure, core_seconds() - started);
    scenario(None).explore(none).unwrap_or_else(|failure| panic!("{failure}"));
}

#[test]
fn blocks_of_two_owners() {
    let twin = Mutant::BlocksOfTwoOwners;
    let scenario = name(twin).client(client().insert(0));
    let second = client().insert(1);
    assert_caught(scenario.clone().client(second.clone().twin(twin)), scenario.client(second));
}

/// Two compare-and-exchanges of one value.
#[test]
fn swap_in_two() {
    let twin = Mutant::SwapInTwo;
    let exchange = || client().knows(0).exchange(0, "i0");
    all(twin, name(twin).stored(0).client(exchange()).client(exchange()));
}

/// Beside two inserters of one key, each in a slot of its own, used or not, that look first and
/// that do not.
fn two_inserters(twin: Mutant) {
    for used in 0..=2 {
        let scenario = name(twin).used(used).seed(2).client(client().insert(0));
        all(twin, scenario.client(client().insert(0)));
    }
    let unseen = |slot| client().guesses(slot).insert(0);
    all(twin, name(twin).client(unseen(0)).client(unseen(1)));
}

#[test]
fn no_claim() {
    two_inserters(Mutant::NoClaim(0));
}

#[test]
fn looks_too_early() {
    two_inserters(Mutant::LooksTooEarly);
}

#[test]
fn nobody_aborted() {
    two_inserters(Mutant::NobodyAborted);
}

#[test]
fn goes_on_after_live() {
    two_inserters(Mutant::GoesOnAfterLive);
}

/// Not where both hints are claims: the second one sees the first one's.
#[test]
fn every_mismatch_believed() {
    let twin = Mutant::EveryMismatchBelieved(0);
    for used in 1..=2 {
        let scenario = name(twin).used(used).seed(2).client(client().insert(0));
        all(twin, scenario.client(client().insert(0)));
    }
    all(twin, name(twin).used(1).client(client().guesses(0).insert(0)).client(client().insert(0)));
}

/// The slot is taken by another client between the look and the claim.
#[test]
fn hint_before_pending() {
    let scenario = |second: Option<Mutant>| {
        let other = client().insert(1).get(1);
        let other = second.into_iter().fold(other, |script, twin| script.twin(twin));
        let name = Scenario::new("HintBeforePending");
        name.slots(1).used(1).client(client().insert(0).get(0)).client(other)
    };
    assert_caught(scenario(Some(Mutant::HintBeforePending(1))), scenario(None));
}

#[test]
fn aborts_to_empty() {
    let twin = Mutant::AbortsToEmpty;
    let others = client().insert(1).insert(2).get(2);
    all(twin, name(twin).used(2).seed(1).client(client().insert(0)).client(others));
}

#[test]
fn takes_aborted() {
    let twin = Mutant::TakesAborted;
    let others = client().insert(1).insert(2).get(2);
    all(twin, name(twin).used(2).seed(1).client(client().insert(0)).client(others));
}

/// Key 0 claims a slot by its hint; a client that took it for key 1 in the incarnation of that hint
/// could be taken for key 0.
#[test]
fn first_twice() {
    let twin = Mutant::FirstTwice(1);
    let scenario = name(twin).slots(1);
    let other = client().insert(1).get(1);
    let honest = scenario.clone().client(client().guesses(0).insert(0)).client(other.clone());
    let other = other.twin(twin);
    assert_caught(scenario.client(client().guesses(0).insert(0)).client(other), honest);
}

/// A slot whose last key was 0, in incarnation 2, is claimed and given up 61 times, because the
/// INSERT slept; then key 2 moves in, in incarnation 2, while a client that wants key 0 reads
/// first the hint, then the word.
#[test]
fn withdraw_keeps_hint() {
    let scenario = |twin| {
        let scenario = name(twin).slots(1).used(1).removed(0).round_trips().jumps(1, &[GRACE_NS]);
        scenario.client(client().insert(2).twin(twin)).client(client().update(0))
    };
    assert_caught(scenario(Mutant::WithdrawKeepsHint), scenario(Mutant::WithdrawOften));
}

/// Key 0 makes room for key 1 while a PUT of key 0 reads first the hint, then the word.
fn another_key(twin: Mutant) -> Scenario {
    let other = client().delete(0).insert(1);
    name(twin).slots(1).used(1).stored(0).client(client().put(0)).client(other)
}

#[test]
fn same_incarnation() {
    all(Mutant::SameIncarnation, another_key(Mutant::SameIncarnation));
}

#[test]
fn incarnations_in_no_time() {
    all(Mutant::IncarnationsInNoTime, another_key(Mutant::IncarnationsInNoTime));
}

#[test]
fn absorbed_by_conditional() {
    let twin = Mutant::AbsorbedByConditional;
    let exchange = client().knows(0).exchange(0, "i0");
    all(twin, name(twin).stored(0).client(client().put(0)).client(exchange));
}

#[test]
fn absorbed_by_old_window() {
    let twin = Mutant::AbsorbedByOldWindow;
    // Its first READ of the window is for a key that is not there.
    let first = client().get(1).put(0);
    all(twin, name(twin).stored(0).client(first).client(client().knows(0).put(0)));
}

/// A lane of the same session tells the cache what is there; and so does another session.
#[test]
fn absorbed_unread() {
    let twin = Mutant::AbsorbedUnread(0);
    let start = || name(twin).stored(0).slots(1).used(1).jumps(1, &[1_300_000]);
    let lanes = client().knows(0).put(0).lane().get(0).get(0);
    let scenario = start().client(client().put(0));
    let failure =
        assert_caught(scenario.clone().client(lanes.clone().twin(twin)), scenario.client(lanes));
    assert_eq!(failure.violation, Violation::NotLinearizable);
}

#[test]
fn delete_absorbed() {
    let twin = Mutant::DeleteAbsorbed;
    let scenario = name(twin).stored(0).client(client().delete(0)).client(client().delete(0));
    all(twin, scenario.client(client().update(0)));
}

#[test]
fn poisoned_believed() {
    let twin = Mutant::PoisonedBelieved;
    let reader = client().knows(0).get(0).get(0);
    let failure = all(twin, name(twin).marked(0).client(client().put(0)).client(reader));
    assert_eq!(failure.violation, Violation::NotLinearizable);
}

/// The mark stands, and the compare-and-swap behind it has not happened.
#[test]
fn successor_believed() {
    let failure = all(Mutant::SuccessorBelieved, cached_get(Mutant::SuccessorBelieved));
    assert_eq!(failure.violation, Violation::NotLinearizable);
}

/// The slot is another key's by the time of the compare-and-swap.
#[test]
fn found_believed() {
    let twin = Mutant::FoundBelieved(0);
    let other = client().delete(0).insert(1);
    let late = client().knows(0).put(0);
    let scenario = name(twin).slots(1).stored(0).client(late.clone().twin(twin));
    let failure = assert_caught(
        scenario.client(other.clone()),
        name(twin).slots(1).stored(0).client(late).client(other),
    );
    assert_eq!(failure.violation, Violation::NotLinearizable);
}
