//! Proves that a region survives its server intact, and that a file without an intact region is
//! refused and not changed.

use std::fs;

use farside_cli::check::{Scope, check};
use farside_fabric::shm::ShmFabric;
use farside_fabric::{Endpoint, LaneId};
use farside_layout::{ChunkEntry, ChunkUse, RegionState, RowHeader, SUBTABLE_BYTES};
use rand::rngs::SmallRng;
use rand::{Rng, RngExt, SeedableRng};

use super::*;

#[test]
fn linked_blocks_stay_linked_and_unfinished_slots_are_emptied() {
    let folder = TestFolder::with_file();
    let server = folder.start();
    let client = folder.writer();
    let class = class(64);
    let blocks = client.take(class, 4);
    let slots: Vec<u64> = (0..4).map(|n| client.slot(n, 0)).collect();
    let states = [SlotState::Live, SlotState::Pending, SlotState::Aborted, SlotState::Tomb];
    for ((slot, block), state) in slots.iter().zip(&blocks).zip(states) {
        client.place_word(*slot, class, *block, |word| word.with_state(state));
    }
    let live = client.word(slots[0]);
    server.stop();
    assert_eq!(client.superblock().0.state().unwrap(), RegionState::Clean);
    let _server = folder.start();
    assert_eq!(client.superblock().0.state().unwrap(), RegionState::InUse);
    assert_eq!(client.lease(), 0, "the former server's clients are fenced");
    let next = folder.writer();
    assert_eq!(next.welcome.incarnation, 2);
    assert_eq!(next.superblock().1, client.superblock().1);
    assert_ne!(next.welcome.lease, client.welcome.lease);
    assert_eq!(next.word(slots[0]), live);
    for slot in &slots[1..] {
        assert_eq!(next.word(*slot), SlotWord::empty(2));
    }
    let class_statistics = next.statistics().classes[0];
    assert_eq!(class_statistics.blocks - class_statistics.blocks_free, 1);
    let mut taken = Vec::new();
    while taken.len() < 2000 {
        taken.extend(next.take(class, 4096));
    }
    assert!(taken.iter().all(|block| block.address != blocks[0].address));
    for block in &blocks[1..] {
        let reused = FreeBlock { generation: block.generation.wrapping_add(1), ..*block };
        assert!(taken.contains(&reused), "{block:?} is free again");
    }
}

/// A few damaged bits pass the first checks. The server then reports or tolerates them.
#[test]
fn a_few_damaged_bits_cause_no_panic() {
    let folder = TestFolder::with_file();
    folder.start().stop();
    let whole = fs::read(folder.region_file()).unwrap();
    let mut random = SmallRng::seed_from_u64(5);
    for _ in 0..60 {
        let mut content = whole.clone();
        for _ in 0..3 {
            // In the tables, or in the first chunk of the index.
            let bit = random.random_range(0..8 * (4 << 20));
            content[bit / 8] ^= 1 << (bit % 8);
        }
        fs::write(folder.region_file(), &content).unwrap();
        match Server::start(&folder.config) {
            Ok(server) => server.stop(),
            Err(error) => assert!(!error.to_string().contains('\n'), "{error}"),
        }
    }
}

#[test]
fn a_restarted_server_waits_for_grace_before_it_serves() {
    let mut folder = TestFolder::with_file();
    folder.config.grace_ms = 300;
    folder.start().stop();
    let started = Instant::now();
    let _server = folder.start();
    assert!(started.elapsed() >= Duration::from_millis(300));
}

#[test]
fn a_wrong_memory_size_is_refused_and_none_is_needed() {
    let mut folder = TestFolder::with_file();
    folder.start().stop();
    folder.config.memory = Some(ByteSize(2 * REGION_BYTES));
    let line = folder.start_error();
    assert!(line.contains("memory = 16MiB") && line.contains("has 8MiB"), "{line}");
    folder.config.memory = None;
    folder.config.grace_ms = 77;
    let _server = folder.start();
    let (superblock, format) = folder.writer().superblock();
    // The refused start did not count as an incarnation, and the region keeps its GRACE.
    assert_eq!((superblock.incarnation(), format.grace_ms), (2, 1));
}

#[test]
fn files_that_hold_no_region_are_refused_and_left_alone() {
    let folder = TestFolder::with_file();
    folder.start().stop();
    let whole = fs::read(folder.region_file()).unwrap();
    let with_version = |version| {
        let mut other = whole.clone();
        other[8] = version;
        other
    };
    let mut longer = whole.clone();
    longer.resize(whole.len() + 4096, 0);
    let refuse = |content: &[u8], expected: &str| {
        fs::write(folder.region_file(), content).unwrap();
        let line = folder.start_error();
        assert!(line.contains(expected), "{line}");
        assert!(line.contains(folder.region_file().to_str().unwrap()), "{line}");
        assert!(fs::read(folder.region_file()).unwrap() == content, "{line}");
        assert!(!folder.socket().exists(), "there is no socket after a refused start");
    };
    for (content, expected) in [
        (b"a letter, not a region".repeat(100), "holds no region"),
        (vec![0; REGION_BYTES as usize], "no magic"),
        (whole[..whole.len() - 4096].to_vec(), "truncated or extended"),
        (longer, "truncated or extended"),
        (whole[..200].to_vec(), "truncated"),
        (whole[..16].to_vec(), "holds no region"),
        (vec![1], "too short"),
        (with_version(99), "format version 99, and this server knows 6"),
        // In version 5 no value had extents.
        (with_version(5), "format version 5, and this server knows 6"),
    ] {
        refuse(&content, expected);
    }
    // The server that made the region can make a snapshot of it.
    refuse(&with_version(99), "kv-cli snapshot");
    refuse(&with_version(99), "--restore");
    let bytes = whole.len();
    for length in [7, 8, 87, 88, 4095, 4096, 1 << 20, bytes / 2, bytes - 1] {
        refuse(&whole[..length], "");
    }
    let mut random = vec![0; bytes];
    SmallRng::seed_from_u64(7).fill_bytes(&mut random);
    for intact in [0, 8, 12, 32, 48, 71] {
        random[..intact].copy_from_slice(&whole[..intact]);
        refuse(&random, "");
    }
    // The superblock has a checksum.
    for byte in 0..72 {
        let mut flipped = whole.clone();
        flipped[byte] ^= 1 << (byte % 8);
        refuse(&flipped, "");
    }
    fs::write(folder.region_file(), &whole).unwrap();
    folder.start().stop();
}

/// Returns the offset of the word to change, and its new value.
type WordChange<'a> = dyn Fn(&Client) -> (u64, u64) + 'a;

/// Changes a word of the region after its server stopped. Returns a client of that server, and the
/// change.
fn damage(folder: &TestFolder, change: &WordChange<'_>) -> (Client, (u64, u64)) {
    let _ = fs::remove_file(folder.region_file());
    let server = folder.start();
    let client = folder.writer();
    let block = client.take(class(64), 1)[0];
    client.place_word(client.slot(0, 0), class(64), block, |word| word.with_state(SlotState::Live));
    let (offset, value) = change(&client);
    server.stop();
    client.region.store(offset, value).unwrap();
    (client, (offset, value))
}

/// Damages a region as [`damage`] does; returns the next server's refusal.
fn refusal(folder: &TestFolder, change: &WordChange<'_>) -> String {
    let (client, (offset, value)) = damage(folder, change);
    let line = folder.start_error();
    assert!(line.contains("is damaged") && line.contains("kv-cli verify --region"), "{line}");
    assert_eq!(client.region.load(offset).unwrap(), value, "{line}");
    line
}

#[test]
fn damaged_regions_are_refused_with_the_location_of_the_damage() {
    let folder = TestFolder::with_file();
    let directory = |client: &Client| client.directory().0;
    let cases: [(&WordChange<'_>, &str); 6] = [
        (&|client| (directory(client), 0), "directory entry 0"),
        (&|client| (directory(client), u64::MAX), "directory entry 0"),
        (&|client| (directory(client) + 8, client.region.load(directory(client)).unwrap()), "row"),
        (&|client| (client.slot(1, 0) - 16, 0), "the row at offset"),
        (
            &|client| (client.slot(0, 0), SlotWord::empty(1).with_state(SlotState::Moved).bits()),
            "split",
        ),
        (&|client| (client.geometry().chunk_entry(2).unwrap(), 4), "chunk 2"),
    ];
    for (case, expected) in cases {
        let line = refusal(&folder, case);
        assert!(line.contains(expected), "{expected}: {line}");
    }
    let lone = ChunkEntry::new(ChunkUse::Blocks(class(3 << 20))).bits();
    let line = refusal(&folder, &|client| (client.geometry().chunk_entry(2).unwrap(), lone));
    assert!(line.contains("chunk 3"), "{line}");
}

/// All other keys are served. The words stay, and are counted.
#[test]
fn damaged_words_of_slots_are_skipped() {
    let folder = TestFolder::with_file();
    let live = |client: &Client| client.word(client.slot(0, 0));
    let live_at = |client: &Client, offset: u64| (live(client).bits() >> 32 << 32) | (offset / 64);
    let index_chunk = |client: &Client| client.geometry().chunk_offset(0).unwrap();
    let cases: [&WordChange<'_>; 6] = [
        &|client| (client.slot(1, 0), live(client).bits()),
        &|client| (client.slot(0, 0), live_at(client, 0)),
        &|client| (client.slot(0, 0), live_at(client, REGION_BYTES)),
        &|client| (client.slot(0, 0), live_at(client, index_chunk(client))),
        &|client| (client.slot(0, 0), SlotWord::empty(1).with_state(SlotState::Live).bits()),
        &|client| (client.slot(0, 0), live(client).with_state(SlotState::Copy).bits()),
    ];
    for (number, case) in cases.into_iter().enumerate() {
        let (before, (offset, value)) = damage(&folder, case);
        let _server = folder.start();
        let client = folder.writer();
        let statistics = client.statistics();
        assert_eq!(statistics.slots_skipped, 1, "case {number}");
        assert_eq!(client.region.load(offset).unwrap(), value, "case {number}");
        // No client gets a block to which a word leads.
        let linked = before.word(before.slot(0, 0)).block().unwrap().address;
        let taken = std::iter::repeat_with(|| client.take(class(64), 4096));
        let taken: Vec<_> = taken.take_while(|blocks| !blocks.is_empty()).flatten().collect();
        assert!(taken.iter().all(|block| block.address != linked), "case {number}");
    }
}

/// Returns the offset of the index's place for a subtable with this number.
fn place_offset(client: &Client, number: u64) -> u64 {
    client.geometry().chunk_offset(0).unwrap() + number * SUBTABLE_BYTES
}

/// The index has eight subtables: place 9 is free. `kv-cli verify` reports words in it, too.
#[test]
fn a_word_in_a_free_place_is_cleared_unless_its_row_is_in_use() {
    let folder = TestFolder::with_file();
    let server = folder.start();
    let client = folder.writer();
    let block = client.take(class(64), 1)[0];
    let live = client
        .place_word(client.slot(0, 0), class(64), block, |word| word.with_state(SlotState::Live));
    let slot = place_offset(&client, 9) + slot_in_subtable(3, 3);
    server.stop();
    for state in [SlotState::Live, SlotState::Frozen, SlotState::Copy] {
        let word = live.with_state(state);
        client.region.store(slot, word.bits()).unwrap();
        assert!(region_problems(&client).contains("is in a free place for a subtable"));
        folder.start().stop();
        assert_eq!(client.word(slot).state(), SlotState::Moved);
        assert_eq!(client.word(client.slot(0, 0)), live, "the key's own word stays");
        assert!(!region_problems(&client).contains("place for a subtable"));
    }
    // Rows of a subtable to which the directory does not lead: its keys may be the only ones.
    client.region.store(slot, live.bits()).unwrap();
    let row = zerocopy::transmute!(RowHeader::new(1, 3));
    let words: [u64; 2] = row;
    client.region.write(place_offset(&client, 9), &words).unwrap();
    assert!(folder.start_error().contains("is damaged"));
    assert_eq!(client.word(slot), live);
}

/// Returns the checker's problems with the region while no server runs, one a line.
fn region_problems(client: &Client) -> String {
    let endpoint = Endpoint::new(ShmFabric::new(client.region.clone(), None, 1), 1);
    let report = check(&endpoint, LaneId(0), REGION_BYTES, (Scope::File, true), &mut ());
    let report = report.unwrap();
    report.problems.iter().map(|problem| format!("{problem}\n")).collect()
}

#[test]
fn a_continuation_chunk_without_a_first_chunk_is_free_after_a_restart() {
    let folder = TestFolder::with_file();
    let server = folder.start();
    let client = folder.writer();
    let entry = client.geometry().chunk_entry(2).unwrap();
    let free = client.statistics().chunks_free;
    server.stop();
    client.region.store(entry, ChunkEntry::new(ChunkUse::Continued).bits()).unwrap();
    let _server = folder.start();
    assert_eq!(folder.writer().statistics().chunks_free, free);
    assert_eq!(client.region.load(entry).unwrap(), 0);
}
