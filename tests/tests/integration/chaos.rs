//! Proves that clients that die at any moment harm nobody: eight processes on a thousand hot keys,
//! killed at random and replaced. No value is ever read that nobody wrote, no increment is lost or
//! happens twice, the index grows all the while (as far as new keys come: few over RDMA in
//! emulation, where `growth.rs` looks at it), and the region checks out afterwards.
//!
//! `FARSIDE_CHAOS_SECONDS` sets how long (5 by default, 60 in `make test`).

use std::time::{Duration, Instant};

use farside_tests::ledger::Ledger;
use farside_tests::{PATIENCE, ServerProcess, Worker, device, scaled};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

const WORKERS: usize = 8;

/// A client at work for so long.
pub(crate) fn worker(server: &ServerProcess, seconds: u64, number: u64) -> Worker {
    let ledger = server.folder().join("ledger").into_os_string();
    let arguments = [seconds.to_string().into(), number.to_string().into(), ledger];
    Worker::start(env!("CARGO_BIN_EXE_chaos-worker"), server, number, arguments)
}

#[test]
fn clients_killed_at_random_harm_nobody() {
    let seconds = std::env::var("FARSIDE_CHAOS_SECONDS").map_or(5, |text| text.parse().unwrap());
    // Room for what killed clients hold until the collector comes.
    let memory = if device().is_some() { "512MiB" } else { "2GiB" };
    let server = ServerProcess::start(&["--memory", memory, "--grace-ms", "20"]);
    Ledger::create(&server.folder().join("ledger"));
    let ledger = Ledger::open(&server.folder().join("ledger"));
    let until = Instant::now() + Duration::from_secs(seconds);
    let left = || until.saturating_duration_since(Instant::now()).as_secs() + 1;
    let mut random = SmallRng::seed_from_u64(1);
    let mut started = WORKERS as u64;
    let mut workers: Vec<Worker> =
        (0..started).map(|number| worker(&server, left(), number)).collect();
    let mut killed = 0;
    // Longer where the machine is so slow that nobody came to some counter.
    while Instant::now() < until || !ledger.is_used() && Instant::now() < until + PATIENCE {
        std::thread::sleep(Duration::from_millis(random.random_range(5..150)));
        workers.swap_remove(random.random_range(0..WORKERS)).kill();
        workers.push(worker(&server, left(), started));
        started += 1;
        killed += 1;
    }
    workers.into_iter().for_each(Worker::wait);
    assert!(killed > scaled(seconds * 2), "{killed} kills");
    ledger.check_counters(&mut server.client().session().unwrap());
    server.assert_verifies();
    let statistics = server.client().statistics().unwrap();
    assert_eq!(statistics.clients, 1, "dead clients are noticed");
    assert!(device().is_some() || statistics.subtables > 4, "{statistics:?}");
}
