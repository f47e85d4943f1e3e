//! `kv-bench ycsb`: prepares a run, runs it, and returns what it measured.

use std::time::{Duration, SystemTime};

use farside::{Client, MetricsFormat, OperationError};
use farside_config::size::ByteSize;
use farside_layout::{BLOCK_HEADER_BYTES, CHUNK_BYTES};

use crate::accounting::Machine;
use crate::args::Ycsb;
use crate::command::Interrupt;
use crate::emulation::Rates;
use crate::journal::{HistoryFile, NUMBER_BYTES};
use crate::publish::{grouped, write_text};
use crate::recorder::{RunFacts, ThreadMeasurement};
use crate::records::KEY_BYTES;
use crate::server::Server;
use crate::shares::EmulatedReport;
use crate::sizing::{self, Demand, ServerMemory};
use crate::verbs::{RawLimit, SocketLoad, SocketRates, are_comparable};
use crate::{Error, Result, phases};

/// The measurement of a run.
pub struct Measured {
    /// The name of the fabric.
    pub fabric: String,
    /// The number of servers.
    pub servers: u16,
    /// The emulated network, if there was one.
    pub emulated: Option<EmulatedReport>,
    /// The sum over all threads.
    pub threads: ThreadMeasurement,
    /// The facts that the supervising thread collected.
    pub facts: RunFacts,
    /// The machine.
    pub machine: Machine,
    /// The end of the last thread, by the wall clock.
    pub ended: SystemTime,
    /// The rates of raw verbs, if they were measured.
    pub raw: Option<RawLimit>,
    /// The reason why raw verbs were not measured, although they were asked for.
    pub raw_missing: Option<String>,
    /// The rates of plain sockets, over TCP on one host.
    pub sockets: Option<SocketRates>,
}

/// Runs a workload.
pub fn ycsb(args: &Ycsb, interrupt: &Interrupt) -> Result<Measured> {
    check_history(args)?;
    let server = match args.servers {
        Some(servers) => {
            let memory = memory(args)?;
            Server::start_cluster(servers, &memory, args.emulation(), interrupt)?
        }
        None => Server::connect_or_start(args.target.config()?, || memory(args), interrupt)?,
    };
    let clients: Vec<_> =
        (0..args.clients).map(|_| connect(args, &server)).collect::<Result<_>>()?;
    // Created only once connected, so that an older history is not overwritten when no server
    // answers.
    let history = args.history.as_deref().map(HistoryFile::create).transpose()?;
    let (threads, facts) = phases::run_phases(args, &clients, &server, history, interrupt)
        .map_err(with_advice(&server))?;
    if let (Some(path), [client, ..]) = (&args.client_metrics, &clients[..]) {
        let text = client.render_metrics(MetricsFormat::Prometheus).unwrap_or_default();
        write_text(path, &text)?;
    }
    // Without operations the report's rates, ratios and percentiles would be undefined.
    if threads.recorder.operations() == 0 {
        return Err(Error::NoOperations);
    }
    let mut measured = Measured {
        fabric: fabric(&server),
        servers: server.servers(),
        emulated: EmulatedReport::new(args, &server, &facts),
        threads,
        facts,
        ended: SystemTime::now(),
        machine: machine(&server)?,
        raw: None,
        raw_missing: None,
        sockets: None,
    };
    if args.limit_seconds > 0.0 && server.map.is_some() {
        measured.raw_missing = Some("their rates are those of one server".to_owned());
    } else if args.limit_seconds > 0.0 {
        match RawLimit::measure(args, &server.config, interrupt)? {
            Ok(raw) => measured.raw = Some(raw),
            Err(why) => measured.raw_missing = Some(why),
        }
        if are_comparable(&server.config) {
            measured.sockets = Some(SocketRates::measure(socket_load(args), interrupt)?);
        }
    }
    Ok(measured)
}

/// Messages as long as the block of a GET or PUT, with as many threads and operations in flight.
fn socket_load(args: &Ycsb) -> SocketLoad {
    let value_bytes = args.value_size.mean().round() as usize;
    SocketLoad {
        bytes: BLOCK_HEADER_BYTES as usize + KEY_BYTES + value_bytes,
        connections: args.all_threads() as usize,
        depth: args.depth,
        duration: Duration::from_secs_f64(args.limit_seconds),
    }
}

/// The name of the fabric, which says whether its network is emulated.
fn fabric(server: &Server) -> String {
    let Some(devices) = &server.devices else { return server.fabric().to_owned() };
    let Rates { chains_per_s, bytes_per_s, .. } = devices.rates();
    let (chains, bytes) = (grouped(chains_per_s), ByteSize(bytes_per_s).rounded());
    format!("{}, emulated network ({chains} chains/s, {bytes}/s a server)", server.fabric())
}

fn machine(server: &Server) -> Result<Machine> {
    let mut connection = server.raw_connection()?;
    let machine = connection.machine()?;
    connection.give_back()?;
    Ok(machine)
}

/// For `map_err`: turns `OutOfSpace` of a server of our own into [`Error::NoRoom`], whose text says
/// what to do.
fn with_advice(server: &Server) -> impl FnOnce(Error) -> Error {
    let is_own = server.is_own();
    move |error| match error {
        Error::Client {
            doing,
            source: source @ farside::Error::Operation(OperationError::OutOfSpace { .. }),
        } if is_own => Error::NoRoom { doing, source },
        error => error,
    }
}

/// Checks that values are long enough for the history, if one was asked for.
fn check_history(args: &Ycsb) -> Result<()> {
    if args.history.is_some() && (args.value_size.min() as usize) < NUMBER_BYTES {
        let advice = format!("--history needs a --value-size of {NUMBER_BYTES} or more, so that");
        return Err(Error::Usage(format!("{advice} every value can be different")));
    }
    Ok(())
}

/// The part of each server, in whole chunks if there are several.
fn bytes_of_each(bytes: u64, servers: u64) -> u64 {
    if servers == 1 { bytes } else { bytes / servers / CHUNK_BYTES * CHUNK_BYTES }
}

/// The memory of each server.
fn memory(args: &Ycsb) -> Result<ServerMemory> {
    let servers = u64::from(args.servers.unwrap_or(1));
    let demand = Demand {
        records: args.records,
        sizes: args.value_size,
        threads: args.all_threads().into(),
        mix: args.mix,
        target_rate: args.target_rate,
        operations: args.operations,
        seconds: args.seconds,
        warmup_seconds: args.warmup_seconds,
        servers,
    };
    match args.memory {
        Some(ByteSize(bytes)) => Ok(demand.memory()?.in_region(bytes_of_each(bytes, servers))),
        None => demand.memory_within(bytes_of_each(sizing::available_bytes()?, servers)),
    }
}

fn connect(args: &Ycsb, server: &Server) -> Result<Client> {
    let mut builder = Client::builder().config(&server.config).pipeline_depth(args.depth);
    builder = builder.operation_counters(true).metrics(args.client_metrics.is_some());
    if let Some(ByteSize(bytes)) = args.cache_bytes {
        builder = builder.cache_bytes(bytes as usize);
    }
    if let Some(devices) = &server.devices {
        builder = builder.intercept_fabric(devices.around());
    }
    let client = builder.connect().map_err(Error::Setup)?;
    check_limits(args, &client)?;
    Ok(client)
}

fn check_limits(args: &Ycsb, client: &Client) -> Result<()> {
    let session = client.session().map_err(Error::client("opening a session"))?;
    let (asked, max) = (args.value_size.max() as usize, session.limits().value_bytes_max);
    if asked <= max {
        return Ok(());
    }
    Err(Error::Usage(format!(
        "values have up to {asked} bytes, and this server takes at most {max}"
    )))
}
