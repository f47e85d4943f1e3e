//! The place of a subtable is its memory in the heap. GRACE after a split the old place is reused
//! for a new subtable, while the directory copy of a sleeping client still leads there.

use farside_simulator::{Mutant, Op, Scenario, client};

use crate::mutants::{assert_caught, named};
use crate::passes;

/// Splits the subtable of key 0 twice, the second time into the place of the first one. Then key 0
/// returns to this place, or other keys could get there.
fn reused(name: impl Into<String>, key_0_returns: bool) -> Scenario {
    Scenario::new(format!(
        "{} | split, split into its place, key_0_returns={key_0_returns}",
        name.into()
    ))
    .splits(0, 1)
    .reuses(key_0_returns)
    .slots(1)
}

#[test]
fn every_operation_beside_a_place_that_is_reused() {
    let ops = [Op::Get(0), Op::Put(0), Op::Insert(0), Op::Delete(0), Op::Exchange(0, "i0")];
    for op in ops {
        for key_0_returns in [false, true] {
            let scenario = reused(format!("{op:?} hit"), key_0_returns).stored(0);
            passes(scenario.client(client().knows(0).op(op)), 0);
        }
    }
    for key_0_returns in [false, true] {
        let scenario = reused("GET, GET", key_0_returns).stored(0);
        passes(scenario.client(client().get(0).get(0)), 0);
        for used in 0..=1 {
            let scenario = reused(format!("INSERT, used={used}"), key_0_returns).used(used);
            passes(scenario.client(client().insert(0)), 0);
        }
    }
}

#[test]
#[ignore = "takes minutes"]
fn windows_read_in_parts_beside_a_place_that_is_reused() {
    for op in [Op::Get(0), Op::Put(0), Op::Delete(0)] {
        for key_0_returns in [false, true] {
            let scenario = reused(format!("{op:?}"), key_0_returns).stored(0);
            passes(scenario.client(client().op(op)), 1);
        }
    }
}

/// If slots of a reused place looked unused, a blind INSERT could claim one among other keys.
#[test]
fn new_again_is_caught() {
    let mutant = Mutant::NewAgain;
    let scenario = reused("INSERT", false).client(client().guesses(0).insert(0).get(0));
    assert_caught(scenario.clone().mutant_for_all(mutant), scenario);
}

#[test]
fn reused_at_once_is_caught() {
    let mutant = Mutant::ReusedAtOnce;
    let scenario = named(mutant).splits(0, 1).reuses(false).slots(1).stored(0);
    let scenario = scenario.client(client().get(0));
    assert_caught(scenario.clone().server_mutant(mutant), scenario);
}
