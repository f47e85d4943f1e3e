//! Sessions at work while hosts die: they track the possible values of each of their keys, and time
//! each call.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use farside::{Client, Session};
use farside_tests::counters::{self, Observation};
use farside_tests::ledger::Ledger;

use crate::worker::{Clock, LoadMix, Progress, Worker, check_own};

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
