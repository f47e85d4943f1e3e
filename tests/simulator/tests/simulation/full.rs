//! INSERT into a window without a free slot. It requests a split of the subtable, or fails, unless
//! a slot becomes free meanwhile.

use farside_simulator::{Op, Scenario, client};

use crate::passes;

#[test]
fn an_insert_into_a_full_window() {
    for op in [Op::Delete(0), Op::Put(0), Op::Insert(1)] {
        let scenario = Scenario::new().slots(1).stored(0).client(client().insert(1).get(1));
        passes(scenario.client(client().op(op).get(1)), 1);
    }
    let scenario = Scenario::new().stored(0).stored(1).client(client().insert(2).get(3));
    passes(scenario.client(client().insert(3).get(2)).client(client().delete(0)), 0);
}

#[test]
fn an_insert_into_a_full_window_that_is_split() {
    for op in [Op::Get(0), Op::Delete(0)] {
        let scenario = Scenario::new().slots(1).stored(0).splits(0, 1);
        passes(scenario.client(client().insert(2).get(2)).client(client().op(op)), 0);
    }
}
