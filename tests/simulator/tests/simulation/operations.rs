//! Every operation beside every other, on one key that is cached or not. Three clients, where two
//! are not enough to go wrong. Clients with several operations, sessions that share a location
//! cache, and lanes of one session. Blind INSERTs, which claim a slot before they read its window,
//! and INSERTs into a window without a free slot.

use farside_simulator::{Mutant, Op, Scenario, Script, Violation, client};

use crate::mutants::assert_caught;
use crate::{GRACE_NS, OPS, knowing, passes};

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

fn stored() -> Scenario {
    Scenario::new().stored(0)
}

#[test]
fn writers_beside_readers() {
    let scenario = stored().client(client().knows(0).put(0)).client(client().put(0));
    passes(scenario.client(client().knows(0).get(0).get(0)), 2);
    let scenario = stored().client(client().knows(0).put(0)).client(client().get(0).get(0));
    passes(scenario.client(client().knows(0).get(0)), None);
}

#[test]
fn conflicting_changes_of_one_key() {
    let delete = || client().delete(0);
    let scenario = stored().client(delete()).client(delete());
    passes(scenario.client(client().update(0)), None);
    let scenario = stored().client(client().put(0)).client(client().exchange(0, "i0"));
    passes(scenario.client(delete()), 1);
    let scenario = stored().client(client().put(0)).client(client().put(0));
    passes(scenario.client(client().get(0).exchange_seen(0)), 2);
    let exchange = || client().knows(0).exchange(0, "i0");
    passes(stored().client(exchange()).client(exchange()).client(exchange()), 2);
}

#[test]
fn two_and_three_inserters_of_one_key() {
    let insert = || client().insert(0);
    for (seed, used) in [(1, 0), (2, 0), (1, 1), (1, 3), (2, 3)] {
        let start = || Scenario::new().seed(seed).used(used);
        let scenario = start().client(insert()).client(insert());
        passes(scenario.client(client().get(0).get(0)), 1);
        let scenario = start().slots(3).client(insert()).client(insert());
        passes(scenario.client(insert()), 0);
        passes(start().client(client().put(0).delete(0)).client(client().put(0)), 2);
        let scenario = start().stored(0).client(client().delete(0));
        passes(scenario.client(insert()).client(insert()), 1);
    }
}

/// A slot that two keys use in turn, with hints and words READ at different moments (I5 to I7,
/// I12).
#[test]
fn one_slot_for_two_keys() {
    for (other, preemptions) in [
        (client().put(0), Some(3)),
        (client().delete(0), Some(3)),
        (client().get(0), None),
        (client().knows(0).put(0), Some(3)),
    ] {
        let scenario = stored().slots(1).used(1).client(other);
        passes(scenario.client(client().delete(0).insert(1).get(1)), preemptions);
    }
    for used in 0..=2 {
        let scenario = Scenario::new().seed(1).used(used).client(client().insert(0));
        passes(scenario.client(client().insert(1).delete(1).put(1).get(1)), 1);
    }
}

/// Key 4's window starts one row later, so the windows share one row only.
#[test]
fn overlapping_windows() {
    for used in [0, 9] {
        let scenario = Scenario::new().slots(9).used(used).client(client().insert(0));
        passes(scenario.client(client().insert(4).get(4)), 1);
    }
}

/// Lanes share the location cache and the free blocks, and nothing else.
#[test]
fn lanes_of_one_session() {
    let lanes = client().knows(0).put(0).lane().put(0).lane().get(0);
    passes(stored().client(lanes), 2);
    for used in 0..=2 {
        let lanes = client().insert(0).lane().insert(0).get(0);
        passes(Scenario::new().used(used).client(lanes), 2);
    }
    let lanes = client().knows(0).delete(0).lane().put(0).get(0);
    passes(stored().client(lanes).client(client().knows(0).get(0)), 1);
}

#[test]
#[ignore = "takes many minutes; run by make soak"]
fn inserters_with_more_preemptions() {
    let insert = || client().insert(0);
    for seed in [1, 2] {
        let start = || Scenario::new().seed(seed);
        let scenario = start().client(insert()).client(insert());
        passes(scenario.client(client().get(0).get(0)), 3);
        passes(start().slots(3).client(insert()).client(insert()).client(insert()), 2);
        let scenario = start().stored(0).client(client().delete(0));
        passes(scenario.client(insert()).client(insert()), 3);
        let scenario = start().stored(0).client(client().put(0));
        passes(scenario.client(client().exchange(0, "i0")).client(client().delete(0)), 3);
    }
}

/// Every operation beside every other of the same client. The second session then reads the key.
#[test]
fn every_pair_of_two_sessions() {
    for first in OPS {
        for second in OPS {
            let scenario = Scenario::new().stored(0).client(client().knows(0).op(first));
            passes(scenario.client(client().op(second).get(0)).shares_locations(), 1);
        }
    }
}

/// Another client changes the key meanwhile.
#[test]
fn two_sessions_beside_another_client() {
    for op in [Op::Get(0), Op::Put(0), Op::Delete(0)] {
        let scenario = Scenario::new().stored(0).client(client().shares().knows(0).op(op));
        let readers = scenario.clone().client(client().shares().get(0).get(0));
        passes(readers.client(client().put(0)), 1);
        let writers = scenario.slots(1).client(client().shares().put(0));
        passes(writers.client(client().knows(0).delete(0).insert(1)), 0);
    }
}

/// A block that one session unlinks becomes the next value, while the other one sleeps.
#[test]
fn two_sessions_and_a_block_that_is_reused() {
    for op in [Op::Get(0), Op::Put(0), Op::Delete(0)] {
        let reuses_block = client().blocks(1).knows(0).put(0).put(0);
        let scenario = Scenario::new().stored(0).jumps(1, &[1_300_000, GRACE_NS]);
        let scenario = scenario.client(client().op(op).get(0)).client(reuses_block);
        passes(scenario.shares_locations(), 0);
    }
}

/// A word that another session cached is the key's, but may be older than this PUT.
#[test]
fn absorbed_unread_is_caught() {
    let mutant = Mutant::AbsorbedUnread(0);
    let start = || Scenario::new().stored(0).slots(1).used(1).client(client().put(0));
    let sessions = |mutant| {
        let scenario = start().client(client().shares().knows(0).put(0).mutant(mutant));
        scenario.client(client().shares().get(0).get(0))
    };
    let failure = assert_caught(sessions(Some(mutant)), sessions(None));
    assert_eq!(failure.violation, Violation::NotLinearizable);
    // Without a shared cache the mutant does no harm.
    let alone = start().client(client().knows(0).put(0).mutant(mutant));
    passes(alone.client(client().get(0).get(0)), 2);
}

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

#[test]
fn an_insert_into_a_full_window() {
    for op in [Op::Delete(0), Op::Put(0), Op::Insert(1)] {
        let scenario = Scenario::new().slots(1).stored(0).client(client().insert(1).get(1));
        passes(scenario.client(client().op(op).get(1)), 1);
    }
    let scenario = Scenario::new().stored(0).stored(1).client(client().insert(2).get(3));
    passes(scenario.client(client().insert(3).get(2)).client(client().delete(0)), 0);
}

#[test]
fn an_insert_into_a_full_window_that_is_split() {
    for op in [Op::Get(0), Op::Delete(0)] {
        let scenario = Scenario::new().slots(1).stored(0).splits(0, 1);
        passes(scenario.client(client().insert(2).get(2)).client(client().op(op)), 0);
    }
}
