//! Sessions at work while their network fails. Each has keys of its own, and knows which values
//! they may have: the last one that was stored, and later ones whose PUT was indeterminate. Each
//! also counts. So an operation that took effect twice shows, too.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use farside::{Client, Error, Session};
use farside_tests::{TEST_TIMEOUT, self_describing};

/// The number of sessions of a load.
pub(super) const SESSIONS: u64 = 4;
/// The number of keys of a session.
const KEYS: u64 = 64;
const VALUE_BYTES: usize = 200;

/// The calls of one session so far.
#[derive(Default)]
struct Progress {
    done: AtomicU64,
    unreachable: AtomicU64,
    indeterminate: AtomicU64,
    slowest_ms: AtomicU64,
}

/// A session and its keys.
pub(super) struct Writer {
    session: Session,
    number: u64,
    count: u64,
    /// For each key, the numbers of the values that it may have. 0 stands for no value.
    possible: Vec<Vec<u64>>,
    /// The values that the counter of the session may have.
    sum: RangeInclusive<i64>,
}

impl Writer {
    pub(super) fn new(client: &Client, number: u64) -> Self {
        let session = client.session().unwrap();
        Self { session, number, count: 0, possible: vec![vec![0]; KEYS as usize], sum: 0..=0 }
    }

    fn key(&self, at: u64) -> u64 {
        self.number * KEYS + at
    }

    /// Stores a new value under the next key.
    fn put(&mut self) -> Result<(), Error> {
        self.count += 1;
        let (at, count) = (self.count % KEYS, self.count);
        let key = self.key(at);
        let value = self_describing::value(key, self.number, count, VALUE_BYTES);
        let result = self.session.put(key.to_le_bytes(), value);
        let possible = &mut self.possible[at as usize];
        match &result {
            Ok(()) => *possible = vec![count],
            Err(error) if error.is_indeterminate() => possible.push(count),
            Err(_) => {}
        }
        result
    }

    /// Reads a key, and checks that its value is a possible one. From then on no other is.
    fn get(&mut self, at: u64) -> Result<(), Error> {
        let key = self.key(at);
        let found = self.session.get(key.to_le_bytes())?;
        let count = found.map_or(0, |value| self_describing::count_in(key, &value).unwrap());
        let possible = &mut self.possible[at as usize];
        assert!(possible.contains(&count), "key {key} has value {count} instead of {possible:?}");
        *possible = vec![count];
        Ok(())
    }

    /// Adds a number to the session's counter, and checks the sum.
    fn add(&mut self, addend: i64) -> Result<(), Error> {
        let (low, high) = (*self.sum.start() + addend, *self.sum.end() + addend);
        match self.session.increment(format!("counter {}", self.number), addend) {
            Ok(sum) => {
                assert!((low..=high).contains(&sum), "{sum} instead of {low} to {high}");
                self.sum = sum..=sum;
                Ok(())
            }
            Err(error) => {
                if error.is_indeterminate() {
                    self.sum = *self.sum.start()..=high;
                }
                Err(error)
            }
        }
    }

    /// Stores a value under each key.
    pub(super) fn put_all(&mut self) {
        (0..KEYS).for_each(|_| self.put().unwrap());
    }

    /// Reads all keys.
    pub(super) fn check(&mut self) {
        (0..KEYS).for_each(|at| self.get(at).unwrap());
        self.add(0).unwrap();
    }

    fn run(mut self, stop: &AtomicBool, progress: &Progress) -> Self {
        for step in (0..3).cycle().take_while(|_| !stop.load(Ordering::Relaxed)) {
            let began = Instant::now();
            let result = match step {
                0 => self.get(self.count * 7 % KEYS),
                1 => self.put(),
                _ => self.add(1),
            };
            let ms = began.elapsed().as_millis() as u64;
            progress.slowest_ms.fetch_max(ms, Ordering::Relaxed);
            let counter = match &result {
                Ok(()) => &progress.done,
                Err(error) if error.is_indeterminate() && step > 0 => &progress.indeterminate,
                Err(Error::Connect(farside::ConnectError::Unreachable { .. })) => {
                    &progress.unreachable
                }
                Err(error) => panic!("a call failed in an unexpected way: {error}"),
            };
            counter.fetch_add(1, Ordering::Relaxed);
        }
        self
    }
}

/// Sessions of one client, each on a thread of its own.
pub(super) struct Load {
    stop: Arc<AtomicBool>,
    /// Not scoped, so that a call without an end does not keep a failed test from ending.
    sessions: Vec<(Arc<Progress>, JoinHandle<Writer>)>,
}

impl Load {
    /// Starts sessions with the number `first` and the next ones, which have stored nothing yet.
    pub(super) fn start(client: &Client, first: u64) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let start = |number| {
            let (writer, progress) = (Writer::new(client, number), Arc::new(Progress::default()));
            let (stop, its_progress) = (stop.clone(), progress.clone());
            (progress, std::thread::spawn(move || writer.run(&stop, &its_progress)))
        };
        let sessions = (first..first + SESSIONS).map(start).collect();
        Self { stop, sessions }
    }

    fn counts(&self, counter: impl Fn(&Progress) -> &AtomicU64) -> Vec<u64> {
        let sessions = self.sessions.iter();
        sessions.map(|(progress, _)| counter(progress).load(Ordering::Relaxed)).collect()
    }

    /// Waits until each session has counted this many more.
    fn wait(&self, what: &str, more: u64, counter: impl Fn(&Progress) -> &AtomicU64) {
        let (started, before) = (Instant::now(), self.counts(&counter));
        while self.counts(&counter).iter().zip(&before).any(|(now, before)| *now < before + more) {
            let has_ended = self.sessions.iter().any(|(_, thread)| thread.is_finished());
            assert!(!has_ended, "a session has ended, as above");
            let waited = started.elapsed();
            assert!(waited < TEST_TIMEOUT, "no {what} within {waited:?}: {}", self.describe());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until each session has made some more successful calls.
    pub(super) fn wait_for_calls(&self) {
        self.wait("successful calls", 20, |progress| &progress.done);
    }

    /// Waits until a further call of each session has found no server.
    pub(super) fn wait_for_unreachable(&self) {
        self.wait("unreachable server", 1, |progress| &progress.unreachable);
    }

    /// Returns the number of successful calls.
    pub(super) fn done(&self) -> u64 {
        self.counts(|progress| &progress.done).iter().sum()
    }

    /// Returns the number of calls that found no server.
    pub(super) fn unreachable(&self) -> u64 {
        self.counts(|progress| &progress.unreachable).iter().sum()
    }

    /// Returns the time of the slowest call that has ended.
    pub(super) fn slowest(&self) -> Duration {
        let slowest_ms = self.counts(|progress| &progress.slowest_ms);
        Duration::from_millis(slowest_ms.into_iter().max().unwrap_or(0))
    }

    /// Returns the figures so far, for the test's output.
    pub(super) fn describe(&self) -> String {
        let indeterminate: u64 = self.counts(|progress| &progress.indeterminate).iter().sum();
        format!(
            "{} calls, {} Unreachable, {indeterminate} Indeterminate, slowest {:?}",
            self.done(),
            self.unreachable(),
            self.slowest()
        )
    }

    /// Ends all sessions. Returns them.
    pub(super) fn stop(mut self) -> Vec<Writer> {
        self.stop.store(true, Ordering::Relaxed);
        std::mem::take(&mut self.sessions).into_iter().map(|(_, it)| it.join().unwrap()).collect()
    }

    /// Ends all sessions, and checks that no value is lost.
    pub(super) fn finish(self) {
        println!("{}", self.describe());
        self.stop().iter_mut().for_each(Writer::check);
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}
