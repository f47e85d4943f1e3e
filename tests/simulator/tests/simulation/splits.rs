//! A subtable is split beside clients: every entry moves, and the directory doubles. Keys 0, 1 and
//! 3 move to one new subtable, key 2 to the other.

use farside_simulator::{Op, Scenario, client};

use crate::{GRACE_NS, OPS, passes};

fn split(name: impl Into<String>) -> Scenario {
    Scenario::new(format!("{} | split", name.into())).splits(0, 1).slots(1)
}

/// Each operation, on a stored key that is cached or not, and on an absent key. The same client
/// then reads the key.
fn every_operation(preemptions: u8, restarts: u32) {
    for op in OPS {
        for known in [false, true] {
            let script = client().op(op).get(0);
            let script = if known { script.knows(0) } else { script };
            let scenario = split(format!("{op:?}, known={known}")).stored(0).restarts(restarts);
            passes(scenario.client(script), preemptions);
        }
        for used in 0..=1 {
            let scenario = split(format!("{op:?}, absent, used={used}")).used(used);
            let scenario = scenario.restarts(restarts).client(client().op(op).get(0));
            passes(scenario, preemptions.min(1));
        }
    }
}

#[test]
fn every_operation_beside_a_split() {
    every_operation(1, 0);
}

#[test]
fn every_operation_beside_a_split_that_is_interrupted_and_continued() {
    every_operation(0, 1);
}

/// A client uses a new subtable. Then the server is killed before the whole directory leads there,
/// and continues the split. The subtable keeps its entries.
#[test]
fn a_continued_split_does_not_fill_a_subtable_again() {
    for key in [0, 2] {
        let script = client().get(key).insert(key).get(key);
        let scenario = split(format!("GET k{key}, INSERT k{key}, killed")).restarts(1).chains(64);
        passes(scenario.stored(key).client(script), 0);
    }
}

#[test]
#[ignore = "takes minutes"]
fn every_operation_beside_a_split_with_more_preemptions() {
    every_operation(3, 0);
    every_operation(1, 1);
}

/// Two clients change one key, in any order.
#[test]
fn two_writers_beside_a_split() {
    let ops = [Op::Put(0), Op::Update(0), Op::Delete(0)];
    for first in ops {
        let scenario = split(format!("{first:?} | PUT hit, GET")).stored(0);
        let second = client().knows(0).put(0).get(0);
        passes(scenario.client(client().op(first)).client(second), 0);
    }
    let scenario = split("PUT hit | DELETE hit").stored(0);
    let delete = client().knows(0).delete(0);
    passes(scenario.client(client().knows(0).put(0)).client(delete), 1);
}

/// Two reads of a client agree with the order of another's write.
#[test]
fn readers_and_a_writer_beside_a_split() {
    let scenario = split("GET, GET | PUT").stored(0);
    passes(scenario.client(client().get(0).get(0)).client(client().put(0)), 1);
    let scenario = split("GET hit, GET | DELETE").stored(0);
    passes(scenario.client(client().knows(0).get(0).get(0)).client(client().delete(0)), 1);
}

/// One key moves to each new subtable, one after the other or at the same time. In the second case
/// the directory does not double.
#[test]
fn one_key_moves_to_each_new_subtable() {
    let start = |name: &str, depth, lanes| {
        Scenario::new(format!("{name} | split in {lanes} lanes from depth {depth}"))
            .splits(depth, lanes)
            .stored(0)
            .stored(2)
    };
    for (depth, lanes) in [(0, 1), (1, 2)] {
        let scenario = start("GET k0, GET k2", depth, lanes);
        passes(scenario.client(client().get(0).get(2)), 0);
        let scenario = start("PUT k0, DELETE k2", depth, lanes);
        passes(scenario.client(client().knows(0).knows(2).put(0).delete(2)), 0);
    }
}

#[test]
fn inserters_beside_a_split() {
    for used in 0..=1 {
        for other in [0, 2] {
            let scenario = split(format!("INSERT k0 | INSERT k{other}, used={used}")).used(used);
            passes(scenario.client(client().insert(0)).client(client().insert(other)), 0);
        }
    }
    let scenario = split("DELETE k0 | INSERT k0, GET").stored(0);
    passes(scenario.client(client().delete(0)).client(client().insert(0).get(0)), 0);
}

/// A client that sleeps through the split, for longer than GRACE, has an old directory copy.
#[test]
fn a_sleep_through_a_split() {
    for op in OPS {
        let scenario = split(format!("{op:?}, asleep")).stored(0).jumps(1, &[GRACE_NS]);
        passes(scenario.client(client().op(op).get(0)), 0);
    }
    for used in 0..=1 {
        let scenario = split(format!("INSERT, asleep, used={used}")).used(used);
        passes(scenario.jumps(1, &[GRACE_NS]).client(client().insert(0).get(0)), 0);
    }
}

/// A client that dies at any moment does not keep a split from completing.
#[test]
fn a_client_dies_beside_a_split() {
    for op in [Op::Put(0), Op::Delete(0), Op::Exchange(0, "i0")] {
        let scenario = split(format!("{op:?} dies | GET")).stored(0).deaths(1);
        passes(scenario.client(client().op(op)).client(client().get(0)), 0);
    }
    for used in 0..=1 {
        let scenario = split(format!("INSERT dies | INSERT, used={used}")).used(used);
        let scenario = scenario.chains(8).deaths(1).client(client().insert(0));
        passes(scenario.client(client().insert(0)), 0);
    }
}
