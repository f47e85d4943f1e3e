//! `kv-bench ycsb`: threads and phases.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use farside::{CacheStatistics, Client, Session};
use farside_common::config::ClientConfig;
use farside_common::size::ByteSize;

use crate::accounting::ServerUsage;
use crate::args::Ycsb;
use crate::arrivals::Schedule;
use crate::driver::Driver;
use crate::environment::Environment;
use crate::interrupt::Interrupt;
use crate::journal::{HistoryFile, Journal, NUMBER_BYTES, Witness};
use crate::operations::{Budget, Generator, Loader};
use crate::pattern::Pattern;
use crate::progress::ProgressLine;
use crate::recorder::Recorder;
use crate::records::RecordCounter;
use crate::server::Server;
use crate::sizing::{Demand, Memory};
use crate::verbs::RawLimit;
use crate::workload::{Kind, Mix};
use crate::{Error, Result, allocations};

/// What a run measured, of all threads together.
pub struct Measured {
    /// The name of the fabric.
    pub fabric: String,
    /// Operations.
    pub recorder: Recorder,
    /// From the first thread's start to the last one's end, in seconds.
    pub seconds: f64,
    /// What the location caches did.
    pub cache: CacheStatistics,
    /// Allocations of the threads that ran operations.
    pub allocations: u64,
    /// CPU time of these threads, in seconds: less than threads x seconds when they had to share
    /// their cores.
    pub cpu_s: f64,
    /// What the server spent meanwhile, if it can be known.
    pub server: Option<ServerUsage>,
    /// How long the load phase took, in seconds.
    pub load_seconds: f64,
    /// The machine.
    pub environment: Environment,
    /// What the fabric can do at most, if it was measured.
    pub raw: Option<RawLimit>,
}

/// Runs a workload.
///
/// # Errors
/// What went wrong first, in whichever thread.
pub fn ycsb(args: &Ycsb, interrupt: &Interrupt) -> Result<Measured> {
    let config = args.target.config()?;
    let history = history(args)?;
    let server = Server::connect_or_start(config, || memory(args), interrupt)?;
    let client = connect(args, &server.config)?;
    check_limits(args, &client)?;
    let shared = Shared {
        args,
        client,
        history,
        pattern: Pattern::new(args),
        records: Arc::new(RecordCounter::new(args.records)),
        // Somebody's server may hold the records already, with other values.
        load_kind: if server.is_own() { Kind::Insert } else { Kind::Put },
        phase: AtomicU8::new(Phase::Load as u8),
        budget: args.operations.map(|operations| Arc::new(Budget::new(operations))),
        loaded: AtomicUsize::new(0),
        ended: AtomicUsize::new(0),
        progress: (0..args.threads).map(|_| Progress::default()).collect(),
    };
    let mut measured = thread::scope(|scope| {
        let workers: Vec<_> = (0..args.threads)
            .map(|thread| {
                scope.spawn({
                    let shared = &shared;
                    move || shared.work(thread)
                })
            })
            .collect();
        let supervised = shared.supervise(&server, interrupt);
        shared.enter(Phase::Stop);
        let worked: Vec<Result<Option<Worked>>> = workers
            .into_iter()
            .map(|worker| worker.join().unwrap_or(Err(Error::Panicked)))
            .collect();
        summarize(server.fabric(), worked, supervised)
    })?;
    measured.raw = RawLimit::measure(args, &server.config, interrupt)?;
    Ok(measured)
}

/// The file that a history goes to.
fn history(args: &Ycsb) -> Result<Option<HistoryFile>> {
    let Some(path) = &args.history else { return Ok(None) };
    if (args.value_size.min() as usize) < NUMBER_BYTES {
        let advice = format!("--history takes a --value-size of {NUMBER_BYTES} or more, so that");
        return Err(Error::Usage(format!("{advice} values can differ")));
    }
    HistoryFile::create(path).map(Some)
}

fn memory(args: &Ycsb) -> Result<Memory> {
    let demand = Demand {
        records: args.records,
        sizes: args.value_size,
        threads: args.threads.into(),
        mix: args.mix,
        target_rate: args.target_rate,
        operations: args.operations,
        seconds: args.seconds,
        warmup_seconds: args.warmup_seconds,
    };
    let memory = demand.memory()?;
    Ok(match args.memory {
        Some(ByteSize(region_bytes)) => Memory { region_bytes, ..memory },
        None => memory,
    })
}

fn connect(args: &Ycsb, config: &ClientConfig) -> Result<Client> {
    let mut builder = Client::builder().config(config).pipeline_depth(args.depth);
    if let Some(ByteSize(bytes)) = args.cache_bytes {
        builder = builder.cache_bytes(bytes as usize);
    }
    builder.connect().map_err(Error::client("connecting"))
}

fn check_limits(args: &Ycsb, client: &Client) -> Result<()> {
    let session = client.session().map_err(Error::client("opening a session"))?;
    let (asked, most) = (args.value_size.max() as usize, session.limits().value_bytes_max);
    if asked <= most {
        return Ok(());
    }
    Err(Error::Usage(format!("values have up to {asked} bytes, this server takes at most {most}")))
}

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
struct Progress(AtomicU64);

struct Shared<'a> {
    args: &'a Ycsb,
    client: Client,
    history: Option<HistoryFile>,
    pattern: Pattern,
    records: Arc<RecordCounter>,
    load_kind: Kind,
    phase: AtomicU8,
    budget: Option<Arc<Budget>>,
    loaded: AtomicUsize,
    /// How many threads have measured all there was.
    ended: AtomicUsize,
    progress: Box<[Progress]>,
}

/// What one thread measured.
struct Worked {
    recorder: Recorder,
    started: Instant,
    ended: Instant,
    cache: CacheStatistics,
    allocations: u64,
    cpu_s: f64,
}

/// What the first thread saw.
struct Supervised {
    server: Option<ServerUsage>,
    load_seconds: f64,
    environment: Environment,
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

impl Shared<'_> {
    fn enter(&self, phase: Phase) {
        self.phase.store(phase as u8, Ordering::Release);
    }

    #[inline]
    fn is_in(&self, phase: Phase) -> bool {
        self.phase.load(Ordering::Relaxed) == phase as u8
    }

    /// One thread, all phases. `None` if the run ended before the measured one.
    fn work(&self, thread: u32) -> Result<Option<Worked>> {
        let Some(file) = &self.history else { return self.witnessed(thread, &mut ()) };
        let mut journal = Journal::new(file, thread, self.args.depth);
        let worked = self.witnessed(thread, &mut journal);
        let recorded = journal.finish();
        // What ended the run is on file.
        worked.and_then(|worked| recorded.map(|()| worked))
    }

    fn witnessed(&self, thread: u32, witness: &mut impl Witness) -> Result<Option<Worked>> {
        let mut stop_others = StopOthers(Some(self));
        let args = self.args;
        let mut session = self.client.session().map_err(Error::client("opening a session"))?;
        // Every thread its own operations and values, whatever the seed.
        let seed = args.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(thread) << 32;
        let progress = &self.progress[thread as usize].0;
        let shape = (args.value_size.max(), args.depth.into());
        let mut driver = Driver::new(witness, shape, seed, &self.records, progress);
        self.load(thread, &mut driver, &mut session)?;
        let mut source = Generator::new(self.pattern.clone(), self.records.clone(), seed);
        let mut ignored = Recorder::new(Mix::NOTHING);
        let mut recorder = Recorder::new(args.mix);
        if let Some(target_ops_s) = args.target_rate {
            let share = (thread.into(), args.threads.into());
            driver.pace(Some(Schedule::new(args.arrivals, target_ops_s, share, seed)));
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
        let (started, cpu_before) = (Instant::now(), thread_cpu_s());
        driver
            .drive(&mut session, &mut source, &mut recorder, || self.is_in(Phase::Measure))
            .map_err(Error::client("measuring"))?;
        let (ended, cpu_s) = (Instant::now(), thread_cpu_s() - cpu_before);
        let allocations = allocations::of_this_thread() - allocated;
        let cache = cache_since(session.cache_statistics(), cache_before);
        self.ended.fetch_add(1, Ordering::Release);
        // They may have some of the operations left.
        stop_others.0 = None;
        Ok(Some(Worked { recorder, started, ended, cache, allocations, cpu_s }))
    }

    /// Stores this thread's share of the records, then waits for the other threads.
    fn load(
        &self,
        thread: u32,
        driver: &mut Driver<'_, impl Witness>,
        session: &mut Session,
    ) -> Result<()> {
        let (records, threads) = (self.args.records, self.args.threads.into());
        let (sizes, share) = (self.args.value_size, (thread.into(), threads));
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
        let usage = || server.process.and_then(|process| ServerUsage::of(process).ok());
        let load = Instant::now();
        let all_loaded = || self.loaded.load(Ordering::Acquire) == self.progress.len();
        self.watch(&line, interrupt, "load", all_loaded)?;
        let load_seconds = load.elapsed().as_secs_f64();
        let environment = Environment::look();
        let until = |seconds: Option<f64>| {
            let end = seconds.map(|seconds| Instant::now() + Duration::from_secs_f64(seconds));
            move || end.is_some_and(|end| Instant::now() >= end)
        };
        self.enter_unless_stopped(Phase::WarmUp);
        self.watch(&line, interrupt, "warm-up", until(Some(self.args.warmup_seconds)))?;
        let before = usage();
        self.enter_unless_stopped(Phase::Measure);
        let is_late = until(self.args.seconds);
        let all_ended = || self.ended.load(Ordering::Acquire) == self.progress.len();
        self.watch(&line, interrupt, "measure", || is_late() || all_ended())?;
        let server = before.zip(usage()).map(|(before, after)| after.since(&before));
        Ok(Supervised { server, load_seconds, environment })
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
                line.show(phase, rate, started.elapsed());
                (before, last) = (now, Instant::now());
            }
        }
        Ok(())
    }

    fn operations(&self) -> u64 {
        self.progress.iter().map(|thread| thread.0.load(Ordering::Relaxed)).sum()
    }
}

/// What this thread used so far.
fn thread_cpu_s() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

fn cache_since(now: CacheStatistics, before: CacheStatistics) -> CacheStatistics {
    // A session that reconnected counts from 0 again.
    CacheStatistics {
        hits: now.hits.saturating_sub(before.hits),
        misses: now.misses.saturating_sub(before.misses),
    }
}

fn summarize(
    fabric: &str,
    worked: Vec<Result<Option<Worked>>>,
    supervised: Result<Supervised>,
) -> Result<Measured> {
    // A failed thread explains more than the end it brought to the others.
    let threads: Vec<Option<Worked>> = worked.into_iter().collect::<Result<_>>()?;
    let supervised = supervised?;
    let threads: Vec<Worked> = threads.into_iter().collect::<Option<_>>().ok_or(Error::Panicked)?;
    let mut recorder = Recorder::new(Mix::NOTHING);
    let (mut cache, mut allocations, mut cpu_s) = (CacheStatistics::default(), 0, 0.0);
    for thread in &threads {
        recorder.merge(&thread.recorder);
        cache.hits += thread.cache.hits;
        cache.misses += thread.cache.misses;
        allocations += thread.allocations;
        cpu_s += thread.cpu_s;
    }
    let started = threads.iter().map(|thread| thread.started).min().ok_or(Error::Panicked)?;
    let ended = threads.iter().map(|thread| thread.ended).max().ok_or(Error::Panicked)?;
    let Supervised { server, load_seconds, environment } = supervised;
    let (fabric, seconds) = (fabric.to_owned(), (ended - started).as_secs_f64());
    Ok(Measured {
        fabric,
        recorder,
        seconds,
        cache,
        allocations,
        cpu_s,
        server,
        load_seconds,
        environment,
        raw: None,
    })
}
