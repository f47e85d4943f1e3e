//! Proves that clients that die at any moment harm nobody: eight processes on a thousand hot keys,
//! killed at random and replaced. No value is ever read that nobody wrote, no increment is lost or
//! happens twice, the index grows all the while (as far as new keys come: few over RDMA in
//! emulation, where `growth.rs` looks at it), and the region checks out afterwards.
//!
//! `FARSIDE_CHAOS_SECONDS` sets how long (5 by default, 60 in `make test`).

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use farside_tests::ledger::{COUNTERS, Ledger};
use farside_tests::{ServerProcess, device, scaled};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

const WORKERS: usize = 8;

struct Worker {
    child: Child,
    errors: std::path::PathBuf,
}

impl Worker {
    fn start(server: &ServerProcess, seconds: u64, number: u64) -> Self {
        let errors = server.folder().join(format!("worker-{number}"));
        let child = Command::new(env!("CARGO_BIN_EXE_chaos-worker"))
            .arg(server.address())
            .arg(seconds.to_string())
            .arg(number.to_string())
            .arg(server.folder().join("ledger"))
            .stdin(Stdio::null())
            .stderr(std::fs::File::create(&errors).unwrap())
            .spawn()
            .unwrap();
        Self { child, errors }
    }

    fn errors(&self) -> String {
        std::fs::read_to_string(&self.errors).unwrap()
    }

    /// That it has not ended by itself for a reason.
    fn check(&mut self) {
        if let Some(status) = self.child.try_wait().unwrap() {
            assert!(status.success(), "a worker failed: {status}: {}", self.errors());
        }
    }
}

#[test]
fn clients_killed_at_random_harm_nobody() {
    let seconds = std::env::var("FARSIDE_CHAOS_SECONDS").map_or(5, |text| text.parse().unwrap());
    // Room for what killed clients hold until the collector comes.
    let memory = if device().is_some() { "512MiB" } else { "2GiB" };
    let server = ServerProcess::start(&["--memory", memory, "--grace-ms", "20"]);
    Ledger::create(&server.folder().join("ledger"));
    let until = Instant::now() + Duration::from_secs(seconds);
    let left = || until.saturating_duration_since(Instant::now()).as_secs() + 1;
    let mut random = SmallRng::seed_from_u64(1);
    let mut started = WORKERS as u64;
    let mut workers: Vec<Worker> =
        (0..started).map(|number| Worker::start(&server, left(), number)).collect();
    let mut killed = 0;
    while Instant::now() < until {
        std::thread::sleep(Duration::from_millis(random.random_range(5..150)));
        let victim = &mut workers[random.random_range(0..WORKERS)];
        victim.check();
        victim.child.kill().unwrap();
        victim.child.wait().unwrap();
        assert_eq!(victim.errors(), "", "a killed worker had seen something");
        *victim = Worker::start(&server, left(), started);
        started += 1;
        killed += 1;
    }
    for worker in &mut workers {
        let status = worker.child.wait().unwrap();
        assert!(status.success(), "a worker failed: {status}: {}", worker.errors());
    }
    assert!(killed > scaled(seconds * 2), "{killed} kills");
    check_counters(&server);
    server.assert_verifies();
    let statistics = server.client().statistics().unwrap();
    assert_eq!(statistics.clients, 1, "dead clients are noticed");
    assert!(device().is_some() || statistics.subtables > 4, "{statistics:?}");
}

fn check_counters(server: &ServerProcess) {
    let mut session = server.client().session().unwrap();
    let ledger = Ledger::open(&server.folder().join("ledger"));
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
