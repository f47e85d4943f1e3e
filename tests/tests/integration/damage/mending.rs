//! Proves that users can repair damage, and that it costs a scan few READs. No key gets the value
//! of another one when blocks that damage freed are used again. Subtables split despite obstacles:
//! a damaged entry or header, and unfinished INSERTs of stopped clients.

use farside::OperationError::{Contended, Layout, OutOfSpace};
use farside::{Client, Error, Exhausted};
use farside_layout::{BLOCK_HEADER_BYTES, FORWARD_OFFSET, ROW_BYTES};
use farside_tests::{fill, fill_up};

use super::*;
use crate::growth::{key, number_at};

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

impl Scene {
    /// Returns the first subtable, which is the only one at the start.
    fn first_subtable(&self) -> u64 {
        self.geometry.chunk_offset(0).unwrap()
    }

    /// Returns the slots of the first subtable.
    fn first_slots(&self) -> impl Iterator<Item = u64> {
        self.subtable_slots(self.first_subtable())
    }

    fn a_live_word(&self) -> SlotWord {
        let mut words = self.first_slots().map(|slot| self.word(slot));
        words.find(|word| word.state() == SlotState::Live).unwrap()
    }
}

/// Returns a server with a hundred keys in its only subtable.
fn start() -> (Scene, Client, Session) {
    let scene = Scene::new("--memory 64MiB");
    let client = scene.server.client();
    let mut session = client.session().unwrap();
    fill(&mut session, 0..100, u64::to_le_bytes);
    (scene, client, session)
}

#[on(shm, tcp_in_soak)]
fn a_damaged_entry_keeps_only_its_subtable_from_growing() {
    let (scene, client, mut session) = start();
    // Flips a bit of a key in its block.
    let at = scene.a_live_word().block().unwrap().address.claimed_offset() + BLOCK_HEADER_BYTES;
    let victim = scene.region.load(at).unwrap().to_le_bytes();
    assert!((0..100).any(|number| key(0, number) == victim));
    scene.flip(Bit { offset: at, bit: 20 });
    let (number, error) = fill_up(&mut session, 100, u64::to_le_bytes);
    assert!(matches!(error, Error::Operation(OutOfSpace { what: Exhausted::Index })), "{error}");
    let statistics = client.admin().statistics().unwrap();
    assert_eq!((statistics.subtables, statistics.splits_stuck), (1, 1));
    for there in (0..number).filter(|there| key(0, *there) != victim) {
        session.clear_cache();
        assert_eq!(number_at(&mut session, &key(0, there)), Some(there));
        session.put(key(0, there), there.to_le_bytes()).unwrap();
    }
    assert!(session.insert(b"no room yet", b"").is_err());
    // A PUT repairs the key, so the split succeeds.
    let mended = u64::from_le_bytes(victim) & 0xffff;
    session.put(victim, mended.to_le_bytes()).unwrap();
    // The server retries the split only after a while.
    std::thread::sleep(Duration::from_millis(200));
    assert!(session.insert(b"room", b"").unwrap());
    assert_eq!(client.admin().statistics().unwrap().splits_stuck, 0);
    for there in 0..number {
        assert_eq!(number_at(&mut session, &key(0, there)), Some(there));
    }
    scene.server.assert_verifies();
}

#[on(shm, tcp_in_soak)]
fn a_damaged_forward_keeps_its_subtable_from_growing_and_harms_nothing_else() {
    let (scene, _client, mut session) = start();
    // As if a split took this row's keys to the superblock and to the middle of the heap.
    const ROW: u64 = 40;
    let forward = scene.first_subtable() + ROW * ROW_BYTES + FORWARD_OFFSET;
    scene.region.store(forward, 1 << 10).unwrap();
    let mut before = vec![0; (scene.first_subtable() / 8) as usize];
    scene.region.read(0, &mut before).unwrap();
    let error = (100..).find_map(|number| {
        match session.put(key(0, number), number.to_le_bytes()) {
            // Operations on keys of this row fail.
            Ok(()) | Err(Error::Operation(Layout(_)) | Error::Operation(Contended { .. })) => None,
            Err(error) => Some(error),
        }
    });
    assert!(
        matches!(error, Some(Error::Operation(OutOfSpace { what: Exhausted::Index }))),
        "{error:?}"
    );
    let log = scene.server.log();
    assert!(log.contains("cannot split a subtable: the row at offset"), "{log}");
    let mut after = before.clone();
    scene.region.read(0, &mut after).unwrap();
    let changed = before.iter().zip(&after).filter(|(before, after)| before != after).count();
    // Only leases and the chunk table may change while clients work.
    assert!(changed <= 8, "{changed} words in front of the heap changed");
    scene.region.store(forward, 0).unwrap();
    assert!(session.insert(b"room", b"").unwrap());
    scene.server.session();
    scene.server.assert_verifies();
}

#[on(shm, tcp_in_soak)]
fn claims_without_an_insert_take_no_room() {
    let (scene, client, mut session) = start();
    let unused = scene.first_slots().filter(|slot| scene.word(*slot) == SlotWord::default());
    let claims = unused.map(|slot| scene.region.store(slot + HINT_OFFSET, 1).unwrap());
    let claims = claims.count() as u64;
    let mut numbers = 100..;
    while client.admin().statistics().unwrap().splits == 0 {
        let number = numbers.next().unwrap();
        assert!(session.insert(key(0, number), number.to_le_bytes()).unwrap());
    }
    // About as many keys fit as without claims.
    assert!(numbers.start - 100 > claims / 8, "{numbers:?}, {claims} claims");
    scene.server.assert_verifies();
}

#[on(shm, tcp_in_soak)]
fn unfinished_inserts_of_stopped_clients_do_not_fill_a_subtable() {
    let (scene, client, mut session) = start();
    let block = scene.a_live_word().block().unwrap();
    // The state after a client was stopped in the middle of very many INSERTs.
    for slot in scene.first_slots() {
        let word = scene.word(slot);
        if word.state() == SlotState::Empty {
            scene.region.store(slot, word.pending(0, block).bits()).unwrap();
        }
    }
    for number in 100..1000 {
        assert!(session.insert(key(0, number), number.to_le_bytes()).unwrap());
    }
    for number in 0..1000 {
        session.clear_cache();
        assert_eq!(number_at(&mut session, &key(0, number)), Some(number));
    }
    assert!(client.admin().statistics().unwrap().splits > 0);
    scene.server.assert_verifies();
}
