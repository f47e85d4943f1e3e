//! Proves that the index grows from one subtable while clients use it.
//!
//! Meanwhile every scan sees every key once, and a server killed anywhere in a split loses nothing.
//! `histories.rs` checks operations on keys that a split moves.
//!
//! `FARSIDE_GROWTH_KEYS` sets how many keys four processes insert: 100 000 by default.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use farside::{Client, Session};
use farside_tests::{ServerProcess, StopOnDrop, Worker, scaled};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

const WRITERS: u64 = 4;
/// Limit on the index's bytes per key. Subtables of 448 slots in 8 KiB are 0.35 full when all were
/// just split, and 0.70 full before the next splits: 52 to 26 bytes per key.
const BYTES_PER_KEY_MAX: f64 = 60.0;

pub(crate) fn key(writer: u64, number: u64) -> [u8; 8] {
    (writer << 48 | number).to_le_bytes()
}

pub(crate) fn number_at(session: &mut Session, key: &[u8]) -> Option<u64> {
    let value = session.get(key).unwrap()?;
    Some(u64::from_le_bytes(value.data.try_into().unwrap()))
}

/// Limit on the keys of a writer, for a fast machine: two writers must not fill 512 MiB.
const INSERTS_MAX: usize = 1_000_000;

/// Inserts keys of this writer until `stop` is set; returns their number.
fn insert_until(client: &Client, writer: u64, stop: &AtomicBool) -> u64 {
    let mut session = client.session().unwrap();
    let is_going = |_: &u64| !stop.load(Ordering::Relaxed);
    let inserted = (0..).take_while(is_going).take(INSERTS_MAX).map(|number| {
        let mut insert = || session.insert(key(writer, number), number.to_le_bytes());
        match insert() {
            Ok(inserted) => assert!(inserted),
            // Over TCP, when the server was killed: it may be there or not.
            Err(error) if error.is_indeterminate() => drop(insert().unwrap()),
            Err(error) => panic!("{error}"),
        }
    });
    inserted.count() as u64
}

#[on(shm, tcp_in_soak)]
fn four_processes_fill_an_index_of_one_subtable() {
    let keys = std::env::var("FARSIDE_GROWTH_KEYS").map(|text| text.parse().unwrap());
    let keys: u64 = keys.unwrap_or(scaled(100_000)) / WRITERS;
    let mib = 128 + WRITERS * keys * 256 / (1 << 20);
    let server = ServerProcess::start(&format!("--memory {mib}MiB"));
    let client = server.client();
    let (stop, operations) = (AtomicBool::new(false), AtomicU64::new(0));
    let rate = |from: (Instant, u64)| {
        (operations.load(Ordering::Relaxed) - from.1) as f64 / from.0.elapsed().as_secs_f64()
    };
    let since = || (Instant::now(), operations.load(Ordering::Relaxed));
    std::thread::scope(|scope| {
        let _stops = StopOnDrop(&stop);
        scope.spawn(|| read_and_write(&server.client(), &stop, &operations));
        let growing = since();
        let program = env!("CARGO_BIN_EXE_growth-worker");
        let start = |writer: u64| {
            let report = server.folder().join(format!("inserted-{writer}"));
            let [number, keys] = [writer, keys].map(|number| number.to_string());
            let arguments = [number, keys, report.display().to_string()];
            (Worker::start(program, &server, writer, arguments), report)
        };
        for (worker, report) in &mut (0..WRITERS).map(start).collect::<Vec<_>>() {
            while !report.exists() {
                worker.check();
                std::thread::sleep(Duration::from_millis(10));
            }
            println!("{}", std::fs::read_to_string(report).unwrap());
        }
        let during = rate(growing);
        let steady = since();
        std::thread::sleep(Duration::from_secs(1));
        let after = rate(steady);
        stop.store(true, Ordering::Relaxed);
        println!("GET and PUT of a bystander: {during:.0} a second, {after:.0} without growth");
    });
    let mut session = client.session().unwrap();
    for writer in 0..WRITERS {
        for number in (0..keys).step_by(7) {
            assert_eq!(number_at(&mut session, &key(writer, number)), Some(number));
        }
        assert_eq!(session.get(key(writer, keys)).unwrap(), None);
    }
    let statistics = client.admin().statistics().unwrap();
    assert_eq!(statistics.splits + 1, statistics.subtables);
    assert_eq!(statistics.splits_stuck, 0);
    let per_key = |bytes: u64| bytes as f64 / (WRITERS * keys) as f64;
    let (exact, chunks) = (statistics.subtables * 8192, statistics.chunks_index << 21);
    println!(
        "{} subtables, {:.1} bytes of index a key, {:.1} with chunks and places that rest",
        statistics.subtables,
        per_key(exact),
        per_key(chunks)
    );
    // With few subtables, the average depends on which were just split.
    assert!(per_key(exact) < BYTES_PER_KEY_MAX || statistics.subtables < 100);
    server.assert_verifies();
}

/// Runs as many GETs as PUTs on a thousand keys, and counts them.
fn read_and_write(client: &Client, stop: &AtomicBool, operations: &AtomicU64) {
    const KEYS: u64 = 1000;
    let mut session = client.session().unwrap();
    let mut random = SmallRng::seed_from_u64(1);
    (0..KEYS).for_each(|number| session.put(key(99, number), [0; 8]).unwrap());
    while !stop.load(Ordering::Relaxed) {
        let key = key(99, random.random_range(0..KEYS));
        session.put(key, [1; 8]).unwrap();
        assert!(session.get(key).unwrap().is_some());
        operations.fetch_add(2, Ordering::Relaxed);
    }
}

#[on(shm, tcp_in_soak)]
fn scans_see_every_key_once_while_the_index_grows() {
    let server = ServerProcess::start("--memory 512MiB --grace-ms 20");
    let mut session = server.session();
    let keys = scaled(3000);
    (0..keys).for_each(|number| session.put(key(9, number), number.to_le_bytes()).unwrap());
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stops = StopOnDrop(&stop);
        for writer in 0..2 {
            let (client, stop) = (server.client(), &stop);
            scope.spawn(move || insert_until(&client, writer, stop));
        }
        let mut seen = vec![0; keys as usize];
        for round in 1..=5 {
            for entry in session.scan().unwrap() {
                let id = u64::from_le_bytes(entry.unwrap().key.try_into().unwrap());
                if id >> 48 == 9 {
                    seen[(id & 0xffff_ffff) as usize] += 1;
                }
            }
            let wrong = seen.iter().position(|times| *times != round);
            assert_eq!(wrong, None, "a key came more or less than once in scan {round}");
        }
        // The checker also follows splits, but fails if the directory keeps growing under it.
        loop {
            let verified = server.cli(&["verify"]);
            if verified.code == Some(0) {
                break;
            }
            let expected = "the directory was replaced during each of";
            assert!(verified.stderr.contains(expected), "{verified:?}");
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(server.client().admin().statistics().unwrap().splits >= scaled(10));
    server.assert_verifies();
}

// On shared memory only: it takes minutes there until a kill hits a split.
#[on(shm)]
fn a_server_killed_in_splits_loses_nothing() {
    const KILLS_MAX: u32 = 60;
    let mut server = ServerProcess::start_with_file("--memory 512MiB --grace-ms 5");
    let stop = AtomicBool::new(false);
    let inserted: Vec<u64> = std::thread::scope(|scope| {
        let _stops = StopOnDrop(&stop);
        let insert = |writer| {
            let client = server.client_builder().connect_timeout(Duration::from_secs(60));
            let client = client.connect().unwrap();
            let stop = &stop;
            scope.spawn(move || insert_until(&client, writer, stop))
        };
        let writers: Vec<_> = (0..WRITERS).map(insert).collect();
        let mut random = SmallRng::seed_from_u64(5);
        for kills in 1.. {
            std::thread::sleep(Duration::from_micros(random.random_range(5_000..60_000)));
            server.kill();
            server.restart();
            // If the kill interrupted a split, the next server logs that.
            let hits = server.log().matches("ended a split that was interrupted").count();
            if hits >= 3 || kills == KILLS_MAX {
                assert!(hits > 0, "no kill hit a split");
                break;
            }
        }
        stop.store(true, Ordering::Relaxed);
        writers.into_iter().map(|writer| writer.join().unwrap()).collect()
    });
    server.assert_verifies();
    let mut session = server.session();
    for (writer, inserted) in (0..).zip(inserted) {
        for number in 0..inserted {
            assert_eq!(number_at(&mut session, &key(writer, number)), Some(number));
        }
    }
    assert_eq!(server.client().admin().statistics().unwrap().splits_stuck, 0);
}
