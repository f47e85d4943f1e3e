//! Clients that die at any moment, connections that break, and servers that restart. None, some or
//! all of the verbs in flight are executed, without a completion. An operation that may have taken
//! effect is `Indeterminate`. A new client repeats all others, while the server clears the
//! unfinished inserts of the old one. Until it fences a client, that client's verbs in flight may
//! still be executed.
//!
//! An operation whose connection is lost before it takes effect is run again, from the key and the
//! value that its lane has. However often it is broken off, and at whichever verb: the value that
//! it leaves, and its answer, are those of one run (I28). It must not take effect twice, either.

use farside_simulator::{Mutant, Op, Scenario, Violation, client};

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

#[test]
fn one_of_two_clients_dies() {
    for op in [Op::Put(0), Op::Insert(0), Op::Delete(0), Op::Exchange(0, "i0")] {
        let absent = (0..=2).map(|used| Scenario::new().used(used).seed(2));
        for scenario in absent.chain([Scenario::new().stored(0)]) {
            let scenario = scenario.deaths(1).client(client().op(op));
            passes(scenario.client(client().put(0).get(0)), 1);
        }
    }
}

/// A PENDING word of a dead client does not keep other clients from inserting the key.
#[test]
fn others_insert_the_key_of_an_inserter_that_dies() {
    for used in 0..=2 {
        let scenario = Scenario::new().deaths(1).seed(2).used(used);
        let scenario = scenario.client(client().insert(0)).client(client().insert(0).delete(0));
        passes(scenario.client(client().get(0)), 0);
    }
}

/// A client that has cached the key can read it after its writer died between mark and
/// compare-and-swap.
#[test]
fn a_writer_dies_and_readers_continue() {
    let writer = || client().knows(0).put(0);
    let reader = client().knows(0).get(0).get(0).get(0);
    let scenario = Scenario::new().stored(0).deaths(1).client(writer()).client(reader);
    passes(scenario.client(writer()), 2);
}

/// Every operation that depends on the present value, on one key.
const MODIFICATIONS: [Op; 8] = [
    Op::Increment(0),
    Op::Append(0),
    Op::Take(0),
    Op::Touch(0),
    Op::PutKeepTtl(0),
    Op::GetOrInsert(0),
    Op::ExchangeSeen(0),
    Op::DeleteSeen(0),
];

/// Every operation, on a key that is absent, and on one that is present. Digits are appended to
/// numbers only.
fn scenarios() -> impl Iterator<Item = Scenario> {
    OPS.into_iter().chain(MODIFICATIONS).flat_map(|op| {
        let script = client().get(0).op(op).get(0);
        let present = match op {
            Op::Increment(0) | Op::Append(0) => Scenario::new().client(script.clone().op(op)),
            _ => Scenario::new().stored(0).client(script.clone()),
        };
        [Scenario::new().client(script), present]
    })
}

/// The server restarts twice, at any moments. An operation goes on with what it has READ before.
/// Its next chain is refused, so the operation knows that it was not executed.
#[test]
fn every_operation_broken_off_equals_one_run() {
    for scenario in scenarios() {
        passes(scenario.clone().server_restarts(2), None);
        passes(scenario.losses(1).server_restarts(1), 0);
    }
}

#[test]
#[ignore = "takes minutes; run by make soak"]
fn every_operation_broken_off_beside_sweeps() {
    for scenario in scenarios().map(Scenario::sweeps) {
        passes(scenario.clone().losses(1).server_restarts(1), None);
        passes(scenario.losses(2), 1);
    }
}

/// Several chains WRITE a value with extents, and another one links them.
#[test]
fn operations_on_long_values_broken_off_equal_one_run() {
    let changes = [
        Op::PutLarge(0),
        Op::Put(0),
        Op::Update(0),
        Op::Take(0),
        Op::Touch(0),
        Op::Delete(0),
        Op::Exchange(0, "i0"),
    ];
    for op in changes {
        let scenario = Scenario::new().extents().client(client().put_large(0).op(op).get(0));
        passes(scenario.clone().server_restarts(1), None);
        passes(scenario.losses(1), None);
    }
}

/// Another client takes the value, possibly between two runs.
#[test]
fn modifications_broken_off_beside_each_other() {
    for op in [Op::Append(0), Op::Increment(0), Op::Touch(0)] {
        let script = client().append(0).op(op);
        let scenario = Scenario::new().server_restarts(1).client(script);
        passes(scenario.client(client().op(Op::Take(0))), 0);
    }
}

/// The shard changes its region between two runs. Its keys are absent afterwards.
#[test]
fn modifications_broken_off_go_to_the_next_region() {
    for op in [Op::Append(0), Op::Increment(0)] {
        let script = client().append(0).op(op).get(0);
        passes(Scenario::new().moves(1, 0).client(script), None);
    }
}

/// The second run appends the beginning of the present value.
#[test]
fn input_overwritten_is_caught() {
    let scenario = Scenario::new().server_restarts(1).client(client().append(0).append(0).get(0));
    let failure = assert_caught_for_all(Mutant::InputOverwritten, scenario);
    assert_eq!(failure.violation, Violation::NotLinearizable);
}

/// One client dies, at any moment, and is swept.
fn dies() -> Scenario {
    Scenario::new().deaths(1).sweeps()
}

fn an_inserter_dies(op: Op, slots: usize, used: usize) -> Scenario {
    let scenario = dies().slots(slots).used(used).seed(2);
    scenario.client(client().insert(0)).client(client().op(op).get(0))
}

#[test]
fn an_inserter_dies_and_is_swept() {
    for op in [Op::Get(0), Op::Put(0), Op::Insert(0), Op::Delete(0)] {
        for used in 0..=1 {
            passes(an_inserter_dies(op, 1, used), 0);
        }
    }
    for used in 0..=2 {
        passes(an_inserter_dies(Op::Insert(0), 2, used), 0);
    }
}

#[test]
#[ignore = "takes minutes; run by make soak"]
fn an_inserter_dies_and_is_swept_with_more_preemptions() {
    for op in [Op::Get(0), Op::Put(0), Op::Insert(0), Op::Delete(0)] {
        for used in 0..=2 {
            passes(an_inserter_dies(op, 2, used), 2);
        }
    }
}

/// Two clients insert different keys, and only one slot is left.
fn two_in_a_slot(used: usize) -> Scenario {
    dies().slots(1).used(used).client(client().insert(0)).client(client().insert(1).get(1))
}

#[test]
fn another_key_gets_the_slot_of_a_dead_inserter() {
    for used in 0..=1 {
        passes(two_in_a_slot(used), 1);
    }
}

#[test]
fn a_writer_dies_and_is_swept() {
    for op in [Op::Put(0), Op::Delete(0), Op::Exchange(0, "i0")] {
        let scenario = dies().stored(0).client(client().op(op));
        passes(scenario.client(client().knows(0).get(0).put(0)), 0);
    }
}

#[test]
fn unfenced_is_caught() {
    assert_caught_of_server(Mutant::Unfenced, two_in_a_slot(1));
}

#[test]
fn sweeps_the_living_is_caught() {
    assert_caught_of_server(Mutant::SweepsTheLiving, two_in_a_slot(1));
}

#[test]
fn hint_after_clear_is_caught() {
    assert_caught_of_server(Mutant::HintAfterClear, two_in_a_slot(1));
}
