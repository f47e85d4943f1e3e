//! Blocks that are reused after GRACE, while other clients have cached their former content.

use farside_simulator::{Mutant, Scenario, client};

use crate::mutants::reuses_block;
use crate::{knowing, passes};

#[test]
fn a_block_is_used_again_for_its_own_key() {
    for (other, preemptions) in [
        (client().knows(0).get(0).get(0), 2),
        (client().get(0).get(0), 2),
        (client().knows(0).put(0), 3),
    ] {
        let scenario = Scenario::new().stored(0).client(other);
        passes(scenario.client(reuses_block()), preemptions);
    }
}

#[test]
fn a_block_is_used_again_for_another_key() {
    for (other, preemptions) in [
        (client().knows(0).get(0), 3),
        (client().knows(0).put(0), 2),
        (client().knows(0).delete(0), 3),
        (client().put(0), 2),
    ] {
        let replaces_key = client().blocks(0).knows(0).delete(0).insert(1).get(1);
        let scenario = Scenario::new().slots(1).stored(0).client(other);
        passes(scenario.client(replaces_key), preemptions);
    }
}

/// The protocol does not depend on the checksum, which is only a safety net (I3).
#[test]
fn a_reader_without_a_checksum() {
    for known in [true, false] {
        let reader = client().get(0).get(0).mutant(Mutant::NoChecksum);
        let scenario = Scenario::new().stored(0).client(knowing(known, reader));
        passes(scenario.client(reuses_block()), 2);
    }
}

/// The block is linked although marked: its writer died after the mark, or a mark came late. A GET
/// then takes two verbs.
#[test]
fn a_linked_block_with_a_mark() {
    let reader = || Scenario::new().marked(0).client(client().knows(0).get(0).get(0));
    passes(reader().client(client().put(0)), None);
    passes(reader().client(reuses_block()), 2);
    let scenario = Scenario::new().marked(0).slots(1).client(client().knows(0).get(0));
    passes(scenario.client(client().blocks(0).delete(0).insert(1).get(1)), 2);
}
