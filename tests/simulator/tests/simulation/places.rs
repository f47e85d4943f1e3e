//! The place of a subtable is its memory in the heap. GRACE after a split the old place is reused
//! for a new subtable, while the directory copy of a sleeping client still leads there.

use farside_simulator::{Mutant, Op, Scenario, client};

use crate::mutants::{assert_caught_for_all, assert_caught_of_server};
use crate::passes;

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
