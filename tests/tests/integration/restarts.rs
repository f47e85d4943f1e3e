//! Proves that kv-server may be killed at any moment and started again on its region file: client
//! processes at work reconnect by themselves, nothing acknowledged is lost, nothing conditional
//! happens twice, and the region checks out.
//!
//! `FARSIDE_RESTART_KILLS` sets how often it is killed (50 by default).

use std::time::Duration;

use farside::Session;
use farside_tests::ledger::{KEYS_PER_WRITER, Ledger, WRITERS, entry_of, is_removal};
use farside_tests::{ServerProcess, Worker, device, proof};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

fn worker(server: &ServerProcess, number: u64) -> Worker {
    let file = |name: &str| server.folder().join(name).into_os_string();
    let arguments = [number.to_string().into(), file("ledger"), file("stop")];
    Worker::start(env!("CARGO_BIN_EXE_restart-worker"), server, number, arguments)
}

#[test]
fn a_server_killed_under_load_loses_nothing_acknowledged() {
    let default = if device().is_some() { 5 } else { 50 };
    let kills: u64 =
        std::env::var("FARSIDE_RESTART_KILLS").map_or(default, |text| text.parse().unwrap());
    let mut server = ServerProcess::start_with_file(&["--memory", "128MiB", "--grace-ms", "20"]);
    Ledger::create(&server.folder().join("ledger"));
    let ledger = Ledger::open(&server.folder().join("ledger"));
    let mut random = SmallRng::seed_from_u64(1);
    let mut workers: Vec<Worker> = (0..WRITERS).map(|number| worker(&server, number)).collect();
    let mut idle_rounds = 0;
    let mut before = acknowledged(&ledger);
    for kill in 0..kills {
        std::thread::sleep(Duration::from_millis(random.random_range(20..400)));
        server.kill();
        if kill % 5 == 4 {
            // Once more, somewhere on its way to serving.
            server.start_again();
            std::thread::sleep(Duration::from_millis(random.random_range(0..120)));
            server.kill();
        }
        server.restart();
        workers.iter_mut().for_each(Worker::check);
        let now = acknowledged(&ledger);
        idle_rounds += u64::from(now == before);
        before = now;
    }
    // Killed soon after it served again, a server may have seen nobody.
    assert!(idle_rounds < kills.div_ceil(2), "{idle_rounds} of {kills} rounds were idle");
    std::thread::sleep(Duration::from_millis(200));
    std::fs::write(server.folder().join("stop"), []).unwrap();
    workers.into_iter().for_each(Worker::wait);
    let check = |server: &ServerProcess| {
        let mut session = server.client().session().unwrap();
        check_keys(&mut session, &ledger);
        ledger.check_counters(&mut session);
        server.assert_verifies();
    };
    check(&server);
    server.kill();
    server.restart();
    check(&server);
}

/// How many steps of all keys were acknowledged.
fn acknowledged(ledger: &Ledger) -> u64 {
    let writers = 0..WRITERS;
    writers
        .flat_map(|writer| (0..KEYS_PER_WRITER).map(move |key| entry_of(writer, key)))
        .map(|name| ledger.bounds(name).0)
        .sum()
}

fn check_keys(session: &mut Session, ledger: &Ledger) {
    for writer in 0..WRITERS {
        for key in 0..KEYS_PER_WRITER {
            let name = entry_of(writer, key);
            let (acknowledged, attempted) = ledger.bounds(name);
            let possible = acknowledged..=attempted;
            match session.get(&name.to_le_bytes()).unwrap() {
                Some(value) => {
                    let number = proof::number(name, &value);
                    let right = number.is_some_and(|n| possible.contains(&n) && !is_removal(n));
                    assert!(right, "key {name} has {number:?}, not one of {possible:?}");
                }
                None => assert!(
                    possible.clone().any(|number| number == 0 || is_removal(number)),
                    "key {name} is absent after {possible:?}"
                ),
            }
        }
    }
}
