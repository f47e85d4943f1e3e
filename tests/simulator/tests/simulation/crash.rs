//! Clients that die anywhere. Nothing has to be repaired before others go on.

use farside_simulator::{Op, Scenario, client};

use crate::passes;

#[test]
fn one_of_two_dies() {
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

/// A PENDING word that no client will ever decide about does not keep others from inserting.
#[test]
fn an_inserter_dies_and_two_more_come() {
    for used in 0..=2 {
        let name = format!("INSERT dies | INSERT, DELETE | GET, used={used}");
        let scenario = Scenario::new(name).deaths(1).seed(2).used(used);
        let scenario = scenario.client(client().insert(0)).client(client().insert(0).delete(0));
        passes(scenario.client(client().get(0)), 0);
    }
}

/// A client that knew the key reads on after its writer died between mark and compare-and-swap.
#[test]
fn a_writer_dies_and_readers_read_on() {
    let scenario = Scenario::new("PUT dies | GET hit, GET, GET | PUT").stored(0).deaths(1);
    let reader = client().knows(0).get(0).get(0).get(0);
    let scenario = scenario.client(client().knows(0).put(0)).client(reader);
    passes(scenario.client(client().knows(0).put(0)), 2);
}
