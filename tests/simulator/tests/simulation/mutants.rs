//! Mutants of the protocol, each with one rule broken: the simulator must catch all of them. It
//! must find nothing wrong in the same scenarios without a mutant.

use farside_layout::INCARNATIONS;
use farside_simulator::{Bounds, Failure, Mutant, Scenario, Violation, client};

use crate::{GRACE_NS, core_seconds};

/// Limits of the search for a mutant's failure.
const BOUNDS: Bounds = Bounds { preemptions: Some(4), executions: 200_000 };

/// Checks that the scenario goes wrong, and that `honest`, the same without mutants, does not.
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
    let explored = explored.unwrap_or_else(|failure| panic!("without the mutant: {failure}"));
    assert!(explored.unfired.is_empty(), "these mutants changed nothing: {:?}", explored.unfired);
    failure
}

/// Prints a line for a mutant that was caught.
pub(crate) fn report(failure: &Failure, took: f64) {
    let name = failure.scenario().replace(" | ", ", ");
    assert!(
        failure.unfired.is_empty(),
        "{name}: these mutants changed nothing: {:?}",
        failure.unfired
    );
    println!("mutant | {name} | {} | {} | {took:.1}", failure.steps(), failure.executions);
}

/// Checks that the mutant is caught if all clients follow it.
pub(crate) fn assert_caught_for_all(mutant: Mutant, scenario: Scenario) -> Box<Failure> {
    assert_caught(scenario.clone().mutant_for_all(mutant), scenario)
}

/// An empty scenario with the mutant's name.
pub(crate) fn named(mutant: Mutant) -> Scenario {
    Scenario::new(format!("{mutant:?}"))
}

/// A PUT, a GET that reads the window, and a GET that has cached the key's former location.
fn cached_get(mutant: Mutant) -> Scenario {
    let reader = client().knows(0).get(0);
    named(mutant).stored(0).client(client().knows(0).put(0)).client(client().get(0)).client(reader)
}

#[test]
fn mark_after_swap_is_caught() {
    assert_caught_for_all(Mutant::MarkAfterSwap, cached_get(Mutant::MarkAfterSwap));
}

#[test]
fn no_mark_is_caught() {
    assert_caught_for_all(Mutant::NoMark, cached_get(Mutant::NoMark));
}

#[test]
fn mark_ignored_is_caught() {
    assert_caught_for_all(Mutant::MarkIgnored, cached_get(Mutant::MarkIgnored));
}

/// The late mark of a PUT that lost its compare-and-swap hits the block after its reuse.
#[test]
fn mark_of_eight_bytes_is_caught() {
    let mutant = Mutant::MarkOfEightBytes;
    let reuses_block = client().blocks(1).knows(0).put(0).put(0);
    assert_caught_for_all(
        mutant,
        named(mutant).stored(0).client(client().knows(0).put(0)).client(reuses_block),
    );
}

/// A client that has cached the block reads it while it is written for its next use.
#[test]
fn generation_ignored_is_caught() {
    let mutant = Mutant::GenerationIgnored;
    let reuses_block = client().blocks(1).knows(0).put(0).put(0);
    let reader = client().knows(0).get(0);
    assert_caught_for_all(
        mutant,
        named(mutant).stored(0).client(reuses_block).client(reader).client(client().get(0)),
    );
}

/// Without the checksum, only GRACE keeps a GET from believing a block that is partly rewritten.
#[test]
fn reuse_before_grace_is_caught() {
    let scenario = |clock: Option<Mutant>| {
        let reuses_block = client().blocks(1).knows(0).put(0).put(0);
        let reuses_block =
            clock.into_iter().fold(reuses_block, |script, mutant| script.mutant(mutant));
        let reader = client().knows(0).get(0).mutant(Mutant::NoChecksum);
        named(Mutant::FastClock).stored(0).client(reuses_block).client(reader)
    };
    assert_caught(scenario(Some(Mutant::FastClock)), scenario(None));
}

#[test]
fn belief_beyond_grace_is_caught() {
    let scenario = |clock| {
        let reuses_block = client().blocks(1).knows(0).put(0).put(0);
        named(clock).stored(0).client(reuses_block).client(client().knows(0).get(0).mutant(clock))
    };
    assert_caught(scenario(Mutant::StoppedClock), scenario(Mutant::NoChecksum));
}

/// After 256 generations the same word can belong to another key.
#[test]
fn proofs_that_do_not_age_is_caught() {
    let scenario = |clock: Option<Mutant>| {
        // Each of two blocks is used 256 times, in all incarnations.
        let mut reuses_block = client().in_one_step().blocks(1).knows(0).delete(0);
        for n in 1..INCARNATIONS {
            reuses_block = reuses_block.insert(1);
            for _ in 0..450 * n / (INCARNATIONS - 1) - 450 * (n - 1) / (INCARNATIONS - 1) {
                reuses_block = reuses_block.put(1);
            }
            reuses_block = reuses_block.delete(1);
        }
        let reuses_block = reuses_block.insert(1);
        let late = client().knows(0).put(0);
        let late = clock.into_iter().fold(late, |script, mutant| script.mutant(mutant));
        named(Mutant::StoppedClockOnly).slots(1).used(1).stored(0).client(reuses_block).client(late)
    };
    let mutant = scenario(Some(Mutant::StoppedClockOnly));
    let bounds = Bounds { preemptions: Some(0), executions: 20 };
    let started = core_seconds();
    let failure = mutant.explore(bounds).expect_err("a proof of 25 seconds ago is relied on");
    report(&failure, core_seconds() - started);
    scenario(None).explore(bounds).unwrap_or_else(|failure| panic!("{failure}"));
}

#[test]
fn blocks_of_two_owners_is_caught() {
    let mutant = Mutant::BlocksOfTwoOwners;
    let scenario = named(mutant).client(client().insert(0));
    let second = client().insert(1);
    assert_caught(scenario.clone().client(second.clone().mutant(mutant)), scenario.client(second));
}

/// Two compare-and-exchanges of one value.
#[test]
fn swap_in_two_is_caught() {
    let mutant = Mutant::SwapInTwo;
    let exchange = || client().knows(0).exchange(0, "i0");
    assert_caught_for_all(mutant, named(mutant).stored(0).client(exchange()).client(exchange()));
}

/// Two inserters of one key, each in its own slot, used before or not. First they read the window
/// before they claim a slot, then they are blind.
fn two_inserters(mutant: Mutant) {
    for used in 0..=2 {
        let scenario = named(mutant).used(used).seed(2).client(client().insert(0));
        assert_caught_for_all(mutant, scenario.client(client().insert(0)));
    }
    let blind = |slot| client().guesses(slot).insert(0);
    assert_caught_for_all(mutant, named(mutant).client(blind(0)).client(blind(1)));
}

#[test]
fn no_claim_is_caught() {
    two_inserters(Mutant::NoClaim(0));
}

#[test]
fn looks_too_early_is_caught() {
    two_inserters(Mutant::LooksTooEarly);
}

#[test]
fn none_aborted_is_caught() {
    two_inserters(Mutant::NoneAborted);
}

#[test]
fn goes_on_after_live_is_caught() {
    two_inserters(Mutant::GoesOnAfterLive);
}

/// Not if both claim by hint: then the second inserter sees the first one's claim.
#[test]
fn every_mismatch_believed_is_caught() {
    let mutant = Mutant::EveryMismatchBelieved(0);
    for used in 1..=2 {
        let scenario = named(mutant).used(used).seed(2).client(client().insert(0));
        assert_caught_for_all(mutant, scenario.client(client().insert(0)));
    }
    assert_caught_for_all(
        mutant,
        named(mutant).used(1).client(client().guesses(0).insert(0)).client(client().insert(0)),
    );
}

/// Another client claims the slot after the INSERT has read it, and before it claims it.
#[test]
fn hint_before_pending_is_caught() {
    let scenario = |second: Option<Mutant>| {
        let other = client().insert(1).get(1);
        let other = second.into_iter().fold(other, |script, mutant| script.mutant(mutant));
        let name = Scenario::new("HintBeforePending");
        name.slots(1).used(1).client(client().insert(0).get(0)).client(other)
    };
    assert_caught(scenario(Some(Mutant::HintBeforePending(1))), scenario(None));
}

#[test]
fn aborts_to_empty_is_caught() {
    let mutant = Mutant::AbortsToEmpty;
    let others = client().insert(1).insert(2).get(2);
    assert_caught_for_all(
        mutant,
        named(mutant).used(2).seed(1).client(client().insert(0)).client(others),
    );
}

#[test]
fn takes_aborted_is_caught() {
    let mutant = Mutant::TakesAborted;
    let others = client().insert(1).insert(2).get(2);
    assert_caught_for_all(
        mutant,
        named(mutant).used(2).seed(1).client(client().insert(0)).client(others),
    );
}

/// Key 0 claims a slot by its hint. If key 1 took the slot in the incarnation of that hint, its
/// word could be mistaken for key 0's.
#[test]
fn first_twice_is_caught() {
    let mutant = Mutant::FirstTwice(1);
    let scenario = named(mutant).slots(1);
    let other = client().insert(1).get(1);
    let honest = scenario.clone().client(client().guesses(0).insert(0)).client(other.clone());
    let other = other.mutant(mutant);
    assert_caught(scenario.client(client().guesses(0).insert(0)).client(other), honest);
}

/// A slot had key 0 in incarnation 2. An INSERT that sleeps claims and withdraws it 61 times. Then
/// key 2 gets it, in incarnation 2 again, between the READs of hint and word of an UPDATE of key 0.
#[test]
fn withdraw_keeps_hint_is_caught() {
    let scenario = |mutant| {
        let scenario =
            named(mutant).slots(1).used(1).removed(0).round_trips().jumps(1, &[GRACE_NS]);
        scenario.client(client().insert(2).mutant(mutant)).client(client().update(0))
    };
    assert_caught(scenario(Mutant::WithdrawKeepsHint), scenario(Mutant::WithdrawOften));
}

/// Key 1 replaces key 0 in a slot, while a PUT of key 0 reads first the hint, then the word.
fn another_key(mutant: Mutant) -> Scenario {
    let other = client().delete(0).insert(1);
    named(mutant).slots(1).used(1).stored(0).client(client().put(0)).client(other)
}

#[test]
fn same_incarnation_is_caught() {
    assert_caught_for_all(Mutant::SameIncarnation, another_key(Mutant::SameIncarnation));
}

#[test]
fn incarnations_in_no_time_is_caught() {
    assert_caught_for_all(Mutant::IncarnationsInNoTime, another_key(Mutant::IncarnationsInNoTime));
}

#[test]
fn absorbed_by_conditional_is_caught() {
    let mutant = Mutant::AbsorbedByConditional;
    let exchange = client().knows(0).exchange(0, "i0");
    assert_caught_for_all(mutant, named(mutant).stored(0).client(client().put(0)).client(exchange));
}

#[test]
fn absorbed_by_old_window_is_caught() {
    let mutant = Mutant::AbsorbedByOldWindow;
    // Its first READ of the window is for an absent key.
    let first = client().get(1).put(0);
    assert_caught_for_all(
        mutant,
        named(mutant).stored(0).client(first).client(client().knows(0).put(0)),
    );
}

/// Another lane of the session caches the word. `sessions` has the same with another session.
#[test]
fn absorbed_unread_is_caught() {
    let mutant = Mutant::AbsorbedUnread(0);
    let start = || named(mutant).stored(0).slots(1).used(1).jumps(1, &[1_300_000]);
    let lanes = client().knows(0).put(0).lane().get(0).get(0);
    let scenario = start().client(client().put(0));
    let failure = assert_caught(
        scenario.clone().client(lanes.clone().mutant(mutant)),
        scenario.client(lanes),
    );
    assert_eq!(failure.violation, Violation::NotLinearizable);
}

#[test]
fn delete_absorbed_is_caught() {
    let mutant = Mutant::DeleteAbsorbed;
    let scenario = named(mutant).stored(0).client(client().delete(0)).client(client().delete(0));
    assert_caught_for_all(mutant, scenario.client(client().update(0)));
}

#[test]
fn poisoned_believed_is_caught() {
    let mutant = Mutant::PoisonedBelieved;
    let reader = client().knows(0).get(0).get(0);
    let failure = assert_caught_for_all(
        mutant,
        named(mutant).marked(0).client(client().put(0)).client(reader),
    );
    assert_eq!(failure.violation, Violation::NotLinearizable);
}

/// The mark is set, but the compare-and-swap after it has not happened.
#[test]
fn successor_believed_is_caught() {
    let failure =
        assert_caught_for_all(Mutant::SuccessorBelieved, cached_get(Mutant::SuccessorBelieved));
    assert_eq!(failure.violation, Violation::NotLinearizable);
}

/// The slot belongs to another key by the time of the compare-and-swap.
#[test]
fn found_believed_is_caught() {
    let mutant = Mutant::FoundBelieved(0);
    let other = client().delete(0).insert(1);
    let late = client().knows(0).put(0);
    let scenario = named(mutant).slots(1).stored(0).client(late.clone().mutant(mutant));
    let failure = assert_caught(
        scenario.client(other.clone()),
        named(mutant).slots(1).stored(0).client(late).client(other),
    );
    assert_eq!(failure.violation, Violation::NotLinearizable);
}
