//! Time: clients that sleep at any moment, and chains that take effect late, or wait in a queue
//! beyond their deadline. Incarnation numbers that recur, clocks that run at different rates, and
//! clocks that stop while a client is paused. The protocol's margins are an eighth of GRACE, and of
//! T_word + L (docs/protocol.md, "Time").

use farside_layout::{INCARNATIONS, clock_lag_max_ns};
use farside_simulator::{Bounds, Mutant, Op, Scenario, Script, client};

use crate::mutants::{assert_caught, assert_fails, reuses_block};
use crate::{GRACE_NS, OPS, knowing, passes};

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

/// The slowest and the fastest clock that the protocol allows, in sixteenths of the true rate.
const SLOW: u8 = 15;
const FAST: u8 = 17;
/// How far a client's clock may fall behind (A). It is a quarter of the time after which a word can
/// recur. T_word and L use the rest.
const CLOCK_LAG_MAX_NS: u64 = clock_lag_max_ns(GRACE_NS);
/// How often key 1 is inserted: the largest multiple of `INCARNATIONS` within 256 generations.
/// A word recurs when generation and incarnation recur together.
const ROUNDS: u64 = 256 / INCARNATIONS * INCARNATIONS;

/// Makes key 0's word recur for key 1 as early as possible. Key 0's block is reused 256 times, once
/// for each GRACE, and the last use has the slot's old incarnation. In the rounds `others_act`,
/// other clients may act.
fn word_recurs(others_act: &[u64]) -> Script {
    let mut reuses_block = client().in_one_step().blocks(0).knows(0).delete(0);
    for round in 1..=ROUNDS {
        reuses_block = reuses_block.insert(1);
        if round < ROUNDS {
            reuses_block = reuses_block.delete(1);
        }
        if others_act.contains(&round) {
            reuses_block = reuses_block.yields();
        }
    }
    // The remaining generations, by PUTs within one incarnation, which alternate with key 3's
    // block.
    reuses_block = reuses_block.delete(3);
    for _ in ROUNDS..256 {
        reuses_block = reuses_block.put(1).update(1);
    }
    reuses_block
}

/// The window has two used slots: key 0's, and key 3's, whose block `word_recurs` frees and uses.
fn recurring_word(others_act: &[u64], pace: u8) -> Scenario {
    let scenario = Scenario::new().used(2).stored(0).stored(3);
    scenario.client(word_recurs(others_act).pace(pace))
}

/// Checks that the scenario goes wrong, because a client relies on a proof that is too old.
fn assert_stale_proof_caught(scenario: &Scenario, preemptions: u8) {
    let bounds = Bounds { preemptions: Some(preemptions), executions: 20_000 };
    assert_fails(|| scenario.explore(bounds));
}

/// A client with a slow clock relies on a proof for T_word, and its chain takes effect within L.
/// The word recurs by a fast clock.
#[test]
fn a_proof_has_a_margin_for_clocks_that_drift() {
    let scenario = |mutant| {
        let late = client().pace(SLOW).knows(0).put(0).mutant(mutant);
        recurring_word(&[150, 180], FAST).client(late)
    };
    assert_stale_proof_caught(&scenario(Some(Mutant::ProofWithoutMargin)), 1);
    passes(scenario(None), 1);
}

/// The time that a chain spends in its queue counts for its deadline. Otherwise the chain could
/// take effect later than L after its post, on a word that has recurred.
#[test]
fn queue_uncounted_is_caught() {
    let scenario =
        |mutant| recurring_word(&[10], 16).client(client().knows(0).put(0).mutant(mutant));
    assert_stale_proof_caught(&scenario(Some(Mutant::QueueUncounted)), 1);
    passes(scenario(None), 1);
}

/// A client whose virtual machine is paused, with its clock, is fenced before a word can recur.
#[test]
#[ignore = "takes a minute; run by make soak"]
fn a_paused_client_is_fenced_before_a_word_recurs() {
    let scenario = recurring_word(&[10, 190], 16).pauses(1, CLOCK_LAG_MAX_NS);
    let scenario = scenario.client(client().pauses().knows(0).put(0));
    for mutant in [Mutant::NeverFenced, Mutant::FencedLate] {
        assert_stale_proof_caught(&scenario.clone().server_mutant(mutant), 0);
    }
    passes(scenario, 0);
}

/// Each operation of a client with a slow clock, beside a client with a fast clock that reuses a
/// block. GETs ignore the checksum, which would hide a wrong margin.
#[test]
fn a_slow_clock_beside_a_fast_one_that_reuses_a_block() {
    let fast = || Scenario::new().stored(0).client(reuses_block().pace(FAST));
    for (known, preemptions) in [(true, 2), (false, 1)] {
        let reader = client().pace(SLOW).get(0).get(0).mutant(Mutant::NoChecksum);
        let scenario = fast().jumps(1, &[GRACE_NS / 2]);
        passes(scenario.client(knowing(known, reader)), preemptions);
    }
    for op in OPS {
        let scenario = fast().jumps(1, &[1_300_000, GRACE_NS]);
        passes(scenario.client(client().pace(SLOW).op(op).get(0)), 0);
    }
}

#[test]
fn patience_without_margin_is_caught() {
    let scenario = |mutant| {
        let scenario = Scenario::new().stored(0).client(reuses_block().pace(FAST));
        scenario.client(client().pace(SLOW).knows(0).get(0).mutant(mutant))
    };
    assert_caught(scenario(Mutant::PatienceWithoutMargin), scenario(Mutant::NoChecksum));
}

/// Each operation, paused at any moment for any time, beside a client that is not paused.
#[test]
fn a_pause_anywhere_keeps_answers_linearizable() {
    for op in OPS {
        let scenario = Scenario::new().stored(0).pauses(1, CLOCK_LAG_MAX_NS);
        let scenario = scenario.jumps(1, &[CLOCK_LAG_MAX_NS + 1]);
        let scenario = scenario.client(client().pauses().knows(0).op(op));
        passes(scenario.client(client().knows(0).update(0)), 0);
    }
}

#[test]
#[ignore = "takes minutes; run by make soak"]
fn a_pause_anywhere_with_more_scenarios() {
    for op in OPS {
        for known in [false, true] {
            let scenario = Scenario::new().stored(0).pauses(1, CLOCK_LAG_MAX_NS);
            let scenario = scenario.jumps(1, &[GRACE_NS, CLOCK_LAG_MAX_NS + 1]);
            let scenario = scenario.client(knowing(known, client().pauses().op(op).get(0)));
            passes(scenario.client(client().blocks(1).knows(0).update(0).update(0)), 0);
        }
    }
}
