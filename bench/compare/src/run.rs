//! `kv-compare`: measures Farside and published stores in turns, on one fabric, in one region, with
//! the same keys, values and operations. Each store has a thread of its own, which sleeps between
//! its turns. So the store's driver, with operations that are generated and not started yet, lives
//! through all turns.

use std::cell::RefCell;
use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use farside::Client;
use farside_bench::accounting::{ServerUsage, thread_cpu_s};
use farside_bench::command::Interrupt;
use farside_bench::daemon::Daemon;
use farside_bench::distribution::{Distribution, Skew};
use farside_bench::driver::Driver;
use farside_bench::operations::{Generator, Loader};
use farside_bench::pattern::Pattern;
use farside_bench::phases::start;
use farside_bench::raw_connection::RawConnection;
use farside_bench::recorder::Recorder;
use farside_bench::records::{KEY_BYTES, RecordCounter, ValueSize};
use farside_bench::server::Server;
use farside_bench::sizing::{self, OPERATIONS_PER_S_MAX, ServerMemory};
use farside_bench::store::MeasuredStore;
use farside_bench::verbs::{Plan, Rates, RawLimit, rates};
use farside_bench::workload::{Kind, Mix, Workload};
use farside_bench::{Error, Result, emulation};
use farside_config::ClientConfig;
use farside_fabric::AnyFabric;
use farside_layout::{BLOCK_BYTES_MAX, BLOCK_HEADER_BYTES, BLOCK_UNIT, SizeClass, class_for};

use crate::args::{Compare, StoreName};
use crate::peers::fusee::Fusee;
use crate::peers::lanes::PeerStore;
use crate::peers::race::Race;
use crate::peers::swarm::Swarm;
use crate::peers::{Peer, PeerDemand, PeerError, SEGMENT_BYTES, Segments};
use crate::report::{CompareReport, Limit, TurnResult, WorkloadReport};
use crate::services::{self, MemcachedProtocol, RedisProtocol, Requests, ServiceError};

/// Starts the server and the stores, lets them take turns, and returns the report.
pub fn run(args: &Compare, interrupt: &Interrupt) -> Result<CompareReport> {
    args.check()?;
    let config = args.target.config()?;
    let server = Server::connect_or_start(config, || memory(args), interrupt)?;
    let (mut stores, mut left_out) = (Vec::new(), Vec::new());
    for store in &args.stores {
        match obstacle(args, *store) {
            None => stores.push(*store),
            Some(why) => left_out.push((*store, why)),
        }
    }
    let mut connection = RawConnection::connect(&server.config)?;
    let (limit, raw) = limit(args, &mut connection)?;
    // The memory for inserts follows from the rate of raw verbs, which no store exceeds. The
    // estimate doubles the highest rate, because other load may have slowed a measurement.
    let fastest = raw.read.max(raw.write).max(raw.cas);
    let demand = demand(args, (2.0 * fastest).min(OPERATIONS_PER_S_MAX as f64));
    let count = stores.iter().map(|store| segments(*store, demand)).sum();
    let mut memory = Segments::new(take_segments(&mut connection, count)?);
    let connection = RefCell::new(connection);
    let between_polls = || {
        connection.borrow_mut().answer_all()?;
        interrupt.check()
    };
    // A server that was not started for this run may hold the keys. The other stores are new and
    // empty.
    let load_kind = |store| match store {
        StoreName::Farside if !server.is_own() => Kind::Put,
        _ => Kind::Insert,
    };
    let start = |program| services::start(program, demand.records, args.value_size, interrupt);
    let services: Result<Vec<_>> =
        stores.iter().map(|store| store.program().map(start).transpose()).collect();
    let services = services?;
    let workloads: Result<Vec<_>> = thread::scope(|scope| {
        let mut handles = Vec::new();
        let own = server.processes.first().copied();
        for (store, service) in stores.iter().zip(&services) {
            let process = service.as_ref().map_or(own, |service| Some(service.process()));
            let (handle, worker) = pair(process);
            let setup = StoreSetup {
                args,
                demand,
                store: *store,
                load_kind: load_kind(*store),
                client: &server.config,
                service: service.as_ref(),
            };
            setup.start(scope, worker, &connection.borrow(), &mut memory)?;
            handles.push(handle);
        }
        for handle in &handles {
            handle.run_turn(Order::Load, None, between_polls)?;
        }
        let turns = |workload: &Workload| {
            let turns = take_turns(args, *workload, &handles, between_polls)?;
            let stores = stores.iter().copied();
            Ok(WorkloadReport::new(*workload, stores.zip(&turns), &raw))
        };
        args.workloads.iter().map(turns).collect()
    });
    let workloads = workloads?;
    let mut connection = connection.into_inner();
    let machine = connection.machine()?;
    connection.give_back()?;
    let fabric_and_machine = (server.fabric(), machine);
    Ok(CompareReport::new(args, &stores, &left_out, fabric_and_machine, limit, workloads))
}

/// Returns why a store cannot take part; `None` if it can.
fn obstacle(args: &Compare, store: StoreName) -> Option<&'static str> {
    let program = store.program()?;
    if args.network.is_some() {
        return Some("a network cannot be emulated around its socket");
    }
    (!services::is_installed(program)).then_some("it is not installed")
}

/// Runs one workload: each store has one turn in each round. Returns the result of each store.
fn take_turns(
    args: &Compare,
    workload: Workload,
    handles: &[TurnHandle],
    between_polls: impl Fn() -> Result<()>,
) -> Result<Vec<TurnResult>> {
    let warm_up = Duration::from_secs_f64(args.warmup_seconds);
    let round = Duration::from_secs_f64(args.seconds / f64::from(args.rounds));
    for handle in handles {
        handle.run_turn(Order::WarmUp(workload), Some(warm_up), &between_polls)?;
    }
    let mut results: Vec<_> = handles.iter().map(|_| TurnResult::nothing(workload.mix())).collect();
    for _ in 0..args.rounds {
        for (handle, result) in handles.iter().zip(&mut results) {
            result.add(&handle.run_turn(Order::Measure, Some(round), &between_polls)?);
        }
    }
    Ok(results)
}

/// The settings from which a store is made.
struct StoreSetup<'a> {
    args: &'a Compare,
    demand: PeerDemand,
    store: StoreName,
    load_kind: Kind,
    client: &'a ClientConfig,
    service: Option<&'a Daemon>,
}

type Scope<'s, 'e> = &'s thread::Scope<'s, 'e>;

impl<'a> StoreSetup<'a> {
    /// Makes the store and starts the thread that drives it.
    fn start<'s>(
        self,
        scope: Scope<'s, '_>,
        worker: TurnWorker,
        connection: &RawConnection,
        memory: &mut Segments,
    ) -> Result<()>
    where
        'a: 's,
    {
        let Self { args, demand, store, .. } = self;
        let peer_failed = |why: PeerError| failed(store, &why);
        let service_failed = |why: ServiceError| failed(store, &why);
        let fabric = |lanes: u16| fabric(args, connection, lanes * args.depth);
        let socket = self.service.map(Daemon::socket).unwrap_or_default();
        match store {
            StoreName::Farside => {
                let session = self.connect()?.session();
                self.run(scope, worker, session.map_err(Error::client("opening a session"))?)
            }
            StoreName::Fusee => {
                let fusee = Fusee::new(fabric(1)?, memory, demand).map_err(peer_failed)?;
                self.run(scope, worker, PeerStore::new(fusee, args.depth))
            }
            StoreName::Race | StoreName::Smart => {
                let is_speculative = store == StoreName::Smart;
                let race = Race::new(fabric(1)?, memory, demand, is_speculative);
                self.run(scope, worker, PeerStore::new(race.map_err(peer_failed)?, args.depth))
            }
            StoreName::Swarm => {
                let fabric = fabric(Swarm::<AnyFabric>::LANES)?;
                let swarm = Swarm::new(fabric, memory, demand).map_err(peer_failed)?;
                self.run(scope, worker, PeerStore::new(swarm, args.depth))
            }
            StoreName::Redis | StoreName::Valkey => {
                let protocol = RedisProtocol::connect(&socket).map_err(service_failed)?;
                self.run(scope, worker, Requests::new(protocol, args.depth))
            }
            StoreName::Memcached => {
                let protocol = MemcachedProtocol::connect(&socket).map_err(service_failed)?;
                self.run(scope, worker, Requests::new(protocol, args.depth))
            }
        }
    }

    fn connect(&self) -> Result<Client> {
        let builder = Client::builder().config(self.client).pipeline_depth(self.args.depth);
        let mut builder = builder.operation_counters(true);
        if let Some(link) = self.args.link() {
            builder = builder.intercept_fabric(emulation::wrap(link));
        }
        builder.connect().map_err(Error::Setup)
    }

    fn run<'s, S>(self, scope: Scope<'s, '_>, worker: TurnWorker, store: S) -> Result<()>
    where
        'a: 's,
        S: MeasuredStore<Error: Display> + Send + 's,
    {
        let (args, name) = (self.args, self.store.name());
        start(scope, move || worker.work(args, name, store, self.load_kind)).map(drop)
    }
}

fn failed(store: StoreName, why: &impl Display) -> Error {
    Error::Store { store: store.name(), why: why.to_string() }
}

/// A fabric on the region, behind the emulated network if one was asked for.
fn fabric(args: &Compare, connection: &RawConnection, lanes: u16) -> Result<AnyFabric> {
    let fabric = connection.fabric(lanes)?;
    Ok(match args.link() {
        Some(link) => AnyFabric::Intercepted(emulation::wrap(link)(Box::new(fabric), lanes)),
        None => fabric,
    })
}

fn demand(args: &Compare, operations_per_s: f64) -> PeerDemand {
    let inserts: f64 =
        args.workloads.iter().map(|workload| workload.mix().share(Kind::Insert)).sum();
    let operations = (args.warmup_seconds + args.seconds) * operations_per_s;
    PeerDemand {
        records: args.records + (operations * inserts) as u64,
        value_bytes: args.value_size as usize,
        depth: args.depth,
    }
}

/// How many segments of memory a store uses, besides Farside's own memory.
fn segments(store: StoreName, demand: PeerDemand) -> u64 {
    match store {
        StoreName::Farside | StoreName::Redis | StoreName::Valkey | StoreName::Memcached => 0,
        StoreName::Fusee => Fusee::<AnyFabric>::segments(demand),
        StoreName::Race | StoreName::Smart => Race::<AnyFabric>::segments(demand),
        StoreName::Swarm => Swarm::<AnyFabric>::segments(demand),
    }
}

/// The memory of a server that is started for the run.
fn memory(args: &Compare) -> Result<ServerMemory> {
    let inserts = args.workloads.iter().map(|workload| workload.mix().share(Kind::Insert)).sum();
    let farside = sizing::Demand {
        records: args.records,
        sizes: ValueSize::Constant(args.value_size),
        threads: 1,
        mix: Mix::new(&[(Kind::Put, 1.0 - inserts), (Kind::Insert, inserts)])
            .unwrap_or(Workload::A.mix()),
        target_rate: None,
        operations: None,
        seconds: Some(args.seconds),
        warmup_seconds: args.warmup_seconds,
        servers: 1,
    };
    let memory = farside.memory()?;
    let demand = demand(args, OPERATIONS_PER_S_MAX as f64);
    let segments = args.stores.iter().map(|store| segments(*store, demand)).sum::<u64>() + 1;
    Ok(ServerMemory { region_bytes: memory.region_bytes + segments * BLOCK_BYTES_MAX, ..memory })
}

/// Takes blocks of the largest class. Returns the first cache line after each block's header.
fn take_segments(connection: &mut RawConnection, count: u64) -> Result<Vec<u64>> {
    let Some(class) = SizeClass::for_bytes(BLOCK_BYTES_MAX) else { return Ok(Vec::new()) };
    let contents = connection.take_blocks(class, count as usize)?;
    Ok(contents.iter().map(|content| content - BLOCK_HEADER_BYTES + BLOCK_UNIT).collect())
}

/// Limit on the time for each raw verb, in seconds.
const LIMIT_SECONDS_MAX: f64 = 1.0;

/// Measures the raw verbs with `--depth` chains in flight, each on the length of a record's block.
fn limit(args: &Compare, connection: &mut RawConnection) -> Result<(Limit, RawLimit)> {
    let segments = take_segments(connection, 1)?;
    let class = class_for(KEY_BYTES, args.value_size as usize);
    let bytes = class.map_or(BLOCK_UNIT, SizeClass::block_bytes);
    let per_segment = (SEGMENT_BYTES / bytes) as usize;
    let within = |start: &u64| (*start..).step_by(bytes as usize).take(per_segment);
    let targets: Vec<u64> = segments.iter().flat_map(within).collect();
    let plan = Plan {
        targets: &targets,
        bytes: bytes as u32,
        lanes: args.depth,
        duration: Duration::from_secs_f64(args.seconds.min(LIMIT_SECONDS_MAX)),
        between_polls: &|| Ok(()),
    };
    let timed = rates(&mut fabric(args, connection, args.depth)?, &plan)?;
    let limit = Limit { bytes: plan.bytes, rates: Rates::of(&timed) };
    Ok((limit, RawLimit::of(&[timed])))
}

/// An order to a store, for one turn.
pub(crate) enum Order {
    /// Store all records.
    Load,
    /// Run a workload from its start until the turn ends. Nothing is recorded.
    WarmUp(Workload),
    /// Continue the workload of the warm-up until the turn ends.
    Measure,
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
fn pair(server: Option<u32>) -> (TurnHandle, TurnWorker) {
    let (orders, order_receiver) = std::sync::mpsc::channel();
    let (result_sender, results) = std::sync::mpsc::channel();
    let go_on = Arc::new(AtomicBool::new(true));
    let handle = TurnHandle { server, orders, results, go_on: go_on.clone() };
    (handle, TurnWorker { orders: order_receiver, results: result_sender, go_on })
}

impl TurnHandle {
    /// Lets the store work until the order is done, or until the timeout. Calls `between_polls`
    /// every few milliseconds; its error ends the turn.
    fn run_turn(
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
