//! Stops a split after each of many chains, as a killed server would, and checks that clients find
//! all keys; then completes the split. Guards against states in which a key is missed, seen twice
//! or lost.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::rc::Rc;

use farside_fabric::shm::ShmFabric;
use farside_fabric::{
    Buffer, Completion, Fabric, Intercepted, Interceptor, LaneId, Nanos, RegionIndex, Verb,
};
use farside_layout::{SUBTABLE_BYTES, prefix_of};

use farside::{Client, Session};
use farside_protocol::split::{Split, SplitProgress, SubtableSplitter};
use farside_protocol::{LANE, ScanCursor, next_entry};
use farside_tests::engine::{TestEngine, engine_over};
use farside_tests::faults::Fence;
use farside_tests::{ServerProcess, fill};

/// The directory's depth: there are 2^DEPTH subtables.
const DEPTH: u8 = 6;
/// The number of keys; every subtable has some.
const KEYS: u64 = 60 << DEPTH;

/// Returns the offset of the `number`-th last subtable in the index's first chunk, which the server
/// has cleared. The server splits no subtable in these tests.
fn space<F: Fabric>(engine: &TestEngine<F>, number: u64) -> u64 {
    let index = engine.region.geometry.chunk_offset(0).unwrap();
    index + (255 - number) * SUBTABLE_BYTES
}

/// Returns the subtable of a prefix in the directory before all splits.
fn subtable<F: Fabric>(engine: &TestEngine<F>, prefix: u32) -> u64 {
    engine.region.directory().subtable(prefix << (32 - DEPTH)).offset
}

/// Returns the sorted keys of a scan.
fn scanned(session: &mut Session) -> Vec<Vec<u8>> {
    let mut keys: Vec<_> = session.scan().unwrap().map(|entry| entry.unwrap().key).collect();
    keys.sort_unstable();
    let scanned = session.scan_keys("").unwrap();
    let mut alone: Vec<_> = scanned.map(|entry| entry.unwrap().key).collect();
    alone.sort_unstable();
    assert_eq!(alone, keys);
    assert_eq!(session.count_keys().unwrap(), keys.len() as u64);
    keys
}

fn find(session: &mut Session, number: u64) {
    let value = session.get(number.to_le_bytes()).unwrap();
    let value = value.unwrap_or_else(|| panic!("key {number} was missed"));
    assert_eq!(value.data, number.to_le_bytes());
}

fn with_keys() -> (ServerProcess, Client, Session) {
    let index_bytes = SUBTABLE_BYTES << DEPTH;
    let server = ServerProcess::start(&format!("--memory 64MiB --index {index_bytes}B"));
    let client = server.client();
    let mut session = client.session().unwrap();
    fill(&mut session, 0..KEYS, u64::to_le_bytes);
    (server, client, session)
}

#[test]
fn clients_find_all_keys_wherever_a_split_stops() {
    let (server, client, mut session) = with_keys();
    // Three sessions: one without a cache, one that has cached all old locations, and one with the
    // old directory that shares the first one's cache.
    let mut other = server.session();
    let mut sibling = client.session().unwrap();
    (0..KEYS).for_each(|n| find(&mut other, n));
    let chains_left = Rc::new(Cell::new(u64::MAX));
    let left = chains_left.clone();
    let admits = move || {
        let admits = left.get() > 0;
        left.update(|left| left - u64::from(admits));
        admits
    };
    let engine = engine_over(&server.address(), |fabric| Fence::around(Box::new(fabric), admits));
    let keys_of = |prefix: u32| {
        let is_here = |n: &u64| {
            prefix_of(engine.region.hasher.hash(&n.to_le_bytes()).directory(), DEPTH) == prefix
        };
        (0..KEYS).filter(is_here).collect::<Vec<u64>>()
    };
    // `total` is the number of chains of a whole split, counted with the first one.
    let (mut depth, mut total) = (DEPTH, u64::MAX);
    for prefix in 0..1u32 << DEPTH {
        let new = [0, 1].map(|n| space(&engine, u64::from(2 * prefix + n)));
        let old = subtable(&engine, prefix);
        let split = Split { prefix, local_depth: DEPTH, old, new };
        let splitter = SubtableSplitter::new(
            &engine.endpoint,
            RegionIndex::FIRST,
            1 + 3 * (prefix as u16 % 3),
            &engine.region.format,
        );
        let keys = keys_of(prefix);
        let chains = if prefix == 0 { u64::MAX } else { (total * u64::from(prefix)) >> DEPTH };
        chains_left.set(chains);
        let stopped = engine.endpoint.drive(splitter.split(&split));
        // Some of the last subtables have fewer entries, so their split completes.
        assert!(stopped.is_err() || !(1..50).contains(&prefix), "{prefix}: {stopped:?}");
        total = if prefix == 0 { chains - chains_left.get() } else { total };
        session.clear_cache();
        for key in &keys {
            find(&mut session, *key);
            find(&mut other, *key);
        }
        chains_left.set(u64::MAX);
        assert_eq!(engine.endpoint.drive(splitter.split(&split)), Ok(SplitProgress::Done));
        depth = engine.endpoint.drive(splitter.publish(&split, depth)).unwrap();
        session.clear_cache();
        for key in &keys {
            find(&mut session, *key);
            if key % 3 == 0 {
                // The key is in the new subtable; this session still looks in the old one.
                sibling.put(key.to_le_bytes(), key.to_le_bytes()).unwrap();
            }
            session.put(key.to_le_bytes(), key.to_le_bytes()).unwrap();
            find(&mut sibling, *key);
            find(&mut other, *key);
            assert!(other.delete(key.to_le_bytes()).unwrap());
            assert!(session.insert(key.to_le_bytes(), key.to_le_bytes()).unwrap());
        }
    }
    assert_eq!(depth, DEPTH + 1);
    let mut seen = scanned(&mut session);
    seen.dedup();
    assert_eq!(seen.len() as u64, KEYS);
}

#[test]
fn a_scan_returns_each_key_once_while_a_split_is_unpublished() {
    let (server, _client, mut session) = with_keys();
    let engine = engine_over(&server.address(), |fabric| fabric);
    let new = [0, 1].map(|n| space(&engine, n));
    let split = Split { prefix: 0, local_depth: DEPTH, old: subtable(&engine, 0), new };
    let splitter =
        SubtableSplitter::new(&engine.endpoint, RegionIndex::FIRST, 1, &engine.region.format);
    assert_eq!(engine.endpoint.drive(splitter.split(&split)), Ok(SplitProgress::Done));
    // A server may be killed at this point, or spend a while doubling a large directory.
    let hash = |n: &u64| engine.region.hasher.hash(&n.to_le_bytes()).directory();
    session.clear_cache();
    let key_in_first_half = (0..KEYS).find(|n| prefix_of(hash(n), DEPTH + 1) == 0).unwrap();
    find(&mut session, key_in_first_half);
    let mut seen = scanned(&mut session);
    let count = seen.len();
    seen.dedup();
    assert_eq!((seen.len() as u64, count as u64), (KEYS, KEYS), "distinct, returned");
}

/// Makes a change during a scan's READ of a row: the scan gets the row's header from before the
/// change and its slots from after it.
struct Tearing {
    change: Option<Box<dyn FnOnce()>>,
    /// The number of such READs before the one with the change.
    reads_before: usize,
    /// The header from before the change.
    header: Option<Vec<u8>>,
}

impl Interceptor<ShmFabric> for Tearing {
    fn post(
        &mut self,
        fabric: &mut ShmFabric,
        lane: LaneId,
        region: RegionIndex,
        chain: &[Verb],
        deadline: Nanos,
    ) {
        if let Verb::Read { remote, into: Buffer::Window, bytes: 128 } = chain[0] {
            if self.reads_before > 0 {
                self.reads_before -= 1;
            } else if let Some(change) = self.change.take() {
                let header = [Verb::Read { remote, into: Buffer::Window, bytes: 16 }];
                fabric.run(lane, region, &header, Nanos::MAX).unwrap();
                self.header = Some(fabric.buffer(lane, Buffer::Window)[..16].to_vec());
                change();
            }
        }
        fabric.post(lane, region, chain, deadline);
    }

    fn poll(&mut self, fabric: &mut ShmFabric) -> Option<Completion> {
        let completion = fabric.poll()?;
        if let Some(header) = self.header.take() {
            fabric.buffer_mut(completion.lane, Buffer::Window)[..16].copy_from_slice(&header);
        }
        Some(completion)
    }
}

#[test]
fn a_scan_whose_read_spans_a_split_misses_no_key() {
    let (server, _client, mut session) = with_keys();
    let engine = Rc::new(engine_over(&server.address(), |fabric| fabric));
    let grace_ns = engine.region.constants.grace_ns;
    let hasher = engine.region.hasher;
    // Splits the subtable that the scan READs, and reuses its memory for another subtable.
    let change = Box::new(move || {
        let [a, b, c] = [0, 1, 2].map(|n| space(&engine, n));
        let splitter =
            SubtableSplitter::new(&engine.endpoint, RegionIndex::FIRST, 1, &engine.region.format);
        let drive = |split: &Split, depth: u8| {
            let (progress, depth) = engine.endpoint.drive(splitter.run(split, depth)).unwrap();
            assert_eq!(progress, SplitProgress::Done);
            depth
        };
        let (first, second) = (subtable(&engine, 0), subtable(&engine, 1));
        let split = Split { prefix: 0, local_depth: DEPTH, old: first, new: [a, b] };
        let depth = drive(&split, DEPTH);
        std::thread::sleep(std::time::Duration::from_nanos(grace_ns * 3 / 2));
        assert!(engine.endpoint.drive(splitter.vacate(first)).unwrap());
        let split = Split { prefix: 1, local_depth: DEPTH, old: second, new: [first, c] };
        drive(&split, depth);
    });
    let hash = |n: &u64| hasher.hash(&n.to_le_bytes()).directory();
    let reads_before = (0..KEYS).filter(|n| prefix_of(hash(n), DEPTH) == 0).count() - 1;
    let interceptor = Tearing { change: Some(change), reads_before, header: None };
    let scanning = engine_over(&server.address(), |fabric| Intercepted {
        interceptor,
        fabric: Box::new(fabric),
    });
    let mut progress = ScanCursor::default();
    let mut seen = BTreeSet::new();
    while let Some(entry) =
        scanning.endpoint.drive(next_entry(scanning.handle(), LANE, &mut progress)).unwrap()
    {
        seen.insert(entry.key);
    }
    let missed: Vec<u64> = (0..KEYS).filter(|n| !seen.contains(&n.to_le_bytes()[..])).collect();
    missed.iter().for_each(|n| find(&mut session, *n));
    assert_eq!(missed, [0; 0], "keys that were always there, and not returned");
}
