//! The threads of a process and the phases that they go through: load, warm-up, measure.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::thread::{self, Builder, Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use farside::{CacheStatistics, Client, Session};

use crate::accounting::{now_ns, thread_cpu_s};
use crate::args::Ycsb;
use crate::arrivals::Schedule;
use crate::command::Interrupt;
use crate::driver::Driver;
use crate::environment::Environment;
use crate::journal::{HistoryFile, Journal, Witness};
use crate::operations::{Budget, Generator, Loader};
use crate::pattern::Pattern;
use crate::processes::Parent;
use crate::progress::ProgressLine;
use crate::recorder::Recorder;
use crate::records::RecordCounter;
use crate::server::Server;
use crate::thread_measurement::{Supervised, ThreadMeasurement};
use crate::workload::{Kind, Mix};
use crate::{Error, Result, allocations};

/// Phases follow each other in this order.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Phase {
    Load,
    WarmUp,
    Measure,
    Stop,
}

/// How many operations a thread did: a cache line of its own, and of the one beside it.
#[derive(Default)]
#[repr(align(128))]
struct ThreadProgress(AtomicU64);

/// What the threads of this process share.
struct Shared<'a> {
    args: &'a Ycsb,
    /// Where this is one of several processes.
    parent: Option<&'a Parent>,
    client: Client,
    history: Option<HistoryFile>,
    pattern: Pattern,
    records: Arc<RecordCounter>,
    load_kind: Kind,
    phase: AtomicU8,
    budget: Option<Arc<Budget>>,
    loaded: AtomicUsize,
    /// How many threads are through with the warm-up.
    started: AtomicUsize,
    /// How many threads have measured all there was.
    ended: AtomicUsize,
    progress: Box<[ThreadProgress]>,
}

/// Ends the run when a thread fails or panics.
struct StopOthers<'a>(Option<&'a Shared<'a>>);

impl Drop for StopOthers<'_> {
    fn drop(&mut self) {
        if let Some(shared) = self.0 {
            shared.enter(Phase::Stop);
        }
    }
}

/// How often threads that wait look around.
const PAUSE: Duration = Duration::from_micros(200);
/// How often the progress line changes.
const TICK: Duration = Duration::from_millis(100);

/// All phases of this process.
pub fn threads(
    args: &Ycsb,
    (client, server): (Client, &Server),
    history: Option<HistoryFile>,
    parent: Option<&Parent>,
    interrupt: &Interrupt,
) -> Result<(ThreadMeasurement, Supervised)> {
    let shared = Shared {
        args,
        parent,
        client,
        history,
        pattern: Pattern::new(args),
        records: Arc::new(RecordCounter::new(args.records, args.part())),
        // A server that ran before may hold the records already, with other values.
        load_kind: if server.is_own() { Kind::Insert } else { Kind::Put },
        phase: AtomicU8::new(Phase::Load as u8),
        budget: args.own_operations().map(|operations| Arc::new(Budget::new(operations))),
        loaded: AtomicUsize::new(0),
        started: AtomicUsize::new(0),
        ended: AtomicUsize::new(0),
        progress: (0..args.threads).map(|_| ThreadProgress::default()).collect(),
    };
    thread::scope(|scope| {
        let shared = &shared;
        let worker = |thread| start(scope, move || shared.work(thread));
        let workers: Result<Vec<_>> = (0..args.threads).map(worker).collect();
        // Those that run wait for the others.
        let workers = workers.inspect_err(|_| shared.enter(Phase::Stop))?;
        let supervised = shared.supervise(server, interrupt);
        shared.enter(Phase::Stop);
        let worked: Vec<Result<Option<ThreadMeasurement>>> = workers
            .into_iter()
            .map(|worker| worker.join().unwrap_or(Err(Error::Panicked)))
            .collect();
        // A failed thread explains more than the end it brought to the others.
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

    /// One thread, all phases. `None` if the run ended before the measured one.
    fn work(&self, thread: u32) -> Result<Option<ThreadMeasurement>> {
        let Some(file) = &self.history else { return self.connected(thread, &mut ()) };
        let mut journal = Journal::new(file, thread, self.args.depth);
        let worked = self.connected(thread, &mut journal);
        let recorded = journal.finish();
        // What ended the run is on file.
        worked.and_then(|worked| recorded.map(|()| worked))
    }

    fn connected(&self, own: u32, witness: &mut impl Witness) -> Result<Option<ThreadMeasurement>> {
        let mut stop_others = StopOthers(Some(self));
        let mut session = self.client.session().map_err(Error::client("opening a session"))?;
        let args = self.args;
        // Among those of all processes.
        let (thread, threads) = args.share(own);
        // Every thread its own operations and values, whatever the seed.
        let seed = args.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ thread << 32;
        let progress = &self.progress[own as usize].0;
        let shape = (args.value_size.max(), args.depth.into());
        let mut driver = Driver::new(witness, shape, seed, &self.records, progress);
        self.load((thread, threads), &mut driver, &mut session)?;
        let mut source = Generator::new(self.pattern.clone(), self.records.clone(), seed);
        let mut ignored = Recorder::new(Mix::NOTHING);
        let mut recorder = Recorder::new(args.mix);
        if let Some(target_ops_s) = args.target_rate {
            let schedule = Schedule::new(args.arrivals, target_ops_s, (thread, threads), seed);
            driver.pace(Some(schedule));
            recorder = recorder.with_services();
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
        // They may have some of the operations left.
        stop_others.0 = None;
        Ok(Some(ThreadMeasurement { recorder, started_ns, ended_ns, cache, allocations, cpu_s }))
    }

    /// Has a name in profiles: tools/scripts/instructions.sh counts what is done in it.
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

    /// Leads through the phases, with a progress line. Returns early when a thread failed.
    fn supervise(&self, server: &Server, interrupt: &Interrupt) -> Result<Supervised> {
        let line = ProgressLine::new();
        let load = Instant::now();
        let all_loaded = || self.loaded.load(Ordering::Acquire) == self.progress.len();
        self.watch(&line, interrupt, "load", all_loaded)?;
        if let Some(parent) = self.parent {
            parent.has_loaded();
            self.watch(&line, interrupt, "load", || parent.wants_warm_up())?;
        }
        let load_seconds = load.elapsed().as_secs_f64();
        let environment = Environment::look();
        let until = |seconds: Option<f64>| {
            let end = seconds.map(|seconds| Instant::now() + Duration::from_secs_f64(seconds));
            move || end.is_some_and(|end| Instant::now() >= end)
        };
        self.enter_unless_stopped(Phase::WarmUp);
        let is_warm = until(Some(self.args.warmup_seconds));
        // Processes begin to measure together.
        let is_over = || self.parent.map_or_else(&is_warm, Parent::wants_measuring);
        self.watch(&line, interrupt, "warm-up", is_over)?;
        let before = server.usage();
        self.enter_unless_stopped(Phase::Measure);
        // What a thread has in flight when its warm-up ends may take longer than a short phase.
        let all_started = || self.started.load(Ordering::Acquire) == self.progress.len();
        self.watch(&line, interrupt, "warm-up", all_started)?;
        let is_late = until(self.args.seconds);
        let all_ended = || self.ended.load(Ordering::Acquire) == self.progress.len();
        self.watch(&line, interrupt, "measure", || is_late() || all_ended())?;
        let spent = before.zip(server.usage()).map(|(before, after)| after.since(&before));
        Ok(Supervised { server: spent, load_seconds, environment })
    }

    fn enter_unless_stopped(&self, phase: Phase) {
        let go_on = |now| (now != Phase::Stop as u8).then_some(phase as u8);
        let _ = self.phase.fetch_update(Ordering::AcqRel, Ordering::Acquire, go_on);
    }

    /// Shows progress until the phase is over.
    fn watch(
        &self,
        line: &ProgressLine,
        interrupt: &Interrupt,
        phase: &str,
        is_over: impl Fn() -> bool,
    ) -> Result<()> {
        let (started, mut last) = (Instant::now(), Instant::now());
        let mut before = self.operations();
        while !is_over() && !self.is_in(Phase::Stop) {
            interrupt.check()?;
            thread::sleep(Duration::from_millis(5));
            if last.elapsed() >= TICK {
                let now = self.operations();
                let rate = (now - before) as f64 / last.elapsed().as_secs_f64();
                match self.parent {
                    Some(parent) => parent.has_done(now),
                    None => line.show(phase, rate, started.elapsed()),
                }
                (before, last) = (now, Instant::now());
            }
        }
        Ok(())
    }

    fn operations(&self) -> u64 {
        self.progress.iter().map(|thread| thread.0.load(Ordering::Relaxed)).sum()
    }
}

fn cache_since(now: CacheStatistics, before: CacheStatistics) -> CacheStatistics {
    // A session that reconnected counts from 0 again.
    CacheStatistics {
        hits: now.hits.saturating_sub(before.hits),
        misses: now.misses.saturating_sub(before.misses),
    }
}

/// As [`Scope::spawn`], which panics then.
pub fn start<'s, T: Send + 's>(
    scope: &'s Scope<'s, '_>,
    work: impl FnOnce() -> T + Send + 's,
) -> Result<ScopedJoinHandle<'s, T>> {
    Builder::new().spawn_scoped(scope, work).map_err(Error::system("starting a thread"))
}
