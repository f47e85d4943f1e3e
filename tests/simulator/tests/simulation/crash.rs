//! Clients that die at any moment. Other clients continue without any repair.

use farside_simulator::{Op, Scenario, client};

use crate::passes;

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
