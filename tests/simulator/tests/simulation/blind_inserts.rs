//! Blind INSERTs, which claim a slot before they read its window, beside every other operation.

use farside_simulator::{Op, Scenario, Script, client};

use crate::{GRACE_NS, OPS, passes};

fn inserter(guess: usize) -> Script {
    client().guesses(guess).insert(0)
}

/// Beside each operation on the same key. The key is absent, and both choose the same slot or
/// different ones, used before or not; or the key is stored.
#[test]
fn a_blind_insert_beside_every_operation() {
    for op in OPS {
        let other = || client().op(op).get(0);
        for seed in [1, 2] {
            for (guess, used) in [(0, 0), (0, 1), (1, 1)] {
                let scenario = Scenario::new().seed(seed).used(used).client(inserter(guess));
                passes(scenario.client(other()), 2);
            }
        }
        for guess in [0, 1] {
            passes(Scenario::new().stored(0).client(inserter(guess)).client(other()), 1);
        }
    }
}

#[test]
fn two_and_three_blind_inserts() {
    for guess in [0, 1] {
        let scenario = Scenario::new().client(inserter(0)).client(inserter(guess).get(0));
        passes(scenario.clone(), 2);
        for used in 0..=1 {
            let scenario = scenario.clone().slots(3).used(used);
            passes(scenario.client(client().insert(0)), 0);
        }
    }
}

/// A neighbour with the same fingerprint, which makes the INSERT read the window again.
#[test]
fn a_blind_insert_beside_a_key_with_the_same_fingerprint() {
    for op in [Op::Put(1), Op::Delete(1), Op::Insert(1), Op::Insert(0)] {
        for (guess, used) in [(0, 0), (1, 0), (0, 1), (1, 1)] {
            let scenario = Scenario::new().stored(1).used(used).client(inserter(guess).get(0));
            passes(scenario.client(client().op(op).get(1)), 1);
        }
    }
}

/// The inserter dies at any moment, and the server clears its slot.
#[test]
fn a_blind_inserter_dies_and_is_swept() {
    for op in [Op::Put(0), Op::Insert(0), Op::Delete(0)] {
        for used in 0..=1 {
            let scenario = Scenario::new().deaths(1).sweeps().slots(1).used(used);
            passes(scenario.client(inserter(0)).client(client().op(op).get(0)), 0);
        }
    }
}

/// The subtable is split meanwhile, and its place reused.
#[test]
fn a_blind_insert_beside_a_split() {
    let split = || Scenario::new().splits(0, 1).slots(1);
    let reader = || split().client(inserter(0).get(0));
    passes(reader(), 1);
    passes(reader().jumps(1, &[GRACE_NS]), 0);
    passes(reader().split_restarts(1), 0);
    passes(split().client(inserter(0)).client(client().insert(0).get(0)), 0);
    for key_0_returns in [false, true] {
        passes(split().reuses(key_0_returns).client(inserter(0)), 0);
    }
}
