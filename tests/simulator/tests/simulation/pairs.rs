//! Every operation beside every other, on one key that is cached or not.

use farside_simulator::{Op, Scenario, client};

use crate::{OPS, knowing, passes};

/// Each pair of operations. The key is absent, and both choose the same slot or different ones,
/// used before or not. Or the key is stored, and in the cache of neither, the first, or both. The
/// second client then reads the key.
fn every_pair(preemptions: Option<u8>) {
    for first in OPS {
        for second in OPS {
            let (one, two) = (client().op(first), client().op(second).get(0));
            for (seed, used) in [(1, 0), (2, 0), (1, 1), (1, 2), (2, 2)] {
                let scenario = Scenario::new().seed(seed).used(used).client(one.clone());
                passes(scenario.client(two.clone()), preemptions);
            }
            for (known_to_one, known_to_two) in [(false, false), (true, false), (true, true)] {
                let one = knowing(known_to_one, one.clone());
                let two = knowing(known_to_two, two.clone());
                passes(Scenario::new().stored(0).client(one).client(two), preemptions);
            }
        }
    }
}

#[test]
fn every_pair_on_one_key() {
    every_pair(Some(2));
}

#[test]
#[ignore = "takes minutes; run by make soak"]
fn every_pair_on_one_key_with_any_number_of_preemptions() {
    every_pair(None);
}

/// Keys that could be confused: they have the same window and the same fingerprint.
#[test]
fn every_pair_of_neighbours() {
    let others = [
        Op::Get(1),
        Op::Put(1),
        Op::Insert(1),
        Op::Update(1),
        Op::Delete(1),
        Op::Exchange(1, "i1"),
    ];
    for first in OPS {
        for second in others {
            for used in 0..=2 {
                let scenario = Scenario::new().used(used).stored(0).client(client().op(first));
                passes(scenario.client(client().op(second).get(1)), 1);
            }
        }
    }
}

/// This operation beside each one that depends on the present value, and beside a PUT, INSERT and
/// DELETE. The key is absent, or has a number that the first client has cached, or both. The
/// checker knows what an append makes of a number only, so none stands beside a PUT or INSERT.
fn beside_every_modification(first: Op) {
    let modifications = [Op::Increment(0), Op::Append(0), Op::Take(0), Op::Touch(0)];
    let others = [Op::GetOrInsert(0), Op::PutKeepTtl(0), Op::Put(0), Op::Insert(0), Op::Delete(0)];
    for second in modifications.into_iter().chain(others) {
        let is_append = |op| matches!(op, Op::Append(_));
        if is_append(first) && others[..4].contains(&second)
            || is_append(second) && others[..4].contains(&first)
        {
            continue;
        }
        // The others differ from these three only in the stored value.
        let is_deep = matches!(first, Op::Increment(_) | Op::Append(_) | Op::Take(_));
        let preemptions = 1 + u8::from(is_deep);
        let (one, two) = (client().op(first), client().op(second).get(0));
        passes(Scenario::new().used(1).client(one.clone()).client(two.clone()), preemptions);
        let one = client().op(Op::Increment(0)).op(first);
        passes(Scenario::new().client(one.clone()).client(two), preemptions);
        let two = client().op(Op::Increment(0)).op(second).get(0);
        passes(Scenario::new().client(one).client(two), 1);
        if matches!(first, Op::Touch(_) | Op::PutKeepTtl(_)) && !is_append(second) {
            // The value has an expiry already, and is no number.
            let one = client().touch(0).op(first);
            passes(Scenario::new().stored(0).client(one).client(client().op(second).get(0)), 1);
        }
    }
}

#[test]
#[ignore = "takes a minute; run by make soak"]
fn an_increment_beside_every_modification() {
    beside_every_modification(Op::Increment(0));
}

#[test]
#[ignore = "takes a minute; run by make soak"]
fn an_append_beside_every_modification() {
    beside_every_modification(Op::Append(0));
}

#[test]
fn a_take_beside_every_modification() {
    beside_every_modification(Op::Take(0));
}

#[test]
fn a_touch_beside_every_modification() {
    beside_every_modification(Op::Touch(0));
}

#[test]
fn a_get_or_insert_beside_every_modification() {
    beside_every_modification(Op::GetOrInsert(0));
}

#[test]
fn a_put_that_keeps_the_ttl_beside_every_modification() {
    beside_every_modification(Op::PutKeepTtl(0));
}

/// DELETE and exchange by a version that a GET found, beside what makes another version.
#[test]
fn a_change_by_version_beside_every_operation() {
    let others = [Op::Touch(0), Op::PutKeepTtl(0), Op::Take(0), Op::GetOrInsert(0)];
    for change in [Op::DeleteSeen(0), Op::ExchangeSeen(0)] {
        for second in OPS.into_iter().chain(others).chain([Op::DeleteSeen(0)]) {
            let (one, two) = (client().get(0).op(change), client().get(0).op(second).get(0));
            passes(Scenario::new().stored(0).client(one.clone()).client(two), 1);
            let two = client().delete(0).op(second);
            passes(Scenario::new().stored(0).client(one).client(two), 1);
        }
    }
}
