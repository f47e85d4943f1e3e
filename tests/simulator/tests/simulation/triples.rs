//! Three clients, where two are not enough to go wrong; two clients with several operations; and
//! lanes of one session.

use farside_simulator::{Scenario, client};

use crate::passes;

fn stored() -> Scenario {
    Scenario::new().stored(0)
}

#[test]
fn writers_beside_readers() {
    let scenario = stored().client(client().knows(0).put(0)).client(client().put(0));
    passes(scenario.client(client().knows(0).get(0).get(0)), 2);
    let scenario = stored().client(client().knows(0).put(0)).client(client().get(0).get(0));
    passes(scenario.client(client().knows(0).get(0)), None);
}

#[test]
fn conflicting_changes_of_one_key() {
    let delete = || client().delete(0);
    let scenario = stored().client(delete()).client(delete());
    passes(scenario.client(client().update(0)), None);
    let scenario = stored().client(client().put(0)).client(client().exchange(0, "i0"));
    passes(scenario.client(delete()), 1);
    let scenario = stored().client(client().put(0)).client(client().put(0));
    passes(scenario.client(client().get(0).exchange_seen(0)), 2);
    let exchange = || client().knows(0).exchange(0, "i0");
    passes(stored().client(exchange()).client(exchange()).client(exchange()), 2);
}

#[test]
fn two_and_three_inserters_of_one_key() {
    let insert = || client().insert(0);
    for (seed, used) in [(1, 0), (2, 0), (1, 1), (1, 3), (2, 3)] {
        let start = || Scenario::new().seed(seed).used(used);
        let scenario = start().client(insert()).client(insert());
        passes(scenario.client(client().get(0).get(0)), 1);
        let scenario = start().slots(3).client(insert()).client(insert());
        passes(scenario.client(insert()), 0);
        passes(start().client(client().put(0).delete(0)).client(client().put(0)), 2);
        let scenario = start().stored(0).client(client().delete(0));
        passes(scenario.client(insert()).client(insert()), 1);
    }
}

/// A slot that two keys use in turn, with hints and words READ at different moments (I5 to I7,
/// I12).
#[test]
fn one_slot_for_two_keys() {
    for (other, preemptions) in [
        (client().put(0), Some(3)),
        (client().delete(0), Some(3)),
        (client().get(0), None),
        (client().knows(0).put(0), Some(3)),
    ] {
        let scenario = stored().slots(1).used(1).client(other);
        passes(scenario.client(client().delete(0).insert(1).get(1)), preemptions);
    }
    for used in 0..=2 {
        let scenario = Scenario::new().seed(1).used(used).client(client().insert(0));
        passes(scenario.client(client().insert(1).delete(1).put(1).get(1)), 1);
    }
}

/// Key 4's window starts one row later, so the windows share one row only.
#[test]
fn overlapping_windows() {
    for used in [0, 9] {
        let scenario = Scenario::new().slots(9).used(used).client(client().insert(0));
        passes(scenario.client(client().insert(4).get(4)), 1);
    }
}

/// Lanes share the location cache and the free blocks, and nothing else.
#[test]
fn lanes_of_one_session() {
    let lanes = client().knows(0).put(0).lane().put(0).lane().get(0);
    passes(stored().client(lanes), 2);
    for used in 0..=2 {
        let lanes = client().insert(0).lane().insert(0).get(0);
        passes(Scenario::new().used(used).client(lanes), 2);
    }
    let lanes = client().knows(0).delete(0).lane().put(0).get(0);
    passes(stored().client(lanes).client(client().knows(0).get(0)), 1);
}

#[test]
#[ignore = "takes many minutes; run by make soak"]
fn inserters_with_more_preemptions() {
    let insert = || client().insert(0);
    for seed in [1, 2] {
        let start = || Scenario::new().seed(seed);
        let scenario = start().client(insert()).client(insert());
        passes(scenario.client(client().get(0).get(0)), 3);
        passes(start().slots(3).client(insert()).client(insert()).client(insert()), 2);
        let scenario = start().stored(0).client(client().delete(0));
        passes(scenario.client(insert()).client(insert()), 3);
        let scenario = start().stored(0).client(client().put(0));
        passes(scenario.client(client().exchange(0, "i0")).client(client().delete(0)), 3);
    }
}
