//! Changes of two regions, one after the other, by clients that may die between the two. Guards
//! against a change that relies on a state that only the first region has.

use farside_simulator::{Mutant, Scenario, client};

use crate::mutants::assert_caught_for_all;
use crate::passes;

/// `count` clients, each of which raises both counts once.
fn clients(count: usize) -> Scenario {
    (0..count).map(|_| client().raises_both()).fold(Scenario::new(), Scenario::client)
}

#[test]
fn a_death_between_two_regions_leaves_one_step() {
    for deaths in [0, 1] {
        let twice = || client().raises_both().raises_both();
        passes(Scenario::new().client(twice()).client(twice()).deaths(deaths), None);
    }
    passes(clients(3).deaths(1), None);
}

/// The mutant takes the step of a client that died between the two regions for a change of both.
#[test]
fn head_believed_is_caught() {
    assert_caught_for_all(Mutant::HeadBelieved, clients(2).deaths(1));
}
