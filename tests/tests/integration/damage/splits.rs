//! Splits despite obstacles: a damaged entry or header, and unfinished INSERTs of stopped clients.

use farside::OperationError::{Contended, Layout, OutOfSpace};
use farside::{Client, Error, Exhausted};
use farside_layout::{BLOCK_HEADER_BYTES, FORWARD_OFFSET, ROW_BYTES};

use farside_tests::{fill, fill_up};

use super::*;
use crate::growth::{key, number_at};

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
