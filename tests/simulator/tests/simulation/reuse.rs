//! Blocks that are reused after GRACE, while other clients have cached their former content.

use farside_simulator::{Mutant, Scenario, client};

use crate::passes;

#[test]
fn a_block_is_used_again_for_its_own_key() {
    let reuses_block = || client().blocks(1).knows(0).put(0).put(0);
    let start = |name: &str| Scenario::new(name).stored(0);
    let readers = client().knows(0).get(0).get(0);
    passes(
        start("GET hit, GET hit | PUT, PUT in two blocks").client(readers).client(reuses_block()),
        2,
    );
    let reader = client().get(0).get(0);
    passes(
        start("GET miss, GET hit | PUT, PUT in two blocks").client(reader).client(reuses_block()),
        2,
    );
    let late = client().knows(0).put(0);
    passes(start("late PUT hit | PUT, PUT in two blocks").client(late).client(reuses_block()), 3);
}

#[test]
fn a_block_is_used_again_for_another_key() {
    let replaces_key = || client().blocks(0).knows(0).delete(0).insert(1).get(1);
    let start = |name: &str| Scenario::new(name).slots(1).stored(0);
    let reader = client().knows(0).get(0);
    passes(
        start("GET hit k0 | DELETE k0, INSERT k1 in its block")
            .client(reader)
            .client(replaces_key()),
        3,
    );
    let late = client().knows(0).put(0);
    passes(start("late PUT hit k0 | DELETE k0, INSERT k1").client(late).client(replaces_key()), 2);
    let late = client().knows(0).delete(0);
    passes(
        start("late DELETE hit k0 | DELETE k0, INSERT k1").client(late).client(replaces_key()),
        3,
    );
    let late = client().put(0);
    passes(start("late PUT miss k0 | DELETE k0, INSERT k1").client(late).client(replaces_key()), 2);
}

/// The protocol does not depend on the checksum, which is only a safety net (I3).
#[test]
fn a_reader_without_a_checksum() {
    let reuses_block = || client().blocks(1).knows(0).put(0).put(0);
    let start = |name: &str| Scenario::new(name).stored(0);
    let reader = client().knows(0).get(0).get(0).mutant(Mutant::NoChecksum);
    passes(
        start("GET hit, no checksum | PUT, PUT in two blocks")
            .client(reader)
            .client(reuses_block()),
        2,
    );
    let reader = client().get(0).get(0).mutant(Mutant::NoChecksum);
    passes(start("GET miss, no checksum | PUT, PUT").client(reader).client(reuses_block()), 2);
}

/// The block is linked although marked: its writer died after the mark, or a mark came late. A GET
/// then takes two verbs.
#[test]
fn a_linked_block_with_a_mark() {
    let start = |name: &str| Scenario::new(name).marked(0);
    let reader = || client().knows(0).get(0).get(0);
    passes(
        start("GET, GET of a marked block | PUT").client(reader()).client(client().put(0)),
        None,
    );
    let reuses_block = client().blocks(1).knows(0).put(0).put(0);
    passes(start("GET, GET of a marked block | PUT, PUT").client(reader()).client(reuses_block), 2);
    let replaces_key = client().blocks(0).delete(0).insert(1).get(1);
    let scenario = start("GET of a marked block | DELETE, INSERT k1").slots(1);
    passes(scenario.client(client().knows(0).get(0)).client(replaces_key), 2);
}
