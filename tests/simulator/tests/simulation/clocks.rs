//! Clocks that run at different rates, clocks that stand still while a client is paused, and chains
//! that wait in a queue beyond their deadline. The margins: an eighth of GRACE, and of T_word + L.

use farside_layout::{INCARNATIONS, clock_lag_max_ns};
use farside_simulator::{Bounds, Mutant, Scenario, Script, client};

use crate::twins::{assert_caught, name, report};
use crate::{GRACE_NS, core_seconds, passes};

/// Sixteenths of a second in a second: as far apart as clocks may be.
const SLOW: u8 = 15;
const FAST: u8 = 17;
/// How far a client's clock may fall behind (A): a quarter of the time in which a word comes
/// again, for T_word and L take the rest.
const ANSWER_NS: u64 = clock_lag_max_ns(GRACE_NS);
/// Why a scenario has key 0's word come again: 256 generations of its block, 62 incarnations.
const ROUNDS: u64 = 256 / INCARNATIONS * INCARNATIONS;

/// As soon as the words of slots can come again, key 0's word stands for key 1: its block is used
/// 256 times, once in a GRACE, the last time in the incarnation that it had. Others may act at any
/// of these rounds.
fn comes_again(others_act: &[u64]) -> Script {
    let mut again = client().swift().blocks(0).knows(0).delete(0);
    for round in 1..=ROUNDS {
        again = again.insert(1);
        if round < ROUNDS {
            again = again.delete(1);
        }
        if others_act.contains(&round) {
            again = again.yields();
        }
    }
    // The rest within one incarnation: key 3's block stands in for it meanwhile.
    again = again.delete(3);
    for _ in ROUNDS..256 {
        again = again.put(1).update(1);
    }
    again
}

/// In two slots: key 3's, whose block is wanted, and key 0's.
fn word_that_comes_again(name: &str, others_act: &[u64], pace: u8) -> Scenario {
    let scenario = Scenario::new(name).slots(2).used(2).stored(0).stored(3);
    scenario.client(comes_again(others_act).pace(pace))
}

/// That the scenario goes wrong.
fn caught(scenario: &Scenario, preemptions: u8) {
    let bounds = |executions| Bounds { preemptions: Some(preemptions), executions };
    let started = core_seconds();
    let failure = scenario.explore(bounds(20_000)).expect_err("a proof that is too old");
    println!("{failure}");
    report(&failure, core_seconds() - started);
}

/// A proof is relied on for T_word, and its chain takes effect within L, by a clock that runs slow;
/// the word comes again by a clock that runs fast.
#[test]
fn clocks_that_drift_and_a_word_that_comes_again() {
    let twin = Mutant::ProofWithoutMargin;
    let rounds = [150, 180];
    let scenario = word_that_comes_again("ProofWithoutMargin", &rounds, FAST);
    let late = client().pace(SLOW).knows(0).put(0);
    caught(&scenario.clone().client(late.clone().twin(twin)), 1);
    passes(scenario.client(late), 1);
}

/// What a chain has waited for in its queue counts: else it takes effect later than L after its
/// post, on a word that came again meanwhile.
#[test]
fn queue_uncounted() {
    let twin = Mutant::QueueUncounted;
    let scenario = word_that_comes_again("QueueUncounted", &[10], 16);
    let late = client().knows(0).put(0);
    caught(&scenario.clone().client(late.clone().twin(twin)), 1);
    passes(scenario.client(late), 1);
}

/// A client whose virtual machine is paused at any moment, with its clock, is fenced in time.
#[test]
fn a_pause_and_a_word_that_comes_again() {
    let scenario = |name: &str| {
        let scenario = word_that_comes_again(name, &[10, 190], 16);
        scenario.pauses(1, ANSWER_NS).client(client().pauses().knows(0).put(0))
    };
    for twin in [Mutant::NeverFenced, Mutant::FencedLate] {
        caught(&scenario(&format!("{twin:?}")).server_twin(twin), 0);
    }
    passes(scenario("PUT hit, paused | its word comes again"), 0);
}

/// Each operation by a slow clock beside one that uses a block again by a fast one. The checksum,
/// which is a net, is left out.
#[test]
fn clocks_that_drift_and_a_block_that_is_used_again() {
    let again = || client().blocks(1).pace(FAST).knows(0).put(0).put(0);
    let start = |name: &str| Scenario::new(name).stored(0).client(again());
    for (known, preemptions) in [(true, 2), (false, 1)] {
        let reader = client().pace(SLOW).get(0).get(0).twin(Mutant::NoChecksum);
        let reader = if known { reader.knows(0) } else { reader };
        let scenario = start(&format!("slow GET, GET, known={known} | fast PUT, PUT"));
        passes(scenario.jumps(1, &[GRACE_NS / 2]).client(reader), preemptions);
    }
    for op in crate::OPS {
        let scenario = start(&format!("slow {op:?} | fast PUT, PUT"));
        let scenario = scenario.jumps(1, &[1_300_000, GRACE_NS]);
        passes(scenario.client(client().pace(SLOW).op(op).get(0)), 0);
    }
}

#[test]
fn patience_without_margin() {
    let twin = Mutant::PatienceWithoutMargin;
    let again = client().blocks(1).pace(FAST).knows(0).put(0).put(0);
    let scenario = name(twin).stored(0).client(again);
    let reader = client().pace(SLOW).knows(0).get(0);
    let honest = scenario.clone().client(reader.clone().twin(Mutant::NoChecksum));
    assert_caught(scenario.client(reader.twin(twin)), honest);
}

/// Each operation, paused at any moment for any time, beside others that go on.
#[test]
fn a_pause_anywhere() {
    for op in crate::OPS {
        let sleeper = client().pauses().knows(0).op(op);
        let scenario = Scenario::new(format!("{op:?} hit, paused | UPDATE")).stored(0);
        let scenario = scenario.pauses(1, ANSWER_NS).jumps(1, &[ANSWER_NS + 1]);
        passes(scenario.client(sleeper).client(client().knows(0).update(0)), 0);
    }
}

#[test]
#[ignore = "takes minutes"]
fn a_pause_anywhere_at_length() {
    for op in crate::OPS {
        for known in [false, true] {
            let sleeper = client().pauses().op(op).get(0);
            let sleeper = if known { sleeper.knows(0) } else { sleeper };
            let name = format!("{op:?}, paused, known={known} | UPDATE, UPDATE in two blocks");
            let scenario = Scenario::new(name).stored(0).pauses(1, ANSWER_NS).client(sleeper);
            let scenario = scenario.jumps(1, &[GRACE_NS, ANSWER_NS + 1]);
            passes(scenario.client(client().blocks(1).knows(0).update(0).update(0)), 0);
        }
    }
}
