//! Stores that take turns. Each has a thread of its own, which sleeps while it is not its turn. So
//! its driver, with operations made and not done yet, lives through all turns.

use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use farside_bench::accounting::{ServerUsage, thread_cpu_s};
use farside_bench::distribution::{Distribution, Skew};
use farside_bench::driver::Driver;
use farside_bench::operations::{Generator, Loader};
use farside_bench::pattern::Pattern;
use farside_bench::recorder::Recorder;
use farside_bench::records::RecordCounter;
use farside_bench::store::MeasuredStore;
use farside_bench::value_size::ValueSize;
use farside_bench::workload::{Kind, Mix, Workload};
use farside_bench::{Error, Result};

use crate::args::Compare;

/// What a store is to do in its turn.
pub(crate) enum Order {
    /// Store all records.
    Load,
    /// Do a workload from its start, until told to stop; nothing is recorded.
    WarmUp(Workload),
    /// Go on with it, until told to stop.
    Measure,
}

/// What it did.
pub(crate) struct Done {
    /// The operations.
    pub(crate) recorder: Recorder,
    /// How long that took.
    pub(crate) seconds: f64,
    /// The CPU time of its thread, in seconds.
    pub(crate) client_cpu_s: f64,
    /// And of its server, in seconds, where that is known.
    pub(crate) server_cpu_s: f64,
}

impl Done {
    /// Nothing so far.
    pub(crate) fn nothing(mix: Mix) -> Self {
        let recorder = Recorder::new(mix);
        Self { recorder, seconds: 0.0, client_cpu_s: 0.0, server_cpu_s: 0.0 }
    }

    /// Both.
    pub(crate) fn add(&mut self, more: &Self) {
        self.recorder.merge(&more.recorder);
        self.seconds += more.seconds;
        self.client_cpu_s += more.client_cpu_s;
        self.server_cpu_s += more.server_cpu_s;
    }
}

/// The longest wait between two looks.
const LOOK: Duration = Duration::from_millis(5);

/// A store's thread, as its caller sees it.
pub(crate) struct TurnHandle {
    /// The process of its server, if known.
    server: Option<u32>,
    orders: Sender<Order>,
    results: Receiver<Result<Done>>,
    go_on: Arc<AtomicBool>,
}

/// What the thread has of that.
pub(crate) struct TurnWorker {
    orders: Receiver<Order>,
    results: Sender<Result<Done>>,
    go_on: Arc<AtomicBool>,
}

/// Both ends.
pub(crate) fn pair(server: Option<u32>) -> (TurnHandle, TurnWorker) {
    let (orders, taken) = std::sync::mpsc::channel();
    let (told, results) = std::sync::mpsc::channel();
    let go_on = Arc::new(AtomicBool::new(true));
    let handle = TurnHandle { server, orders, results, go_on: go_on.clone() };
    (handle, TurnWorker { orders: taken, results: told, go_on })
}

impl TurnHandle {
    /// Lets it work until it is done, or for so long. `look` is called every now and then.
    pub(crate) fn play(
        &self,
        order: Order,
        most: Option<Duration>,
        look: impl Fn() -> Result<()>,
    ) -> Result<Done> {
        self.go_on.store(true, Ordering::Relaxed);
        let usage = || self.server.and_then(|server| ServerUsage::of(server).ok());
        let (started, before) = (Instant::now(), usage());
        self.orders.send(order).map_err(|_| Error::Panicked)?;
        let mut looked = Ok(());
        loop {
            let left = most.map_or(LOOK, |most| most.saturating_sub(started.elapsed()).min(LOOK));
            match self.results.recv_timeout(left.max(Duration::from_micros(1))) {
                Ok(done) => {
                    let spent = usage().zip(before).map(|(after, before)| after.since(&before));
                    let server_cpu_s = spent.unwrap_or_default().cpu_s;
                    return looked.and(done).map(|done| Done { server_cpu_s, ..done });
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return looked.and(Err(Error::Panicked)),
            }
            looked = looked.and_then(|()| look());
            if looked.is_err() || most.is_some_and(|most| started.elapsed() >= most) {
                self.go_on.store(false, Ordering::Relaxed);
            }
        }
    }
}

impl TurnWorker {
    /// Works until no more orders can come.
    pub(crate) fn work<S: MeasuredStore<Error: Display>>(
        self,
        args: &Compare,
        name: &'static str,
        mut store: S,
        load_kind: Kind,
    ) {
        let records = Arc::new(RecordCounter::new(args.records, (0, 1)));
        let progress = AtomicU64::new(0);
        let sizes = ValueSize::Constant(args.value_size);
        let shape = (args.value_size, args.depth.into());
        let mut witness = ();
        let mut driver = Driver::new(&mut witness, shape, args.seed, &records, &progress);
        let mut source = None;
        let go_on = || self.go_on.load(Ordering::Relaxed);
        for order in &self.orders {
            let (workload, recorder) = match order {
                Order::Load => (None, Recorder::new(Mix::NOTHING)),
                Order::WarmUp(workload) => {
                    let shape = workload.default_shape();
                    let distribution = Distribution::new(shape, &Skew::default(), args.records);
                    let (mix, distribution) = (workload.mix(), Arc::new(distribution));
                    let pattern = Pattern { mix, distribution, sizes };
                    driver.clear();
                    source = Some((Generator::new(pattern, records.clone(), args.seed), mix));
                    (source.as_mut(), Recorder::new(Mix::NOTHING))
                }
                Order::Measure => {
                    let mix = source.as_ref().map_or(Mix::NOTHING, |(_, mix)| *mix);
                    (source.as_mut(), Recorder::new(mix))
                }
            };
            let mut recorder = recorder;
            let cpu_before_s = thread_cpu_s();
            let started = Instant::now();
            let driven = match workload {
                Some((generator, _)) => driver.drive(&mut store, generator, &mut recorder, go_on),
                None => {
                    let mut loader = Loader::new(load_kind, sizes, args.records, (0, 1));
                    driver.drive(&mut store, &mut loader, &mut recorder, go_on)
                }
            };
            let seconds = started.elapsed().as_secs_f64();
            let failed = |why: S::Error| Error::Store { store: name, why: why.to_string() };
            let client_cpu_s = thread_cpu_s() - cpu_before_s;
            let done = Done { recorder, seconds, client_cpu_s, server_cpu_s: 0.0 };
            let done = driven.map(|()| done).map_err(failed);
            if self.results.send(done).is_err() {
                return;
            }
        }
    }
}
