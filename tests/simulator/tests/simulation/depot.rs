//! Blocks that one client gives to the depot and another client takes from there. A chunk that
//! changes its class while marks are in flight, and locations cached, for its old blocks.

use farside_simulator::{Mutant, Op, Scenario, Script, client};

use crate::mutants::{assert_caught, assert_caught_of_server};
use crate::{GRACE_NS, knowing, passes};

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
