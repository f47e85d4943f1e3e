//! `kv-bench ycsb`: what a run needs, and what comes of it.

use std::time::SystemTime;

use farside::{Client, OperationError};
use farside_config::ClientConfig;
use farside_config::size::ByteSize;

use crate::args::Ycsb;
use crate::command::Interrupt;
use crate::journal::{HistoryFile, NUMBER_BYTES};
use crate::phases;
use crate::processes::{self, Parent};
use crate::server::Server;
use crate::sizing::{self, Demand, ServerMemory};
use crate::thread_measurement::{Supervised, ThreadMeasurement};
use crate::verbs::RawLimit;
use crate::{Error, Result};

/// What a run measured.
pub struct Measured {
    /// The name of the fabric.
    pub fabric: String,
    /// All threads together.
    pub threads: ThreadMeasurement,
    /// What their supervisor saw.
    pub supervised: Supervised,
    /// When the last thread ended.
    pub ended: SystemTime,
    /// What the fabric can do at most, if it was measured.
    pub raw: Option<RawLimit>,
    /// Why it was not, if it should have been.
    pub raw_missing: Option<String>,
}

/// Runs a workload.
pub fn ycsb(args: &Ycsb, interrupt: &Interrupt) -> Result<Measured> {
    check_history(args)?;
    let server = Server::connect_or_start(args.target.config()?, || memory(args), interrupt)?;
    let (threads, supervised) = if args.processes > 1 {
        processes::run(args, &server, interrupt)?
    } else {
        let client = connect(args, &server.config)?;
        // Not before there are operations: an older history stays where no server answers.
        let history = args.history.as_deref().map(HistoryFile::create).transpose()?;
        let done = phases::threads(args, (client, &server), history, None, interrupt);
        done.map_err(advised(&server))?
    };
    // Of nothing there are no rates, ratios and percentiles.
    if threads.recorder.operations() == 0 {
        return Err(Error::NoOperations);
    }
    let mut measured = Measured {
        fabric: server.fabric().to_owned(),
        threads,
        supervised,
        ended: SystemTime::now(),
        raw: None,
        raw_missing: None,
    };
    if args.limit_seconds > 0.0 {
        match RawLimit::measure(args, &server.config, interrupt)? {
            Ok(raw) => measured.raw = Some(raw),
            Err(why) => measured.raw_missing = Some(why),
        }
    }
    Ok(measured)
}

/// The run of one of several processes, which tells its parent what came of it.
pub fn child(args: &Ycsb, interrupt: &Interrupt) {
    let measured = Parent::listen(interrupt).and_then(|parent| part(args, &parent, interrupt));
    processes::answer(measured);
}

/// What one of several processes does of a run.
fn part(
    args: &Ycsb,
    parent: &Parent,
    interrupt: &Interrupt,
) -> Result<(ThreadMeasurement, Supervised)> {
    let server = parent.server(args.target.config()?);
    let client = connect(args, &server.config)?;
    let done = phases::threads(args, (client, &server), None, Some(parent), interrupt);
    done.map_err(advised(&server))
}

/// For `map_err`: what to do where a server of our own has no room.
fn advised(server: &Server) -> impl FnOnce(Error) -> Error {
    let is_own = server.is_own();
    move |error| match error {
        Error::Client {
            doing,
            source: source @ farside::Error::Operation(OperationError::OutOfSpace { .. }),
        } if is_own => Error::NoRoom { doing, source },
        error => error,
    }
}

/// Whether values are long enough for the history, if one was asked for.
fn check_history(args: &Ycsb) -> Result<()> {
    if args.history.is_some() && (args.value_size.min() as usize) < NUMBER_BYTES {
        let advice = format!("--history takes a --value-size of {NUMBER_BYTES} or more, so that");
        return Err(Error::Usage(format!("{advice} values can differ")));
    }
    Ok(())
}

fn memory(args: &Ycsb) -> Result<ServerMemory> {
    let demand = Demand {
        records: args.records,
        sizes: args.value_size,
        threads: args.all_threads().into(),
        mix: args.mix,
        target_rate: args.target_rate,
        operations: args.operations,
        seconds: args.seconds,
        warmup_seconds: args.warmup_seconds,
    };
    match args.memory {
        Some(ByteSize(region_bytes)) => Ok(demand.memory()?.in_region(region_bytes)),
        None => demand.memory_within(sizing::available_bytes()?),
    }
}

fn connect(args: &Ycsb, config: &ClientConfig) -> Result<Client> {
    let mut builder = Client::builder().config(config).pipeline_depth(args.depth);
    if let Some(ByteSize(bytes)) = args.cache_bytes {
        builder = builder.cache_bytes(bytes as usize);
    }
    let client = builder.connect().map_err(Error::client("connecting"))?;
    check_limits(args, &client)?;
    Ok(client)
}

fn check_limits(args: &Ycsb, client: &Client) -> Result<()> {
    let session = client.session().map_err(Error::client("opening a session"))?;
    let (asked, most) = (args.value_size.max() as usize, session.limits().value_bytes_max);
    if asked <= most {
        return Ok(());
    }
    Err(Error::Usage(format!("values have up to {asked} bytes, this server takes at most {most}")))
}
