//! One future that changes two regions in turn, with a death between. Guards against a change that
//! relies on what only the first region has.

use farside_simulator::{Mutant, Scenario, Script, client};

use crate::mutants::{assert_caught_for_all, named};
use crate::passes;

/// Clients that raise both counts, and so many deaths.
fn raises(scenario: Scenario, deaths: u32) -> Scenario {
    let twice = || client().raises_both().raises_both();
    scenario.client(twice()).client(twice()).deaths(deaths)
}

#[test]
fn a_death_between_two_regions_leaves_one_step() {
    passes(raises(Scenario::new("two regions"), 0), None);
    passes(raises(Scenario::new("two regions, a death"), 1), None);
    let three = (0..3).map(|_| client().raises_both());
    let three = three.fold(Scenario::new("two regions, three clients, a death"), Scenario::client);
    passes(three.deaths(1), None);
}

/// The step of a client that died between the two is taken for a change of both.
#[test]
fn head_believed_is_caught() {
    let once = |script: Script| script.raises_both();
    let scenario = named(Mutant::HeadBelieved).client(once(client())).client(once(client()));
    assert_caught_for_all(Mutant::HeadBelieved, scenario.deaths(1));
}
