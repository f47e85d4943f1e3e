//! Blocks that one client gives to the depot and another client takes from there. A chunk that
//! changes its class while marks are in flight, and locations cached, for its old blocks.

use farside_simulator::{Mutant, Op, Scenario, Script, client};

use crate::mutants::assert_caught;
use crate::{GRACE_NS, passes};

/// Longer than a chunk keeps its class.
const CHUNK_REST_NS: u64 = 290 * GRACE_NS;

/// A client gives key 0's block to the depot, and another stores key 1 in it, GRACE later.
fn taken_over(name: String, reader: Script) -> Scenario {
    let giver = client().blocks(1).takes().knows(0).put(0).gives_back();
    let taker = client().blocks(0).takes().insert(1);
    let scenario = Scenario::new(name).depot().slots(2).jumps(1, &[GRACE_NS]);
    scenario.client(giver).client(taker).client(reader)
}

#[test]
fn a_block_goes_from_client_to_client() {
    for known in [true, false] {
        let reader = client().get(0);
        let reader = if known { reader.knows(0) } else { reader };
        let name = format!("PUT, give | INSERT k1 | GET, known={known}");
        passes(taken_over(name, reader), 0);
    }
    let name = "PUT, give | INSERT k1 | late PUT".to_owned();
    passes(taken_over(name, client().knows(0).put(0)), 0);
}

#[test]
fn given_at_once_is_caught() {
    let mutant = Mutant::GivenAtOnce;
    let reader = client().knows(0).get(0);
    let honest = taken_over(format!("{mutant:?}"), reader.clone());
    let scenario = taken_over(format!("{mutant:?}"), reader.mutant(Mutant::NoChecksum));
    assert_caught(scenario.server_mutant(mutant), honest);
}

/// One client sets the mark of key 0's block late. Another gives the block back, waits for `after`,
/// and takes a larger block of the same chunk, with a value where the header was.
fn larger_block(name: &str, after: u64, late: Script) -> Scenario {
    let changes_class = client().in_one_step().blocks(1).takes().knows(0).put(0).gives_back();
    let changes_class = changes_class.sleeps(after).put_large(1);
    Scenario::new(name).depot().slots(2).client(changes_class).client(late)
}

#[test]
fn a_late_mark_does_not_hit_a_chunk_that_changed_its_class() {
    for (after, what) in [(3 * GRACE_NS, "too soon"), (CHUNK_REST_NS, "in time")] {
        for late in [Op::Put(0), Op::Delete(0)] {
            let name = format!("PUT, give, larger PUT {what} | {late:?}");
            passes(larger_block(&name, after, client().knows(0).op(late)), 2);
        }
    }
}

#[test]
fn chunk_rests_for_grace_is_caught() {
    let mutant = Mutant::ChunkRestsForGrace;
    let scenario = larger_block("ChunkRestsForGrace", 3 * GRACE_NS, client().knows(0).put(0));
    assert_caught(scenario.clone().server_mutant(mutant), scenario);
}

/// If the time in the queue does not count, the mark can come after any rest of the chunk.
#[test]
fn queue_uncounted_is_caught() {
    let late = client().knows(0).put(0);
    let scenario = |late| larger_block("QueueUncounted", CHUNK_REST_NS, late);
    assert_caught(scenario(late.clone().mutant(Mutant::QueueUncounted)), scenario(late));
}

/// The chunk has small blocks, then large ones, then small ones again. The second of these begins
/// where a value had zeros. A location cached for the first small block must not fit the last one.
fn small_again() -> Scenario {
    let changes_class = client().in_one_step().blocks(1).takes().knows(0).put(0).gives_back();
    let changes_class = changes_class.sleeps(CHUNK_REST_NS).put_large(1).delete(1).gives_back();
    let takes_small = client().blocks(0).takes().insert(2).put(0);
    let scenario = Scenario::new("HeadersNotWritten").depot().slots(3);
    let scenario = scenario.client(changes_class.sleeps(CHUNK_REST_NS)).client(takes_small);
    scenario.client(client().knows(0).get(0)).client(client().get(0))
}

#[test]
fn headers_not_written_is_caught() {
    let scenario = small_again();
    assert_caught(scenario.clone().server_mutant(Mutant::HeadersNotWritten), scenario);
}
