//! Three clients, where two are not enough to go wrong; two clients with several operations; and
//! lanes of one session.

use farside_simulator::{Scenario, client};

use crate::passes;

#[test]
fn writers_beside_readers() {
    let scenario = Scenario::new("PUT hit | PUT miss | GET hit, GET hit").stored(0);
    let scenario = scenario.client(client().knows(0).put(0)).client(client().put(0));
    passes(scenario.client(client().knows(0).get(0).get(0)), 2);
    let scenario = Scenario::new("PUT hit | GET miss, GET hit | GET hit").stored(0);
    let scenario = scenario.client(client().knows(0).put(0)).client(client().get(0).get(0));
    passes(scenario.client(client().knows(0).get(0)), None);
}

#[test]
fn conflicting_changes_of_one_key() {
    let start = |name: &str| Scenario::new(name).stored(0);
    let delete = || client().delete(0);
    let scenario = start("DELETE | DELETE | UPDATE").client(delete()).client(delete());
    passes(scenario.client(client().update(0)), None);
    let scenario = start("PUT | exchange | DELETE").client(client().put(0));
    passes(scenario.client(client().exchange(0, "i0")).client(delete()), 1);
    let scenario = start("PUT | PUT | exchange of what was seen");
    let seen = client().get(0).exchange_seen(0);
    passes(scenario.client(client().put(0)).client(client().put(0)).client(seen), 2);
    let scenario = start("exchange | exchange | exchange");
    let exchange = || client().knows(0).exchange(0, "i0");
    passes(scenario.client(exchange()).client(exchange()).client(exchange()), 2);
}

#[test]
fn two_and_three_inserters_of_one_key() {
    let insert = || client().insert(0);
    for (seed, used) in [(1, 0), (2, 0), (1, 1), (1, 3), (2, 3)] {
        let start = |name: &str| {
            Scenario::new(format!("{name}, seed={seed}, used={used}")).seed(seed).used(used)
        };
        let scenario = start("INSERT | INSERT | GET, GET");
        passes(scenario.client(insert()).client(insert()).client(client().get(0).get(0)), 1);
        let scenario = start("INSERT | INSERT | INSERT").slots(3);
        passes(scenario.client(insert()).client(insert()).client(insert()), 0);
        let scenario = start("PUT, DELETE | PUT");
        passes(scenario.client(client().put(0).delete(0)).client(client().put(0)), 2);
        let scenario = start("DELETE | INSERT | INSERT").stored(0);
        passes(scenario.client(client().delete(0)).client(insert()).client(insert()), 1);
    }
}

/// A slot that two keys use in turn, with hints and words READ at different moments (I5 to I7,
/// I12).
#[test]
fn one_slot_for_two_keys() {
    let start = |name: &str| Scenario::new(name).slots(1).used(1).stored(0);
    let replaces_key = || client().delete(0).insert(1).get(1);
    passes(
        start("PUT k0 | DELETE k0, INSERT k1").client(client().put(0)).client(replaces_key()),
        3,
    );
    passes(
        start("DELETE k0 | DELETE k0, INSERT k1").client(client().delete(0)).client(replaces_key()),
        3,
    );
    passes(
        start("GET k0 | DELETE k0, INSERT k1").client(client().get(0)).client(replaces_key()),
        None,
    );
    let cached = client().knows(0).put(0);
    passes(start("PUT hit k0 | DELETE k0, INSERT k1").client(cached).client(replaces_key()), 3);
    let other = client().insert(1).delete(1).put(1).get(1);
    for used in 0..=2 {
        let name = format!("INSERT k0 | INSERT k1, DELETE k1, PUT k1, GET k1, used={used}");
        let scenario = Scenario::new(name).seed(1).used(used).client(client().insert(0));
        passes(scenario.client(other.clone()), 1);
    }
}

/// Key 4's window starts one row later, so the windows share one row only.
#[test]
fn overlapping_windows() {
    for used in [0, 9] {
        let scenario = Scenario::new(format!("INSERT k0 | INSERT k4, GET k4, used={used}"));
        let scenario = scenario.slots(9).used(used).client(client().insert(0));
        passes(scenario.client(client().insert(4).get(4)), 1);
    }
}

/// Lanes share the location cache and the free blocks, and nothing else.
#[test]
fn lanes_of_one_session() {
    let lanes = client().knows(0).put(0).lane().put(0).lane().get(0);
    passes(Scenario::new("PUT & PUT & GET of one session").stored(0).client(lanes), 2);
    for used in 0..=2 {
        let lanes = client().insert(0).lane().insert(0).get(0);
        let scenario = Scenario::new(format!("INSERT & INSERT of one session, used={used}"));
        passes(scenario.used(used).client(lanes), 2);
    }
    let lanes = client().knows(0).delete(0).lane().put(0).get(0);
    let scenario = Scenario::new("DELETE & PUT of one session | GET hit").stored(0).client(lanes);
    passes(scenario.client(client().knows(0).get(0)), 1);
}

#[test]
#[ignore = "takes many minutes"]
fn inserters_at_length() {
    let insert = || client().insert(0);
    for seed in [1, 2] {
        let scenario = Scenario::new("INSERT | INSERT | GET, GET").seed(seed);
        passes(scenario.client(insert()).client(insert()).client(client().get(0).get(0)), 3);
        let scenario = Scenario::new("INSERT | INSERT | INSERT").slots(3).seed(seed);
        passes(scenario.client(insert()).client(insert()).client(insert()), 2);
        let scenario = Scenario::new("DELETE | INSERT | INSERT").stored(0).seed(seed);
        passes(scenario.client(client().delete(0)).client(insert()).client(insert()), 3);
        let scenario = Scenario::new("PUT | exchange | DELETE").stored(0).seed(seed);
        let scenario = scenario.client(client().put(0)).client(client().exchange(0, "i0"));
        passes(scenario.client(client().delete(0)), 3);
    }
}
