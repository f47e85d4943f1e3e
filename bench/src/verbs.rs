//! `kv-bench verbs`: the highest rates of a fabric, without keys, index or checks.
//!
//! The verbs access free blocks that the server gave to this client, after their headers. So the
//! verbs change no key and no index. The blocks are given back afterwards. A report shows such
//! rates beside a result as its limit. They are measured on the same server as the result, with as
//! many threads and as many chains in flight.

mod measure;
mod sockets;
mod values;

use std::fmt::{self, Write as _};
use std::thread;
use std::time::Duration;

use farside_config::ClientConfig;
use farside_config::size::ByteSize;
use farside_fabric::{AnyFabric, Fabric};
use farside_layout::{BLOCK_HEADER_BYTES, CHUNK_BYTES, SizeClass, class_for};
use serde::{Deserialize, Serialize};

use crate::accounting::Origin;
use crate::args::{Verbs, Ycsb};
use crate::command::Interrupt;
use crate::phases::start;
use crate::publish::grouped;
use crate::raw_connection::RawConnection;
use crate::recorder::Recorder;
use crate::records::KEY_BYTES;
use crate::server::Server;
use crate::sizing::{ServerMemory, VALUE_BYTES_MAX_DEFAULT};
use crate::workload::Kind;
use crate::{Error, Result};

pub use measure::{Plan, Rate, RawVerb, Timed, measure};
pub use sockets::{SocketLoad, SocketRates, are_comparable};
pub use values::{ValueRates, ValuesReport, run as values};

/// The time between two answers to the server.
const ANSWER_PAUSE: Duration = Duration::from_millis(10);

/// The result of `kv-bench verbs`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names are those of the JSON")]
pub struct VerbsReport {
    #[serde(flatten)]
    pub origin: Origin,
    pub fabric: String,
    pub bytes: u32,
    pub depth: u16,
    #[serde(flatten)]
    pub rates: Rates,
    /// Null except over TCP on one host.
    #[serde(default)]
    pub sockets: Option<SocketRates>,
    #[serde(skip)]
    pub blocks: usize,
}

/// The rates of all verbs, and of a cached PUT's chain.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names are those of the JSON")]
pub struct Rates {
    pub read: Rate,
    pub write: Rate,
    pub cas: Rate,
    pub update: Rate,
}

impl Rates {
    /// The rates that [`rates`] measured.
    pub fn of(timed: &[Timed; 4]) -> Self {
        let [read, write, cas, update] = timed.each_ref().map(Timed::rate);
        Self { read, write, cas, update }
    }

    /// All rates, in the order of the fields.
    pub fn all(&self) -> [Rate; 4] {
        [self.read, self.write, self.cas, self.update]
    }
}

/// Measures READ, WRITE, compare-and-swap and a PUT's chain, one after the other.
pub fn run(args: &Verbs, interrupt: &Interrupt) -> Result<VerbsReport> {
    let block_bytes = BLOCK_HEADER_BYTES + u64::from(args.bytes);
    let class = SizeClass::for_bytes(block_bytes)
        .ok_or_else(|| Error::Usage(format!("no block holds {block_bytes} bytes")))?;
    let ByteSize(span_bytes) = args.span;
    let blocks = (span_bytes / class.block_bytes()).max(args.depth.into()) as usize;
    let config = args.target.config()?;
    let server = Server::connect_or_start(config, || Ok(memory(class, blocks)), interrupt)?;
    let mut connection = server.raw_connection()?;
    // On a server of our own all blocks are spare: no other client uses it.
    let spare = if server.is_own() { blocks } else { connection.spare_blocks(class)? };
    let too_few =
        |spare| Err(Error::TooFewBlocks { asked: blocks, bytes: class.block_bytes(), spare });
    if spare < blocks {
        return too_few(spare);
    }
    let targets = connection.take_blocks(class, blocks)?;
    if targets.len() < blocks {
        return too_few(targets.len());
    }
    let load = ThreadLoad {
        bytes: args.bytes,
        lanes: args.depth,
        duration: Duration::from_secs_f64(args.seconds),
    };
    let timed = rates_of_threads(&mut connection, &targets, 1, load, interrupt)?;
    let timed = timed.first().ok_or(Error::Panicked)?;
    let origin = Origin::of("kv-bench", connection.machine()?);
    connection.give_back()?;
    let sockets = are_comparable(&server.config).then(|| {
        let (bytes, depth) = (args.bytes as usize, args.depth);
        let duration = Duration::from_secs_f64(2.0 * args.seconds);
        SocketRates::measure(SocketLoad { bytes, connections: 1, depth, duration }, interrupt)
    });
    Ok(VerbsReport {
        origin,
        fabric: server.fabric().to_owned(),
        bytes: args.bytes,
        depth: args.depth,
        rates: Rates::of(timed),
        sockets: sockets.transpose()?,
        blocks: targets.len(),
    })
}

/// Measures READ, WRITE, compare-and-swap and a PUT's chain, one after the other, each for the
/// plan's duration.
pub fn rates<F: Fabric>(fabric: &mut F, plan: &Plan<'_>) -> Result<[Timed; 4]> {
    // A warm-up, because the first READs are slow: pages and branch predictors are cold.
    measure(fabric, RawVerb::Read, &Plan { duration: plan.duration / 10, ..*plan })?;
    Ok([
        measure(fabric, RawVerb::Read, plan)?,
        measure(fabric, RawVerb::Write, plan)?,
        measure(fabric, RawVerb::CompareSwap, plan)?,
        measure(fabric, RawVerb::Update, plan)?,
    ])
}

/// The verbs that each thread keeps in flight.
#[derive(Clone, Copy)]
struct ThreadLoad {
    bytes: u32,
    lanes: u16,
    /// The time for each verb.
    duration: Duration,
}

/// Measures all rates in several threads, each with a fabric and a part of the targets. Answers the
/// server meanwhile.
fn rates_of_threads(
    connection: &mut RawConnection,
    targets: &[u64],
    threads: usize,
    ThreadLoad { bytes, lanes, duration }: ThreadLoad,
    interrupt: &Interrupt,
) -> Result<Vec<[Timed; 4]>> {
    let fabrics: Vec<AnyFabric> =
        (0..threads).map(|_| connection.fabric(lanes)).collect::<Result<_>>()?;
    let measure = |mut fabric, targets| {
        let between_polls = &|| interrupt.check();
        rates(&mut fabric, &Plan { targets, bytes, lanes, duration, between_polls })
    };
    thread::scope(|scope| {
        let measure = &measure;
        let parts = fabrics.into_iter().zip(targets.chunks(targets.len() / threads));
        let of_part = |(fabric, part)| start(scope, move || measure(fabric, part));
        let running = parts.map(of_part).collect::<Result<Vec<_>>>()?;
        while running.iter().any(|thread| !thread.is_finished()) {
            connection.answer_all()?;
            thread::sleep(ANSWER_PAUSE);
        }
        running.into_iter().map(|thread| thread.join().unwrap_or(Err(Error::Panicked))).collect()
    })
}

/// The memory of a server of our own, with `blocks` blocks of this class.
fn memory(class: SizeClass, blocks: usize) -> ServerMemory {
    let spans = (blocks as u64).div_ceil(class.blocks_per_span());
    let heap_bytes = spans * class.chunks_per_span() * CHUNK_BYTES;
    let region_bytes = heap_bytes + 32 * CHUNK_BYTES;
    ServerMemory {
        region_bytes,
        index_bytes: CHUNK_BYTES,
        value_bytes_max: VALUE_BYTES_MAX_DEFAULT,
    }
}

impl VerbsReport {
    /// The table for people.
    pub fn table(&self) -> std::result::Result<String, fmt::Error> {
        let mut out = String::new();
        let Self { fabric, bytes, depth, blocks, .. } = self;
        let blocks = grouped(*blocks as u64);
        writeln!(out, "verbs on {fabric}: {bytes} B, depth {depth}, over {blocks} blocks")?;
        writeln!(out, "{}\n", self.origin.machine)?;
        writeln!(out, "{:<7}{:>14}{:>9}{:>9}", "", "rate /s", "p50 ns", "p99 ns")?;
        for (name, rate) in ["READ", "WRITE", "CAS", "PUT's"].into_iter().zip(self.rates.all()) {
            let Rate { rate_per_s, p50_ns, p99_ns } = rate;
            let rate = grouped(rate_per_s as u64);
            writeln!(out, "{name:<7}{rate:>14}{:>9}{:>9}", grouped(p50_ns), grouped(p99_ns))?;
        }
        if let Some(SocketRates { read, write }) = self.sockets {
            let line = |name, verb: &Rate, sockets: f64| {
                let ratio = verb.rate_per_s / sockets;
                format!("{name} {} /s, of which the verb has {ratio:.2}", grouped(sockets as u64))
            };
            let (read, write) =
                (line("READ", &self.rates.read, read), line("WRITE", &self.rates.write, write));
            writeln!(out, "\nplain sockets: {read}; {write}")?;
        }
        Ok(out)
    }
}

/// Limit on the memory that the verbs access: the default of `kv-bench verbs --span`.
const TARGET_BYTES_MAX: u64 = 64 << 20;
/// The number of chains that are measured: READ, WRITE, compare-and-swap, and a PUT's chain.
const CHAINS: u32 = 4;

/// The rates of raw chains, in chains a second, of all threads together.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RawLimit {
    /// READs as long as the largest content of a record's size class, without the block's header.
    #[serde(rename = "read_ops_s")]
    pub read: f64,
    /// WRITEs of the same length.
    #[serde(rename = "write_ops_s")]
    pub write: f64,
    /// Compare-and-swaps.
    #[serde(rename = "cas_ops_s")]
    pub cas: f64,
    /// A cached PUT's chains.
    #[serde(rename = "update_ops_s")]
    pub update: f64,
}

impl RawLimit {
    /// Measures the rates in free blocks of the server. The inner error says why that was not
    /// possible.
    pub fn measure(
        args: &Ycsb,
        config: &ClientConfig,
        interrupt: &Interrupt,
    ) -> Result<std::result::Result<Self, String>> {
        let Some(class) = class_for(KEY_BYTES, args.value_size.mean().round() as usize) else {
            return Ok(Err("no block holds such values".to_owned()));
        };
        let mut connection = RawConnection::connect(config)?;
        let threads = args.all_threads() as usize;
        // Each chain in flight needs a target of its own.
        let in_flight = threads * usize::from(args.depth);
        let blocks_max = (TARGET_BYTES_MAX / class.block_bytes()) as usize;
        let blocks_max = blocks_max.min(connection.spare_blocks(class)?);
        let targets =
            connection.take_blocks(class, blocks_max.min(in_flight.max(args.records as usize)))?;
        if targets.len() < in_flight {
            connection.give_back()?;
            let (blocks, bytes) = (targets.len(), class.block_bytes());
            return Ok(Err(format!(
                "{in_flight} operations in flight need as many free blocks of {bytes} B, and the \
                 server gave {blocks}"
            )));
        }
        let load = ThreadLoad {
            bytes: (class.block_bytes() - BLOCK_HEADER_BYTES) as u32,
            lanes: args.depth,
            duration: Duration::from_secs_f64(args.limit_seconds) / CHAINS,
        };
        let measured = rates_of_threads(&mut connection, &targets, threads, load, interrupt)?;
        connection.give_back()?;
        Ok(Ok(Self::of(&measured)))
    }

    /// The rates of all threads, summed up; see [`rates`].
    pub fn of(threads: &[[Timed; CHAINS as usize]]) -> Self {
        let sum = |chain: usize| threads.iter().map(|timed| timed[chain].rate_per_s()).sum();
        Self { read: sum(0), write: sum(1), cas: sum(2), update: sum(3) }
    }

    /// The rate that these operations would have, in operations a second, if they took only the
    /// time of their chains. Their round trips are in the row Farside of the table "How it
    /// compares" in docs/benchmarks.md.
    pub fn mix_ops_s(&self, recorder: &Recorder) -> f64 {
        let counts = recorder.kinds().map(|(kind, record)| (kind, record.latencies.count()));
        recorder.operations() as f64 / self.seconds(counts)
    }

    /// How many seconds these operations take. An INSERT counts as two chains: a PUT's and a
    /// compare-and-swap. Its READ of the window is left out.
    fn seconds(&self, operations: impl Iterator<Item = (Kind, u64)>) -> f64 {
        let seconds_each = |kind| match kind {
            Kind::Get => 1.0 / self.read,
            Kind::Put => 1.0 / self.update,
            Kind::Insert => 1.0 / self.update + 1.0 / self.cas,
            Kind::Rmw => 1.0 / self.read + 1.0 / self.update,
        };
        operations.map(|(kind, count)| count as f64 * seconds_each(kind)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_json_has_every_field() {
        let rate = Rate { rate_per_s: 1e6, p50_ns: 100, p99_ns: 200 };
        let report = VerbsReport {
            fabric: "shm".into(),
            bytes: 128,
            depth: 4,
            rates: Rates { read: rate, write: rate, cas: rate, update: rate },
            origin: Origin::default(),
            sockets: Some(SocketRates { read: 2e6, write: 4e6 }),
            blocks: 7,
        };
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json.as_object().unwrap().len(), 12);
        assert_eq!(json["sockets"]["socket_read_ops_s"], 2e6);
        for verb in ["read", "write", "cas"] {
            assert_eq!(json[verb]["rate_per_s"], 1e6);
            assert_eq!(
                (json[verb]["p50_ns"].as_u64(), json[verb]["p99_ns"].as_u64()),
                (Some(100), Some(200))
            );
        }
        assert_eq!((json["bytes"].as_u64(), json["depth"].as_u64()), (Some(128), Some(4)));
        let table = report.table().unwrap();
        assert!(table.contains("1,000,000"));
        let sockets = "READ 2,000,000 /s, of which the verb has 0.50; WRITE 4,000,000 /s";
        assert!(table.contains(sockets), "{table}");
    }

    #[test]
    fn operations_take_the_time_of_their_chains() {
        let raw = RawLimit { read: 4.0, write: 3.0, cas: 2.0, update: 1.0 };
        let seconds = |kind| raw.seconds(std::iter::once((kind, 8)));
        let all = [Kind::Get, Kind::Put, Kind::Insert, Kind::Rmw].map(seconds);
        assert_eq!(all, [2.0, 8.0, 12.0, 10.0]);
        let mix = [(Kind::Get, 8), (Kind::Put, 8)];
        assert_eq!(raw.seconds(mix.into_iter()), 10.0);
    }
}
