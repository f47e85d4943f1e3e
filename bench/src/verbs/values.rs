//! `kv-bench verbs --values`: GETs and PUTs of long values at cached locations, one after the
//! other, beside the raw verbs of the same bytes.
//!
//! The four take turns, each for a short time. So what disturbs the machine disturbs all of them,
//! and a ratio is the median over all turns.

use std::fmt::{self, Write as _};
use std::hint::black_box;
use std::time::{Duration, Instant};

use farside::{Client, Session};
use farside_config::size::ByteSize;
use farside_config::{ClientConfig, KEY_BYTES_MAX_DEFAULT};
use farside_fabric::AnyFabric;
use farside_layout::{BLOCK_BYTES_MAX, CHUNK_BYTES, SizeClass, block_bytes};
use serde::{Deserialize, Serialize};

use super::{Plan, RawVerb, measure};
use crate::args::Verbs;
use crate::command::Interrupt;
use crate::environment::Origin;
use crate::keys::{self, KEY_BYTES};
use crate::publish::grouped;
use crate::raw_connection::RawConnection;
use crate::server::Server;
use crate::sizing::ServerMemory;
use crate::{Error, Result};

/// The time of one turn of one of the four.
const TURN: Duration = Duration::from_millis(25);
/// The longest value, in bytes: that of a server with the default limit on keys.
const VALUE_BYTES_MAX: u64 = BLOCK_BYTES_MAX - block_bytes(KEY_BYTES_MAX_DEFAULT as usize, 0);
/// The memory for the blocks that PUTs replaced, which rest for GRACE.
const RESTING_BYTES: u64 = 2 << 30;
/// The numbers of the records, which no other workload uses.
const FIRST_RECORD: u64 = 1 << 60;

/// The result of `kv-bench verbs --values`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names are those of the JSON")]
pub struct ValuesReport {
    #[serde(flatten)]
    pub origin: Origin,
    pub fabric: String,
    pub values: Vec<ValueRates>,
}

/// The rates for one length, in operations a second, and their ratios to the raw verbs.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names are those of the JSON")]
pub struct ValueRates {
    pub bytes: u64,
    pub read_per_s: f64,
    pub get_per_s: f64,
    pub get_ratio: f64,
    pub write_per_s: f64,
    pub put_per_s: f64,
    pub put_ratio: f64,
}

/// Measures each length, on a server of its own unless one is named.
pub fn run(args: &Verbs, sizes: &[ByteSize], interrupt: &Interrupt) -> Result<ValuesReport> {
    let config = args.target.config()?;
    let mut report = ValuesReport {
        origin: Origin::default(),
        fabric: String::new(),
        values: Vec::with_capacity(sizes.len()),
    };
    for ByteSize(bytes) in sizes {
        let bytes = (*bytes / 8 * 8).clamp(8, VALUE_BYTES_MAX);
        let (config, span) = (config.clone(), args.span.0);
        let server = Server::connect_or_start(config, || Ok(memory(bytes, span)), interrupt)?;
        report.fabric = server.fabric().to_owned();
        let mut run = Run::new(&server, bytes, span, interrupt)?;
        report.values.push(run.measure(Duration::from_secs_f64(args.seconds))?);
        report.origin = run.end()?;
    }
    Ok(report)
}

/// The memory of a server of our own.
fn memory(bytes: u64, span: u64) -> ServerMemory {
    // A block is at most a quarter longer than what it holds. Keys and raw verbs have a span each.
    let region_bytes = (2 * (span + span / 4) + RESTING_BYTES).next_multiple_of(CHUNK_BYTES);
    ServerMemory { region_bytes, index_bytes: CHUNK_BYTES, value_bytes_max: bytes.max(1 << 20) }
}

/// The rates of one turn of each.
struct Turn {
    read: f64,
    get: f64,
    write: f64,
    put: f64,
}

/// The measurement of one length.
struct Run<'a> {
    connection: RawConnection,
    fabric: AnyFabric,
    targets: Vec<u64>,
    session: Session,
    keys: Vec<keys::Key>,
    /// The value that PUTs store.
    value: Vec<u8>,
    /// The value that a GET found.
    found: Vec<u8>,
    /// The number of the next operation.
    next: usize,
    interrupt: &'a Interrupt,
}

impl<'a> Run<'a> {
    /// Takes blocks for the raw verbs, and stores the values.
    fn new(server: &Server, bytes: u64, span: u64, interrupt: &'a Interrupt) -> Result<Self> {
        let held = block_bytes(KEY_BYTES, bytes as usize);
        let class = SizeClass::for_bytes(held)
            .ok_or_else(|| Error::Usage(format!("no block holds {held} bytes")))?;
        let blocks = (span / class.block_bytes()).max(1) as usize;
        let mut connection = server.raw_connection()?;
        let targets = connection.take_blocks(class, blocks)?;
        if targets.len() < blocks {
            let (asked, bytes, spare) = (blocks, class.block_bytes(), targets.len());
            return Err(Error::TooFewBlocks { asked, bytes, spare });
        }
        if server.is_own() {
            connection.wait_for_huge_pages()?;
        }
        let fabric = connection.fabric(1)?;
        let session = session(&server.config)?;
        let keys = (0..blocks as u64).map(|record| keys::encode(FIRST_RECORD + record)).collect();
        let value = (0..bytes).map(|at| ((at * 31) >> 3) as u8).collect();
        let (found, next) = (Vec::new(), 0);
        let mut run =
            Self { connection, fabric, targets, session, keys, value, found, next, interrupt };
        for at in 0..blocks {
            run.put(at)?;
            run.connection.answer_all()?;
            run.interrupt.check()?;
        }
        Ok(run)
    }

    fn measure(&mut self, each: Duration) -> Result<ValueRates> {
        // The first turn warms up.
        self.turn()?;
        let (mut turns, started) = (Vec::new(), Instant::now());
        while turns.is_empty() || started.elapsed() < 4 * each {
            turns.push(self.turn()?);
        }
        let median = |of: &dyn Fn(&Turn) -> f64| {
            let mut all: Vec<f64> = turns.iter().map(of).collect();
            all.sort_by(f64::total_cmp);
            all[all.len() / 2]
        };
        Ok(ValueRates {
            bytes: self.value.len() as u64,
            read_per_s: median(&|turn| turn.read),
            get_per_s: median(&|turn| turn.get),
            get_ratio: median(&|turn| turn.get / turn.read),
            write_per_s: median(&|turn| turn.write),
            put_per_s: median(&|turn| turn.put),
            put_ratio: median(&|turn| turn.put / turn.write),
        })
    }

    fn turn(&mut self) -> Result<Turn> {
        let read = self.raw(RawVerb::Read)?;
        let get = self.timed(TURN, Self::get)?;
        let write = self.raw(RawVerb::Write)?;
        // Before it is measured, the session has blocks that rest and blocks that have rested.
        self.timed(self.session.limits().grace + TURN, Self::put)?;
        let put = self.timed(TURN, Self::put)?;
        self.connection.answer_all()?;
        self.interrupt.check()?;
        Ok(Turn { read, get, write, put })
    }

    /// The rate of a raw verb.
    fn raw(&mut self, verb: RawVerb) -> Result<f64> {
        let (targets, bytes, interrupt) = (&self.targets, self.value.len() as u32, self.interrupt);
        let between_polls = &|| interrupt.check();
        let plan = Plan { targets, bytes, lanes: 1, duration: TURN, between_polls };
        Ok(measure(&mut self.fabric, verb, &plan)?.rate_per_s())
    }

    /// The rate of an operation on one key after another.
    fn timed(
        &mut self,
        time: Duration,
        operation: impl Fn(&mut Self, usize) -> Result<()>,
    ) -> Result<f64> {
        let (started, mut count) = (Instant::now(), 0);
        loop {
            self.next = (self.next + super::measure::STRIDE) % self.keys.len();
            operation(self, self.next)?;
            count += 1;
            let elapsed = started.elapsed();
            if elapsed >= time {
                return Ok(f64::from(count) / elapsed.as_secs_f64());
            }
        }
    }

    fn get(&mut self, at: usize) -> Result<()> {
        let found = self.session.get_into(self.keys[at], &mut self.found);
        let found = found.map_err(Error::client("reading a value"))?;
        if found.is_none() || self.found.len() != self.value.len() {
            return Err(Error::Usage("another client changes the values of this run".to_owned()));
        }
        black_box(&self.found);
        Ok(())
    }

    fn put(&mut self, at: usize) -> Result<()> {
        self.session.put(self.keys[at], &self.value).map_err(Error::client("storing a value"))
    }

    /// Removes the values, and gives the blocks back.
    fn end(mut self) -> Result<Origin> {
        for key in &self.keys {
            self.session.delete(key).map_err(Error::client("removing a value"))?;
        }
        let origin = Origin::of("kv-bench", self.connection.machine()?);
        drop(self.fabric);
        self.connection.give_back()?;
        Ok(origin)
    }
}

fn session(config: &ClientConfig) -> Result<Session> {
    let client = Client::builder().config(config).connect().map_err(Error::Setup)?;
    client.session().map_err(Error::client("opening a session"))
}

impl ValuesReport {
    /// The table for people.
    pub fn table(&self) -> std::result::Result<String, fmt::Error> {
        let mut out = String::new();
        writeln!(out, "values on {}, one operation after the other", self.fabric)?;
        writeln!(out, "{}\n", self.origin.machine)?;
        writeln!(
            out,
            "{:>9}{:>12}{:>12}{:>9}{:>12}{:>12}{:>9}",
            "bytes", "READ /s", "GET /s", "of READ", "WRITE /s", "PUT /s", "of WRITE"
        )?;
        for rates in &self.values {
            let [read, get, write, put] =
                [rates.read_per_s, rates.get_per_s, rates.write_per_s, rates.put_per_s]
                    .map(|rate| grouped(rate as u64));
            let ValueRates { bytes, get_ratio, put_ratio, .. } = rates;
            writeln!(
                out,
                "{:>9}{read:>12}{get:>12}{get_ratio:>9.2}{write:>12}{put:>12}{put_ratio:>9.2}",
                grouped(*bytes)
            )?;
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_value_fits_a_block_and_a_server_has_room_for_it() {
        let held = block_bytes(KEY_BYTES, VALUE_BYTES_MAX as usize);
        assert!(SizeClass::for_bytes(held).is_some() && VALUE_BYTES_MAX.is_multiple_of(8));
        assert!(memory(VALUE_BYTES_MAX, 64 << 20).region_bytes > RESTING_BYTES);
    }

    #[test]
    fn the_table_and_the_json_have_each_length() {
        let rates = ValueRates {
            bytes: 65536,
            read_per_s: 2e6,
            get_per_s: 1e6,
            get_ratio: 0.5,
            write_per_s: 4e6,
            put_per_s: 1e6,
            put_ratio: 0.25,
        };
        let (origin, fabric, values) = (Origin::default(), "shm".to_owned(), vec![rates]);
        let report = ValuesReport { origin, fabric, values };
        let table = report.table().unwrap();
        let row = table.lines().last().unwrap().split_whitespace().collect::<Vec<_>>();
        let expected =
            ["65,536", "2,000,000", "1,000,000", "0.50", "4,000,000", "1,000,000", "0.25"];
        assert_eq!(row, expected);
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["values"][0]["get_ratio"], 0.5);
        // `kv-bench report` takes a file with this field for raw verbs alone.
        assert!(json.get("update").is_none());
    }
}
