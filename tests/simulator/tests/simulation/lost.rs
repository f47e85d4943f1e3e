//! Connections that break, and servers that restart. None, some or all of the verbs in flight are
//! executed, without a completion. An operation that may have taken effect is `Indeterminate`. A
//! new client repeats all others, while the server clears the slots of the old one.

use farside_simulator::{Mutant, Op, Scenario, client};

use crate::mutants::{assert_caught_for_all, assert_caught_of_server};
use crate::{OPS, passes};

fn start(stored: bool) -> Scenario {
    if stored { Scenario::new().stored(0) } else { Scenario::new() }
}

/// Two clients, one of which loses its connection at any moment.
fn breaks(op: Op, stored: bool, other: Op) -> Scenario {
    let scenario = start(stored).losses(1).sweeps();
    scenario.client(client().op(op).get(0)).client(client().op(other))
}

/// Two clients, and a server that restarts at any moment.
fn with_restarts(op: Op, stored: bool, other: Op) -> Scenario {
    let scenario = start(stored).server_restarts(1);
    scenario.client(client().op(op).get(0)).client(client().knows(0).op(other))
}

#[test]
fn a_connection_that_breaks_anywhere_keeps_answers_linearizable() {
    for op in OPS {
        passes(breaks(op, true, Op::Update(0)), 0);
    }
    for used in 0..=2 {
        passes(breaks(Op::Insert(0), false, Op::Delete(0)).used(used), 0);
    }
}

#[test]
fn the_server_restarts_at_any_moment() {
    for op in OPS {
        passes(with_restarts(op, true, Op::Put(0)), 0);
    }
    for used in 0..=2 {
        passes(with_restarts(Op::Insert(0), false, Op::Delete(0)).used(used), 0);
    }
}

#[test]
#[ignore = "takes minutes; run by make soak"]
fn connections_break_with_more_preemptions() {
    for op in OPS {
        for (stored, other) in [(true, Op::Delete(0)), (false, Op::Insert(0)), (false, Op::Put(0))]
        {
            for used in 0..=2 {
                passes(breaks(op, stored, other).used(used), 1);
                passes(with_restarts(op, stored, other).used(used), 1);
            }
        }
    }
}

/// A client that has cached the key starts with an empty cache on its new connection.
#[test]
fn a_connection_with_the_key_in_its_cache_breaks() {
    for op in [Op::Put(0), Op::Delete(0), Op::Exchange(0, "i0")] {
        let scenario = start(true).losses(1).sweeps().client(client().knows(0).op(op).get(0));
        passes(scenario.client(client().delete(0)), 0);
    }
}

/// Two clients insert different keys, and only one slot is left.
fn inserters(used: usize) -> Scenario {
    let scenario = Scenario::new().slots(1).used(used).client(client().insert(0).get(0));
    scenario.client(client().insert(1).get(1))
}

#[test]
fn inserters_of_one_slot_lose_their_connection() {
    for used in 0..=1 {
        passes(inserters(used).losses(1).sweeps(), 0);
    }
}

#[test]
fn inserters_of_one_slot_and_a_server_that_restarts() {
    for used in 0..=1 {
        passes(inserters(used).server_restarts(1), 1);
    }
}

#[test]
fn unknown_is_nothing_is_caught() {
    let scenario = start(true).losses(1).client(client().knows(0).exchange(0, "i0"));
    assert_caught_for_all(Mutant::UnknownIsNothing, scenario);
}

#[test]
fn former_clients_not_fenced_is_caught() {
    let scenario = Scenario::new().slots(1).used(1).server_restarts(1).client(client().insert(0));
    assert_caught_of_server(
        Mutant::FormerClientsNotFenced,
        scenario.client(client().insert(1).get(1)),
    );
}
