//! The server removes keys beside clients: those that a cache evicts, and those whose values have
//! expired. The block of a removed key goes to the depot, and from there to another client.

use farside_simulator::{Bounds, Mutant, Op, Scenario, Script, TTL_NS, Violation, client};

use crate::mutants::{
    assert_caught, assert_caught_of_server, assert_fails, reuses_all_generations,
};
use crate::{OPS, knowing, passes};

/// The operations that depend on the present value, on key 0.
const MODIFICATIONS: [Op; 5] =
    [Op::Take(0), Op::Touch(0), Op::PutKeepTtl(0), Op::GetOrInsert(0), Op::Increment(0)];
/// Operations that may store a key that is absent.
const INSERTS: [Op; 3] = [Op::Put(0), Op::Insert(0), Op::GetOrInsert(0)];

/// Key 0 is evicted at some moment.
fn evicts() -> Scenario {
    Scenario::new().depot().evicts(0).chains(64)
}

/// Key 0 has a value that expires at some moment. The server looks for one at some moment.
fn expires() -> Scenario {
    Scenario::new().expiring(0).expires(1).jumps(1, &[TTL_NS]).chains(64)
}

/// Each operation, with a slot for INSERTs besides the tombstone or without.
fn every_operation(scenario: fn() -> Scenario, preemptions: u8) {
    for known in [false, true] {
        for op in OPS.into_iter().chain(MODIFICATIONS) {
            let script = knowing(known, client().op(op).get(0));
            passes(scenario().client(script), preemptions);
        }
    }
    for op in INSERTS {
        passes(scenario().slots(1).client(client().op(op)), 0);
    }
}

#[test]
fn every_operation_beside_an_eviction() {
    every_operation(evicts, 2);
}

#[test]
fn every_operation_beside_an_expiry() {
    every_operation(expires, 1);
}

/// Two clients change or read the key, one of them by its cached location.
#[test]
fn two_clients_beside_a_removal() {
    for first in OPS {
        for second in [Op::Get(0), Op::Put(0), Op::Delete(0)] {
            let (one, two) = (client().op(first), client().knows(0).op(second));
            passes(evicts().client(one).client(two.get(0)), 0);
        }
    }
    for first in [Op::Get(0), Op::Put(0), Op::Delete(0), Op::Update(0)] {
        for second in [Op::Put(0), Op::Delete(0)] {
            let scenario = expires().client(client().op(first));
            passes(scenario.client(client().knows(0).op(second)), 0);
        }
    }
}

/// Clients store values that expire, before their expiry or after it, beside others that began
/// before it.
#[test]
fn values_that_expire_are_stored() {
    let scenario = || Scenario::new().jumps(1, &[TTL_NS]).chains(64);
    for first in [Op::PutTtl(0), Op::InsertTtl(0)] {
        for second in OPS {
            let scenario = scenario().slots(1).client(client().op(first));
            passes(scenario.client(client().op(second)), 0);
        }
        let scenario = scenario().expires(1).stored(0).client(client().op(first).get(0));
        passes(scenario.client(client().knows(0).get(0).get(0)), 0);
    }
    let scenario = scenario().expires(1).client(client().put_ttl(0));
    passes(scenario.client(client().insert(0).get(0)), 0);
}

/// An expired value may be evicted as well.
#[test]
fn an_expired_value_is_evicted() {
    for op in [Op::Get(0), Op::Put(0), Op::Delete(0), Op::Touch(0)] {
        let scenario = evicts().expiring(0).jumps(1, &[TTL_NS]);
        passes(scenario.client(client().op(op).get(0)), 1);
    }
}

/// A client takes the evicted block and stores a key in it, GRACE later: the clearing of the
/// tombstone takes GRACE.
fn taken_over(key: usize, reader: Script) -> Scenario {
    let taker = client().blocks(0).takes().insert(key);
    evicts().slots(2).client(taker).client(reader)
}

#[test]
fn an_evicted_block_goes_to_a_client() {
    for key in [0, 1] {
        for known in [true, false] {
            passes(taken_over(key, knowing(known, client().get(0))), 0);
        }
    }
    for op in [Op::Put(0), Op::Delete(0)] {
        passes(taken_over(1, client().knows(0).op(op)), 0);
    }
}

/// The key is inserted again, and evicted again.
#[test]
fn a_key_is_evicted_twice() {
    for op in [Op::Get(0), Op::Put(0), Op::Delete(0)] {
        let scenario = evicts().evicts(0).client(client().insert(0));
        passes(scenario.client(client().knows(0).op(op).get(0)), 0);
    }
}

/// The subtable is split while the slot is a tombstone.
#[test]
fn a_tombstone_beside_a_split() {
    for op in OPS {
        for known in [false, true] {
            let scenario = evicts().splits(0, 1).slots(1);
            passes(scenario.client(knowing(known, client().op(op).get(0))), 0);
        }
    }
}

/// A key is evicted after a split has moved it.
#[test]
fn a_moved_key_is_evicted() {
    for op in [Op::Get(2), Op::Put(2), Op::Delete(2)] {
        let scenario = evicts().evicts(2).splits(0, 1).slots(2).stored(2);
        passes(scenario.client(client().knows(2).op(op).get(2)), 0);
    }
}

#[test]
fn a_client_dies_beside_an_eviction() {
    for op in [Op::Put(0), Op::Insert(0), Op::Delete(0), Op::Take(0)] {
        let scenario = evicts().deaths(1).client(client().op(op));
        passes(scenario.client(client().knows(0).get(0)), 0);
    }
}

/// Without the mark, a GET finds an evicted value at its cached location.
#[test]
fn no_mark_of_an_evicted_block_is_caught() {
    let failure =
        assert_caught_of_server(Mutant::NoMark, evicts().client(client().knows(0).get(0)));
    assert_eq!(failure.violation, Violation::NotLinearizable);
}

/// A GET by the cached location finds a value that another GET did not find before.
#[test]
fn mark_after_eviction_is_caught() {
    let scenario = evicts().client(client().get(0)).client(client().knows(0).get(0));
    assert_caught_of_server(Mutant::MarkAfterSwap, scenario);
}

/// Without the checksum, only GRACE keeps a GET from believing an evicted block that is partly
/// rewritten.
#[test]
fn evicted_block_given_at_once_is_caught() {
    let reader = client().knows(0).get(0);
    let scenario = taken_over(1, reader.clone().mutant(Mutant::NoChecksum));
    assert_caught(scenario.server_mutant(Mutant::GivenAtOnce), taken_over(1, reader));
}

/// A GET by the cached location finds the value of an INSERT that has not published its slot yet.
#[test]
fn removed_generation_kept_is_caught() {
    let scenario = taken_over(0, client().knows(0).get(0)).client(client().get(0));
    assert_caught_of_server(Mutant::RemovedGenerationKept, scenario);
}

#[test]
fn replaced_removed_is_caught() {
    for scenario in [evicts(), expires()] {
        let scenario = scenario.client(client().put(0));
        assert_caught_of_server(Mutant::ReplacedRemoved, scenario);
    }
}

/// The word of the key that the server read names another key's value by the time of the
/// compare-and-swap: each of two blocks was used 256 times, in all incarnations of the slot.
#[test]
fn removed_by_old_proof_is_caught() {
    let scenario = Scenario::new().slots(1).used(1).stored(0).evicts(0);
    let scenario = scenario.client(reuses_all_generations());
    let bounds = Bounds { preemptions: Some(1), executions: 200 };
    let old = scenario.clone().server_mutant(Mutant::RemovedByOldProof);
    assert_fails(|| old.explore(bounds));
    scenario.explore(bounds).unwrap_or_else(|failure| panic!("{failure}"));
}

#[test]
fn absorbed_by_tomb_is_caught() {
    for scenario in [evicts(), expires()] {
        let scenario = |mutant| scenario.clone().client(client().put(0).mutant(mutant));
        assert_caught(scenario(Some(Mutant::AbsorbedByTomb)), scenario(None));
    }
}

#[test]
fn expires_early_is_caught() {
    assert_caught_of_server(Mutant::ExpiresEarly, expires().client(client().get(0)));
}

#[test]
fn expiry_ignored_is_caught() {
    let scenario = |mutant| expires().client(client().knows(0).get(0).mutant(mutant));
    assert_caught(scenario(Some(Mutant::ExpiryIgnored)), scenario(None));
}

/// No operation relies on TOMB instead of EMPTY: GRACE of a tombstone is a margin.
fn cleared_at_once(preemptions: u8) {
    let at_once = |scenario: Scenario| scenario.server_mutant(Mutant::TombClearedAtOnce);
    for first in OPS {
        for second in [Op::Put(0), Op::Delete(0), Op::Insert(0)] {
            let scenario = at_once(evicts()).client(client().op(first).get(0));
            passes(scenario.client(client().op(second)), preemptions);
        }
    }
    for first in [Op::Put(0), Op::Delete(0)] {
        let scenario = at_once(expires()).client(client().op(first));
        passes(scenario.client(client().put(0)), preemptions);
    }
}

#[test]
fn a_tombstone_that_is_cleared_at_once() {
    cleared_at_once(0);
}

#[test]
#[ignore = "takes minutes; run by make soak"]
fn a_tombstone_that_is_cleared_at_once_with_more_preemptions() {
    cleared_at_once(2);
}
