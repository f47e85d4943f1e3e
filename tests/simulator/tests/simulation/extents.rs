//! Values with extents: no GET returns parts of two values, whatever others do meanwhile. At each
//! unlink of a head the simulator checks that the session holds the extents (I27).

use farside_simulator::{Mutant, Op, Scenario, Script, Violation, client};

use crate::mutants::{assert_caught, assert_caught_for_all};
use crate::passes;

fn extents() -> Scenario {
    Scenario::new().extents().stored(0)
}

/// Writes two values, which take all extents of the client, and then a third one into the memory of
/// the first.
fn reuses_extents() -> Script {
    client().put_large(0).put_large(0).put_large(0)
}

#[test]
fn operations_on_long_values_beside_each_other() {
    let others = [
        client().get(0).get(0),
        client().put_large(0).get(0),
        client().put(0).get(0),
        client().delete(0).get(0),
        client().insert(0).get(0),
        client().exchange(0, "i0").get(0),
    ];
    for other in others {
        for writer in [client().put_large(0).get(0), client().put_large(0).delete(0)] {
            passes(extents().client(writer).client(other.clone()), 2);
        }
    }
}

#[test]
#[ignore = "takes a minute; run by make soak"]
fn extents_are_reused_beside_a_reader() {
    for reader in [client().get(0), client().knows(0).get(0)] {
        passes(extents().client(reuses_extents()).client(reader), 1);
    }
}

#[test]
fn writers_of_long_values_die() {
    let writer = client().put_large(0).put_large(0);
    passes(extents().client(writer.clone()).client(client().get(0)).deaths(1).sweeps(), 1);
    passes(extents().client(writer).client(client().put(0).get(0)).deaths(1).sweeps(), 1);
}

/// A reader whose clock stands still relies on extents that were reused (I26, I3).
#[test]
fn a_reader_that_relies_on_old_extents_is_caught() {
    let scenario = |mutant| {
        let reader = client().get(0).get(0).mutant(mutant);
        extents().client(reuses_extents()).client(reader)
    };
    assert_caught(scenario(Some(Mutant::StoppedClock)), scenario(None));
}

/// A collection that reads the slot after the unlink, and asks the session before its next note,
/// would take the extents for lost.
#[test]
fn old_extents_unheld_is_caught() {
    let writer = || client().put_large(0);
    let unlinking = [
        writer().put_large(0),
        writer().put(0),
        writer().update(0),
        writer().delete(0),
        writer().op(Op::Take(0)),
    ];
    for writer in unlinking {
        // Also if the other client has the table, and if it loses the slot to the first one.
        for other in [client().get(0), client().get(0).put(0)] {
            let scenario = extents().client(writer.clone()).client(other);
            let failure = assert_caught_for_all(Mutant::OldExtentsUnheld, scenario);
            assert!(matches!(failure.violation, Violation::Unheld(_)), "{failure}");
        }
    }
}
