//! Blocks that are reused while other clients have cached their former content. After GRACE a
//! session reuses its own. The depot gives a client those of another one, also in a chunk that has
//! changed its class. The server removes keys that a cache evicts, and those whose values have
//! expired, and their blocks go to the depot. No GET returns parts of two values with extents. At
//! each unlink of a head the simulator checks that the session holds the extents (I27).

use farside_simulator::{Bounds, Mutant, Op, Scenario, Script, TTL_NS, Violation, client};

use crate::mutants::{
    assert_caught, assert_caught_for_all, assert_caught_of_server, assert_fails,
    reuses_all_generations, reuses_block,
};
use crate::{GRACE_NS, OPS, knowing, passes};

#[test]
fn a_block_is_used_again_for_its_own_key() {
    for (other, preemptions) in [
        (client().knows(0).get(0).get(0), 2),
        (client().get(0).get(0), 2),
        (client().knows(0).put(0), 3),
    ] {
        let scenario = Scenario::new().stored(0).client(other);
        passes(scenario.client(reuses_block()), preemptions);
    }
}

#[test]
fn a_block_is_used_again_for_another_key() {
    for (other, preemptions) in [
        (client().knows(0).get(0), 3),
        (client().knows(0).put(0), 2),
        (client().knows(0).delete(0), 3),
        (client().put(0), 2),
    ] {
        let replaces_key = client().blocks(0).knows(0).delete(0).insert(1).get(1);
        let scenario = Scenario::new().slots(1).stored(0).client(other);
        passes(scenario.client(replaces_key), preemptions);
    }
}

/// The protocol does not depend on the checksum, which is only a safety net (I3).
#[test]
fn a_reader_without_a_checksum() {
    for known in [true, false] {
        let reader = client().get(0).get(0).mutant(Mutant::NoChecksum);
        let scenario = Scenario::new().stored(0).client(knowing(known, reader));
        passes(scenario.client(reuses_block()), 2);
    }
}

/// The block is linked although marked: its writer died after the mark, or a mark came late. A GET
/// then takes two verbs.
#[test]
fn a_linked_block_with_a_mark() {
    let reader = || Scenario::new().marked(0).client(client().knows(0).get(0).get(0));
    passes(reader().client(client().put(0)), None);
    passes(reader().client(reuses_block()), 2);
    let scenario = Scenario::new().marked(0).slots(1).client(client().knows(0).get(0));
    passes(scenario.client(client().blocks(0).delete(0).insert(1).get(1)), 2);
}

/// Longer than a chunk keeps its class.
const CHUNK_REST_NS: u64 = 290 * GRACE_NS;

/// A client gives key 0's block to the depot, and another stores key 1 in it, GRACE later.
fn taken_over(other: Script) -> Scenario {
    let giver = client().blocks(1).takes().knows(0).put(0).gives_back();
    let taker = client().blocks(0).takes().insert(1);
    let scenario = Scenario::new().depot().jumps(1, &[GRACE_NS]);
    scenario.client(giver).client(taker).client(other)
}

#[test]
fn a_block_goes_from_client_to_client() {
    for known in [true, false] {
        passes(taken_over(knowing(known, client().get(0))), 0);
    }
    passes(taken_over(client().knows(0).put(0)), 0);
}

#[test]
fn given_at_once_is_caught() {
    let reader = client().knows(0).get(0);
    let scenario = taken_over(reader.clone().mutant(Mutant::NoChecksum));
    assert_caught(scenario.server_mutant(Mutant::GivenAtOnce), taken_over(reader));
}

/// One client sets the mark of key 0's block late. Another gives the block back, waits for `after`,
/// and takes a larger block of the same chunk, with a value where the header was.
fn larger_block(after: u64, late: Script) -> Scenario {
    let changes_class = client().in_one_step().blocks(1).takes().knows(0).put(0).gives_back();
    let changes_class = changes_class.sleeps(after).put_large(1);
    Scenario::new().depot().client(changes_class).client(late)
}

#[test]
fn a_late_mark_does_not_hit_a_chunk_that_changed_its_class() {
    for after in [3 * GRACE_NS, CHUNK_REST_NS] {
        for late in [Op::Put(0), Op::Delete(0)] {
            passes(larger_block(after, client().knows(0).op(late)), 2);
        }
    }
}

#[test]
fn chunk_rests_for_grace_is_caught() {
    let scenario = larger_block(3 * GRACE_NS, client().knows(0).put(0));
    assert_caught_of_server(Mutant::ChunkRestsForGrace, scenario);
}

/// If the time in the queue does not count, the mark can come after any rest of the chunk.
#[test]
fn queue_uncounted_is_caught() {
    let scenario = |mutant| larger_block(CHUNK_REST_NS, client().knows(0).put(0).mutant(mutant));
    assert_caught(scenario(Some(Mutant::QueueUncounted)), scenario(None));
}

/// The chunk has small blocks, then large ones, then small ones again. The second of the last small
/// blocks begins where the large block's value had zeros. A location cached for the first small
/// block must not fit the last one.
#[test]
fn headers_not_written_is_caught() {
    let changes_class = client().in_one_step().blocks(1).takes().knows(0).put(0).gives_back();
    let changes_class = changes_class.sleeps(CHUNK_REST_NS).put_large(1).delete(1).gives_back();
    let takes_small = client().blocks(0).takes().insert(2).put(0);
    let scenario = Scenario::new().depot().slots(3);
    let scenario = scenario.client(changes_class.sleeps(CHUNK_REST_NS)).client(takes_small);
    let scenario = scenario.client(client().knows(0).get(0)).client(client().get(0));
    assert_caught_of_server(Mutant::HeadersNotWritten, scenario);
}

fn extents() -> Scenario {
    Scenario::new().extents().stored(0)
}

/// Writes two values, which take all extents of the client, and then a third one into the memory of
/// the first.
fn reuses_extents() -> Script {
    client().put_large(0).put_large(0).put_large(0)
}

#[test]
fn operations_on_long_values_beside_each_other() {
    let others = [
        client().get(0).get(0),
        client().put_large(0).get(0),
        client().put(0).get(0),
        client().delete(0).get(0),
        client().insert(0).get(0),
        client().exchange(0, "i0").get(0),
    ];
    for other in others {
        for writer in [client().put_large(0).get(0), client().put_large(0).delete(0)] {
            passes(extents().client(writer).client(other.clone()), 2);
        }
    }
}

#[test]
#[ignore = "takes a minute; run by make soak"]
fn extents_are_reused_beside_a_reader() {
    for reader in [client().get(0), client().knows(0).get(0)] {
        passes(extents().client(reuses_extents()).client(reader), 1);
    }
}

#[test]
fn writers_of_long_values_die() {
    let writer = client().put_large(0).put_large(0);
    passes(extents().client(writer.clone()).client(client().get(0)).deaths(1).sweeps(), 1);
    passes(extents().client(writer).client(client().put(0).get(0)).deaths(1).sweeps(), 1);
}

/// A reader whose clock stands still relies on extents that were reused (I26, I3).
#[test]
fn a_reader_that_relies_on_old_extents_is_caught() {
    let scenario = |mutant| {
        let reader = client().get(0).get(0).mutant(mutant);
        extents().client(reuses_extents()).client(reader)
    };
    assert_caught(scenario(Some(Mutant::StoppedClock)), scenario(None));
}

/// A collection that reads the slot after the unlink, and asks the session before its next note,
/// would take the extents for lost.
#[test]
fn old_extents_unheld_is_caught() {
    let writer = || client().put_large(0);
    let unlinking = [
        writer().put_large(0),
        writer().put(0),
        writer().update(0),
        writer().delete(0),
        writer().op(Op::Take(0)),
    ];
    for writer in unlinking {
        // Also if the other client has the table, and if it loses the slot to the first one.
        for other in [client().get(0), client().get(0).put(0)] {
            let scenario = extents().client(writer.clone()).client(other);
            let failure = assert_caught_for_all(Mutant::OldExtentsUnheld, scenario);
            assert!(matches!(failure.violation, Violation::Unheld(_)), "{failure}");
        }
    }
}

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
fn taken_after_eviction(key: usize, reader: Script) -> Scenario {
    let taker = client().blocks(0).takes().insert(key);
    evicts().slots(2).client(taker).client(reader)
}

#[test]
fn an_evicted_block_goes_to_a_client() {
    for key in [0, 1] {
        for known in [true, false] {
            passes(taken_after_eviction(key, knowing(known, client().get(0))), 0);
        }
    }
    for op in [Op::Put(0), Op::Delete(0)] {
        passes(taken_after_eviction(1, client().knows(0).op(op)), 0);
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
    let scenario = taken_after_eviction(1, reader.clone().mutant(Mutant::NoChecksum));
    assert_caught(scenario.server_mutant(Mutant::GivenAtOnce), taken_after_eviction(1, reader));
}

/// A GET by the cached location finds the value of an INSERT that has not published its slot yet.
#[test]
fn removed_generation_kept_is_caught() {
    let scenario = taken_after_eviction(0, client().knows(0).get(0)).client(client().get(0));
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
