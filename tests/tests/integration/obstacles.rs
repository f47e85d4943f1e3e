//! Proves that a split copes with what is in its way: a damaged entry or header, and INSERTs of
//! clients that do not go on.

use std::time::Duration;

use farside::OperationError::{Contended, Layout, OutOfSpace};
use farside::{Client, Error, Exhausted, Session};
use farside_fabric::shm::Region;
use farside_layout::{
    BLOCK_HEADER_BYTES, FORWARD_OFFSET, Format, HINT_OFFSET, ROW_BYTES, ROWS_PER_SUBTABLE,
    SLOTS_PER_ROW, SlotState, SlotWord, Superblock, slot_in_subtable,
};
use farside_tests::{ServerProcess, left_out_over_rdma};

use crate::growth::{key, number_at};

/// The first subtable of a server's region.
struct FirstSubtable {
    region: Region,
    start: u64,
}

impl FirstSubtable {
    fn of(server: &ServerProcess) -> Self {
        let file = std::fs::OpenOptions::new().read(true).write(true).open(server.region_file());
        let region = Region::map(&file.unwrap()).unwrap();
        let mut words = [0; 512];
        region.read(0, &mut words).unwrap();
        let bytes: Vec<u8> = words.iter().flat_map(|word: &u64| word.to_le_bytes()).collect();
        let (_, format): (_, Format) = Superblock::decode(&bytes, region.bytes()).unwrap();
        let start = format.geometry().chunk_offset(0).unwrap();
        Self { region, start }
    }

    /// Every slot's offset and word.
    fn slots(&self) -> impl Iterator<Item = (u64, SlotWord)> {
        (0..SLOTS_PER_ROW * ROWS_PER_SUBTABLE).map(|n| {
            let at = self.start + slot_in_subtable(n / SLOTS_PER_ROW, n % SLOTS_PER_ROW);
            (at, SlotWord::from_bits(self.region.load(at).unwrap()))
        })
    }

    fn a_live_word(&self) -> SlotWord {
        self.slots().map(|(_, word)| word).find(|word| word.state() == SlotState::Live).unwrap()
    }
}

/// Stores keys until one does not fit; how many there are then, and why.
fn fill(session: &mut Session, from: u64) -> (u64, Error) {
    for number in from.. {
        if let Err(error) = session.put(&key(0, number), &number.to_le_bytes()) {
            return (number, error);
        }
    }
    unreachable!()
}

/// A server with a hundred keys in its only subtable; `None` where that cannot be changed.
fn start() -> Option<(ServerProcess, Client, Session, FirstSubtable)> {
    if left_out_over_rdma("it changes the region file behind the device's back") {
        return None;
    }
    let server = ServerProcess::start_with_file(&["--memory", "64MiB"]);
    let client = server.client();
    let mut session = client.session().unwrap();
    (0..100).for_each(|number| session.put(&key(0, number), &number.to_le_bytes()).unwrap());
    let subtable = FirstSubtable::of(&server);
    Some((server, client, session, subtable))
}

#[test]
fn a_damaged_entry_keeps_only_its_subtable_from_growing() {
    let Some((server, client, mut session, subtable)) = start() else { return };
    let victim =
        damage_a_key(&subtable, &(0..100).map(|number| key(0, number)).collect::<Vec<_>>());
    let (number, error) = fill(&mut session, 100);
    assert!(matches!(error, Error::Operation(OutOfSpace { what: Exhausted::Index })), "{error}");
    let statistics = client.statistics().unwrap();
    assert_eq!((statistics.subtables, statistics.splits_stuck), (1, 1));
    for there in (0..number).filter(|there| key(0, *there) != victim) {
        session.clear_cache();
        assert_eq!(number_at(&mut session, &key(0, there)), Some(there));
        session.put(&key(0, there), &there.to_le_bytes()).unwrap();
    }
    assert!(session.insert(b"no room yet", b"").is_err());
    // Another value mends the key, and with it the split.
    let mended = u64::from_le_bytes(victim) & 0xffff;
    session.put(&victim, &mended.to_le_bytes()).unwrap();
    // The server does not try again at once.
    std::thread::sleep(Duration::from_millis(200));
    assert!(session.insert(b"room", b"").unwrap());
    assert_eq!(client.statistics().unwrap().splits_stuck, 0);
    for there in 0..number {
        assert_eq!(number_at(&mut session, &key(0, there)), Some(there));
    }
    server.assert_verifies();
}

/// Flips a bit of some key in its block; returns the key.
fn damage_a_key(subtable: &FirstSubtable, keys: &[[u8; 8]]) -> [u8; 8] {
    let block = subtable.a_live_word().block().unwrap();
    let at = block.address.offset() + BLOCK_HEADER_BYTES;
    let victim = subtable.region.load(at).unwrap();
    assert!(keys.contains(&victim.to_le_bytes()));
    subtable.region.store(at, victim ^ 1 << 20).unwrap();
    victim.to_le_bytes()
}

#[test]
fn a_header_that_leads_astray_keeps_its_subtable_from_growing_and_harms_nothing_else() {
    let Some((server, _client, mut session, subtable)) = start() else { return };
    // As if a split took this row's keys to the superblock and to the middle of the heap.
    const ROW: u64 = 40;
    let forward = subtable.start + ROW * ROW_BYTES + FORWARD_OFFSET;
    subtable.region.store(forward, 1 << 10).unwrap();
    let mut before = vec![0; (subtable.start / 8) as usize];
    subtable.region.read(0, &mut before).unwrap();
    let error = (100..).find_map(|number| {
        match session.put(&key(0, number), &number.to_le_bytes()) {
            // Keys of this row cannot be served.
            Ok(()) | Err(Error::Operation(Layout(_) | Contended { .. })) => None,
            Err(error) => Some(error),
        }
    });
    assert!(
        matches!(error, Some(Error::Operation(OutOfSpace { what: Exhausted::Index }))),
        "{error:?}"
    );
    let log = server.log();
    assert!(log.contains("cannot split a subtable: the row at offset"), "{log}");
    let mut after = before.clone();
    subtable.region.read(0, &mut after).unwrap();
    let changed = before.iter().zip(&after).filter(|(before, after)| before != after).count();
    // Leases and the chunk table change while clients work, nothing else does.
    assert!(changed <= 8, "{changed} words before the heap changed");
    subtable.region.store(forward, 0).unwrap();
    assert!(session.insert(b"room", b"").unwrap());
    server.client().session().unwrap();
    server.assert_verifies();
}

#[test]
fn claims_that_nobody_follows_take_no_room() {
    let Some((server, client, mut session, subtable)) = start() else { return };
    let unused = subtable.slots().filter(|(_, word)| *word == SlotWord::default());
    let claims = unused.map(|(slot, _)| subtable.region.store(slot + HINT_OFFSET, 1).unwrap());
    let claims = claims.count() as u64;
    let mut numbers = 100..;
    while client.statistics().unwrap().splits == 0 {
        let number = numbers.next().unwrap();
        assert!(session.insert(&key(0, number), &number.to_le_bytes()).unwrap());
    }
    // As many as without claims, which varies.
    assert!(numbers.start - 100 > claims / 8, "{numbers:?}, {claims} claims");
    server.assert_verifies();
}

#[test]
fn inserts_of_sleeping_clients_do_not_fill_a_subtable() {
    let Some((server, client, mut session, subtable)) = start() else { return };
    let block = subtable.a_live_word().block().unwrap();
    // What a client leaves that is stopped in the middle of very many INSERTs.
    for (slot, word) in subtable.slots() {
        if word.state() == SlotState::Empty {
            subtable.region.store(slot, word.pending(0, block).bits()).unwrap();
        }
    }
    for number in 100..1000 {
        assert!(session.insert(&key(0, number), &number.to_le_bytes()).unwrap());
    }
    for number in 0..1000 {
        session.clear_cache();
        assert_eq!(number_at(&mut session, &key(0, number)), Some(number));
    }
    assert!(client.statistics().unwrap().splits > 0);
    server.assert_verifies();
}
