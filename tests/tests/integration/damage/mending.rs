//! Proves that users can repair damage, and that it costs a scan few READs. Also proves that no key
//! gets the value of another one when blocks that damage freed are used again.

use farside::Error;
use farside::OperationError::Layout;
use farside_layout::BLOCK_HEADER_BYTES;

use super::*;

const KEY: &[u8] = b"a key";

/// Returns a bit of the value of a key without company, which only its block's checksum covers.
fn value_bit(scene: &Scene) -> Bit {
    let block = scene.word(scene.slot_of(KEY)).block().unwrap();
    Bit { offset: block.address.claimed_offset() + BLOCK_HEADER_BYTES + 8, bit: 3 }
}

/// A PUT or DELETE relies on the slot's hint, except when its READ took too long.
#[on(shm, tcp_in_soak)]
fn storing_or_deleting_a_key_mends_its_damaged_block() {
    let scene = Scene::new("--memory 32MiB --index 8KiB --grace-ms 20");
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

#[on(shm, tcp_in_soak)]
fn a_damaged_block_costs_a_scan_few_reads() {
    let scene = Scene::new("--memory 16MiB --index 8KiB");
    let mut session = scene.cold();
    session.put(KEY, b"a value of some length").unwrap();
    session.put(b"another", b"value").unwrap();
    scene.flip(value_bit(&scene));
    let before = session.counters();
    let (found, failed): (Vec<_>, Vec<_>) = session.scan().unwrap().partition(Result::is_ok);
    let counters = session.counters() - before;
    assert_eq!((found.len(), failed.len()), (1, 1));
    assert!(matches!(failed[0], Err(Error::Operation(Layout(_)))), "{:?}", failed[0]);
    // The scan READs the subtable, the intact block, and the damaged one a few times.
    assert!(counters.round_trips <= 1 + 1 + 4, "{counters:?}");
}

/// The checksum covers the value as well, which a scan of keys does not read.
#[on(shm, tcp_in_soak)]
fn a_scan_of_keys_proves_them_by_their_hints() {
    let scene = Scene::new("--memory 16MiB --index 8KiB");
    let mut session = scene.cold();
    session.put(KEY, [7; 4000]).unwrap();
    session.put(b"another", [7; 4000]).unwrap();
    let start = scene.word(scene.slot_of(KEY)).block().unwrap().address.claimed_offset();
    let mut scan = || {
        let before = session.counters();
        let scan = session.scan_keys("").unwrap();
        let (found, failed): (Vec<_>, Vec<_>) = scan.partition(Result::is_ok);
        let mut keys: Vec<_> = found.into_iter().map(|entry| entry.unwrap().key).collect();
        keys.sort();
        let round_trips = (session.counters() - before).round_trips;
        (keys, failed.into_iter().map(Result::unwrap_err).collect::<Vec<_>>(), round_trips)
    };
    scene.flip(Bit { offset: start + BLOCK_HEADER_BYTES + 1000, bit: 3 });
    let (keys, failed, round_trips) = scan();
    assert_eq!((keys, failed.len()), (vec![KEY.to_vec(), b"another".to_vec()], 0));
    assert_eq!(round_trips, 1 + 2, "the subtable, and both keys");
    scene.flip(Bit { offset: start + BLOCK_HEADER_BYTES, bit: 3 });
    let (keys, failed, round_trips) = scan();
    assert_eq!(keys, [b"another"]);
    assert!(matches!(failed[..], [Error::Operation(Layout(_))]), "{failed:?}");
    assert!(round_trips <= 1 + 2 + 4, "{round_trips}");
    assert_eq!(session.count_keys().unwrap(), 2);
}

/// Every second key's word gets one flipped bit in its target. Then a session that must trust the
/// word stores the key again. Its mark of four bytes goes to the word's target, which may be the
/// middle of another key's block. But no block of another key is freed: reusing the freed blocks
/// loses no more keys, and no key gets another key's value.
#[on(shm, tcp_in_soak)]
fn blocks_that_damage_frees_never_carry_a_value_to_another_key() {
    let scene = Scene::new("--memory 16MiB --index 64KiB --grace-ms 40");
    let mut session = scene.cold();
    let key = |n: u64| format!("key-{n}").into_bytes();
    let bytes = |n: u64| [10, 50, 200, 700][n as usize / 2 % 4];
    let keys = 8 * u64::from(TARGET_BITS);
    (0..keys).for_each(|n| session.put(key(n), value(n, 0, bytes(n))).unwrap());
    for n in (0..keys).step_by(2) {
        scene.flip(Bit { offset: scene.slot_of(&key(n)), bit: n as u32 / 8 });
        let what = format!("key {n}, PUT");
        let _ = timed(&what, || session.put(key(n), value(n, 1, bytes(n))));
    }
    let others = |session: &mut Session| -> Vec<u64> {
        let lost = |n: &u64| !matches!(session.get(key(*n)), Ok(Some(_)));
        (1..keys).step_by(2).filter(lost).collect()
    };
    let marked = others(&mut session);
    // Reuses the freed blocks.
    for round in 2..12 {
        std::thread::sleep(Duration::from_millis(50));
        for n in 0..keys {
            let what = format!("round {round}, key {n}");
            let values: Vec<Vec<u8>> = (0..round).map(|count| value(n, count, bytes(n))).collect();
            let allowed: Vec<&[u8]> = values.iter().map(Vec::as_slice).collect();
            let _ = get(&mut session, &key(n), &allowed, &what);
            if n % 3 == 0 {
                let _ = timed(&what, || session.put(key(n), value(n, round, bytes(n))));
            }
        }
    }
    let lost = others(&mut session);
    assert!(lost.iter().all(|n| marked.contains(n)), "{lost:?}, right after the damage {marked:?}");
}
