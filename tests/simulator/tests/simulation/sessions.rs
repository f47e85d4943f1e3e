//! Sessions of one client, which share a location cache, beside other clients. One session relies
//! on what another has cached, proved or removed.

use farside_simulator::{Mutant, Op, Scenario, Violation, client};

use crate::mutants::assert_caught;
use crate::{GRACE_NS, OPS, passes};

/// Every operation beside every other of the same client. The second session then reads the key.
#[test]
fn every_pair_of_two_sessions() {
    for first in OPS {
        for second in OPS {
            let scenario = Scenario::new().stored(0).client(client().knows(0).op(first));
            passes(scenario.client(client().op(second).get(0)).shares_locations(), 1);
        }
    }
}

/// Another client changes the key meanwhile.
#[test]
fn two_sessions_beside_another_client() {
    for op in [Op::Get(0), Op::Put(0), Op::Delete(0)] {
        let scenario = Scenario::new().stored(0).client(client().shares().knows(0).op(op));
        let readers = scenario.clone().client(client().shares().get(0).get(0));
        passes(readers.client(client().put(0)), 1);
        let writers = scenario.slots(1).client(client().shares().put(0));
        passes(writers.client(client().knows(0).delete(0).insert(1)), 0);
    }
}

/// A block that one session unlinks becomes the next value, while the other one sleeps.
#[test]
fn two_sessions_and_a_block_that_is_reused() {
    for op in [Op::Get(0), Op::Put(0), Op::Delete(0)] {
        let reuses_block = client().blocks(1).knows(0).put(0).put(0);
        let scenario = Scenario::new().stored(0).jumps(1, &[1_300_000, GRACE_NS]);
        let scenario = scenario.client(client().op(op).get(0)).client(reuses_block);
        passes(scenario.shares_locations(), 0);
    }
}

/// A word that another session cached is the key's, but may be older than this PUT.
#[test]
fn absorbed_unread_is_caught() {
    let mutant = Mutant::AbsorbedUnread(0);
    let start = || Scenario::new().stored(0).slots(1).used(1).client(client().put(0));
    let sessions = |mutant| {
        let scenario = start().client(client().shares().knows(0).put(0).mutant(mutant));
        scenario.client(client().shares().get(0).get(0))
    };
    let failure = assert_caught(sessions(Some(mutant)), sessions(None));
    assert_eq!(failure.violation, Violation::NotLinearizable);
    // Without a shared cache the mutant does no harm.
    let alone = start().client(client().knows(0).put(0).mutant(mutant));
    passes(alone.client(client().get(0).get(0)), 2);
}
