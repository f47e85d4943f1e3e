//! Stores that take turns. Each store has a thread of its own, which sleeps between its turns. So
//! the store's driver, with operations that are generated and not started yet, lives through all
//! turns.

use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
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

/// An order to a store, for one turn.
pub(crate) enum Order {
    /// Store all records.
    Load,
    /// Run a workload from its start until the turn ends. Nothing is recorded.
    WarmUp(Workload),
    /// Continue the workload of the warm-up until the turn ends.
    Measure,
}

/// The result of a store's turn, or of several.
pub(crate) struct TurnResult {
    /// The operations of these turns.
    pub(crate) recorder: Recorder,
    /// How long the turns took, in seconds.
    pub(crate) seconds: f64,
    /// The CPU time of the store's thread, in seconds.
    pub(crate) client_cpu_s: f64,
    /// The CPU time of the store's server, in seconds; 0 if its process is not known.
    pub(crate) server_cpu_s: f64,
}

impl TurnResult {
    /// An empty result, before the first turn.
    pub(crate) fn nothing(mix: Mix) -> Self {
        let recorder = Recorder::new(mix);
        Self { recorder, seconds: 0.0, client_cpu_s: 0.0, server_cpu_s: 0.0 }
    }

    /// Adds the result of another turn.
    pub(crate) fn add(&mut self, more: &Self) {
        self.recorder.merge(&more.recorder);
        self.seconds += more.seconds;
        self.client_cpu_s += more.client_cpu_s;
        self.server_cpu_s += more.server_cpu_s;
    }
}

/// The longest time between two calls of `between_polls`.
const BETWEEN_POLLS: Duration = Duration::from_millis(5);

/// The supervising thread's end of the channels to a store's thread.
pub(crate) struct TurnHandle {
    /// The process of the store's server, if known.
    server: Option<u32>,
    orders: Sender<Order>,
    results: Receiver<Result<TurnResult>>,
    go_on: Arc<AtomicBool>,
}

/// The end of these channels in the store's thread.
pub(crate) struct TurnWorker {
    orders: Receiver<Order>,
    results: Sender<Result<TurnResult>>,
    go_on: Arc<AtomicBool>,
}

/// Makes both ends. `server` is the process of the store's server, if known.
pub(crate) fn pair(server: Option<u32>) -> (TurnHandle, TurnWorker) {
    let (orders, order_receiver) = std::sync::mpsc::channel();
    let (result_sender, results) = std::sync::mpsc::channel();
    let go_on = Arc::new(AtomicBool::new(true));
    let handle = TurnHandle { server, orders, results, go_on: go_on.clone() };
    (handle, TurnWorker { orders: order_receiver, results: result_sender, go_on })
}

impl TurnHandle {
    /// Lets the store work until the order is done, or until the timeout. Calls `between_polls`
    /// every few milliseconds; its error ends the turn.
    pub(crate) fn run_turn(
        &self,
        order: Order,
        timeout: Option<Duration>,
        between_polls: impl Fn() -> Result<()>,
    ) -> Result<TurnResult> {
        self.go_on.store(true, Ordering::Relaxed);
        let usage = || self.server.and_then(|server| ServerUsage::of(server).ok());
        let (started, before) = (Instant::now(), usage());
        self.orders.send(order).map_err(|_| Error::Panicked)?;
        let mut polled = Ok(());
        loop {
            let left = timeout.map_or(BETWEEN_POLLS, |timeout| {
                timeout.saturating_sub(started.elapsed()).min(BETWEEN_POLLS)
            });
            match self.results.recv_timeout(left.max(Duration::from_micros(1))) {
                Ok(done) => {
                    let spent = usage().zip(before).map(|(after, before)| after.since(&before));
                    let server_cpu_s = spent.unwrap_or_default().cpu_s;
                    return polled.and(done).map(|done| TurnResult { server_cpu_s, ..done });
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return polled.and(Err(Error::Panicked)),
            }
            polled = polled.and_then(|()| between_polls());
            if polled.is_err() || timeout.is_some_and(|timeout| started.elapsed() >= timeout) {
                self.go_on.store(false, Ordering::Relaxed);
            }
        }
    }
}

impl TurnWorker {
    /// Executes orders until the [`TurnHandle`] is dropped.
    pub(crate) fn work<S: MeasuredStore<Error: Display>>(
        self,
        args: &Compare,
        name: &'static str,
        mut store: S,
        load_kind: Kind,
    ) {
        let records = Arc::new(RecordCounter::new(args.records));
        let sizes = ValueSize::Constant(args.value_size);
        let value_bytes_max_and_depth = (args.value_size, args.depth.into());
        let mut witness = ();
        let mut driver = Driver::new(&mut witness, value_bytes_max_and_depth, args.seed, &records);
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
            let done = TurnResult { recorder, seconds, client_cpu_s, server_cpu_s: 0.0 };
            let done = driven.map(|()| done).map_err(failed);
            if self.results.send(done).is_err() {
                return;
            }
        }
    }
}
