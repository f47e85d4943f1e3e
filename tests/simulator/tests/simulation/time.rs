//! Time: clients that sleep at any moment, chains that take effect late, and incarnation numbers
//! that recur.

use farside_layout::INCARNATIONS;
use farside_simulator::{Bounds, Mutant, Op, Scenario, client};

use crate::mutants::assert_fails;
use crate::{GRACE_NS, knowing, passes};

/// Sleeps longer than T_hint (61 times 20 us), than the patience of an operation, than L, and than
/// T_word (docs/protocol.md, "Time").
const JUMPS: [u64; 4] = [1_300_000, GRACE_NS, 8_100_000_000, 256 * GRACE_NS];

/// Each operation sleeps for any of these times at any moment. Another client meanwhile replaces
/// the value twice and so reuses its block, or gives the slot to another key.
#[test]
fn a_sleep_anywhere_keeps_answers_linearizable() {
    for op in [Op::Get(0), Op::Put(0), Op::Insert(0), Op::Delete(0), Op::Exchange(0, "i0")] {
        for (known, jumps) in [(false, &JUMPS[..3]), (true, &JUMPS[1..])] {
            let scenario = Scenario::new().stored(0).jumps(1, jumps);
            let scenario = scenario.client(knowing(known, client().op(op)));
            passes(scenario.client(client().blocks(1).knows(0).update(0).update(0)), 0);
        }
        let scenario = Scenario::new().slots(1).stored(0).jumps(1, &JUMPS[..2]);
        let scenario = scenario.client(client().op(op));
        passes(scenario.client(client().knows(0).delete(0).insert(1).get(1)), 0);
    }
}

#[test]
fn inserters_that_sleep() {
    for (seed, used) in [(1, 0), (2, 0), (1, 1), (1, 2), (2, 2)] {
        let scenario = Scenario::new().seed(seed).used(used).jumps(1, &JUMPS[1..3]);
        passes(scenario.client(client().insert(0)).client(client().insert(0)), 0);
    }
}

/// The slot has 62 incarnations, each as short as possible, between hint and word of one READ. So
/// the READ takes longer than T_hint, and its hint is not believed (invariant I7). With a stopped
/// clock it would be, as the mutant shows.
#[test]
fn all_incarnations_pass_within_one_read() {
    let mut replaces_key = client().in_one_step().blocks(70).knows(0).delete(0);
    for _ in 0..INCARNATIONS - 1 {
        replaces_key = replaces_key.insert(1).delete(1);
    }
    let replaces_key = replaces_key.insert(1).get(1);
    let bounds = |executions| Bounds { preemptions: Some(1), executions };
    let scenario = |clock| {
        let scenario = Scenario::new().slots(1).used(1).stored(0).round_trips();
        scenario.client(client().update(0).mutant(clock)).client(replaces_key.clone())
    };
    let stopped = scenario(Some(Mutant::StoppedClockOnly));
    let failure = assert_fails(|| stopped.explore(bounds(20_000)));
    let honest = scenario(None).explore(bounds(failure.executions));
    honest.unwrap_or_else(|failure| panic!("{failure}"));
}
