//! The server clears unfinished inserts of dead clients, while others use the same slots and keys.
//! Until it fences a client, that client's verbs in flight may still be executed.

use farside_simulator::{Mutant, Op, Scenario, client};

use crate::mutants::assert_caught;
use crate::passes;

fn dies(name: &str) -> Scenario {
    Scenario::new(format!("{name} | sweep")).deaths(1).sweeps()
}

fn an_inserter_dies(op: Op, slots: usize, used: usize) -> Scenario {
    let name = format!("INSERT dies | {op:?}, GET in {slots} slots, used={used}");
    let scenario = dies(&name).slots(slots).used(used);
    scenario.seed(2).client(client().insert(0)).client(client().op(op).get(0))
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
#[ignore = "takes minutes"]
fn an_inserter_dies_and_is_swept_at_length() {
    for op in [Op::Get(0), Op::Put(0), Op::Insert(0), Op::Delete(0)] {
        for used in 0..=2 {
            passes(an_inserter_dies(op, 2, used), 2);
        }
    }
}

/// Another key then gets the only slot.
#[test]
fn another_key_gets_the_slot_of_a_dead_inserter() {
    for used in 0..=1 {
        let scenario = dies(&format!("INSERT k0 dies | INSERT k1, GET k1, used={used}"));
        let scenario = scenario.slots(1).used(used).client(client().insert(0));
        passes(scenario.client(client().insert(1).get(1)), 1);
    }
}

#[test]
fn a_writer_dies_and_is_swept() {
    for op in [Op::Put(0), Op::Delete(0), Op::Exchange(0, "i0")] {
        let scenario = dies(&format!("{op:?} dies | GET hit, PUT")).stored(0);
        let other = client().knows(0).get(0).put(0);
        passes(scenario.client(client().op(op)).client(other), 0);
    }
}

fn two_in_a_slot(mutant: Mutant) -> Scenario {
    let scenario = Scenario::new(format!("{mutant:?}")).deaths(1).sweeps().slots(1).used(1);
    scenario.client(client().insert(0)).client(client().insert(1).get(1))
}

#[test]
fn unfenced_is_caught() {
    let scenario = two_in_a_slot(Mutant::Unfenced);
    assert_caught(scenario.clone().server_mutant(Mutant::Unfenced), scenario);
}

#[test]
fn sweeps_the_living_is_caught() {
    let scenario = two_in_a_slot(Mutant::SweepsTheLiving);
    assert_caught(scenario.clone().server_mutant(Mutant::SweepsTheLiving), scenario);
}

#[test]
fn hint_after_clear_is_caught() {
    let scenario = two_in_a_slot(Mutant::HintAfterClear);
    assert_caught(scenario.clone().server_mutant(Mutant::HintAfterClear), scenario);
}
