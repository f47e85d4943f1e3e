//! What a user can do about damage, and what damage costs who meets it.

use farside::Error;
use farside::OperationError::Layout;
use farside_layout::BLOCK_HEADER_BYTES;

use super::*;

const KEY: &[u8] = b"a key";

/// A bit of the value of a key without company, which only its block's checksum covers.
fn value_bit(scene: &Scene) -> Bit {
    let block = scene.word(scene.slot_of(KEY)).block().unwrap();
    Bit { offset: block.address.offset() + BLOCK_HEADER_BYTES + 8, bit: 3 }
}

/// A PUT or DELETE goes by the slot's hint, and now and then its READ takes too long for that.
#[test]
fn storing_or_deleting_a_key_mends_its_damaged_block() {
    let scene = Scene::new(&["--memory", "32MiB", "--index", "8KiB", "--grace-ms", "20"]);
    let mut session = scene.cold();
    for round in 0..3000 {
        let new = value(1, round, 50);
        session.put(KEY, &new).unwrap();
        scene.flip(value_bit(&scene));
        if round % 100 == 0 {
            assert!(matches!(session.get(KEY), Err(Error::Operation(Layout(_)))), "round {round}");
        }
        match round % 3 {
            0 => session.put(KEY, &new).unwrap(),
            1 => assert!(session.update(KEY, &new).unwrap()),
            _ => {
                assert!(session.delete(KEY).unwrap());
                continue;
            }
        }
        assert!(session.get(KEY).unwrap().unwrap().data == new, "round {round}");
    }
    scene.server.assert_verifies();
}

#[test]
fn a_damaged_block_costs_a_scan_few_reads() {
    let scene = Scene::new(&["--memory", "16MiB", "--index", "8KiB"]);
    let mut session = scene.cold();
    session.put(KEY, b"a value of some length").unwrap();
    session.put(b"another", b"value").unwrap();
    scene.flip(value_bit(&scene));
    let before = session.counters();
    let (found, failed): (Vec<_>, Vec<_>) = session.scan().unwrap().partition(Result::is_ok);
    let counters = session.counters() - before;
    assert_eq!((found.len(), failed.len()), (1, 1));
    assert!(matches!(failed[0], Err(Error::Operation(Layout(_)))), "{:?}", failed[0]);
    // The subtable, the whole block, and the damaged one a few times.
    assert!(counters.round_trips <= 1 + 1 + 4, "{counters:?}");
}
