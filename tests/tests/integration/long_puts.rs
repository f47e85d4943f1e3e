//! Proves that clients may be killed at any moment of a PUT of many extents: each key has its old
//! or its new value, whole, and after a collection no block is lost.
//!
//! The clients are processes, which SIGKILL ends at random moments. Two work at a time, so that the
//! server collects the extents of a dead client while another one replaces values of the same key.
//! The sample in CI is small; `make soak` kills 1,000 clients.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use farside::{Client, Session};
use farside_layout::SizeClass;
use farside_tests::counters::Ledger;
use farside_tests::self_describing::{
    COUNTERS_EACH, LongValues, SHARED, WORKERS, counters_of, is_in_flight, key_of,
};
use farside_tests::{ServerProcess, TEST_TIMEOUT, Worker, blocks_with_clients, scaled, wait_until};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

/// The number of kills in CI, and in a soak.
const KILLS: u64 = 40;
const KILLS_OF_SOAK: u64 = 1000;
/// Limit on the time between the first PUT of the clients and the first kill, and between the two
/// kills of a round.
const WORK_MS: u64 = 60;
/// One in this many rounds ends with `kv-cli verify`.
const ROUNDS_PER_VERIFY: u64 = 10;

/// The figures of all rounds, printed in one line.
#[derive(Default)]
struct Figures {
    kills: u64,
    /// Clients that were killed in a PUT, and how many of these PUTs took effect.
    in_flight: u64,
    stored: u64,
    /// Lost blocks that the server found.
    collected: u64,
    verified: u64,
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} clients killed, {} of them in a PUT, of which {} were stored; {} blocks collected, \
             {} times verified",
            self.kills, self.in_flight, self.stored, self.collected, self.verified
        )
    }
}

/// A server, and the files that its clients share.
struct Run {
    server: ServerProcess,
    observer: Client,
    ledger: Ledger,
    files: [PathBuf; 2],
    values: LongValues,
    /// The blocks in use while no client works.
    used: BTreeMap<SizeClass, u64>,
    started: u64,
    figures: Figures,
}

/// Returns the number of blocks of each class that the server does not have.
fn used_blocks(observer: &Client) -> BTreeMap<SizeClass, u64> {
    let classes = observer.admin().statistics().unwrap().classes;
    let used = classes.iter().map(|class| (class.class, class.blocks - class.blocks_free));
    used.filter(|(_, used)| *used > 0).collect()
}

impl Run {
    /// Starts a server, and stores the first value of each key.
    fn start() -> Self {
        let server = ServerProcess::start("--memory 512MiB --grace-ms 20");
        let observer = server.client();
        let files = ["ledger", "values"].map(|name| server.folder().join(name));
        Ledger::create(&files[0]);
        let (ledger, values) = (Ledger::open(&files[0]), LongValues::create(&files[1]));
        {
            let mut session = server.session();
            for counter in (0..WORKERS).flat_map(counters_of) {
                session.put(key_of(counter), values.value(counter, 0)).unwrap();
            }
        }
        wait_until("all blocks are back", TEST_TIMEOUT, || blocks_with_clients(&observer) == 0);
        let used = used_blocks(&observer);
        assert!(used[&SizeClass::EXTENT] > 40, "{used:?}");
        let (started, figures) = (0, Figures::default());
        Self { server, observer, ledger, files, values, used, started, figures }
    }

    fn start_worker(&mut self, worker: u64) -> Worker {
        let [ledger, values] = self.files.each_ref().map(|file| file.display().to_string());
        let arguments = [ledger, values, worker.to_string()];
        self.started += 1;
        let program = env!("CARGO_BIN_EXE_long-put-worker");
        Worker::start(program, &self.server, self.started, arguments)
    }

    /// Returns the number of PUTs that a worker has begun.
    fn begun(&self, worker: u64) -> u64 {
        counters_of(worker).map(|counter| self.ledger.bounds(counter).1).sum()
    }

    /// Starts clients, kills them one after the other, and checks what they leave.
    fn round(&mut self, random: &mut SmallRng) {
        let before = [0, 1].map(|worker| self.begun(worker));
        let mut workers: Vec<_> =
            (0..WORKERS).map(|worker| (worker, self.start_worker(worker))).collect();
        wait_until("the clients begin", TEST_TIMEOUT, || {
            (0..WORKERS).zip(before).all(|(worker, before)| self.begun(worker) > before)
        });
        while !workers.is_empty() {
            std::thread::sleep(Duration::from_millis(random.random_range(0..WORK_MS)));
            let (worker, process) = workers.swap_remove(random.random_range(0..workers.len()));
            process.kill();
            self.figures.kills += 1;
            let is_in_flight = |counter| is_in_flight(&self.ledger, counter);
            self.figures.in_flight += u64::from(counters_of(worker).any(is_in_flight));
            if !workers.is_empty() {
                // The server collects while the other client works.
                self.observer.admin().collect().unwrap();
            }
        }
        wait_until("the clients are lost", TEST_TIMEOUT, || {
            self.observer.admin().statistics().unwrap().clients == 1
        });
        self.figures.collected = self.observer.admin().collect().unwrap().blocks_collected;
        assert_eq!(used_blocks(&self.observer), self.used, "blocks are lost: {}", self.figures);
        let mut session = self.observer.session().unwrap();
        for counter in (0..WORKERS).flat_map(counters_of) {
            if key_of(counter) != SHARED {
                self.check(&mut session, &[counter]);
            }
        }
        let shared = [0, 1].map(|worker| counters_of(worker).end - 1);
        self.check(&mut session, &shared);
    }

    /// Checks that the key of these counters has the value of a last PUT that ended, or of one in
    /// flight. Then corrects the counters of PUTs in flight.
    fn check(&mut self, session: &mut Session, counters: &[u64]) {
        let key = key_of(counters[0]);
        let found = session.get(&key).unwrap().unwrap_or_else(|| panic!("{key} is lost"));
        let mut is_whole = false;
        for counter in counters {
            let (done, begun) = self.ledger.bounds(*counter);
            let is_stored = found.data == self.values.value(*counter, begun);
            is_whole |= is_stored || found.data == self.values.value(*counter, done);
            if done == begun {
                continue;
            }
            assert_eq!(begun, done + 1, "a client has one PUT in flight");
            self.figures.stored += u64::from(is_stored);
            if is_stored {
                self.ledger.acknowledge(*counter);
            } else {
                self.ledger.retract(*counter);
            }
        }
        let bounds: Vec<_> = counters.iter().map(|counter| self.ledger.bounds(*counter)).collect();
        assert!(is_whole, "{key} has neither the old nor the new value: {bounds:?}");
    }

    fn verify(&mut self) {
        self.server.assert_verifies();
        self.figures.verified += 1;
    }
}

/// Kills this many clients.
fn kill_clients(kills: u64, seed: u64) {
    let (mut run, mut random) = (Run::start(), SmallRng::seed_from_u64(seed));
    let started = Instant::now();
    for round in 1..=kills.div_ceil(WORKERS) {
        run.round(&mut random);
        if round % ROUNDS_PER_VERIFY == 0 {
            run.verify();
        }
    }
    run.verify();
    let extents = run.used[&SizeClass::EXTENT];
    let figures = &run.figures;
    println!("in {:?}: {figures}; {extents} extents in use before and after", started.elapsed());
    assert!(figures.in_flight > figures.kills / 2, "{figures}");
    assert!(figures.collected > figures.in_flight * COUNTERS_EACH, "{figures}");
    assert_eq!(run.observer.admin().statistics().unwrap().clients_lost, figures.kills);
}

#[on(shm, tcp_in_soak)]
fn clients_killed_in_puts_of_long_values_lose_no_value_and_no_block() {
    kill_clients(scaled(KILLS), 1);
}

#[on(shm)]
#[ignore = "kills 1,000 clients; run by make soak"]
fn soak() {
    kill_clients(KILLS_OF_SOAK, 2);
}
