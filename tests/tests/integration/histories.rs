//! Proves that operations on one key are linearizable, by what real processes record: while
//! subtables split, clients are killed and replaced, and kv-server is killed and restarted. Also
//! that the judgement can fail.
//!
//! `make soak MINUTES=n` is all of that together for long.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use farside::Client;
use farside_common::fabric::shm::boot_time_ns;
use farside_tests::linearizability::{self, Ended, Operation, Record, Violation};
use farside_tests::recorder::{HOT_KEYS, RECORD_BYTES, RecordingSession, read};
use farside_tests::{ServerProcess, Worker, device, scaled};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

const WORKERS: usize = 2;
const SESSIONS: u64 = 3;
/// A run goes on until there is so much to judge, which takes longer where others are at work.
const OPERATIONS_MIN: u64 = 10_000;
const SPLITS_MIN: u64 = 60;
/// But no longer than this.
const PATIENCE: Duration = Duration::from_secs(60);

/// What is killed meanwhile.
#[derive(Clone, Copy, Default)]
struct Kills {
    workers: bool,
    server: bool,
}

/// What a run came to.
#[derive(Clone, Copy, Debug, Default)]
struct Figures {
    operations: u64,
    /// Nobody knows whether they happened.
    unknown: u64,
    failed: u64,
    clients_killed: u64,
    server_restarts: u64,
    splits: u64,
    violations: u64,
    /// How long the judgement took.
    judging: Duration,
}

impl Figures {
    fn add(&mut self, other: &Self) {
        self.operations += other.operations;
        self.unknown += other.unknown;
        self.failed += other.failed;
        self.clients_killed += other.clients_killed;
        self.server_restarts += other.server_restarts;
        self.splits += other.splits;
        self.violations += other.violations;
        self.judging += other.judging;
    }
}

impl std::fmt::Display for Figures {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} operations ({} unknown, {} failed), {} clients killed, {} server restarts, \
             {} splits, {} violations; {:.0} operations judged a second",
            self.operations,
            self.unknown,
            self.failed,
            self.clients_killed,
            self.server_restarts,
            self.splits,
            self.violations,
            self.operations as f64 / self.judging.as_secs_f64()
        )
    }
}

/// A server, processes at work on it, and what these recorded.
struct Run {
    server: ServerProcess,
    folder: PathBuf,
    /// With the number of the first session of each.
    workers: Vec<(u64, Worker)>,
    sessions: u64,
    /// When the workers with these first sessions were certainly dead.
    deaths: Vec<(u64, u64)>,
    figures: Figures,
}

impl Run {
    fn start() -> Self {
        let memory = if device().is_some() { "512MiB" } else { "1GiB" };
        let server = ServerProcess::start_with_file(&["--memory", memory, "--grace-ms", "20"]);
        let folder = server.folder().join("histories");
        std::fs::create_dir(&folder).unwrap();
        let (workers, deaths, figures) = (Vec::new(), Vec::new(), Figures::default());
        let mut run = Self { server, folder, workers, sessions: 0, deaths, figures };
        (0..WORKERS).for_each(|_| run.start_worker());
        run
    }

    fn start_worker(&mut self) {
        let first = self.sessions;
        self.sessions += SESSIONS;
        let folder = self.folder.clone().into_os_string();
        let arguments = [folder, first.to_string().into(), SESSIONS.to_string().into()];
        let program = env!("CARGO_BIN_EXE_history-worker");
        self.workers.push((first, Worker::start(program, &self.server, first, arguments)));
    }

    /// Kills for so long what is to be killed, and until there is enough to judge.
    fn go_on(&mut self, duration: Duration, kills: Kills, random: &mut SmallRng) {
        let started = Instant::now();
        while started.elapsed() < duration || (self.is_early() && started.elapsed() < PATIENCE) {
            std::thread::sleep(Duration::from_millis(random.random_range(20..200)));
            self.workers.iter_mut().for_each(|(_, worker)| worker.check());
            if kills.server && (!kills.workers || random.random_range(0..4) == 0) {
                self.add_splits();
                self.server.kill();
                if kills.workers && random.random() {
                    self.replace_worker(random);
                }
                self.server.restart();
                self.figures.server_restarts += 1;
            } else if kills.workers {
                self.replace_worker(random);
            }
        }
    }

    /// Another client. It may take long to get in between those at work.
    fn client(&self) -> Client {
        self.server.client_builder().connect_timeout(Duration::from_secs(60)).connect().unwrap()
    }

    /// Whether there is not enough to judge yet.
    fn is_early(&self) -> bool {
        // Files of /dev/shm consist of pages that were touched.
        let bytes = |file: std::fs::DirEntry| file.metadata().unwrap().blocks() * 512;
        let files = std::fs::read_dir(&self.folder).unwrap();
        let touched: u64 = files.map(|file| bytes(file.unwrap())).sum();
        let splits = self.figures.splits + self.client().statistics().unwrap().splits;
        touched / RECORD_BYTES < 2 * scaled(OPERATIONS_MIN) || splits <= scaled(SPLITS_MIN)
    }

    fn replace_worker(&mut self, random: &mut SmallRng) {
        let (first, victim) = self.workers.swap_remove(random.random_range(0..WORKERS));
        victim.kill();
        self.deaths.push((first, boot_time_ns()));
        self.figures.clients_killed += 1;
        self.start_worker();
    }

    /// Splits of this server; a restarted one counts anew.
    fn add_splits(&mut self) {
        self.figures.splits += self.client().statistics().unwrap().splits;
    }

    /// Stops all, has somebody new read every key, and judges what is on file.
    fn judge(mut self) -> (Figures, Vec<Record>) {
        std::fs::write(self.folder.join("stop"), []).unwrap();
        self.workers.drain(..).for_each(|(_, worker)| worker.wait());
        self.add_splits();
        let (session, last) = (self.client().session().unwrap(), self.sessions);
        let file = self.folder.join(last.to_string());
        let mut reader = RecordingSession::new(session, &file, last, HOT_KEYS).unwrap();
        for key in 0..HOT_KEYS {
            reader.get(key).unwrap();
        }
        let history = self.history();
        let count = |end| history.iter().filter(|record| record.result == end).count() as u64;
        self.figures.operations = history.len() as u64;
        self.figures.unknown = count(Ended::Unknown);
        self.figures.failed = count(Ended::Failed);
        let judging = Instant::now();
        if let Err(violation) = linearizability::check(&history) {
            println!("VIOLATION: {violation}\nThe history is in {}", keep(&history).display());
            self.figures.violations = 1;
        }
        self.figures.judging = judging.elapsed();
        self.server.assert_verifies();
        println!("{}", self.figures);
        (self.figures, history)
    }

    /// What is on file.
    fn history(&self) -> Vec<Record> {
        let mut history = Vec::new();
        for process in 0..=self.sessions {
            let of = |(first, _): &&(u64, u64)| (*first..first + SESSIONS).contains(&process);
            // What a device was given it may execute after the process is gone.
            let died = self.deaths.iter().find(of).filter(|_| device().is_none());
            let file = self.folder.join(process.to_string());
            // A worker may be killed before its sessions are connected.
            if file.exists() {
                history.extend(read(&file, process, died.map(|(_, at)| *at)).unwrap());
            }
        }
        history
    }
}

/// Writes a history to where it outlives the test.
fn keep(history: &[Record]) -> PathBuf {
    let file = format!("history-{}-{}.jsonl", std::process::id(), boot_time_ns());
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(file);
    linearizability::write(history, std::fs::File::create(&path).unwrap()).unwrap();
    path
}

/// So many seconds, or more over RDMA, where everything takes longer.
fn seconds(count: u64) -> Duration {
    Duration::from_secs(if device().is_some() { 4 * count } else { count })
}

fn run(duration: Duration, kills: Kills, seed: u64) -> Figures {
    let mut run = Run::start();
    run.go_on(duration, kills, &mut SmallRng::seed_from_u64(seed));
    run.judge().0
}

/// That there was something to judge, and nothing wrong with it.
fn assert_good(figures: &Figures) {
    assert_eq!(figures.violations, 0, "{figures}");
    assert!(figures.operations > scaled(OPERATIONS_MIN), "{figures}");
    assert!(figures.failed < figures.operations / 10, "{figures}");
    assert!(figures.splits > scaled(SPLITS_MIN), "{figures}");
}

#[test]
fn hot_keys_that_move_all_the_time_are_linearizable() {
    // Anew each time, for the first splits are those that all keys see.
    for seed in 0..scaled(3) {
        let figures = run(seconds(1), Kills::default(), seed);
        assert_good(&figures);
        assert_eq!(figures.unknown, 0, "{figures}");
    }
}

#[test]
fn clients_killed_at_random_leave_linearizable_histories() {
    let figures = run(seconds(3), Kills { workers: true, server: false }, 1);
    assert_good(&figures);
    assert!(figures.clients_killed > 5, "{figures}");
}

#[test]
fn a_server_killed_at_random_leaves_linearizable_histories() {
    let figures = run(seconds(3), Kills { workers: false, server: true }, 1);
    assert_good(&figures);
    assert!(figures.server_restarts > 2, "{figures}");
}

#[test]
fn a_history_with_one_wrong_answer_is_refused() {
    let mut run = Run::start();
    run.go_on(seconds(1), Kills::default(), &mut SmallRng::seed_from_u64(1));
    let (figures, history) = run.judge();
    assert_good(&figures);
    let refused = |wrong: Record, right: &Record| {
        let mut history = history.clone();
        *history.iter_mut().find(|record| *record == right).unwrap() = wrong;
        let verdict = linearizability::check(&history);
        assert!(matches!(verdict, Err(Violation::NotLinearizable { .. })), "{verdict:?}");
    };
    let of_one_key = || history.iter().filter(|record| record.key == "0");
    let is_put =
        |record: &&Record| (record.operation, record.result) == (Operation::Put, Ended::Done);
    let puts = || of_one_key().filter(is_put);
    let is_before = |one: &Record, other: &Record| one.returned < Some(other.invoke);
    // A GET that finds what was overwritten before it began.
    let (stale, get) = of_one_key()
        .filter(|record| record.operation == Operation::Get && record.found.is_some())
        .find_map(|get| {
            let last = puts().find(|put| is_before(put, get))?;
            Some((puts().find(|put| is_before(put, last))?, get))
        })
        .unwrap();
    refused(Record { found: stale.argument.clone(), version: None, ..get.clone() }, get);
    // A PUT that failed, although its value was found.
    let found = of_one_key().filter_map(|record| record.found.as_ref());
    let found: Vec<&String> = found.collect();
    let put = puts().find(|put| found.contains(&put.argument.as_ref().unwrap())).unwrap();
    refused(Record { result: Ended::Failed, ..put.clone() }, put);
}

#[test]
#[ignore = "as long as FARSIDE_SOAK_MINUTES says; for make soak"]
fn soak() {
    const ROUND: Duration = Duration::from_secs(5);
    let minutes = std::env::var("FARSIDE_SOAK_MINUTES").map_or(10, |text| text.parse().unwrap());
    let until = Instant::now() + Duration::from_secs(60 * minutes);
    let mut total = Figures::default();
    for round in 0.. {
        if Instant::now() >= until {
            break;
        }
        total.add(&run(ROUND, Kills { workers: true, server: true }, round));
    }
    println!("in {minutes} minutes: {total}");
    assert_good(&total);
}
