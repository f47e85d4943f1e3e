//! INSERTs that claim a slot without having looked, beside everything else.

use farside_simulator::{Op, Scenario, Script, client};

use crate::{GRACE_NS, OPS, passes};

fn inserter(guess: usize) -> Script {
    client().guesses(guess).insert(0)
}

fn unseen(name: impl Into<String>) -> Scenario {
    Scenario::new(format!("unseen INSERT | {}", name.into()))
}

/// Beside each operation on the same key: absent, with different and with the same choice of a
/// slot, used or not, and there.
#[test]
fn beside_every_operation() {
    for op in OPS {
        for seed in [1, 2] {
            for (guess, used) in [(0, 0), (0, 1), (1, 1)] {
                let name = format!("{op:?}, GET, seed {seed}, guess {guess}, used={used}");
                let scenario = unseen(name).seed(seed).used(used).client(inserter(guess));
                passes(scenario.client(client().op(op).get(0)), 2);
            }
        }
        for guess in [0, 1] {
            let scenario = unseen(format!("{op:?}, GET, stored, guess {guess}")).stored(0);
            passes(scenario.client(inserter(guess)).client(client().op(op).get(0)), 1);
        }
    }
}

#[test]
fn two_and_three_of_them() {
    for guess in [0, 1] {
        let scenario = unseen(format!("unseen INSERT of slot {guess}, GET"));
        let scenario = scenario.client(inserter(0)).client(inserter(guess).get(0));
        passes(scenario.clone(), 2);
        for used in 0..=1 {
            let scenario = scenario.clone().slots(3).used(used);
            passes(scenario.client(client().insert(0)), 0);
        }
    }
}

/// A neighbour with the same fingerprint asks for a second look.
#[test]
fn beside_a_key_that_could_be_taken_for_it() {
    for op in [Op::Put(1), Op::Delete(1), Op::Insert(1), Op::Insert(0)] {
        let scenario = unseen(format!("{op:?}, k1 there")).stored(1);
        for (guess, used) in [(0, 0), (1, 0), (0, 1), (1, 1)] {
            let scenario = scenario.clone().used(used).client(inserter(guess).get(0));
            passes(scenario.client(client().op(op).get(1)), 1);
        }
    }
}

/// It dies anywhere, and the server clears what it left.
#[test]
fn dies_and_is_swept() {
    for op in [Op::Put(0), Op::Insert(0), Op::Delete(0)] {
        for used in 0..=1 {
            let scenario = unseen(format!("dies | {op:?}, GET | sweep, used={used}"));
            let scenario = scenario.deaths(1).sweeps().slots(1).used(used).client(inserter(0));
            passes(scenario.client(client().op(op).get(0)), 0);
        }
    }
}

/// The subtable is split meanwhile, and its place used again.
#[test]
fn beside_a_split() {
    let split = |name: &str| unseen(format!("{name} | split")).splits(0, 1).slots(1);
    passes(split("GET").client(inserter(0).get(0)), 1);
    passes(split("asleep").client(inserter(0).get(0)).jumps(1, &[GRACE_NS]), 0);
    passes(split("killed").client(inserter(0).get(0)).restarts(1), 0);
    passes(split("INSERT").client(inserter(0)).client(client().insert(0).get(0)), 0);
    for returns in [false, true] {
        let scenario = split(&format!("split into its place, returns={returns}"));
        passes(scenario.reuses(returns).client(inserter(0)), 0);
    }
}
