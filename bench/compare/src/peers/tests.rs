//! Proves that every peer agrees with a model, also with many operations in flight. Also proves
//! that each operation costs the verbs and round trips that the peer's file states.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use farside::Counters;
use farside_bench::records::{self, Key};
use farside_bench::store::{Action, Completed, MeasuredStore, Pipelined};
use farside_fabric::memory::Region;
use farside_fabric::shm::ShmFabric;

use super::fusee::Fusee;
use super::lanes::PeerStore;
use super::race::Race;
use super::swarm::Swarm;
use super::{Peer, PeerDemand, SEGMENT_BYTES, Segments, *};
use crate::test_operations::TestOperations;

const DEPTH: u16 = 8;
const DEMAND: PeerDemand = PeerDemand { records: 1000, value_bytes: 13, depth: DEPTH };

/// A region of `count` segments, without a zero in them, and a fabric on it.
fn memory(segments: u64, lanes: u16) -> (Segments, ShmFabric) {
    let file = tempfile::tempfile().unwrap();
    file.set_len((segments + 1) * SEGMENT_BYTES).unwrap();
    let region = Arc::new(Region::map(&file).unwrap());
    let dirt = vec![u64::MAX; SEGMENT_BYTES as usize / 8];
    let starts: Vec<u64> = (0..segments).map(|index| 64 + index * SEGMENT_BYTES).collect();
    starts.iter().for_each(|start| region.write(*start, &dirt).unwrap());
    (Segments::new(starts), ShmFabric::new(region, None, lanes))
}

fn fusee() -> PeerStore<Fusee<ShmFabric>> {
    let (mut memory, fabric) = memory(Fusee::<ShmFabric>::segments(DEMAND), DEPTH);
    PeerStore::new(Fusee::new(fabric, &mut memory, DEMAND).unwrap(), DEPTH)
}

fn race(is_speculative: bool) -> PeerStore<Race<ShmFabric>> {
    let (mut memory, fabric) = memory(Race::<ShmFabric>::segments(DEMAND), DEPTH);
    PeerStore::new(Race::new(fabric, &mut memory, DEMAND, is_speculative).unwrap(), DEPTH)
}

fn swarm() -> PeerStore<Swarm<ShmFabric>> {
    let (mut memory, fabric) = memory(Swarm::<ShmFabric>::segments(DEMAND), 2 * DEPTH);
    PeerStore::new(Swarm::new(fabric, &mut memory, DEMAND).unwrap(), DEPTH)
}

/// A value of the demanded length.
fn value(number: u64) -> Vec<u8> {
    format!("{number:013}").into_bytes()
}

/// Performs pseudo-random operations, one after another, on few keys.
fn follows_the_model<S: MeasuredStore<Error: std::fmt::Debug>>(mut store: S) {
    let mut model: HashMap<Key, Vec<u8>> = HashMap::new();
    let mut found = Vec::new();
    for number in 0..60_000 {
        let dice = records::hash(number);
        let (key, value) = (records::key_of(dice / 16 % 800), value(number));
        match dice % 16 {
            0..3 => {
                let is_new = !model.contains_key(&key);
                assert_eq!(store.change(Action::Insert, &key, &value).unwrap(), is_new, "{number}");
                model.entry(key).or_insert(value);
            }
            3..8 => {
                store.change(Action::Put, &key, &value).unwrap();
                model.insert(key, value);
            }
            _ => {
                let is_there = store.get(&key, &mut found).unwrap();
                assert_eq!(is_there.then_some(&found), model.get(&key), "{number}");
            }
        }
    }
    assert!(model.len() > 300, "the model has only {} keys", model.len());
}

#[test]
fn every_peer_follows_the_model() {
    follows_the_model(fusee());
    follows_the_model(race(false));
    follows_the_model(race(true));
    follows_the_model(swarm());
}

/// An operation in flight.
#[derive(Clone)]
struct Open {
    number: u64,
    record: usize,
    is_get: bool,
    /// For a GET, the PUTs whose values it may find. For a PUT, the PUTs that it overlaps.
    puts: Vec<u64>,
}

/// Performs overlapping operations on few keys. A GET must not find a value that a PUT has surely
/// overwritten.
fn survives_overlaps<S: MeasuredStore<Error: std::fmt::Debug>>(mut store: S, operations: u64) {
    const KEYS: u64 = 5;
    for record in 0..KEYS {
        assert!(store.change(Action::Insert, &records::key_of(record), &value(0)).unwrap());
    }
    // By key, the PUTs whose values may be stored.
    let mut stored: Vec<Vec<u64>> = vec![vec![0]; KEYS as usize];
    let mut lanes: Vec<Option<Open>> = vec![None; DEPTH.into()];
    let (mut next, mut gets) = (1, 0);
    let mut pipeline = store.pipeline().unwrap();
    while next < operations || pipeline.in_flight() > 0 {
        while next < operations && pipeline.in_flight() < pipeline.depth() {
            let (number, record) = (next, (records::hash(next) % KEYS) as usize);
            let (key, is_get) = (records::key_of(record as u64), number % 2 == 1);
            let mut puts = stored[record].clone();
            let lane = if is_get {
                pipeline.start(Action::Get, &key, &[]).unwrap()
            } else {
                let open = lanes.iter_mut().flatten().filter(|open| open.record == record);
                puts.clear();
                for open in open {
                    open.puts.push(number);
                    puts.extend((!open.is_get).then_some(open.number));
                }
                stored[record].push(number);
                pipeline.start(Action::Put, &key, &value(number)).unwrap()
            };
            assert!(lanes[lane].is_none());
            lanes[lane] = Some(Open { number, record, is_get, puts });
            next += 1;
        }
        let Completed { lane, result, .. } = pipeline.wait().unwrap();
        let Open { number, record, is_get, puts } = lanes[lane].take().unwrap();
        let outcome = result.unwrap();
        assert_eq!((outcome.applied, outcome.value.is_some()), (true, is_get));
        if let Some(found) = outcome.value {
            assert!(puts.iter().any(|put| value(*put) == *found), "{number} {puts:?}");
            gets += 1;
        } else {
            stored[record].retain(|put| *put >= number || puts.contains(put));
        }
    }
    drop(pipeline);
    assert_eq!(gets, operations / 2);
}

#[test]
fn operations_in_flight_do_not_disturb_each_other() {
    survives_overlaps(fusee(), 20_000);
    survives_overlaps(race(false), 20_000);
    survives_overlaps(race(true), 20_000);
    survives_overlaps(swarm(), 20_000);
}

/// Returns what an operation cost: round trips, READs, WRITEs, compare-and-swaps.
fn cost<S: MeasuredStore>(store: &mut S, operation: impl FnOnce(&mut S)) -> [u64; 4] {
    let before = store.counters();
    operation(store);
    let Counters { round_trips, reads, writes, compare_swaps, .. } = store.counters() - before;
    [round_trips, reads, writes, compare_swaps]
}

/// The costs of an INSERT, and of a GET and an UPDATE with a cached location.
fn costs<S: MeasuredStore<Error: std::fmt::Debug>>(store: &mut S) -> [[u64; 4]; 3] {
    // It is the only key, so that no other key has its fingerprint.
    let (key, mut found) = (records::key_of(1), Vec::new());
    [
        cost(store, |store| assert!(store.change(Action::Insert, &key, &value(1)).unwrap())),
        cost(store, |store| assert!(store.get(&key, &mut found).unwrap())),
        cost(store, |store| _ = store.change(Action::Put, &key, &value(2)).unwrap()),
    ]
}

#[test]
fn cached_operations_cost_what_the_tables_say() {
    //                            INSERT        GET           UPDATE
    assert_eq!(costs(&mut fusee()), [[2, 2, 2, 1], [1, 3, 0, 0], [2, 3, 2, 1]]);
    assert_eq!(costs(&mut race(false)), [[3, 4, 1, 1], [2, 3, 0, 0], [3, 3, 1, 1]]);
    assert_eq!(costs(&mut race(true)), [[3, 4, 1, 1], [1, 1, 0, 0], [3, 3, 1, 1]]);
    // Includes the WRITE and the compare-and-swap that the UPDATE does not wait for.
    assert_eq!(costs(&mut swarm()), [[2, 2, 1, 1], [1, 1, 0, 0], [2, 0, 2, 2]]);
}

/// The costs of a GET and an UPDATE after the client has forgotten where the key is.
fn uncached<P: Peer>(store: &mut PeerStore<P>, forget: impl Fn(&P)) -> [[u64; 4]; 2] {
    let (key, mut found) = (records::key_of(1), Vec::new());
    assert!(store.change(Action::Insert, &key, &value(1)).unwrap());
    forget(&store.peer);
    let get = cost(store, |store| assert!(store.get(&key, &mut found).unwrap()));
    forget(&store.peer);
    [get, cost(store, |store| _ = store.change(Action::Put, &key, &value(2)).unwrap())]
}

#[test]
fn uncached_operations_cost_what_the_tables_say() {
    let forget = |peer: &Fusee<_>| peer.cache.known.borrow_mut().clear();
    assert_eq!(uncached(&mut fusee(), forget), [[2, 3, 0, 0], [3, 3, 2, 1]]);
    let forget = |peer: &Race<_>| peer.cache.known.borrow_mut().clear();
    assert_eq!(uncached(&mut race(true), forget), [[2, 3, 0, 0], [3, 3, 1, 1]]);
    let forget = |peer: &Swarm<_>| peer.cache.known.borrow_mut().clear();
    assert_eq!(uncached(&mut swarm(), forget), [[2, 3, 0, 0], [4, 3, 2, 2]]);
}

#[test]
fn a_pipeline_attributes_verbs_to_each_operation() {
    let mut store = swarm();
    let key = records::key_of(1);
    store.change(Action::Insert, &key, &value(1)).unwrap();
    let mut pipeline = store.pipeline().unwrap();
    for number in 2..20 {
        pipeline.start(Action::Put, &key, &value(number)).unwrap();
        let Counters { writes, compare_swaps, .. } = *pipeline.wait().unwrap().counters.unwrap();
        assert_eq!([writes, compare_swaps], [2, 2]);
        pipeline.start(Action::Get, &key, &[]).unwrap();
        let Completed { result, counters, .. } = pipeline.wait().unwrap();
        let found = result.unwrap().value.unwrap();
        assert_eq!((&*found, counters.unwrap().reads), (&value(number)[..], 1));
    }
}

#[test]
fn a_chain_that_no_operation_waits_for_may_rest_between_two_turns() {
    let mut store = swarm();
    let (key, mut found) = (records::key_of(1), Vec::new());
    store.change(Action::Insert, &key, &value(1)).unwrap();
    for number in 2..4 {
        // The copy in place has no doorbell yet. With the deadline of Farside's chains it would be
        // late.
        store.change(Action::Put, &key, &value(number)).unwrap();
        std::thread::sleep(Duration::from_millis(60));
        assert!(store.get(&key, &mut found).unwrap());
        assert_eq!(found, value(number));
    }
}

#[test]
fn a_full_store_returns_an_error_that_names_the_cause() {
    let mut store = fusee();
    let failed = (0..100_000)
        .find_map(|record| store.change(Action::Insert, &records::key_of(record), b"x").err());
    assert!(failed.unwrap().to_string().contains("full"));
}

#[test]
fn pieces_do_not_overlap_and_stay_within_their_segments() {
    let (bytes, count) = (100, 100_000);
    let starts: Vec<u64> = (1..=segments(bytes, count)).map(|n| n << 30).collect();
    let mut memory = Segments::new(starts.clone());
    let pieces = memory.cut(bytes, count).unwrap();
    assert!(memory.cut(1, 1).is_err());
    let mut places: Vec<u64> = (0..count).map(|index| pieces.at(index)).collect();
    places.sort_unstable();
    assert!(places.is_sorted_by(|a, b| a + bytes <= *b));
    let within = |at: &u64| starts.iter().any(|s| *s <= *at && at + bytes <= s + SEGMENT_BYTES);
    assert!(places.iter().all(within));
}

#[test]
fn the_piece_that_was_free_longest_is_taken_first() {
    let mut heap = Heap::new(Segments::new(vec![0]).cut(64, 2).unwrap());
    let (first, second) = (heap.take().unwrap(), heap.take().unwrap());
    assert!(heap.take().is_err());
    heap.give(second);
    heap.give(first);
    assert_eq!([heap.take().unwrap(), heap.take().unwrap()], [second, first]);
}
