//! A shard that changes its region, while clients of the former one may still trust its server.
//! Guards against an operation that is executed, or a value that is read, where the shard no longer
//! is. Keys 0 and 1 move; key 2 is in a shard that stays.
//!
//! Then changes of two regions, one after the other, by clients that may die between the two. They
//! guard against a change that relies on a state that only the first region has.

use farside_simulator::{Mutant, Scenario, Script, TRUST_NS, Violation, client};

use crate::mutants::{
    BOUNDS, assert_caught, assert_caught_for_all, assert_caught_of_server, assert_fails,
};
use crate::{GRACE_NS, OPS, knowing, passes};

/// The owner may stand still when the shard is revoked, and answers one heartbeat after that. The
/// clock jumps to the end of the trust that clients have at the start.
fn moves() -> Scenario {
    Scenario::new().stored(0).moves(1, 1).jumps(1, &[TRUST_NS - 1])
}

/// The owner may stand still from the moment at which the shard is revoked.
fn moves_without_heartbeats() -> Scenario {
    Scenario::new().stored(0).moves(1, 0)
}

#[test]
fn a_change_beside_a_get() {
    let scenario = moves_without_heartbeats().client(client().knows(0).put(0));
    passes(scenario.client(client().knows(0).get(0)), None);
    for change in [client().delete(0), client().update(0), client().insert(1)] {
        passes(moves_without_heartbeats().client(change).client(client().get(0).get(1)), 0);
    }
}

#[test]
fn every_operation_alone() {
    for op in OPS {
        for known in [false, true] {
            passes(moves().client(knowing(known, client().op(op))), None);
        }
    }
}

#[test]
fn two_operations() {
    passes(moves().client(client().knows(0).get(0).get(0)), None);
    passes(moves().client(client().knows(0).get(0).put(0)), None);
    passes(moves().client(client().knows(0).put(0).get(0)), None);
    passes(moves().client(client().insert(1).get(1)), None);
}

#[test]
fn the_other_shard_goes_on() {
    let scenario =
        moves_without_heartbeats().stored(2).client(client().knows(0).knows(2).put(0).put(2));
    passes(scenario.clone().client(client().knows(2).get(2)), 1);
    passes(scenario.client(client().knows(2).get(2).get(0)), 0);
}

#[test]
fn a_death_during_the_move() {
    let scenario = moves_without_heartbeats().deaths(1).client(client().knows(0).put(0));
    passes(scenario.client(client().knows(0).get(0)), 0);
    passes(moves().deaths(1).client(client().knows(0).put(0).get(0)), None);
}

#[test]
fn clients_return_to_the_former_server() {
    let scenario = moves_without_heartbeats().reconnects(1).jumps(2, &[TRUST_NS]);
    passes(scenario.client(client().knows(0).put(0).get(0).get(0)), None);
}

#[test]
fn an_older_map_changes_nothing() {
    passes(moves().old_maps(1).client(client().knows(0).put(0).get(0)), None);
}

#[test]
fn answers_to_heartbeats_are_late() {
    passes(moves().late_answers().client(client().knows(0).put(0).get(0)), None);
}

/// The owner is told of a newer view, but cannot read the records. It answers for two seconds more.
fn moves_without_records() -> Scenario {
    moves().records_fail().jumps(2, &[TRUST_NS - 1]).client(client().knows(0).put(0))
}

#[test]
fn a_server_without_records_stops_by_itself() {
    passes(moves_without_records(), None);
}

#[test]
fn answer_uncounted_is_caught() {
    assert_caught_of_server(Mutant::AnswerUncounted, moves_without_records());
}

/// A client whose clock is slow by a sixteenth.
fn slow(script: Script) -> Scenario {
    let until = TRUST_NS / 15 * 16;
    let scenario = moves_without_heartbeats().jumps(1, &[until - GRACE_NS, until]);
    scenario.client(script.pace(15))
}

#[test]
fn clocks_are_slow_by_a_sixteenth() {
    passes(slow(client().knows(0).put(0)), None);
    passes(slow(client().get(0).put(0)), None);
}

/// A version is the address and generation of a block, and the next region has the same ones.
#[test]
fn a_version_counts_in_one_region_only() {
    let scenario = moves_without_heartbeats().client(client().knows(0).put(0).put(0));
    let scenario = scenario.client(client().get(0).exchange_seen(0));
    let failure = assert_fails(|| scenario.explore_deeper(BOUNDS));
    assert_eq!(failure.violation, Violation::NotLinearizable);
}

#[test]
fn trust_ignored_is_caught() {
    let scenario = moves_without_heartbeats().client(client().knows(0).get(0).get(0));
    let failure = assert_caught_for_all(Mutant::TrustIgnored, scenario);
    assert_eq!(failure.violation, Violation::NotLinearizable);
    let scenario = moves_without_heartbeats().client(client().knows(0).put(0).put(0));
    assert_caught_for_all(Mutant::TrustIgnored, scenario);
}

#[test]
fn trust_from_answer_is_caught() {
    let scenario = moves().late_answers().client(client().knows(0).get(0).get(0));
    assert_caught_for_all(Mutant::TrustFromAnswer, scenario);
}

#[test]
fn reassigned_at_once_is_caught() {
    let scenario = moves_without_heartbeats().client(client().knows(0).get(0).get(0));
    assert_caught_of_server(Mutant::ReassignedAtOnce, scenario);
    let scenario = moves_without_heartbeats().client(client().knows(0).put(0));
    assert_caught_of_server(Mutant::ReassignedAtOnce, scenario);
}

#[test]
fn distrust_without_margin_is_caught() {
    assert_caught_of_server(Mutant::DistrustWithoutMargin, slow(client().knows(0).put(0)));
}

#[test]
fn unconfirmed_answers_is_caught() {
    let scenario = moves().client(client().knows(0).get(0).get(0));
    assert_caught_of_server(Mutant::UnconfirmedAnswers, scenario);
}

/// The chain of a PUT is executed later than L after its post.
#[test]
fn queue_uncounted_is_caught() {
    let scenario = moves_without_heartbeats().client(client().knows(0).put(0));
    assert_caught_for_all(Mutant::QueueUncounted, scenario);
}

#[test]
fn patience_without_end_is_caught() {
    let scenario = |mutant| {
        let scenario = moves_without_heartbeats().client(client().knows(0).get(0).mutant(mutant));
        scenario.client(client().knows(0).put(0))
    };
    assert_caught(scenario(Some(Mutant::PatienceWithoutEnd)), scenario(None));
}

#[test]
fn older_view_taken_is_caught() {
    let scenario = moves().old_maps(1).client(client().knows(0).get(0).get(0));
    assert_caught_for_all(Mutant::OlderViewTaken, scenario);
}

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
