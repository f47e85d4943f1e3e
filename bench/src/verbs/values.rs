//! `kv-bench verbs --values`: GETs and PUTs of long values at cached locations, one after the
//! other, beside the raw verbs of the same bytes. Over TCP on one host also beside plain sockets.
//!
//! All of them take turns, each for a short time, or for one value if that takes longer. So what
//! disturbs the machine disturbs all of them, and a ratio is the median over all turns.

use std::fmt::{self, Write as _};
use std::hint::black_box;
use std::time::{Duration, Instant};

use farside::{Client, Session};
use farside_config::ClientConfig;
use farside_config::size::ByteSize;
use farside_fabric::{AnyFabric, RegisteredBuffer};
use farside_layout::CHUNK_BYTES;
use serde::{Deserialize, Serialize};

use super::measure::ValueBlocks;
use super::sockets::{ValueSockets, are_comparable};
use super::{Plan, RawVerb, measure};
use crate::accounting::Origin;
use crate::args::Verbs;
use crate::command::Interrupt;
use crate::publish::grouped;
use crate::raw_connection::RawConnection;
use crate::server::Server;
use crate::sizing::{ServerMemory, VALUE_BYTES_MAX_DEFAULT};
use crate::{Error, Result, records};

/// The time of one turn of one of them.
const TURN: Duration = Duration::from_millis(25);
/// The memory for the blocks that PUTs replaced, which rest for GRACE.
const RESTING_BYTES: u64 = 2 << 30;
/// The same for values with extents, whose PUTs are slower. The extents that a PUT writes come in
/// addition.
const RESTING_BYTES_OF_EXTENTS: u64 = 1 << 30;
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
    /// The number of turns, of which all figures are medians.
    pub turns: usize,
    pub read_per_s: f64,
    pub get_per_s: f64,
    pub get_ratio: f64,
    pub write_per_s: f64,
    pub put_per_s: f64,
    pub put_ratio: f64,
    /// Null except over TCP on one host.
    #[serde(default)]
    pub sockets: Option<SocketRatios>,
}

/// The rates of plain sockets, in values a second, and the ratios of GET and PUT to them.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names are those of the JSON")]
pub struct SocketRatios {
    pub socket_read_per_s: f64,
    pub get_ratio: f64,
    pub socket_write_per_s: f64,
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
        let too_long = || Error::Usage(format!("no value has {bytes} bytes"));
        let blocks = ValueBlocks::of(bytes / 8 * 8).ok_or_else(too_long)?;
        let (config, span) = (config.clone(), args.span.0);
        let server = Server::connect_or_start(config, || Ok(memory(blocks, span)), interrupt)?;
        report.fabric = server.fabric().to_owned();
        let mut run = Run::new(&server, blocks, span, interrupt)?;
        report.values.push(run.measure(Duration::from_secs_f64(args.seconds))?);
        report.origin = run.end()?;
    }
    Ok(report)
}

/// How many values the run has.
fn values(blocks: ValueBlocks, span: u64) -> usize {
    (span / blocks.bytes()).max(1) as usize
}

/// The memory of a server of our own.
fn memory(blocks: ValueBlocks, span: u64) -> ServerMemory {
    let value_bytes_max = blocks.value_bytes.max(VALUE_BYTES_MAX_DEFAULT);
    // Keys and raw verbs have a span each. A block is at most a quarter longer than what it holds.
    let (spans, resting) = match blocks.are_extents() {
        false => (2 * (span + span / 4), RESTING_BYTES),
        true => {
            let linked = 2 * values(blocks, span) as u64 * blocks.bytes();
            // Heads, and the index.
            (linked + 32 * CHUNK_BYTES, RESTING_BYTES_OF_EXTENTS + blocks.bytes())
        }
    };
    let region_bytes = (spans + resting).next_multiple_of(CHUNK_BYTES);
    ServerMemory { region_bytes, index_bytes: CHUNK_BYTES, value_bytes_max }
}

/// Checks that a server can store the values of this run.
fn check_server(
    connection: &mut RawConnection,
    session: &Session,
    blocks: ValueBlocks,
    values: usize,
) -> Result<()> {
    let (bytes, max) = (blocks.value_bytes, session.limits().value_bytes_max as u64);
    if bytes > max {
        return Err(Error::ValueTooLong { bytes, max });
    }
    if !blocks.are_extents() {
        return Ok(());
    }
    // Keys and raw verbs have so many values each. One more is written, and another one rests.
    let needed = (2 * values as u64 + 2) * blocks.bytes();
    let free = connection.free_blocks(blocks.class)? as u64 * blocks.class.block_bytes();
    if needed > free {
        let mib = |bytes: u64| bytes.div_ceil(1 << 20);
        let memory_mib = mib(connection.region_bytes() + needed - free);
        let (needed_mib, free_mib) = (mib(needed), mib(free));
        return Err(Error::TooLittleMemory { bytes, needed_mib, free_mib, memory_mib });
    }
    Ok(())
}

/// The rates of one turn of each.
struct Turn {
    read: f64,
    get: f64,
    write: f64,
    put: f64,
    /// Those of plain sockets: read and write.
    sockets: Option<(f64, f64)>,
}

/// The measurement of one length.
struct Run<'a> {
    connection: RawConnection,
    fabric: AnyFabric,
    blocks: ValueBlocks,
    /// Where the content of each block of the raw verbs starts.
    targets: Vec<u64>,
    session: Session,
    sockets: Option<ValueSockets>,
    keys: Vec<records::Key>,
    /// The value that PUTs store.
    value: RegisteredBuffer,
    /// The memory for the value that a GET finds.
    found: RegisteredBuffer,
    /// The number of the next operation.
    next: usize,
    interrupt: &'a Interrupt,
}

impl<'a> Run<'a> {
    /// Takes blocks for the raw verbs, and stores the values.
    fn new(
        server: &Server,
        blocks: ValueBlocks,
        span: u64,
        interrupt: &'a Interrupt,
    ) -> Result<Self> {
        let values = values(blocks, span);
        let mut connection = server.raw_connection()?;
        let session = session(&server.config)?;
        check_server(&mut connection, &session, blocks, values)?;
        let asked = values * blocks.count;
        let mut targets = connection.take_blocks(blocks.class, asked)?;
        if targets.len() < asked {
            let (bytes, spare) = (blocks.class.block_bytes(), targets.len());
            return Err(Error::TooFewBlocks { asked, bytes, spare });
        }
        targets.iter_mut().for_each(|target| *target += blocks.offset());
        if server.is_own() {
            connection.wait_for_huge_pages()?;
        }
        let fabric = connection.fabric(blocks.lanes())?;
        let bytes = blocks.value_bytes as usize;
        let sockets = are_comparable(&server.config).then(|| ValueSockets::connect(bytes));
        let sockets = sockets.transpose()?;
        let keys =
            (0..values as u64).map(|record| records::key_of(FIRST_RECORD + record)).collect();
        let memory = |bytes| {
            RegisteredBuffer::new(bytes).map_err(Error::system("allocating memory for values"))
        };
        let mut value = memory(bytes)?;
        value.iter_mut().enumerate().for_each(|(at, byte)| *byte = ((at * 31) >> 3) as u8);
        // A block may be longer than its value, and is READ as a whole.
        let (found, next) = (memory(bytes + bytes / 4 + 4096)?, 0);
        let mut run = Self {
            connection,
            fabric,
            blocks,
            targets,
            session,
            sockets,
            keys,
            value,
            found,
            next,
            interrupt,
        };
        for at in 0..values {
            run.put(at)?;
            run.go_on()?;
        }
        Ok(run)
    }

    /// Measures for four times `each`, or for one turn if that takes longer.
    fn measure(&mut self, each: Duration) -> Result<ValueRates> {
        // The first turn warms up.
        self.turn()?;
        let (mut turns, started) = (Vec::new(), Instant::now());
        // Another turn takes about as long as those before.
        let ends_in_time = |turns: u32| started.elapsed() * (turns + 1) <= 4 * each * turns;
        while turns.is_empty() || ends_in_time(turns.len() as u32) {
            turns.push(self.turn()?);
        }
        let median = |of: &dyn Fn(&Turn) -> f64| {
            let mut all: Vec<f64> = turns.iter().map(of).collect();
            all.sort_by(f64::total_cmp);
            all[all.len() / 2]
        };
        let of_sockets = |turn: &Turn| turn.sockets.unwrap_or((f64::NAN, f64::NAN));
        let sockets = self.sockets.is_some().then(|| SocketRatios {
            socket_read_per_s: median(&|turn| of_sockets(turn).0),
            get_ratio: median(&|turn| turn.get / of_sockets(turn).0),
            socket_write_per_s: median(&|turn| of_sockets(turn).1),
            put_ratio: median(&|turn| turn.put / of_sockets(turn).1),
        });
        Ok(ValueRates {
            bytes: self.blocks.value_bytes,
            turns: turns.len(),
            read_per_s: median(&|turn| turn.read),
            get_per_s: median(&|turn| turn.get),
            get_ratio: median(&|turn| turn.get / turn.read),
            write_per_s: median(&|turn| turn.write),
            put_per_s: median(&|turn| turn.put),
            put_ratio: median(&|turn| turn.put / turn.write),
            sockets,
        })
    }

    fn turn(&mut self) -> Result<Turn> {
        let read = self.raw(RawVerb::Read)?;
        self.go_on()?;
        let get = self.timed(TURN, Self::get)?;
        self.go_on()?;
        let write = self.raw(RawVerb::Write)?;
        self.go_on()?;
        // Before it is measured, the session has blocks that rest and blocks that have rested.
        self.timed(self.session.limits().grace + TURN, Self::put)?;
        self.go_on()?;
        let put = self.timed(TURN, Self::put)?;
        self.go_on()?;
        let sockets = match self.sockets {
            None => None,
            Some(_) => Some((
                self.timed(TURN, Self::read_from_socket)?,
                self.timed(TURN, Self::write_to_socket)?,
            )),
        };
        Ok(Turn { read, get, write, put, sockets })
    }

    /// Answers the server, and ends the run if it was interrupted.
    fn go_on(&mut self) -> Result<()> {
        self.connection.answer_all()?;
        self.interrupt.check()
    }

    /// The rate of a raw verb.
    fn raw(&mut self, verb: RawVerb) -> Result<f64> {
        let Self { fabric, blocks, targets, interrupt, .. } = self;
        if blocks.are_extents() {
            return blocks.measure(fabric, verb, targets, TURN);
        }
        let bytes = blocks.value_bytes as u32;
        let between_polls = &|| interrupt.check();
        let plan = Plan { targets, bytes, lanes: 1, duration: TURN, between_polls };
        Ok(measure(fabric, verb, &plan)?.rate_per_s())
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
        if found.is_none_or(|found| found.bytes != self.value.len()) {
            return Err(Error::Usage("another client changes the values of this run".to_owned()));
        }
        black_box(&*self.found);
        Ok(())
    }

    fn put(&mut self, at: usize) -> Result<()> {
        self.session.put(self.keys[at], &self.value).map_err(Error::client("storing a value"))
    }

    fn read_from_socket(&mut self, _: usize) -> Result<()> {
        let Self { sockets, found, value, .. } = self;
        let found = &mut found[..value.len()];
        sockets.as_mut().map_or(Ok(()), |sockets| sockets.read(found))
    }

    fn write_to_socket(&mut self, _: usize) -> Result<()> {
        let Self { sockets, value, .. } = self;
        sockets.as_mut().map_or(Ok(()), |sockets| sockets.write(value))
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
            "{:>11}{:>7}{:>12}{:>12}{:>9}{:>12}{:>12}{:>9}",
            "bytes", "turns", "READ /s", "GET /s", "of READ", "WRITE /s", "PUT /s", "of WRITE"
        )?;
        for rates in &self.values {
            let [read, get, write, put] =
                [rates.read_per_s, rates.get_per_s, rates.write_per_s, rates.put_per_s].map(rate);
            let ValueRates { turns, get_ratio, put_ratio, .. } = rates;
            writeln!(
                out,
                "{:>11}{turns:>7}{read:>12}{get:>12}{get_ratio:>9.2}{write:>12}{put:>12}\
                 {put_ratio:>9.2}",
                grouped(rates.bytes)
            )?;
        }
        self.add_sockets(&mut out)?;
        Ok(out)
    }

    /// Adds the table of plain sockets, if there are any.
    fn add_sockets(&self, out: &mut String) -> fmt::Result {
        if self.values.iter().all(|rates| rates.sockets.is_none()) {
            return Ok(());
        }
        writeln!(out, "\nbeside plain sockets with the same bytes")?;
        let [read, write] = ["received /s", "sent /s"];
        writeln!(out, "{:>11}{read:>14}{:>8}{write:>14}{:>8}", "bytes", "GET", "PUT")?;
        for ValueRates { bytes, sockets, .. } in &self.values {
            let Some(sockets) = sockets else { continue };
            let SocketRatios { socket_read_per_s, get_ratio, socket_write_per_s, put_ratio } =
                *sockets;
            let (read, write) = (rate(socket_read_per_s), rate(socket_write_per_s));
            let bytes = grouped(*bytes);
            writeln!(out, "{bytes:>11}{read:>14}{get_ratio:>8.2}{write:>14}{put_ratio:>8.2}")?;
        }
        Ok(())
    }
}

/// A rate for people.
fn rate(per_s: f64) -> String {
    if per_s < 1000.0 { format!("{per_s:.1}") } else { grouped(per_s as u64) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_has_room_for_the_values() {
        let memory = |bytes| memory(ValueBlocks::of(bytes).unwrap(), 64 << 20);
        assert!(memory(1 << 20).region_bytes > RESTING_BYTES + (128 << 20));
        let longest = memory(256 << 20);
        assert!(longest.region_bytes > 4 * (256 << 20) && longest.region_bytes < 8 * (256 << 20));
        assert_eq!(longest.value_bytes_max, 256 << 20);
    }

    #[test]
    fn the_table_and_the_json_have_each_length() {
        let rates = ValueRates {
            bytes: 65536,
            turns: 9,
            read_per_s: 2e6,
            get_per_s: 1e6,
            get_ratio: 0.5,
            write_per_s: 4e6,
            put_per_s: 1e6,
            put_ratio: 0.25,
            sockets: None,
        };
        let sockets = Some(SocketRatios {
            socket_read_per_s: 12.25,
            get_ratio: 0.75,
            socket_write_per_s: 8000.0,
            put_ratio: 0.5,
        });
        let with_sockets = ValueRates { sockets, ..rates };
        let report =
            |values| ValuesReport { origin: Origin::default(), fabric: "shm".to_owned(), values };
        let last_row = |report: &ValuesReport| {
            let table = report.table().unwrap();
            let row = table.lines().last().unwrap().split_whitespace();
            row.map(str::to_owned).collect::<Vec<_>>()
        };
        let (plain, with_sockets) = (report(vec![rates]), report(vec![with_sockets]));
        let expected =
            ["65,536", "9", "2,000,000", "1,000,000", "0.50", "4,000,000", "1,000,000", "0.25"];
        assert_eq!(last_row(&plain), expected);
        assert_eq!(last_row(&with_sockets), ["65,536", "12.2", "0.75", "8,000", "0.50"]);
        let json = serde_json::to_value(&with_sockets).unwrap();
        assert_eq!(json["values"][0]["get_ratio"], 0.5);
        assert_eq!(json["values"][0]["sockets"]["get_ratio"], 0.75);
        // `kv-bench report` takes a file with this field for raw verbs alone.
        assert!(json.get("update").is_none());
    }
}
