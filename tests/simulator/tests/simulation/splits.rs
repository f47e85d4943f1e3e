//! A subtable is split beside clients: every entry moves, and the directory doubles. Keys 0, 1 and
//! 3 move to one new subtable, key 2 to the other. Beside that, mutants of the split, and of
//! clients beside one. GRACE after a split the memory of the old subtable is reused for a new one,
//! while the directory copy of a sleeping client still leads there.

use farside_simulator::{Bounds, Mutant, Op, Scenario, Script, client};

use crate::mutants::{assert_caught_for_all, assert_caught_of_server, assert_fails};
use crate::{GRACE_NS, OPS, knowing, passes};

fn split() -> Scenario {
    Scenario::new().splits(0, 1).slots(1)
}

/// Each operation, on a stored key that is cached or not, and on an absent key. The same client
/// then reads the key.
fn every_operation(preemptions: u8, split_restarts: u32) {
    for op in OPS {
        for known in [false, true] {
            let scenario = split().stored(0).split_restarts(split_restarts);
            passes(scenario.client(knowing(known, client().op(op).get(0))), preemptions);
        }
        for used in 0..=1 {
            let scenario = split().used(used).split_restarts(split_restarts);
            passes(scenario.client(client().op(op).get(0)), preemptions.min(1));
        }
    }
}

#[test]
fn every_operation_beside_a_split() {
    every_operation(1, 0);
}

#[test]
fn every_operation_beside_a_split_that_is_interrupted_and_continued() {
    every_operation(0, 1);
}

/// A client uses a new subtable. Then the server is killed before the whole directory leads there,
/// and continues the split. The subtable keeps its entries.
#[test]
fn a_continued_split_does_not_fill_a_subtable_again() {
    for key in [0, 2] {
        let scenario = split().split_restarts(1).chains(64).stored(key);
        passes(scenario.client(client().get(key).insert(key).get(key)), 0);
    }
}

#[test]
#[ignore = "takes minutes; run by make soak"]
fn every_operation_beside_a_split_with_more_preemptions() {
    every_operation(3, 0);
    every_operation(1, 1);
}

/// Two clients change one key, in any order.
#[test]
fn two_writers_beside_a_split() {
    for first in [Op::Put(0), Op::Update(0), Op::Delete(0)] {
        let scenario = split().stored(0).client(client().op(first));
        passes(scenario.client(client().knows(0).put(0).get(0)), 0);
    }
    let scenario = split().stored(0).client(client().knows(0).put(0));
    passes(scenario.client(client().knows(0).delete(0)), 1);
}

/// Two reads of a client agree with the order of another's write.
#[test]
fn readers_and_a_writer_beside_a_split() {
    for (known, write) in [(false, Op::Put(0)), (true, Op::Delete(0))] {
        let scenario = split().stored(0).client(knowing(known, client().get(0).get(0)));
        passes(scenario.client(client().op(write)), 1);
    }
}

/// One key moves to each new subtable, one after the other or at the same time. In the second case
/// the directory does not double.
#[test]
fn one_key_moves_to_each_new_subtable() {
    for (depth, lanes) in [(0, 1), (1, 2)] {
        for script in [client().get(0).get(2), client().knows(0).knows(2).put(0).delete(2)] {
            let scenario = Scenario::new().splits(depth, lanes).stored(0).stored(2);
            passes(scenario.client(script), 0);
        }
    }
}

#[test]
fn inserters_beside_a_split() {
    for used in 0..=1 {
        for other in [0, 2] {
            let scenario = split().used(used).client(client().insert(0));
            passes(scenario.client(client().insert(other)), 0);
        }
    }
    let scenario = split().stored(0).client(client().delete(0));
    passes(scenario.client(client().insert(0).get(0)), 0);
}

/// A client that sleeps through the split, for longer than GRACE, has an old directory copy.
#[test]
fn a_sleep_through_a_split() {
    for op in OPS {
        let scenario = split().stored(0).jumps(1, &[GRACE_NS]);
        passes(scenario.client(client().op(op).get(0)), 0);
    }
    for used in 0..=1 {
        let scenario = split().used(used).jumps(1, &[GRACE_NS]);
        passes(scenario.client(client().insert(0).get(0)), 0);
    }
}

/// A client that dies at any moment does not keep a split from completing.
#[test]
fn a_client_dies_beside_a_split() {
    for op in [Op::Put(0), Op::Delete(0), Op::Exchange(0, "i0")] {
        let scenario = split().stored(0).deaths(1).client(client().op(op));
        passes(scenario.client(client().get(0)), 0);
    }
    for used in 0..=1 {
        let scenario = split().used(used).chains(8).deaths(1).client(client().insert(0));
        passes(scenario.client(client().insert(0)), 0);
    }
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

/// Splits the subtable of key 0 twice, the second time into the place of the first one. Then key 0
/// returns to this place, or other keys could get there.
fn reused(key_0_returns: bool) -> Scenario {
    Scenario::new().splits(0, 1).reuses(key_0_returns).slots(1)
}

#[test]
fn every_operation_beside_a_place_that_is_reused() {
    for key_0_returns in [false, true] {
        for op in [Op::Get(0), Op::Put(0), Op::Insert(0), Op::Delete(0), Op::Exchange(0, "i0")] {
            let scenario = reused(key_0_returns).stored(0);
            passes(scenario.client(client().knows(0).op(op)), 0);
        }
        passes(reused(key_0_returns).stored(0).client(client().get(0).get(0)), 0);
        for used in 0..=1 {
            passes(reused(key_0_returns).used(used).client(client().insert(0)), 0);
        }
    }
}

#[test]
#[ignore = "takes minutes; run by make soak"]
fn windows_read_in_parts_beside_a_place_that_is_reused() {
    for op in [Op::Get(0), Op::Put(0), Op::Delete(0)] {
        for key_0_returns in [false, true] {
            passes(reused(key_0_returns).stored(0).client(client().op(op)), 1);
        }
    }
}

/// If slots of a reused place looked unused, a blind INSERT could claim one among other keys.
#[test]
fn reused_place_looks_unused_is_caught() {
    let scenario = reused(false).client(client().guesses(0).insert(0).get(0));
    assert_caught_for_all(Mutant::ReusedPlaceLooksUnused, scenario);
}

#[test]
fn reused_at_once_is_caught() {
    let scenario = reused(false).stored(0).client(client().get(0));
    assert_caught_of_server(Mutant::ReusedAtOnce, scenario);
}
