//! `kv-compare`: Farside and what others published, on one fabric, in one region, with the
//! same keys, values and operations, in turns.

use std::cell::RefCell;
use std::fmt::Display;
use std::path::Path;
use std::thread;
use std::time::Duration;

use farside::Client;
use farside_bench::command::Interrupt;
use farside_bench::daemon::Daemon;
use farside_bench::environment::Environment;
use farside_bench::keys::KEY_BYTES;
use farside_bench::phases::start;
use farside_bench::raw_connection::Attached;
use farside_bench::server::Server;
use farside_bench::sizing::{self, OPERATIONS_PER_S_MAX, ServerMemory};
use farside_bench::store::MeasuredStore;
use farside_bench::value_size::ValueSize;
use farside_bench::verbs::{Plan, RawLimit, Timed, rates};
use farside_bench::workload::{Kind, Mix, Workload};
use farside_bench::{Error, Result};
use farside_config::ClientConfig;
use farside_fabric::Fabric;
use farside_fabric::shm::ShmFabric;
use farside_layout::{BLOCK_BYTES_MAX, BLOCK_HEADER_BYTES, BLOCK_UNIT, SizeClass, class_for};

use crate::args::{Compare, StoreName};
use crate::emulation::{self, NetworkName};
use crate::peers::fusee::Fusee;
use crate::peers::lanes::PeerStore;
use crate::peers::memory::{SEGMENT_BYTES, Segments};
use crate::peers::race::Race;
use crate::peers::swarm::Swarm;
use crate::peers::{Peer, PeerDemand, PeerError};
use crate::report::{CompareReport, Limit, WorkloadReport};
use crate::services::memcached::MemcachedProtocol;
use crate::services::redis::RedisProtocol;
use crate::services::requests::Requests;
use crate::services::{ExternalServer, ServiceError};
use crate::turns::{Done, Order, TurnHandle, TurnWorker, pair};

/// Runs everything.
pub fn run(args: &Compare, interrupt: &Interrupt) -> Result<CompareReport> {
    args.check()?;
    let config = args.target.config()?;
    let server = Server::connect_or_start(config, || memory(args), interrupt)?;
    let (mut stores, mut left_out) = (Vec::new(), Vec::new());
    for store in &args.stores {
        match obstacle(*store, args.network) {
            None => stores.push(*store),
            Some(why) => left_out.push((*store, why)),
        }
    }
    let mut attached = Attached::connect(&server.config)?;
    let (limit, raw) = limit(args, &mut attached)?;
    // No store does more operations than the fabric READs, with some room for noise.
    let demand = demand(args, (2.0 * raw.read).min(OPERATIONS_PER_S_MAX as f64));
    let count = stores.iter().map(|store| segments(*store, demand)).sum();
    let mut memory = Segments::new(take_segments(&mut attached, count)?);
    let attached = RefCell::new(attached);
    let look = || {
        attached.borrow_mut().answer_all()?;
        interrupt.check()
    };
    // A server that ran before may hold the keys already; the other stores hold nothing yet.
    let load_kind = |store| match store {
        StoreName::Farside if !server.is_own() => Kind::Put,
        _ => Kind::Insert,
    };
    let start = |service: ExternalServer| service.start(demand.records, args.value_size, interrupt);
    let services: Result<Vec<_>> =
        stores.iter().map(|store| store.service().map(start).transpose()).collect();
    let services = services?;
    let workloads: Result<Vec<_>> = thread::scope(|scope| {
        let mut handles = Vec::new();
        for (store, service) in stores.iter().zip(&services) {
            let process = service.as_ref().map_or(server.process, |of| Some(of.process()));
            let (handle, worker) = pair(process);
            let setup = StoreSetup {
                args,
                demand,
                store: *store,
                load_kind: load_kind(*store),
                client: &server.config,
                service: service.as_ref(),
            };
            setup.start(scope, worker, &attached.borrow(), &mut memory)?;
            handles.push(handle);
        }
        for handle in &handles {
            handle.play(Order::Load, None, look)?;
        }
        let turns = |workload: &Workload| {
            let turns = take_turns(args, *workload, &handles, look)?;
            let stores = stores.iter().copied();
            Ok(WorkloadReport::new(*workload, stores.zip(&turns), &raw))
        };
        args.workloads.iter().map(turns).collect()
    });
    let workloads = workloads?;
    // While the region is mapped.
    let machine = Environment::look();
    attached.into_inner().give_back()?;
    let place = (server.fabric(), machine);
    Ok(CompareReport::new(args, &stores, &left_out, place, limit, workloads))
}

/// Why a store cannot take part.
fn obstacle(store: StoreName, network: Option<NetworkName>) -> Option<&'static str> {
    let service = store.service()?;
    if network.is_some() {
        return Some("nothing emulates a network around its socket");
    }
    (!service.is_installed()).then_some("it is not installed")
}

/// One workload, by each store in each round: what each did.
fn take_turns(
    args: &Compare,
    workload: Workload,
    handles: &[TurnHandle],
    look: impl Fn() -> Result<()>,
) -> Result<Vec<Done>> {
    let warm_up = Duration::from_secs_f64(args.warmup_seconds);
    let round = Duration::from_secs_f64(args.seconds / f64::from(args.rounds));
    for handle in handles {
        handle.play(Order::WarmUp(workload), Some(warm_up), &look)?;
    }
    let mut all: Vec<_> = handles.iter().map(|_| Done::nothing(workload.mix())).collect();
    for _ in 0..args.rounds {
        for (handle, all) in handles.iter().zip(&mut all) {
            all.add(&handle.play(Order::Measure, Some(round), &look)?);
        }
    }
    Ok(all)
}

/// What it takes to make a store.
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
    /// Makes the store and starts its thread.
    fn start<'s>(
        self,
        scope: Scope<'s, '_>,
        worker: TurnWorker,
        attached: &Attached,
        memory: &mut Segments,
    ) -> Result<()>
    where
        'a: 's,
    {
        if self.store == StoreName::Farside {
            let session = self.connect()?.session().map_err(Error::client("opening a session"))?;
            return self.run(scope, worker, session);
        }
        if let Some(service) = self.service {
            return self.service(scope, worker, &service.socket());
        }
        let lanes = lanes(self.store) * self.args.depth;
        let fabric = attached.fabric(lanes)?;
        match self.args.link() {
            None => self.peer(scope, worker, fabric, memory),
            Some(link) => {
                let fabric = emulation::around(Box::new(fabric), lanes, link);
                self.peer(scope, worker, fabric, memory)
            }
        }
    }

    fn connect(&self) -> Result<Client> {
        let mut builder = Client::builder().config(self.client).pipeline_depth(self.args.depth);
        if let Some(link) = self.args.link() {
            builder = builder.intercept_fabric(emulation::wrap(link));
        }
        builder.connect().map_err(Error::client("connecting"))
    }

    fn peer<'s, F: Fabric + Send + 's>(
        self,
        scope: Scope<'s, '_>,
        worker: TurnWorker,
        fabric: F,
        memory: &mut Segments,
    ) -> Result<()>
    where
        'a: 's,
    {
        let (demand, store, depth) = (self.demand, self.store, self.args.depth);
        let failed = |why: PeerError| failed(store, &why);
        match store {
            StoreName::Fusee => {
                let fusee = Fusee::new(fabric, memory, demand).map_err(failed)?;
                self.run(scope, worker, PeerStore::new(fusee, depth))
            }
            StoreName::Race | StoreName::Smart => {
                let is_speculative = store == StoreName::Smart;
                let race = Race::new(fabric, memory, demand, is_speculative).map_err(failed)?;
                self.run(scope, worker, PeerStore::new(race, depth))
            }
            StoreName::Swarm => {
                let swarm = Swarm::new(fabric, memory, demand).map_err(failed)?;
                self.run(scope, worker, PeerStore::new(swarm, depth))
            }
            StoreName::Farside | StoreName::Redis | StoreName::Valkey | StoreName::Memcached => {
                Ok(())
            }
        }
    }

    fn service<'s>(self, scope: Scope<'s, '_>, worker: TurnWorker, socket: &Path) -> Result<()>
    where
        'a: 's,
    {
        let (store, depth) = (self.store, self.args.depth);
        let failed = |why: ServiceError| failed(store, &why);
        if store == StoreName::Memcached {
            let protocol = MemcachedProtocol::connect(socket).map_err(failed)?;
            self.run(scope, worker, Requests::new(protocol, depth))
        } else {
            let protocol = RedisProtocol::connect(socket).map_err(failed)?;
            self.run(scope, worker, Requests::new(protocol, depth))
        }
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

/// How many lanes of the fabric an operation of the store takes.
fn lanes(store: StoreName) -> u16 {
    match store {
        StoreName::Swarm => Swarm::<ShmFabric>::LANES,
        _ => 1,
    }
}

fn demand(args: &Compare, operations_per_s: f64) -> PeerDemand {
    let inserts: f64 = args.workloads.iter().map(|of| of.mix().share(Kind::Insert)).sum();
    let operations = (args.warmup_seconds + args.seconds) * operations_per_s;
    PeerDemand {
        records: args.records + (operations * inserts) as u64,
        value_bytes: args.value_size as usize,
        depth: args.depth,
    }
}

/// How many segments of memory a store takes besides Farside's own.
fn segments(store: StoreName, demand: PeerDemand) -> u64 {
    match store {
        StoreName::Farside | StoreName::Redis | StoreName::Valkey | StoreName::Memcached => 0,
        StoreName::Fusee => Fusee::<ShmFabric>::segments(demand),
        StoreName::Race | StoreName::Smart => Race::<ShmFabric>::segments(demand),
        StoreName::Swarm => Swarm::<ShmFabric>::segments(demand),
    }
}

/// What the server started for the run is told.
fn memory(args: &Compare) -> Result<ServerMemory> {
    let inserts = args.workloads.iter().map(|of| of.mix().share(Kind::Insert)).sum();
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
    };
    let memory = farside.memory()?;
    let demand = demand(args, OPERATIONS_PER_S_MAX as f64);
    let segments = args.stores.iter().map(|store| segments(*store, demand)).sum::<u64>() + 1;
    Ok(ServerMemory { region_bytes: memory.region_bytes + segments * BLOCK_BYTES_MAX, ..memory })
}

/// Takes blocks of the largest class, and their parts that begin on a cache line.
fn take_segments(attached: &mut Attached, count: u64) -> Result<Vec<u64>> {
    let Some(class) = SizeClass::for_bytes(BLOCK_BYTES_MAX) else { return Ok(Vec::new()) };
    let contents = attached.take_blocks(class, count as usize)?;
    Ok(contents.iter().map(|at| at - BLOCK_HEADER_BYTES + BLOCK_UNIT).collect())
}

/// How long each raw verb is measured, at most.
const LIMIT_SECONDS_MAX: f64 = 1.0;

/// The raw verbs, with as many in flight, on what a record of Farside takes.
fn limit(args: &Compare, attached: &mut Attached) -> Result<(Limit, RawLimit)> {
    let segments = take_segments(attached, 1)?;
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
        look: &|| Ok(()),
    };
    let mut fabric = attached.fabric(args.depth)?;
    let timed = match args.link() {
        Some(link) => rates(&mut emulation::around(Box::new(fabric), args.depth, link), &plan)?,
        None => rates(&mut fabric, &plan)?,
    };
    let [read, write, cas, update] = timed.each_ref().map(Timed::rate);
    Ok((Limit { bytes: plan.bytes, read, write, cas, update }, RawLimit::of(&[timed])))
}
