//! `kv-compare cache`: full caches on the same requests. Each thread asks for a key, and stores its
//! value if it was absent, as a program with a cache beside a slow database does. Each trace runs
//! on a new server of each store.
//!
//! Memcached gets the memory that Farside's region has for blocks, without the index. Its own hash
//! table is beside that. Beside each store stand the exact policies with as many items as this
//! store had on average over the second half of the requests. So the policies can be compared apart
//! from the memory of an item.

mod policies;

use std::fmt::{self, Display, Write as _};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use farside::Client;
use farside_bench::accounting::{Machine, Origin, ServerUsage, thread_cpu_s};
use farside_bench::command::Interrupt;
use farside_bench::publish::grouped;
use farside_bench::records::{KEY_BYTES, ValueSize, key_of};
use farside_bench::server::Server;
use farside_bench::sizing::{Demand, ServerMemory};
use farside_bench::store::{Action, MeasuredStore, Outcome};
use farside_bench::{Error, Result, workload};
use farside_config::ServerConfig;
use farside_config::size::ByteSize;
use farside_layout::{CHUNK_BYTES, SizeClass, class_for};
use policies::{Extent, Trace, WORKLOADS, Workload};
use serde::Serialize;

use self::policies::ExactHits;
use crate::args::{Cache, StoreName};
use crate::services::{self, MemcachedProtocol, Requests, ServiceError};

/// A thread takes this many requests at once. So the threads stay close to the trace's order.
const REQUESTS_AT_ONCE: usize = 32;
/// The pause between two counts of the values.
const COUNT_PAUSE: Duration = Duration::from_millis(20);
/// The least memory for values, in MiB. Memcached takes 1 MiB at a time.
const VALUES_MIB_MIN: u64 = 8;
/// Limit on the number of keys. The exact policies take some 40 bytes for each.
const KEYS_MAX: f64 = 100e6;

/// Runs all traces on all stores.
///
/// # Errors
/// [`Error::Usage`] if the memory is too small, and the errors of servers and stores.
pub fn run(args: &Cache, interrupt: &Interrupt) -> Result<CacheReport> {
    let memory = CacheMemory::of(args)?;
    let is_wanted = |workload: &Workload| {
        let name = workload.name();
        args.only.is_empty() || args.only.iter().any(|part| name.contains(part))
    };
    let memcached = services::is_installed("memcached");
    let mut machine = Machine::detect(0);
    let mut traces = Vec::new();
    for percent in &args.sizes {
        let keys = memory.keys(*percent)?;
        for workload in WORKLOADS.into_iter().filter(is_wanted) {
            let Cache { requests, seed, .. } = *args;
            let trace = workload.trace(Extent { keys, requests, seed });
            let (found, farside) = run_farside(args, &memory, &trace, interrupt)?;
            machine = found;
            let mut stores = vec![farside];
            if memcached {
                stores.push(run_memcached(args, &memory, &trace, interrupt)?);
            }
            traces.push(TraceReport::new(&trace, *percent, stores));
        }
    }
    Ok(CacheReport::new(args, &memory, machine, memcached, traces))
}

/// The memory of the stores.
struct CacheMemory {
    server: ServerMemory,
    /// The memory for blocks, in MiB.
    values_mib: u64,
    /// How many objects fit into it.
    objects: u64,
}

impl CacheMemory {
    fn of(args: &Cache) -> Result<Self> {
        let ByteSize(region_bytes) = args.memory;
        let class = class_for(KEY_BYTES, args.value_size as usize);
        let block_bytes = class.map_or(1, SizeClass::block_bytes);
        let server = Demand {
            records: region_bytes / block_bytes,
            sizes: ValueSize::Constant(args.value_size),
            threads: args.threads.into(),
            mix: workload::Workload::C.mix(),
            target_rate: None,
            operations: None,
            seconds: None,
            warmup_seconds: 0.0,
            servers: 1,
        };
        let server = server.memory()?.in_region(region_bytes);
        let geometry = ServerConfig::default().format(region_bytes, [0; 16], [0; 16]).geometry();
        let heap_bytes = u64::from(geometry.chunks()) * CHUNK_BYTES;
        let values_bytes = heap_bytes.saturating_sub(server.index_bytes);
        if values_bytes >> 20 < VALUES_MIB_MIN {
            let advice = "caches that are compared have at least 8 MiB for values: give --memory";
            return Err(Error::Usage(format!("{advice} 16MiB or more")));
        }
        Ok(Self { server, values_mib: values_bytes >> 20, objects: values_bytes / block_bytes })
    }

    /// The number of keys of which a cache is this percentage.
    fn keys(&self, percent: f64) -> Result<u32> {
        let keys = self.objects as f64 * 100.0 / percent;
        if keys > KEYS_MAX {
            let (keys, most) = (grouped(keys as u64), grouped(KEYS_MAX as u64));
            return Err(Error::Usage(format!(
                "a cache of {percent} % needs {keys} keys, more than {most}: give less --memory, \
                 longer values or larger --sizes"
            )));
        }
        Ok(keys as u32)
    }
}

/// Replays the trace on a new server of Farside.
fn run_farside(
    args: &Cache,
    memory: &CacheMemory,
    trace: &Trace,
    interrupt: &Interrupt,
) -> Result<(Machine, StoreReport)> {
    let server = Server::start_cache(&memory.server, interrupt)?;
    let client = Client::builder().config(&server.config).connect().map_err(Error::Setup)?;
    let session = || client.session().map_err(Error::client("opening a session"));
    let usage = || server.usage().unwrap_or_default();
    let store = StoreName::Farside;
    let replay = Replay { args, trace, interrupt, store, usage: &usage };
    let mut connection = server.raw_connection()?;
    let done = replay.run(session, || connection.blocks_in_use())?;
    Ok((connection.machine()?, done.report(store, trace)))
}

/// Replays the trace on a new memcached.
fn run_memcached(
    args: &Cache,
    memory: &CacheMemory,
    trace: &Trace,
    interrupt: &Interrupt,
) -> Result<StoreReport> {
    let store = StoreName::Memcached;
    let daemon = services::start_with("memcached", memory.values_mib, interrupt)?;
    let failed = |why: ServiceError| Error::Store { store: store.name(), why: why.to_string() };
    let connect = |socket: &Path| MemcachedProtocol::connect(socket).map_err(failed);
    let socket = daemon.socket();
    let usage = || ServerUsage::of(daemon.process()).unwrap_or_default();
    let replay = Replay { args, trace, interrupt, store, usage: &usage };
    let mut watched = connect(&socket)?;
    let items = || watched.items().map_err(failed);
    let done = replay.run(|| Ok(Requests::new(connect(&socket)?, 1)), items)?;
    Ok(done.report(store, trace))
}

/// A trace to be replayed on a store.
struct Replay<'a> {
    args: &'a Cache,
    trace: &'a Trace,
    interrupt: &'a Interrupt,
    store: StoreName,
    /// The expense of the server's process so far.
    usage: &'a dyn Fn() -> ServerUsage,
}

/// What the threads did.
#[derive(Clone, Copy, Default)]
struct Replayed {
    hits: u64,
    /// The mean number of values in the second half of the requests.
    items: u64,
    /// PUTs that the store refused.
    refused: u64,
    seconds: f64,
    client_cpu_s: f64,
    server_cpu_s: f64,
}

impl Replay<'_> {
    /// Replays it with as many threads as were asked for, each with a store of its own. `items`
    /// returns the present number of values.
    fn run<S>(
        &self,
        store: impl Fn() -> Result<S>,
        mut items: impl FnMut() -> Result<u64>,
    ) -> Result<Replayed>
    where
        S: MeasuredStore<Error: Display> + Send,
    {
        let stores: Result<Vec<S>> = (0..self.args.threads).map(|_| store()).collect();
        let next = AtomicUsize::new(0);
        let (before, started) = ((self.usage)(), Instant::now());
        let (args, trace, interrupt, name) =
            (self.args, self.trace, self.interrupt, self.store.name());
        let stores = stores?;
        let mut done = thread::scope(|scope| {
            let next = &next;
            let threads: Vec<_> = stores
                .into_iter()
                .map(|store| {
                    let thread = Asking { store, name, value: vec![0; args.value_size as usize] };
                    scope.spawn(move || thread.run(trace, next, interrupt))
                })
                .collect();
            let (mut counts, mut failure) = (Vec::new(), None);
            while threads.iter().any(|thread| !thread.is_finished()) {
                thread::sleep(COUNT_PAUSE);
                match items() {
                    Ok(_) if next.load(Ordering::Relaxed) < trace.requests.len() / 2 => {}
                    Ok(count) => counts.push(count),
                    Err(error) => failure = Some(error),
                }
            }
            if counts.is_empty() {
                counts.push(items()?);
            }
            let done =
                threads.into_iter().map(|thread| thread.join().map_err(|_| Error::Panicked)?);
            let items = counts.iter().sum::<u64>() / counts.len() as u64;
            let done = Replayed { items, ..done.sum::<Result<Replayed>>()? };
            failure.map_or(Ok(done), Err)
        })?;
        done.seconds = started.elapsed().as_secs_f64();
        done.server_cpu_s = (self.usage)().since(&before).cpu_s;
        Ok(done)
    }
}

impl std::iter::Sum for Replayed {
    fn sum<I: Iterator<Item = Self>>(parts: I) -> Self {
        parts.fold(Self::default(), |sum, part| Self {
            hits: sum.hits + part.hits,
            refused: sum.refused + part.refused,
            client_cpu_s: sum.client_cpu_s + part.client_cpu_s,
            ..sum
        })
    }
}

/// A thread that asks a store.
struct Asking<S> {
    store: S,
    name: &'static str,
    /// A value. It begins with the number of its key.
    value: Vec<u8>,
}

impl<S: MeasuredStore<Error: Display>> Asking<S> {
    fn run(mut self, trace: &Trace, next: &AtomicUsize, interrupt: &Interrupt) -> Result<Replayed> {
        let (mut done, mut found) = (Replayed::default(), Vec::new());
        let cpu_s = thread_cpu_s();
        loop {
            interrupt.check()?;
            let first = next.fetch_add(REQUESTS_AT_ONCE, Ordering::Relaxed);
            let Some(requests) = trace.requests.get(first..) else { break };
            for key in requests.iter().take(REQUESTS_AT_ONCE) {
                self.ask(*key, &mut found, &mut done)?;
            }
        }
        done.client_cpu_s = thread_cpu_s() - cpu_s;
        Ok(done)
    }

    /// Asks for a key. After a miss it stores the value, as if it came from elsewhere.
    fn ask(&mut self, number: u32, found: &mut Vec<u8>, done: &mut Replayed) -> Result<()> {
        let key = key_of(number.into());
        let mark = u64::from(number).to_le_bytes();
        let failed = |why: String| Error::Store { store: self.name, why };
        let outcome = self.store.perform(Action::Get, &key, &[], found);
        let Outcome { applied, value, .. } = outcome.map_err(|why| failed(why.to_string()))?;
        if applied {
            let data = value.map(|value| value.data).unwrap_or_default();
            if data.len() != self.value.len() || !data.starts_with(&mark) {
                return Err(failed(format!("a GET of key {number} found another value")));
            }
            done.hits += 1;
            return Ok(());
        }
        self.value[..mark.len()].copy_from_slice(&mark);
        // A cache may refuse a value. If the connection broke, the next GET fails.
        let stored = self.store.perform(Action::Put, &key, &self.value, found);
        done.refused += u64::from(stored.is_err());
        Ok(())
    }
}

impl Replayed {
    fn report(self, store: StoreName, trace: &Trace) -> StoreReport {
        let requests = trace.requests.len() as f64;
        StoreReport {
            store: store.name(),
            items: self.items,
            hit_percent: 100.0 * self.hits as f64 / requests,
            exact: ExactHits::of(trace, self.items),
            requests_s: requests / self.seconds,
            requests_per_cpu_s: requests / (self.client_cpu_s + self.server_cpu_s),
            refused: self.refused,
        }
    }
}

/// The result of `kv-compare cache`.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs, reason = "the names are those of the JSON")]
pub struct CacheReport {
    #[serde(flatten)]
    pub origin: Origin,
    pub region_bytes: u64,
    pub value_size: u32,
    pub threads: u16,
    pub seed: u64,
    /// The memory that each store has for values.
    pub values_mib: u64,
    /// Whether memcached is installed.
    pub memcached: bool,
    pub traces: Vec<TraceReport>,
}

/// The results with one trace and one size.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs, reason = "the names are those of the JSON")]
pub struct TraceReport {
    pub name: String,
    /// The size of the cache that was asked for, in percent of the data.
    pub cache_percent: f64,
    pub keys: u64,
    pub requests: u64,
    pub stores: Vec<StoreReport>,
}

/// The result of one store.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs, reason = "the names are those of the JSON")]
pub struct StoreReport {
    pub store: &'static str,
    /// The mean number of values that it held in the second half of the requests. That of Farside
    /// includes the free blocks of its clients.
    pub items: u64,
    pub hit_percent: f64,
    /// The hits of exact policies on the same requests, with as many items.
    pub exact: ExactHits,
    /// GETs a second. A miss is followed by a PUT, which is not counted.
    pub requests_s: f64,
    /// Requests for each second of CPU time of clients and server.
    pub requests_per_cpu_s: f64,
    /// PUTs that the store refused.
    pub refused: u64,
}

impl TraceReport {
    fn new(trace: &Trace, cache_percent: f64, stores: Vec<StoreReport>) -> Self {
        let (name, requests) = (trace.name.clone(), trace.requests.len() as u64);
        Self { name, cache_percent, keys: trace.data_keys, requests, stores }
    }
}

impl CacheReport {
    fn new(
        args: &Cache,
        memory: &CacheMemory,
        machine: Machine,
        memcached: bool,
        traces: Vec<TraceReport>,
    ) -> Self {
        Self {
            origin: Origin::of("kv-compare", machine),
            region_bytes: args.memory.0,
            value_size: args.value_size,
            threads: args.threads,
            seed: args.seed,
            values_mib: memory.values_mib,
            memcached,
            traces,
        }
    }

    /// A table for each trace and size.
    pub fn table(&self) -> std::result::Result<String, fmt::Error> {
        let mut out = String::new();
        let Self { values_mib, value_size, threads, .. } = self;
        writeln!(
            out,
            "{threads} threads, values of {value_size} bytes, {values_mib} MiB for them"
        )?;
        if !self.memcached {
            writeln!(out, "memcached is left out: it is not installed")?;
        }
        for TraceReport { name, cache_percent, keys, requests, stores } in &self.traces {
            let [keys, requests] = [keys, requests].map(|count| grouped(*count));
            writeln!(out, "\n{name}: {requests} requests, {keys} keys, cache {cache_percent} %\n")?;
            write!(
                out,
                "| store | items | bytes an item | hits | LRU | FIFO | S3-FIFO | Belady |"
            )?;
            writeln!(out, " requests/s | requests/CPU s | refused |")?;
            writeln!(out, "|---|{}", "---|".repeat(10))?;
            for row in stores {
                let bytes = (values_mib << 20) / row.items.max(1);
                let ExactHits { lru, fifo, s3_fifo, belady } = row.exact;
                let [rate, per_cpu] =
                    [row.requests_s, row.requests_per_cpu_s].map(|rate| grouped(rate as u64));
                write!(out, "| {} | {} | {bytes} |", row.store, grouped(row.items))?;
                write!(out, " {:.2} | {lru:.2} | {fifo:.2} |", row.hit_percent)?;
                write!(out, " {s3_fifo:.2} | {belady:.2} |")?;
                writeln!(out, " {rate} | {per_cpu} | {} |", grouped(row.refused))?;
            }
        }
        Ok(out)
    }
}
