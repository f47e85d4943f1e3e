//! INSERT into a window without a free slot. It requests a split of the subtable, or fails, unless
//! a slot becomes free meanwhile.

use farside_simulator::{Op, Scenario, client};

use crate::passes;

#[test]
fn an_insert_into_a_full_window() {
    for op in [Op::Delete(0), Op::Put(0), Op::Insert(1)] {
        let scenario = Scenario::new(format!("INSERT k1, GET k1 | {op:?}, GET k1, full window"));
        let scenario = scenario.slots(1).stored(0).client(client().insert(1).get(1));
        passes(scenario.client(client().op(op).get(1)), 1);
    }
    let scenario = Scenario::new("INSERT k2 | INSERT k3 | DELETE k0, full window").slots(2);
    let scenario = scenario.stored(0).stored(1).client(client().insert(2).get(3));
    passes(scenario.client(client().insert(3).get(2)).client(client().delete(0)), 0);
}

#[test]
fn an_insert_into_a_full_window_that_is_split() {
    for op in [Op::Get(0), Op::Delete(0)] {
        let name = format!("INSERT k2, GET k2 | {op:?} | split of the full window");
        let scenario = Scenario::new(name).slots(1).stored(0).splits(0, 1);
        passes(scenario.client(client().insert(2).get(2)).client(client().op(op)), 0);
    }
}
