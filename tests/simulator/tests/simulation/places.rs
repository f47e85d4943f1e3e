//! The place of a subtable that was split is used again, GRACE later, for one of the two that a split
//! of its successor makes. Meanwhile clients sleep with a directory that leads there.

use farside_simulator::{Mutant, Op, Scenario, client};

use crate::passes;
use crate::twins::{assert_caught, name};

/// Key 0 comes back to the place, or other keys could come there.
fn reused(name: impl Into<String>, returns: bool) -> Scenario {
    Scenario::new(format!("{} | split, split into its place, returns={returns}", name.into()))
        .splits(0, 1)
        .reuses(returns)
        .slots(1)
}

#[test]
fn every_operation_beside_a_place_that_is_used_again() {
    let ops = [Op::Get(0), Op::Put(0), Op::Insert(0), Op::Delete(0), Op::Exchange(0, "i0")];
    for op in ops {
        for returns in [false, true] {
            let scenario = reused(format!("{op:?} hit"), returns).stored(0);
            passes(scenario.client(client().knows(0).op(op)), 0);
        }
    }
    for returns in [false, true] {
        let scenario = reused("GET, GET", returns).stored(0);
        passes(scenario.client(client().get(0).get(0)), 0);
        for used in 0..=1 {
            let scenario = reused(format!("INSERT, used={used}"), returns).used(used);
            passes(scenario.client(client().insert(0)), 0);
        }
    }
}

#[test]
#[ignore = "takes minutes"]
fn torn_windows_and_a_place_that_is_used_again() {
    for op in [Op::Get(0), Op::Put(0), Op::Delete(0)] {
        for returns in [false, true] {
            let scenario = reused(format!("{op:?}"), returns).stored(0);
            passes(scenario.client(client().op(op)), 1);
        }
    }
}

/// A client that claimed a slot by its hint would find it as it was, in a subtable of other keys.
#[test]
fn new_again() {
    let twin = Mutant::NewAgain;
    let scenario = reused("INSERT", false).client(client().guesses(0).insert(0).get(0));
    assert_caught(scenario.clone().all_twins(twin), scenario);
}

#[test]
fn reused_at_once() {
    let twin = Mutant::ReusedAtOnce;
    let scenario = name(twin).splits(0, 1).reuses(false).slots(1).stored(0);
    let scenario = scenario.client(client().get(0));
    assert_caught(scenario.clone().server_twin(twin), scenario);
}
