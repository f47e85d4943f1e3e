//! Every operation beside every other, on one key that is cached or not.

use farside_simulator::{Op, Scenario, client};

use crate::{OPS, passes};

/// Each pair of operations. The key is absent, and both choose the same slot or different ones,
/// used before or not. Or the key is stored, and in the cache of neither, the first, or both. The
/// second client then reads the key.
fn every_pair(preemptions: Option<u8>) {
    for first in OPS {
        for second in OPS {
            let scenario = |kind: &str| Scenario::new(format!("{first:?} | {second:?} {kind}"));
            let (one, two) = (client().op(first), client().op(second).get(0));
            for (seed, used) in [(1, 0), (2, 0), (1, 1), (1, 2), (2, 2)] {
                let scenario = scenario(&format!("absent, used={used}")).seed(seed).used(used);
                passes(scenario.client(one.clone()).client(two.clone()), preemptions);
            }
            let (known_one, known_two) = (one.clone().knows(0), two.clone().knows(0));
            for (one, two, kind) in [
                (&one, &two, "unknown"),
                (&known_one, &two, "known to the first"),
                (&known_one, &known_two, "known"),
            ] {
                let scenario = scenario(kind).stored(0);
                passes(scenario.client(one.clone()).client(two.clone()), preemptions);
            }
        }
    }
}

#[test]
fn every_pair_on_one_key() {
    every_pair(Some(2));
}

#[test]
#[ignore = "takes minutes"]
fn every_pair_on_one_key_with_any_number_of_preemptions() {
    every_pair(None);
}

/// Keys that could be confused: they have the same window and the same fingerprint.
#[test]
fn every_pair_of_neighbours() {
    let other = |op| match op {
        Op::Get(_) => Op::Get(1),
        Op::Put(_) => Op::Put(1),
        Op::Insert(_) => Op::Insert(1),
        Op::Update(_) => Op::Update(1),
        Op::Delete(_) => Op::Delete(1),
        _ => Op::Exchange(1, "i1"),
    };
    for first in OPS {
        for second in OPS {
            let name = format!("{first:?} | {:?}", other(second));
            for used in 0..=2 {
                let scenario = Scenario::new(format!("{name}, used={used}")).used(used).stored(0);
                let scenario = scenario.client(client().op(first));
                passes(scenario.client(client().op(other(second)).get(1)), 1);
            }
        }
    }
}
