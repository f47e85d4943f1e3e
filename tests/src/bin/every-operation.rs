//! A client that makes every operation there is on a server of its own, for `make memcheck`: it is
//! to be run slowly, by something that looks at each of its accesses to memory. Panics when an
//! answer is not the one that nobody else's operations allow.
//!
//! `every-operation ADDRESS ROUNDS`
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::time::Duration;

use farside::{BatchOutcome, Client, Exchange, Outcome, Role, Session, Store};

/// Of values, in bytes: the smallest block to some of the largest classes.
const SIZES: [usize; 6] = [0, 24, 100, 2000, 70_000, 600_000];
/// Keys of a round: enough that the index, which starts with one subtable, grows.
const KEYS: u64 = 400;
const TTL: Duration = Duration::from_secs(3600);

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [address, rounds] = arguments.as_slice() else {
        panic!("every-operation ADDRESS ROUNDS");
    };
    let builder = || Client::builder().server(address).cache_bytes(1 << 20).pipeline_depth(16);
    let client = builder().connect().unwrap();
    let mut session = client.session().unwrap();
    let rounds: u64 = rounds.parse().unwrap();
    for round in 0..rounds {
        for bytes in SIZES {
            single(&mut session, round, &vec![round as u8; bytes]);
        }
        batches(&mut session);
        pipelines(&mut session, round);
        session.clear_cache();
    }
    others(&client);
    let reader = builder().role(Role::Reader).connect().unwrap();
    let mut reader = reader.session().unwrap();
    assert_eq!(reader.scan().unwrap().map(Result::unwrap).count() as u64, rounds * KEYS);
    assert!(reader.put(b"key", b"").is_err());
    println!("{rounds} rounds, {:?}", session.counters());
}

/// The operations of a session, on one key.
fn single(session: &mut Session, round: u64, value: &[u8]) {
    let key = format!("key of {} bytes, round {round}", value.len());
    let key = key.as_bytes();
    assert!(!session.update(key, value).unwrap());
    assert!(session.insert(key, value).unwrap() && !session.insert(key, value).unwrap());
    let found = session.get(key).unwrap().unwrap();
    assert_eq!(*found, *value);
    session.put(key, b"another").unwrap();
    let mut into = Vec::new();
    assert!(session.get_into(key, &mut into).unwrap().is_some() && into == b"another");
    assert!(session.update(key, value).unwrap());
    let by_value = session.compare_exchange(key, Some(value), b"exchanged").unwrap();
    assert_eq!(by_value, Exchange::Exchanged);
    let stale = session.compare_exchange_version(key, found.version, b"").unwrap();
    assert!(matches!(stale, Exchange::Mismatch(Some(value)) if *value == *b"exchanged"));
    session.put_with_ttl(key, value, TTL).unwrap();
    let version = session.get(key).unwrap().unwrap().version;
    assert!(session.store(key, b"last", Store::if_version(version).ttl(TTL)).unwrap());
    assert!(!session.store(key, b"", Store::if_absent()).unwrap());
    assert!(session.delete(key).unwrap() && !session.delete(key).unwrap());
    assert_eq!(session.compare_exchange(key, None, value).unwrap(), Exchange::Exchanged);
    session.clear_cache();
    assert!(session.delete(key).unwrap() && session.get(key).unwrap().is_none());
}

fn batches(session: &mut Session) {
    let mut batch = session.batch();
    batch.put(b"a", b"1").insert(b"b", b"2").update(b"c", b"3");
    batch.store(b"d", b"4", Store::always().ttl(TTL));
    let outcomes: Vec<_> = batch.run().unwrap().into_iter().map(Result::unwrap).collect();
    assert_eq!(outcomes[1..3], [BatchOutcome::Applied(true), BatchOutcome::Applied(false)]);
    let mut batch = session.batch();
    batch.get(b"a").get(b"c").get(b"d");
    let outcomes: Vec<_> = batch.run().unwrap().into_iter().map(Result::unwrap).collect();
    assert!(matches!(&outcomes[0], BatchOutcome::Value(Some(value)) if **value == *b"1"));
    assert_eq!(outcomes[1], BatchOutcome::Value(None));
    let mut batch = session.batch();
    batch.delete(b"a").delete(b"b").delete(b"d");
    assert!(batch.run().unwrap().into_iter().all(|outcome| outcome.is_ok()));
}

/// Inserts keys that stay, then reads, updates and deletes, with more in flight than there are
/// lanes.
fn pipelines(session: &mut Session, round: u64) {
    let mut pipeline = session.pipeline().unwrap();
    for n in 0..KEYS * 4 {
        // An UPDATE beside an INSERT that waits for a split may come before it.
        while n == KEYS && pipeline.in_flight() > 0 {
            assert!(is_sound(&pipeline.wait().unwrap().result.unwrap()));
        }
        let key = (round * KEYS + n % KEYS).to_le_bytes();
        loop {
            let started = match n / KEYS {
                0 => pipeline.insert(&key, &key),
                1 => pipeline.get(&key),
                2 => pipeline.update(&key, &[round as u8; 500]),
                _ => pipeline.put(&key, &key),
            };
            if started.is_ok() {
                break;
            }
            assert!(is_sound(&pipeline.wait().unwrap().result.unwrap()));
        }
    }
    while let Some(completed) = pipeline.wait() {
        assert!(is_sound(&completed.result.unwrap()));
    }
}

fn is_sound(outcome: &Outcome<'_>) -> bool {
    match outcome {
        // A GET runs beside the UPDATE of its key.
        Outcome::Value(value) => value.is_none_or(|(value, _)| [8, 500].contains(&value.len())),
        Outcome::Stored => true,
        Outcome::Applied(applied) => *applied,
    }
}

/// What a client asks its server.
fn others(client: &Client) {
    client.collect().unwrap();
    client.compact().unwrap();
    client.report_snapshot(1000).unwrap();
    assert!(client.statistics().unwrap().subtables > 1, "the index has grown");
}
