//! Sessions of one client, which share a location cache, beside others: what one of them learns,
//! proves or forgets the next one goes by.

use farside_simulator::{Mutant, Op, Scenario, Violation, client};

use crate::twins::{assert_caught, name};
use crate::{GRACE_NS, OPS, passes};

/// Every operation beside every other of the same client; the second one looks afterwards.
#[test]
fn every_pair_of_two_sessions() {
    for first in OPS {
        for second in OPS {
            let scenario = Scenario::new(format!("{first:?} | {second:?}, GET")).stored(0);
            let scenario = scenario.client(client().knows(0).op(first));
            let scenario = scenario.client(client().op(second).get(0));
            passes(scenario.shares_locations(), 1);
        }
    }
}

/// Another client changes the key meanwhile.
#[test]
fn two_sessions_beside_another_client() {
    for op in [Op::Get(0), Op::Put(0), Op::Delete(0)] {
        let scenario = Scenario::new(format!("{op:?} hit & GET, GET share locations | PUT"));
        let scenario = scenario.stored(0).client(client().shares().knows(0).op(op));
        let scenario = scenario.client(client().shares().get(0).get(0));
        passes(scenario.client(client().put(0)), 1);
        let scenario = Scenario::new(format!("{op:?} hit & PUT share locations | DELETE, INSERT"));
        let scenario = scenario.slots(1).stored(0).client(client().shares().knows(0).op(op));
        let scenario = scenario.client(client().shares().put(0));
        passes(scenario.client(client().knows(0).delete(0).insert(1)), 0);
    }
}

/// A block that one session unlinks becomes the next value, while the other one sleeps.
#[test]
fn two_sessions_and_a_block_that_is_used_again() {
    for op in [Op::Get(0), Op::Put(0), Op::Delete(0)] {
        let again = client().shares().blocks(1).knows(0).put(0).put(0);
        let scenario = Scenario::new(format!("{op:?}, asleep & PUT, PUT share locations"));
        let scenario = scenario.stored(0).jumps(1, &[1_300_000, GRACE_NS]);
        passes(scenario.client(client().shares().op(op).get(0)).client(again), 0);
    }
}

/// What the other session learnt says that a word is the key's, not that it is new.
#[test]
fn absorbed_unread() {
    let twin = Mutant::AbsorbedUnread(0);
    let start = || name(twin).stored(0).slots(1).used(1).client(client().put(0));
    let writer = || client().shares().knows(0).put(0);
    let reader = || client().shares().get(0).get(0);
    let failure = assert_caught(
        start().client(writer().twin(twin)).client(reader()),
        start().client(writer()).client(reader()),
    );
    assert_eq!(failure.violation, Violation::NotLinearizable);
    // It takes a cache that is shared.
    let alone = start().client(client().knows(0).put(0).twin(twin));
    passes(alone.client(client().get(0).get(0)), 2);
}
