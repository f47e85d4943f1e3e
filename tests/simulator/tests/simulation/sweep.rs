//! The server clears unfinished inserts of dead clients, while others use the same slots and keys.
//! Until it fences a client, that client's verbs in flight may still be executed.

use farside_simulator::{Mutant, Op, Scenario, client};

use crate::mutants::assert_caught_of_server;
use crate::passes;

/// One client dies, at any moment, and is swept.
fn dies() -> Scenario {
    Scenario::new().deaths(1).sweeps()
}

fn an_inserter_dies(op: Op, slots: usize, used: usize) -> Scenario {
    let scenario = dies().slots(slots).used(used).seed(2);
    scenario.client(client().insert(0)).client(client().op(op).get(0))
}

#[test]
fn an_inserter_dies_and_is_swept() {
    for op in [Op::Get(0), Op::Put(0), Op::Insert(0), Op::Delete(0)] {
        for used in 0..=1 {
            passes(an_inserter_dies(op, 1, used), 0);
        }
    }
    for used in 0..=2 {
        passes(an_inserter_dies(Op::Insert(0), 2, used), 0);
    }
}

#[test]
#[ignore = "takes minutes; run by make soak"]
fn an_inserter_dies_and_is_swept_with_more_preemptions() {
    for op in [Op::Get(0), Op::Put(0), Op::Insert(0), Op::Delete(0)] {
        for used in 0..=2 {
            passes(an_inserter_dies(op, 2, used), 2);
        }
    }
}

/// Two clients insert different keys, and only one slot is left.
fn two_in_a_slot(used: usize) -> Scenario {
    dies().slots(1).used(used).client(client().insert(0)).client(client().insert(1).get(1))
}

#[test]
fn another_key_gets_the_slot_of_a_dead_inserter() {
    for used in 0..=1 {
        passes(two_in_a_slot(used), 1);
    }
}

#[test]
fn a_writer_dies_and_is_swept() {
    for op in [Op::Put(0), Op::Delete(0), Op::Exchange(0, "i0")] {
        let scenario = dies().stored(0).client(client().op(op));
        passes(scenario.client(client().knows(0).get(0).put(0)), 0);
    }
}

#[test]
fn unfenced_is_caught() {
    assert_caught_of_server(Mutant::Unfenced, two_in_a_slot(1));
}

#[test]
fn sweeps_the_living_is_caught() {
    assert_caught_of_server(Mutant::SweepsTheLiving, two_in_a_slot(1));
}

#[test]
fn hint_after_clear_is_caught() {
    assert_caught_of_server(Mutant::HintAfterClear, two_in_a_slot(1));
}
