//! Proves that kv-server may be killed at any moment and started again on its region file: client
//! processes at work reconnect by themselves, nothing acknowledged is lost, nothing conditional
//! happens twice, and the region checks out.
//!
//! `FARSIDE_RESTART_KILLS` sets how often it is killed (50 by default).

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use farside::Session;
use farside_tests::ledger::{COUNTERS, KEYS_PER_WRITER, Ledger, WRITERS, entry_of, is_removal};
use farside_tests::{ServerProcess, device, proof};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

struct Worker {
    child: Child,
    errors: std::path::PathBuf,
}

impl Worker {
    fn start(server: &ServerProcess, number: u64) -> Self {
        let errors = server.folder().join(format!("worker-{number}"));
        let child = Command::new(env!("CARGO_BIN_EXE_restart-worker"))
            .arg(server.address())
            .arg(number.to_string())
            .arg(server.folder().join("ledger"))
            .arg(server.folder().join("stop"))
            .stdin(Stdio::null())
            .stderr(std::fs::File::create(&errors).unwrap())
            .spawn()
            .unwrap();
        Self { child, errors }
    }

    /// That it has not ended by itself.
    fn check(&mut self) {
        if let Some(status) = self.child.try_wait().unwrap() {
            panic!("a worker ended: {status}: {}", std::fs::read_to_string(&self.errors).unwrap());
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
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
    let mut workers: Vec<Worker> =
        (0..WRITERS).map(|number| Worker::start(&server, number)).collect();
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
    for worker in &mut workers {
        let status = worker.child.wait().unwrap();
        let errors = std::fs::read_to_string(&worker.errors).unwrap();
        assert!(status.success(), "a worker failed: {status}: {errors}");
    }
    let check = |server: &ServerProcess| {
        let mut session = server.client().session().unwrap();
        check_keys(&mut session, &ledger);
        check_counters(&mut session, &ledger);
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

fn check_counters(session: &mut Session, ledger: &Ledger) {
    for counter in 0..COUNTERS {
        let (acknowledged, attempted) = ledger.bounds(counter);
        let value = session.get(format!("counter {counter}").as_bytes()).unwrap();
        let number = value.map_or(0, |value| u64::from_le_bytes(value.data.try_into().unwrap()));
        assert!(acknowledged > 0, "counter {counter} was not used");
        assert!(
            (acknowledged..=attempted).contains(&number),
            "counter {counter} is {number}, between {acknowledged} and {attempted} were possible"
        );
    }
}
