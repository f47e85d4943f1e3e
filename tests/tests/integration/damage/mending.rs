//! What a user can do about damage, and what damage costs who meets it.

use farside::Error;
use farside_common::layout::BLOCK_HEADER_BYTES;

use super::*;

const KEY: &[u8] = b"a key";

/// A bit of the value of a key without company, which only its block's checksum covers.
fn value_bit(scene: &Scene) -> Bit {
    let block = scene.word(scene.slot_of(KEY)).block().unwrap();
    Bit { offset: block.address.offset() + BLOCK_HEADER_BYTES + 8, bit: 3 }
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
    assert!(matches!(failed[0], Err(Error::Layout(_))), "{:?}", failed[0]);
    // The subtable, the whole block, and the damaged one a few times.
    assert!(counters.round_trips <= 1 + 1 + 4, "{counters:?}");
}
