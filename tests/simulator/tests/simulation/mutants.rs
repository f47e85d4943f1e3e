//! Mutants of the protocol, each with one rule broken: the simulator must catch all of them. It
//! must find nothing wrong in the same scenarios without a mutant.

use farside_layout::INCARNATIONS;
use farside_simulator::{
    Bounds, Explored, Failure, Mutant, Op, Scenario, Script, Violation, client,
};

use crate::{GRACE_NS, core_seconds};

/// Limits of the search for a mutant's failure.
pub(crate) const BOUNDS: Bounds = Bounds { preemptions: Some(4), executions: 200_000 };

/// Checks that an execution goes wrong, and that each mutant broke its rule in it.
pub(crate) fn assert_fails(
    explore: impl FnOnce() -> Result<Explored, Box<Failure>>,
) -> Box<Failure> {
    let started = core_seconds();
    let failure = explore().expect_err("the mutant is not caught");
    let seconds = core_seconds() - started;
    println!("{failure}");
    assert!(failure.unfired.is_empty(), "these mutants changed nothing: {:?}", failure.unfired);
    let (steps, executions) = (failure.steps(), failure.executions);
    println!("mutant | {} | {steps} | {executions} | {seconds:.1}", failure.scenario);
    failure
}

/// Checks that the scenario goes wrong, and that `honest`, the same without mutants, does not.
pub(crate) fn assert_caught(scenario: Scenario, honest: Scenario) -> Box<Failure> {
    let failure = assert_fails(|| scenario.explore_deeper(BOUNDS));
    let explored = honest.explore(Bounds { preemptions: Some(2), executions: 2_000 });
    let explored = explored.unwrap_or_else(|failure| panic!("without the mutant: {failure}"));
    assert!(explored.unfired.is_empty(), "these mutants changed nothing: {:?}", explored.unfired);
    failure
}

/// Checks that the mutant is caught if all clients follow it.
pub(crate) fn assert_caught_for_all(mutant: Mutant, scenario: Scenario) -> Box<Failure> {
    assert_caught(scenario.clone().mutant_for_all(mutant), scenario)
}

/// Checks that the mutant is caught if the server follows it.
pub(crate) fn assert_caught_of_server(mutant: Mutant, scenario: Scenario) -> Box<Failure> {
    assert_caught(scenario.clone().server_mutant(mutant), scenario)
}

/// Returns a client with one free block. It uses the block, and then the block that it has
/// unlinked.
pub(crate) fn reuses_block() -> Script {
    client().blocks(1).knows(0).put(0).put(0)
}

/// Returns a client that uses each of two blocks 256 times, for key 1, in all incarnations of the
/// only slot. In the end the slot has the word that it had with key 0.
pub(crate) fn reuses_all_generations() -> Script {
    let mut script = client().in_one_step().blocks(1).knows(0).delete(0);
    for n in 1..INCARNATIONS {
        script = script.insert(1);
        for _ in 0..450 * n / (INCARNATIONS - 1) - 450 * (n - 1) / (INCARNATIONS - 1) {
            script = script.put(1);
        }
        script = script.delete(1);
    }
    script.insert(1)
}

/// Returns a PUT, a GET that reads the window, and a GET that has cached the key's former location.
fn put_beside_gets() -> Scenario {
    let scenario = Scenario::new().stored(0).client(client().knows(0).put(0));
    scenario.client(client().get(0)).client(client().knows(0).get(0))
}

#[test]
fn mark_after_swap_is_caught() {
    assert_caught_for_all(Mutant::MarkAfterSwap, put_beside_gets());
}

#[test]
fn no_mark_is_caught() {
    assert_caught_for_all(Mutant::NoMark, put_beside_gets());
}

#[test]
fn mark_ignored_is_caught() {
    assert_caught_for_all(Mutant::MarkIgnored, put_beside_gets());
}

/// The late mark of a PUT that lost its compare-and-swap hits the block after its reuse.
#[test]
fn mark_of_eight_bytes_is_caught() {
    let scenario = Scenario::new().stored(0).client(client().knows(0).put(0));
    assert_caught_for_all(Mutant::MarkOfEightBytes, scenario.client(reuses_block()));
}

/// A client that has cached the block reads it while it is written for its next use.
#[test]
fn generation_ignored_is_caught() {
    let scenario = Scenario::new().stored(0).client(reuses_block());
    let scenario = scenario.client(client().knows(0).get(0)).client(client().get(0));
    assert_caught_for_all(Mutant::GenerationIgnored, scenario);
}

/// Without the checksum, only GRACE keeps a GET from believing a block that is partly rewritten.
#[test]
fn reuse_before_grace_is_caught() {
    let scenario = |clock| {
        let scenario = Scenario::new().stored(0).client(reuses_block().mutant(clock));
        scenario.client(client().knows(0).get(0).mutant(Mutant::NoChecksum))
    };
    assert_caught(scenario(Some(Mutant::FastClock)), scenario(None));
}

#[test]
fn belief_beyond_grace_is_caught() {
    let scenario = |clock| {
        let scenario = Scenario::new().stored(0).client(reuses_block());
        scenario.client(client().knows(0).get(0).mutant(clock))
    };
    assert_caught(scenario(Mutant::StoppedClock), scenario(Mutant::NoChecksum));
}

/// After 256 generations the same word can belong to another key.
#[test]
fn proofs_that_do_not_age_is_caught() {
    let scenario = |clock| {
        let scenario = Scenario::new().slots(1).used(1).stored(0).client(reuses_all_generations());
        scenario.client(client().knows(0).put(0).mutant(clock))
    };
    let bounds = Bounds { preemptions: Some(0), executions: 20 };
    assert_fails(|| scenario(Some(Mutant::StoppedClockOnly)).explore(bounds));
    scenario(None).explore(bounds).unwrap_or_else(|failure| panic!("{failure}"));
}

#[test]
fn blocks_of_two_owners_is_caught() {
    let scenario = |mutant| {
        let scenario = Scenario::new().client(client().insert(0));
        scenario.client(client().insert(1).mutant(mutant))
    };
    assert_caught(scenario(Some(Mutant::BlocksOfTwoOwners)), scenario(None));
}

/// Two compare-and-exchanges of one value.
#[test]
fn swap_in_two_is_caught() {
    let exchange = || client().knows(0).exchange(0, "i0");
    let scenario = Scenario::new().stored(0).client(exchange()).client(exchange());
    assert_caught_for_all(Mutant::SwapInTwo, scenario);
}

/// Two inserters of one key, each in its own slot. They read the window before they claim a slot.
fn two_inserters(used: usize) -> Scenario {
    let scenario = Scenario::new().used(used).seed(2).client(client().insert(0));
    scenario.client(client().insert(0))
}

/// Checks two inserters of one key, in slots that were used before or not, and two blind ones.
fn assert_caught_with_two_inserters(mutant: Mutant) {
    for used in 0..=2 {
        assert_caught_for_all(mutant, two_inserters(used));
    }
    let blind = |slot| client().guesses(slot).insert(0);
    assert_caught_for_all(mutant, Scenario::new().client(blind(0)).client(blind(1)));
}

#[test]
fn no_claim_is_caught() {
    assert_caught_with_two_inserters(Mutant::NoClaim(0));
}

#[test]
fn looks_too_early_is_caught() {
    assert_caught_with_two_inserters(Mutant::LooksTooEarly);
}

#[test]
fn none_aborted_is_caught() {
    assert_caught_with_two_inserters(Mutant::NoneAborted);
}

#[test]
fn goes_on_after_live_is_caught() {
    assert_caught_with_two_inserters(Mutant::GoesOnAfterLive);
}

/// The mutant does no harm if both INSERTs claim by hint: then the second one sees the first one's
/// claim.
#[test]
fn every_mismatch_believed_is_caught() {
    let mutant = Mutant::EveryMismatchBelieved(0);
    for used in 1..=2 {
        assert_caught_for_all(mutant, two_inserters(used));
    }
    let scenario = Scenario::new().used(1).client(client().guesses(0).insert(0));
    assert_caught_for_all(mutant, scenario.client(client().insert(0)));
}

/// Another client claims the slot between the mutant's READ of the slot and its claim.
#[test]
fn hint_before_pending_is_caught() {
    let scenario = |mutant| {
        let scenario = Scenario::new().slots(1).used(1).client(client().insert(0).get(0));
        scenario.client(client().insert(1).get(1).mutant(mutant))
    };
    assert_caught(scenario(Some(Mutant::HintBeforePending(1))), scenario(None));
}

/// Key 0 is inserted beside keys 1 and 2.
fn three_inserts() -> Scenario {
    let scenario = Scenario::new().used(2).seed(1).client(client().insert(0));
    scenario.client(client().insert(1).insert(2).get(2))
}

#[test]
fn aborts_to_empty_is_caught() {
    assert_caught_for_all(Mutant::AbortsToEmpty, three_inserts());
}

#[test]
fn takes_aborted_is_caught() {
    assert_caught_for_all(Mutant::TakesAborted, three_inserts());
}

/// Key 0 claims a slot by its hint. If key 1 took the slot in the incarnation of that hint, its
/// word could be mistaken for key 0's.
#[test]
fn first_incarnation_twice_is_caught() {
    let scenario = |mutant| {
        let scenario = Scenario::new().slots(1).client(client().guesses(0).insert(0));
        scenario.client(client().insert(1).get(1).mutant(mutant))
    };
    assert_caught(scenario(Some(Mutant::FirstIncarnationTwice(1))), scenario(None));
}

/// A slot had key 0 in incarnation 2. An INSERT that sleeps claims and withdraws it 61 times. Then
/// key 2 gets it, in incarnation 2 again. This happens between the moments at which the READ of an
/// UPDATE of key 0 sees hint and word.
#[test]
fn withdraw_keeps_hint_is_caught() {
    let scenario = |mutant| {
        let scenario = Scenario::new().slots(1).used(1).removed(0).round_trips();
        let scenario = scenario.jumps(1, &[GRACE_NS]).client(client().insert(2).mutant(mutant));
        scenario.client(client().update(0))
    };
    assert_caught(scenario(Mutant::WithdrawKeepsHint), scenario(Mutant::WithdrawOften));
}

/// Key 1 replaces key 0 in a slot, while a PUT of key 0 reads first the hint, then the word.
fn another_key() -> Scenario {
    let scenario = Scenario::new().slots(1).used(1).stored(0).client(client().put(0));
    scenario.client(client().delete(0).insert(1))
}

#[test]
fn same_incarnation_is_caught() {
    assert_caught_for_all(Mutant::SameIncarnation, another_key());
}

#[test]
fn incarnations_in_no_time_is_caught() {
    assert_caught_for_all(Mutant::IncarnationsInNoTime, another_key());
}

#[test]
fn absorbed_by_conditional_is_caught() {
    let scenario = Scenario::new().stored(0).client(client().put(0));
    let scenario = scenario.client(client().knows(0).exchange(0, "i0"));
    assert_caught_for_all(Mutant::AbsorbedByConditional, scenario);
}

/// A touch copies the value, and a store that keeps the TTL the expiry.
#[test]
fn first_block_kept_is_caught() {
    for (first, second) in [
        (Op::Touch(0), Op::Put(0)),
        (Op::PutKeepTtl(0), Op::Touch(0)),
        (Op::Increment(0), Op::Increment(0)),
    ] {
        let scenario = |mutant| {
            let stored = client().op(Op::Increment(0)).op(second);
            let changes = client().op(first).op(first).mutant(mutant);
            Scenario::new().client(stored).client(changes)
        };
        let failure = assert_caught(scenario(Some(Mutant::FirstBlockKept)), scenario(None));
        assert_eq!(failure.violation, Violation::NotLinearizable, "{first:?}");
    }
}

/// Two clients that both find the key absent.
#[test]
fn get_or_insert_none_aborted_is_caught() {
    let scenario = Scenario::new().used(2).seed(2).client(client().get_or_insert(0));
    let scenario = scenario.client(client().get_or_insert(0));
    assert_caught_for_all(Mutant::NoneAborted, scenario);
}

#[test]
fn absorbed_by_touch_is_caught() {
    let scenario = Scenario::new().stored(0).client(client().put(0));
    let scenario = scenario.client(client().knows(0).touch(0));
    assert_caught_for_all(Mutant::AbsorbedByConditional, scenario);
}

#[test]
fn delete_by_version_absorbed_is_caught() {
    let scenario = Scenario::new().stored(0).client(client().get(0).delete_seen(0));
    assert_caught_for_all(Mutant::DeleteAbsorbed, scenario.client(client().update(0)));
}

/// The first READ of the window is for an absent key.
#[test]
fn absorbed_by_old_window_is_caught() {
    let scenario = Scenario::new().stored(0).client(client().get(1).put(0));
    let scenario = scenario.client(client().knows(0).put(0));
    assert_caught_for_all(Mutant::AbsorbedByOldWindow, scenario);
}

/// Another lane of the session caches the word. `sessions` has the same with another session.
#[test]
fn absorbed_unread_is_caught() {
    let scenario = |mutant| {
        let scenario = Scenario::new().stored(0).slots(1).used(1).jumps(1, &[1_300_000]);
        let lanes = client().knows(0).put(0).lane().get(0).get(0);
        scenario.client(client().put(0)).client(lanes.mutant(mutant))
    };
    let failure = assert_caught(scenario(Some(Mutant::AbsorbedUnread(0))), scenario(None));
    assert_eq!(failure.violation, Violation::NotLinearizable);
}

#[test]
fn delete_absorbed_is_caught() {
    let scenario = Scenario::new().stored(0).client(client().delete(0)).client(client().delete(0));
    assert_caught_for_all(Mutant::DeleteAbsorbed, scenario.client(client().update(0)));
}

#[test]
fn stale_mark_believed_is_caught() {
    let scenario = Scenario::new().marked(0).client(client().put(0));
    let scenario = scenario.client(client().knows(0).get(0).get(0));
    let failure = assert_caught_for_all(Mutant::StaleMarkBelieved, scenario);
    assert_eq!(failure.violation, Violation::NotLinearizable);
}

/// The mark is set, but the compare-and-swap after it has not happened.
#[test]
fn successor_believed_is_caught() {
    let failure = assert_caught_for_all(Mutant::SuccessorBelieved, put_beside_gets());
    assert_eq!(failure.violation, Violation::NotLinearizable);
}

/// The slot belongs to another key by the time of the compare-and-swap.
#[test]
fn found_believed_is_caught() {
    let scenario = |mutant| {
        let late = client().knows(0).put(0).mutant(mutant);
        let scenario = Scenario::new().slots(1).stored(0).client(late);
        scenario.client(client().delete(0).insert(1))
    };
    let failure = assert_caught(scenario(Some(Mutant::FoundBelieved(0))), scenario(None));
    assert_eq!(failure.violation, Violation::NotLinearizable);
}
