//! Sessions at work while hosts die: they track the possible values of each of their keys, and time
//! each call. A session panics when an operation returns a wrong result.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use farside::ConnectError::Unreachable;
use farside::OperationError::{Contended, Indeterminate};
use farside::{Client, Error, Result, Session, Value};
use farside_tests::counters::{self, Observation};
use farside_tests::counters::{COUNTERS, Ledger};
use farside_tests::self_describing;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

/// The number of sessions of one process.
pub(crate) const SESSIONS: u64 = 4;

/// Sessions of one client at work, each on its own thread.
pub(crate) struct Load {
    client: Client,
    clock: Clock,
    stop: Arc<AtomicBool>,
    progress: Vec<Arc<Progress>>,
    threads: Vec<JoinHandle<Worker>>,
}

impl Load {
    /// Starts [`SESSIONS`] sessions, which write as `writer` and the numbers after it.
    pub(crate) fn start(client: Client, kind: LoadMix, writer: u64, ledger: &Path) -> Self {
        let (clock, stop) = (Clock(Instant::now()), Arc::new(AtomicBool::new(false)));
        let progress: Vec<Arc<Progress>> = (0..SESSIONS).map(|_| Arc::default()).collect();
        let start = |(writer, progress): (u64, &Arc<Progress>)| {
            let session = client.session().unwrap();
            let ledger = Ledger::open(ledger);
            let worker = Worker::new(session, writer, progress.clone(), clock, ledger);
            let stop = stop.clone();
            std::thread::spawn(move || worker.run(kind, &stop))
        };
        let threads = (writer..).zip(&progress).map(start).collect();
        Self { client, clock, stop, progress, threads }
    }

    fn sum(&self, counter: impl Fn(&Progress) -> &AtomicU64) -> u64 {
        self.progress.iter().map(|progress| counter(progress).load(Ordering::Relaxed)).sum()
    }

    /// Panics with the panic of a session that ended early.
    fn check(&mut self) {
        if let Some(at) = self.threads.iter().position(JoinHandle::is_finished) {
            let worker = self.threads.swap_remove(at).join();
            panic!("a session ended: {}", reason(&worker.map(|_| ()).unwrap_err()));
        }
    }

    /// Waits until every session has made `count` more successful calls.
    pub(crate) fn wait_for(&mut self, count: u64, timeout: Duration) {
        let done = |progress: &Arc<Progress>| progress.done.load(Ordering::Relaxed);
        let before: Vec<u64> = self.progress.iter().map(done).collect();
        self.wait_until("every session makes calls", timeout, |load| {
            load.progress.iter().zip(&before).all(|(now, before)| done(now) >= before + count)
        });
    }

    /// Waits until a call of every session has failed with `Unreachable`.
    pub(crate) fn wait_for_unreachable(&mut self, timeout: Duration) {
        self.wait_until("every session finds the server unreachable", timeout, |load| {
            let mut all = load.progress.iter();
            all.all(|progress| progress.unreachable.load(Ordering::Relaxed) > 0)
        });
    }

    fn wait_until(&mut self, what: &str, timeout: Duration, holds: impl Fn(&Self) -> bool) {
        let started = Instant::now();
        while !holds(self) {
            self.check();
            let is_late = started.elapsed() > timeout;
            assert!(!is_late, "after {timeout:?} still waiting: {what}; {}", self.describe());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Returns the time of the slowest call, including calls under way.
    pub(crate) fn slowest(&self) -> Duration {
        let now = self.clock.now_ns();
        let slowest_ns = |progress: &Arc<Progress>| {
            let began = progress.began_ns.load(Ordering::Relaxed);
            let under_way = if began == 0 { 0 } else { now.saturating_sub(began) };
            progress.slowest_ns.load(Ordering::Relaxed).max(under_way)
        };
        Duration::from_nanos(self.progress.iter().map(slowest_ns).max().unwrap_or(0))
    }

    /// Returns the figures so far, for the test's output.
    pub(crate) fn describe(&self) -> String {
        format!(
            "{} done, {} Unreachable, {} Indeterminate, {} Contended, slowest call {:.2} s",
            self.sum(|progress| &progress.done),
            self.sum(|progress| &progress.unreachable),
            self.sum(|progress| &progress.indeterminate),
            self.sum(|progress| &progress.contended),
            self.slowest().as_secs_f64()
        )
    }

    /// Ends all sessions; panics if one of them panicked.
    pub(crate) fn stop(mut self) -> Finished {
        self.stop.store(true, Ordering::Relaxed);
        let figures = self.describe();
        let threads = std::mem::take(&mut self.threads);
        let workers: Vec<Worker> = threads
            .into_iter()
            .map(|thread| {
                thread.join().unwrap_or_else(|panic| panic!("a session: {}", reason(&panic)))
            })
            .collect();
        let slowest = self.slowest();
        Finished { client: self.client.clone(), workers, figures, slowest }
    }

    /// Ends all sessions, as [`Load::stop`] does. Panics if a call took longer than `call_max`.
    pub(crate) fn stop_within(self, call_max: Duration) -> Finished {
        let finished = self.stop();
        assert!(finished.slowest <= call_max, "over {call_max:?}: {}", finished.figures);
        finished
    }
}

impl Drop for Load {
    /// Stops the sessions of a failed scenario: they would disturb the next one.
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Returns the message of a panic.
pub(crate) fn reason(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("a panic").to_owned()
}

/// Sessions that have ended, and their figures.
pub(crate) struct Finished {
    pub(crate) client: Client,
    workers: Vec<Worker>,
    pub(crate) figures: String,
    slowest: Duration,
}

impl Finished {
    /// Returns the operations of all sessions on the counters.
    pub(crate) fn seen(&self) -> Vec<Observation> {
        self.workers.iter().flat_map(|worker| worker.seen.iter().copied()).collect()
    }

    /// Checks the counters, and that each session's own keys hold a possible value. `session` has
    /// no cached locations.
    pub(crate) fn check(&self, session: &mut Session) {
        counters::check(&self.seen()).unwrap();
        self.workers.iter().for_each(|worker| check_own(session, worker));
    }
}

/// Runs the load on the other client's host: `load ADDRESS KIND WRITER SECONDS LEDGER`. Prints
/// `under way`, and at the end all increments as `increment COUNTER VALUE`.
#[allow(clippy::print_stdout)]
pub(crate) fn run_elsewhere(arguments: &[String]) {
    let [address, kind, writer, seconds, ledger] = arguments else {
        panic!("load ADDRESS mixed|churn WRITER SECONDS LEDGER");
    };
    let kind = if kind == "churn" { LoadMix::Churn } else { LoadMix::Mixed };
    let ledger = PathBuf::from(ledger);
    if !ledger.exists() {
        Ledger::create(&ledger);
    }
    let client = Client::builder().server(address).connect().unwrap();
    let mut load = Load::start(client, kind, writer.parse().unwrap(), &ledger);
    load.wait_for(1, Duration::from_secs(20));
    println!("under way");
    std::thread::sleep(Duration::from_secs(seconds.parse().unwrap()));
    let finished = load.stop();
    let mut session = finished.client.session().unwrap();
    session.clear_cache();
    finished.check(&mut session);
    drop(session);
    for seen in finished.seen().iter().filter(|seen| seen.is_increment) {
        println!("increment {} {}", seen.counter, seen.value);
    }
    let figures = finished.figures.clone();
    let started = Instant::now();
    drop(finished);
    println!("{figures}, ended in {:.2} s", started.elapsed().as_secs_f64());
}

/// Keys that all sessions write.
const HOT_KEYS: u64 = 16;
/// Keys that one session alone writes.
const OWN_KEYS: u64 = 8;
const SIZES: [usize; 4] = [24, 100, 500, 2000];

/// The mix of operations of the sessions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LoadMix {
    /// All operations.
    Mixed,
    /// Inserts and deletes: a client that dies is probably in the middle of an insert.
    Churn,
}

/// The counts and times of one session's calls so far.
#[derive(Default)]
pub(crate) struct Progress {
    pub(crate) done: AtomicU64,
    pub(crate) unreachable: AtomicU64,
    pub(crate) indeterminate: AtomicU64,
    pub(crate) contended: AtomicU64,
    pub(crate) slowest_ns: AtomicU64,
    /// When the call under way began; 0 between calls.
    pub(crate) began_ns: AtomicU64,
}

/// The clock of all sessions of this process; never 0.
#[derive(Clone, Copy)]
pub(crate) struct Clock(pub(crate) Instant);

impl Clock {
    pub(crate) fn now_ns(self) -> u64 {
        self.0.elapsed().as_nanos() as u64 + 1
    }
}

impl Progress {
    /// Makes a call; also returns when it began and ended.
    pub(crate) fn timed<T>(&self, clock: Clock, call: impl FnOnce() -> T) -> (T, u64, u64) {
        let began = clock.now_ns();
        self.began_ns.store(began, Ordering::Relaxed);
        let result = call();
        self.began_ns.store(0, Ordering::Relaxed);
        let ended = clock.now_ns();
        self.slowest_ns.fetch_max(ended - began, Ordering::Relaxed);
        (result, began, ended)
    }
}

/// The effect of a call that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CallFailure {
    /// The operation has not happened, and will not.
    NotDone,
    /// The operation may have happened.
    Unknown,
}

pub(crate) struct Worker {
    session: Session,
    writer: u64,
    progress: Arc<Progress>,
    clock: Clock,
    ledger: Ledger,
    random: SmallRng,
    /// The number of the present operation, which is also the count in the value that it writes.
    operation_number: u64,
    /// The possible values of each of its own keys, by their counts; 0 if the key may be absent.
    own: Vec<Vec<u64>>,
    /// Its operations on the counters.
    pub(crate) seen: Vec<Observation>,
}

/// Returns the name of a key that a session alone writes.
pub(crate) fn own_name(writer: u64, key: u64) -> u64 {
    writer << 32 | (key + 1)
}

/// Returns the name of a counter.
pub(crate) fn counter_name(counter: u64) -> String {
    format!("counter {counter}")
}

/// Returns the value of a counter; 0 if it is absent.
pub(crate) fn number(value: Option<&[u8]>) -> u64 {
    value.map_or(0, |bytes| u64::from_le_bytes(bytes.try_into().unwrap()))
}

/// Returns the count that a value of an own key was written with.
fn count_of(value: &[u8]) -> u64 {
    u64::from_le_bytes(value[16..24].try_into().unwrap())
}

/// Checks that a value of an own key is possible; returns its count, or 0 if the key is absent.
fn checked_count(name: u64, value: Option<Value>, possible: &[u64]) -> u64 {
    let count = value.as_ref().map_or(0, |value| count_of(&value.data));
    let is_written = value.is_none_or(|value| self_describing::holds(name, &value));
    assert!(is_written, "key {name:#x}: no session wrote its value");
    assert!(possible.contains(&count), "key {name:#x} holds {count}, not {possible:?}");
    count
}

/// Checks, through another session, that the own keys of an ended session hold a possible value.
pub(crate) fn check_own(session: &mut Session, worker: &Worker) {
    for (key, possible) in (0..).zip(&worker.own) {
        let name = own_name(worker.writer, key);
        checked_count(name, session.get(name.to_le_bytes()).unwrap(), possible);
    }
}

impl Worker {
    pub(crate) fn new(
        session: Session,
        writer: u64,
        progress: Arc<Progress>,
        clock: Clock,
        ledger: Ledger,
    ) -> Self {
        let own = vec![vec![0]; OWN_KEYS as usize];
        let (random, seen) = (SmallRng::seed_from_u64(writer), Vec::new());
        let operation_number = 0;
        Self { session, writer, progress, clock, ledger, random, operation_number, own, seen }
    }

    /// Runs operations until `stop` is set.
    pub(crate) fn run(mut self, kind: LoadMix, stop: &AtomicBool) -> Self {
        while !stop.load(Ordering::Relaxed) {
            self.operation_number += 1;
            match (kind, self.random.random_range(0..100)) {
                (LoadMix::Churn, _) | (_, 0..10) => self.churn(),
                (_, 10..30) => self.put_own(),
                (_, 30..50) => self.get_own(),
                (_, 50..60) => self.put_hot(),
                (_, 60..75) => self.get_hot(),
                (_, 75..80) => self.delete_hot(),
                (_, 80..90) => self.increment(),
                _ => {
                    self.read_counter();
                }
            }
        }
        self
    }

    /// Makes a call; also returns when it began and ended.
    fn call<T>(
        &mut self,
        call: impl FnOnce(&mut Session) -> Result<T>,
    ) -> (std::result::Result<T, CallFailure>, u64, u64) {
        let (result, began, ended) = self.progress.timed(self.clock, || call(&mut self.session));
        let count = |counter: &AtomicU64| counter.fetch_add(1, Ordering::Relaxed);
        let result = match result {
            Ok(output) => {
                count(&self.progress.done);
                Ok(output)
            }
            Err(Error::Connect(Unreachable { .. })) => {
                count(&self.progress.unreachable);
                Err(CallFailure::NotDone)
            }
            Err(Error::Operation(Contended { .. })) => {
                count(&self.progress.contended);
                Err(CallFailure::NotDone)
            }
            Err(Error::Operation(Indeterminate)) => {
                count(&self.progress.indeterminate);
                Err(CallFailure::Unknown)
            }
            Err(error) => panic!("{error}: {error:?}"),
        };
        (result, began, ended)
    }

    fn new_value(&mut self, name: u64) -> Vec<u8> {
        let bytes = SIZES[self.random.random_range(0..SIZES.len())];
        self_describing::value(name, self.writer, self.operation_number, bytes)
    }

    /// Picks one of its own keys; returns the key, its name, and its possible values.
    fn pick_own(&mut self) -> (usize, u64, Vec<u64>) {
        let key = self.random.random_range(0..OWN_KEYS);
        (key as usize, own_name(self.writer, key), self.own[key as usize].clone())
    }

    /// Notes the result of a write after which an own key would hold `count`.
    fn note(&mut self, key: usize, count: u64, failed: Option<CallFailure>) {
        match failed {
            None => self.own[key] = vec![count],
            Some(CallFailure::Unknown) => self.own[key].push(count),
            Some(CallFailure::NotDone) => {}
        }
    }

    fn put_own(&mut self) {
        let (key, name, _) = self.pick_own();
        let value = self.new_value(name);
        let (result, ..) = self.call(|session| session.put(name.to_le_bytes(), &value));
        self.note(key, self.operation_number, result.err());
    }

    fn get_own(&mut self) {
        let (key, name, possible) = self.pick_own();
        let (result, ..) = self.call(|session| session.get(name.to_le_bytes()));
        let Ok(value) = result else { return };
        // A write whose outcome was unknown has happened by now, or never will.
        self.own[key] = vec![checked_count(name, value, &possible)];
    }

    /// Inserts one of its own keys, or deletes it if it may be there.
    fn churn(&mut self) {
        let (key, name, possible) = self.pick_own();
        let name_bytes = name.to_le_bytes();
        let is_there = possible.iter().any(|count| *count > 0);
        let (result, count) = if is_there {
            (self.call(|session| session.delete(name_bytes)).0, 0)
        } else {
            let value = self.new_value(name);
            (self.call(|session| session.insert(name_bytes, &value)).0, self.operation_number)
        };
        match result {
            Ok(true) => self.note(key, count, None),
            // A DELETE found nothing. An INSERT is tried only when the key is surely absent.
            Ok(false) => {
                assert!(is_there && possible.contains(&0), "key {name:#x} is not {possible:?}");
                self.own[key] = vec![0];
            }
            Err(failed) => self.note(key, count, Some(failed)),
        }
    }

    fn put_hot(&mut self) {
        let name = self.random.random_range(0..HOT_KEYS);
        let value = self.new_value(name);
        let _ = self.call(|session| session.put(name.to_le_bytes(), &value));
    }

    fn get_hot(&mut self) {
        let name = self.random.random_range(0..HOT_KEYS);
        let (result, ..) = self.call(|session| session.get(name.to_le_bytes()));
        if let Ok(Some(value)) = result {
            assert!(
                self_describing::holds(name, &value),
                "key {name}: no session wrote {:?}",
                value.data
            );
        }
    }

    fn delete_hot(&mut self) {
        let name = self.random.random_range(0..HOT_KEYS);
        let _ = self.call(|session| session.delete(name.to_le_bytes()));
    }

    fn saw(&mut self, counter: u64, value: u64, is_increment: bool, (began, ended): (u64, u64)) {
        let (invoked_ns, returned_ns) = (began, ended);
        self.seen.push(Observation { counter, value, is_increment, invoked_ns, returned_ns });
    }

    fn read_counter(&mut self) -> Option<(u64, u64)> {
        let counter = self.random.random_range(0..COUNTERS);
        let name = counter_name(counter);
        let (result, began, ended) = self.call(|session| session.get(name.as_bytes()));
        let value = number(result.ok()?.as_ref().map(|value| value.data.as_slice()));
        self.saw(counter, value, false, (began, ended));
        Some((counter, value))
    }

    /// Adds one to a shared counter, and notes that in the ledger.
    fn increment(&mut self) {
        let Some((counter, value)) = self.read_counter() else { return };
        let name = counter_name(counter);
        let (old, new) = (value.to_le_bytes(), (value + 1).to_le_bytes());
        let expected = (value > 0).then_some(old.as_slice());
        self.ledger.attempt(counter);
        let (result, began, ended) =
            self.call(|session| session.compare_exchange(name.as_bytes(), expected, new));
        match result {
            Ok(outcome) if outcome.applied => {
                self.ledger.acknowledge(counter);
                self.saw(counter, value + 1, true, (began, ended));
            }
            Ok(_) | Err(CallFailure::NotDone) => self.ledger.retract(counter),
            Err(CallFailure::Unknown) => {}
        }
    }
}
