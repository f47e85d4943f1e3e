//! An operation whose connection is lost before it takes effect is run again, from the key and the
//! value that its lane has. However often it is broken off, and at whichever verb: the value that
//! it leaves, and its answer, are those of one run (I28). It must not take effect twice, either.

use farside_simulator::{Mutant, Op, Scenario, Violation, client};

use crate::mutants::assert_caught_for_all;
use crate::{OPS, passes};

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
