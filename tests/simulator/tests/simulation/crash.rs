//! Clients that die at any moment. Other clients continue without any repair.

use farside_simulator::{Op, Scenario, client};

use crate::passes;

#[test]
fn one_of_two_clients_dies() {
    let ops = [Op::Put(0), Op::Insert(0), Op::Delete(0), Op::Exchange(0, "i0")];
    for op in ops {
        for (stored, used) in [(false, 0), (false, 1), (false, 2), (true, 0)] {
            let name = format!("{op:?} dies, stored={stored}, used={used} | PUT, GET");
            let scenario = Scenario::new(name).used(used);
            let scenario = if stored { scenario.stored(0) } else { scenario.seed(2) };
            let scenario = scenario.deaths(1).client(client().op(op));
            passes(scenario.client(client().put(0).get(0)), 1);
        }
    }
}

/// A PENDING word of a dead client does not keep other clients from inserting the key.
#[test]
fn others_insert_the_key_of_an_inserter_that_dies() {
    for used in 0..=2 {
        let name = format!("INSERT dies | INSERT, DELETE | GET, used={used}");
        let scenario = Scenario::new(name).deaths(1).seed(2).used(used);
        let scenario = scenario.client(client().insert(0)).client(client().insert(0).delete(0));
        passes(scenario.client(client().get(0)), 0);
    }
}

/// A client that has cached the key can read it after its writer died between mark and
/// compare-and-swap.
#[test]
fn a_writer_dies_and_readers_continue() {
    let scenario = Scenario::new("PUT dies | GET hit, GET, GET | PUT").stored(0).deaths(1);
    let reader = client().knows(0).get(0).get(0).get(0);
    let scenario = scenario.client(client().knows(0).put(0)).client(reader);
    passes(scenario.client(client().knows(0).put(0)), 2);
}
