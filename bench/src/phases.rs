//! The threads of a run and the phases that they go through: load, warm-up, measure.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::thread::{self, Builder, Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use farside::{CacheStatistics, Client, Session};
use indicatif::{ProgressBar, ProgressFinish, ProgressStyle};

use crate::accounting::{now_ns, thread_cpu_s};
use crate::args::Ycsb;
use crate::arrivals::Schedule;
use crate::command::Interrupt;
use crate::driver::Driver;
use crate::journal::{HistoryFile, Journal, Witness};
use crate::operations::{Budget, Generator, Loader};
use crate::pattern::Pattern;
use crate::recorder::{Recorder, RunFacts, ThreadMeasurement};
use crate::records::RecordCounter;
use crate::server::Server;
use crate::workload::{Kind, Mix};
use crate::{Error, Result, allocations};

/// The phases of a run, in their order.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Phase {
    Load,
    WarmUp,
    Measure,
    Stop,
}

/// The state that all threads share.
struct Shared<'a> {
    args: &'a Ycsb,
    clients: &'a [Client],
    history: Option<HistoryFile>,
    pattern: Pattern,
    records: Arc<RecordCounter>,
    load_kind: Kind,
    phase: AtomicU8,
    budget: Option<Arc<Budget>>,
    /// How many threads have loaded their share of the records.
    loaded: AtomicU32,
    /// How many threads have ended their warm-up.
    started: AtomicU32,
    /// How many threads have ended their measurement.
    ended: AtomicU32,
}

/// A guard: ends the run for the other threads when this one fails or panics.
struct StopOthers<'a>(Option<&'a Shared<'a>>);

impl Drop for StopOthers<'_> {
    fn drop(&mut self) {
        if let Some(shared) = self.0 {
            shared.enter(Phase::Stop);
        }
    }
}

/// The time between two checks of a thread that waits for the next phase.
const PAUSE: Duration = Duration::from_micros(200);
/// The time between two checks whether a phase is over.
const WATCH_PAUSE: Duration = Duration::from_millis(5);

/// The time between two drawings of the progress line.
const TICK: Duration = Duration::from_millis(100);

/// Runs all phases.
pub fn run_phases(
    args: &Ycsb,
    clients: &[Client],
    server: &Server,
    history: Option<HistoryFile>,
    interrupt: &Interrupt,
) -> Result<(ThreadMeasurement, RunFacts)> {
    let shared = Shared {
        args,
        clients,
        history,
        pattern: Pattern::new(args),
        records: Arc::new(RecordCounter::new(args.records)),
        // A server that was not started for this run may hold the records already, with other
        // values.
        load_kind: if server.is_own() { Kind::Insert } else { Kind::Put },
        phase: AtomicU8::new(Phase::Load as u8),
        budget: args.operations.map(|operations| Arc::new(Budget::new(operations))),
        loaded: AtomicU32::new(0),
        started: AtomicU32::new(0),
        ended: AtomicU32::new(0),
    };
    thread::scope(|scope| {
        let shared = &shared;
        let worker = |thread| start(scope, move || shared.work(thread));
        let workers: Result<Vec<_>> = (0..args.all_threads()).map(worker).collect();
        // Without this, the threads that already run would wait for the missing ones forever.
        let workers = workers.inspect_err(|_| shared.enter(Phase::Stop))?;
        let supervised = shared.supervise(server, interrupt);
        shared.enter(Phase::Stop);
        let worked: Vec<Result<Option<ThreadMeasurement>>> = workers
            .into_iter()
            .map(|worker| worker.join().unwrap_or(Err(Error::Panicked)))
            .collect();
        // A thread's own error is reported first, because it made the other threads end.
        let threads: Vec<Option<ThreadMeasurement>> = worked.into_iter().collect::<Result<_>>()?;
        let supervised = supervised?;
        let threads = threads.into_iter().collect::<Option<Vec<_>>>().ok_or(Error::Panicked)?;
        Ok((ThreadMeasurement::sum(threads).ok_or(Error::Panicked)?, supervised))
    })
}

impl Shared<'_> {
    fn enter(&self, phase: Phase) {
        self.phase.store(phase as u8, Ordering::Release);
    }

    #[inline]
    fn is_in(&self, phase: Phase) -> bool {
        self.phase.load(Ordering::Relaxed) == phase as u8
    }

    /// Runs all phases of one thread. Returns `None` if the run ended before the measurement.
    fn work(&self, thread: u32) -> Result<Option<ThreadMeasurement>> {
        let Some(file) = &self.history else { return self.work_connected(thread, &mut ()) };
        let mut journal = Journal::new(file, thread, self.args.depth);
        let worked = self.work_connected(thread, &mut journal);
        // The journal is also finished if the thread failed: the file then shows what ended the
        // run.
        let recorded = journal.finish();
        worked.and_then(|worked| recorded.map(|()| worked))
    }

    /// Does the work of [`Self::work`], with a session and a witness.
    fn work_connected(
        &self,
        thread: u32,
        witness: &mut impl Witness,
    ) -> Result<Option<ThreadMeasurement>> {
        let mut stop_others = StopOthers(Some(self));
        let args = self.args;
        let client = &self.clients[(thread / args.threads) as usize];
        let mut session = client.session().map_err(Error::client("opening a session"))?;
        let share = (thread.into(), args.all_threads().into());
        // Each thread has its own operations and values for every --seed.
        let seed = args.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(thread) << 32;
        let value_bytes_max_and_depth = (args.value_size.max(), args.depth.into());
        let mut driver = Driver::new(witness, value_bytes_max_and_depth, seed, &self.records);
        self.load(share, &mut driver, &mut session)?;
        let mut source = Generator::new(self.pattern.clone(), self.records.clone(), seed);
        let mut ignored = Recorder::new(Mix::NOTHING);
        let mut recorder = Recorder::new(args.mix);
        if let Some(target_ops_s) = args.target_rate {
            driver.pace(Some(Schedule::new(args.arrivals, target_ops_s, share, seed)));
            recorder = recorder.with_service_times();
        }
        driver
            .drive(&mut session, &mut source, &mut ignored, || self.is_in(Phase::WarmUp))
            .map_err(Error::client("warming up"))?;
        if !self.is_in(Phase::Measure) {
            return Ok(None);
        }
        source.limit(self.budget.clone());
        let (cache_before, allocated) = (session.cache_statistics(), allocations::of_this_thread());
        self.started.fetch_add(1, Ordering::Release);
        let (started_ns, cpu_before) = (now_ns(), thread_cpu_s());
        self.measure(&mut driver, &mut session, &mut source, &mut recorder)?;
        let (ended_ns, cpu_s) = (now_ns(), thread_cpu_s() - cpu_before);
        let allocations = allocations::of_this_thread() - allocated;
        let cache = cache_since(session.cache_statistics(), cache_before);
        self.ended.fetch_add(1, Ordering::Release);
        // This does not stop the other threads, because they may still have claimed operations to
        // do.
        stop_others.0 = None;
        Ok(Some(ThreadMeasurement { recorder, started_ns, ended_ns, cache, allocations, cpu_s }))
    }

    /// Not inlined, so that tools/scripts/instructions.sh finds it by name and counts its
    /// instructions.
    #[inline(never)]
    fn measure(
        &self,
        driver: &mut Driver<'_, impl Witness>,
        session: &mut Session,
        source: &mut Generator,
        recorder: &mut Recorder,
    ) -> Result<()> {
        driver
            .drive(session, source, recorder, || self.is_in(Phase::Measure))
            .map_err(Error::client("measuring"))
    }

    /// Stores this thread's share of the records, then waits for the other threads.
    fn load(
        &self,
        share: (u64, u64),
        driver: &mut Driver<'_, impl Witness>,
        session: &mut Session,
    ) -> Result<()> {
        let (sizes, records) = (self.args.value_size, self.args.records);
        let mut loader = Loader::new(self.load_kind, sizes, records, share);
        let mut ignored = Recorder::new(Mix::NOTHING);
        driver
            .drive(session, &mut loader, &mut ignored, || self.is_in(Phase::Load))
            .map_err(Error::client("loading"))?;
        driver.clear();
        self.loaded.fetch_add(1, Ordering::Release);
        while self.is_in(Phase::Load) {
            thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// Starts one phase after another and shows a progress line. Returns early if a thread failed.
    fn supervise(&self, server: &Server, interrupt: &Interrupt) -> Result<RunFacts> {
        let have_all = |count: &AtomicU32| count.load(Ordering::Acquire) == self.args.all_threads();
        let load = Instant::now();
        self.watch(interrupt, "load", || have_all(&self.loaded))?;
        let load_seconds = load.elapsed().as_secs_f64();
        let until = |seconds: Option<f64>| {
            let end = seconds.map(|seconds| Instant::now() + Duration::from_secs_f64(seconds));
            move || end.is_some_and(|end| Instant::now() >= end)
        };
        self.enter_unless_stopped(Phase::WarmUp);
        let mut warmup_seconds = self.args.warmup_seconds;
        if let Some(devices) = &server.devices {
            // Slow devices would take long to fill the location caches.
            warmup_seconds /= 2.0;
            self.watch(interrupt, "warm-up", until(Some(warmup_seconds)))?;
            devices.start();
        }
        self.watch(interrupt, "warm-up", until(Some(warmup_seconds)))?;
        let (before, chains_before) = (server.usage(), chains(server));
        self.enter_unless_stopped(Phase::Measure);
        // A thread first finishes the operations that its warm-up left in flight, which may take
        // long. The time of the measurement counts only from here.
        self.watch(interrupt, "warm-up", || have_all(&self.started))?;
        let is_time_up = until(self.args.seconds);
        self.watch(interrupt, "measure", || is_time_up() || have_all(&self.ended))?;
        let spent = before.zip(server.usage()).map(|(before, after)| after.since(&before));
        let now = chains(server);
        let chains = now.iter().zip(chains_before).map(|(now, before)| now - before).collect();
        Ok(RunFacts { server: spent, load_seconds, chains })
    }

    fn enter_unless_stopped(&self, phase: Phase) {
        let next = |current| (current != Phase::Stop as u8).then_some(phase as u8);
        let _ = self.phase.fetch_update(Ordering::AcqRel, Ordering::Acquire, next);
    }

    /// Shows the name of a phase until it is over, or until a thread has stopped the run.
    fn watch(
        &self,
        interrupt: &Interrupt,
        phase: &'static str,
        is_over: impl Fn() -> bool,
    ) -> Result<()> {
        let _line = progress_line(phase);
        while !is_over() && !self.is_in(Phase::Stop) {
            interrupt.check()?;
            thread::sleep(WATCH_PAUSE);
        }
        Ok(())
    }
}

/// The chains that the emulated device of each shard has executed; empty without devices.
fn chains(server: &Server) -> Vec<u64> {
    server.devices.as_ref().map(|devices| devices.chains()).unwrap_or_default()
}

/// A line on stderr with the name of a phase and the time since its start, until it is dropped. It
/// is invisible if stderr is no terminal.
fn progress_line(phase: &'static str) -> ProgressBar {
    let style = ProgressStyle::with_template("{spinner} {msg} {elapsed}");
    let style = style.unwrap_or_else(|_| ProgressStyle::default_spinner());
    let line = ProgressBar::no_length().with_style(style).with_finish(ProgressFinish::AndClear);
    line.set_message(phase);
    line.enable_steady_tick(TICK);
    line
}

fn cache_since(now: CacheStatistics, before: CacheStatistics) -> CacheStatistics {
    // A session that reconnected counts from 0 again.
    CacheStatistics {
        hits: now.hits.saturating_sub(before.hits),
        misses: now.misses.saturating_sub(before.misses),
    }
}

/// As [`Scope::spawn`], but returns an error if the system starts no thread.
pub fn start<'s, T: Send + 's>(
    scope: &'s Scope<'s, '_>,
    work: impl FnOnce() -> T + Send + 's,
) -> Result<ScopedJoinHandle<'s, T>> {
    Builder::new().spawn_scoped(scope, work).map_err(Error::system("starting a thread"))
}
