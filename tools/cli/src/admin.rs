//! What an operator asks of servers: `clients` and `kick`, `ping`, `gc` and `compact`.

use std::io::Write;
use std::panic::resume_unwind;
use std::time::{Duration, Instant};

use farside::{Admin, Client, ClientDescription, ConnectedClient};
use farside_cli::formats::{printable, to_json};
use farside_config::command_line::{exit_code, one_line};
use serde::Serialize;

use crate::args::{self, Args};
use crate::connect;
use crate::output::{self, ExitStatus, Usage, count, duration};

/// How long `clients` waits until all clients have described themselves.
const DESCRIBE_TIMEOUT: Duration = Duration::from_secs(1);
/// How long it sleeps before it asks again.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// A description of this age counts as new: the server asks at most every 100 ms, and the answer
/// takes time.
const NEW_MS_MAX: u64 = 200;
/// The age from which on a table says that a description is old.
const OLD_MS_MIN: u64 = 2000;

/// A line of `clients --json`.
#[derive(Serialize)]
struct ListedClient<'c> {
    /// In a cluster: the number of the shard.
    #[serde(skip_serializing_if = "Option::is_none")]
    shard: Option<u16>,
    #[serde(flatten)]
    client: &'c ConnectedClient,
}

/// `clients`: prints a line for each client except this command.
pub(crate) fn clients(args: &Args, json: bool) -> anyhow::Result<ExitStatus> {
    let client = connect::reader(args)?;
    let (mut stdout, mut status) = (output::stdout(), ExitStatus::Done);
    let shards = client.admin().shards();
    for number in 0..shards {
        let listed = match described(client.admin().shard(number)) {
            Ok(listed) => listed,
            Err(error) => {
                output::print_message(format_args!("shard {number}: {}", one_line(&error)));
                status = status.or_failed(exit_code::NO_SERVER);
                continue;
            }
        };
        let shard = (shards > 1).then_some(number);
        if json {
            for client in &listed {
                writeln!(stdout, "{}", to_json(&ListedClient { shard, client })?)?;
            }
            continue;
        }
        if let Some(shard) = shard {
            writeln!(stdout, "shard {shard}")?;
        }
        stdout.write_all(table(&listed).as_bytes())?;
    }
    output::finish(stdout)?;
    Ok(status)
}

/// Returns the clients of a shard except this one, if possible with new descriptions.
fn described(admin: Admin<'_>) -> farside::Result<Vec<ConnectedClient>> {
    let started = Instant::now();
    loop {
        let mut clients = admin.clients()?;
        clients.retain(|client| !client.is_asking);
        let since_ms = started.elapsed().as_millis() as u64;
        let is_new = |client: &ConnectedClient| {
            client.description.is_some() && client.description_age_ms <= since_ms + NEW_MS_MAX
        };
        if clients.iter().all(is_new) || started.elapsed() >= DESCRIBE_TIMEOUT {
            return Ok(clients);
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

fn table(clients: &[ConnectedClient]) -> String {
    let titles = [
        "id",
        "role",
        "fabric",
        "user",
        "connected",
        "program",
        "pid",
        "host",
        "sessions",
        "held",
        "operations",
        "answered",
    ];
    let rows: Vec<_> =
        std::iter::once(titles.map(str::to_owned)).chain(clients.iter().map(row)).collect();
    output::aligned(&rows)
}

/// The cells of a client: `-` for what is unknown.
fn row(client: &ConnectedClient) -> [String; 12] {
    let unknown = || "-".to_owned();
    let described = |of: fn(&ClientDescription) -> String| {
        client.description.as_ref().map(of).filter(|text| !text.is_empty()).unwrap_or_else(unknown)
    };
    let answered = match (&client.description, client.description_age_ms) {
        (None, _) => "never".to_owned(),
        (_, OLD_MS_MIN..) => format!("{} ago", duration(client.description_age_ms)),
        _ => "now".to_owned(),
    };
    [
        client.id.to_string(),
        client.role.name().to_owned(),
        client.fabric.name().to_owned(),
        client.user.map_or_else(unknown, |user| user.to_string()),
        duration(client.connected_ms),
        described(|it| printable(&it.program)),
        described(|it| it.pid.to_string()),
        described(|it| printable(&it.host)),
        described(|it| it.sessions.to_string()),
        described(|it| it.blocks_held.to_string()),
        described(|it| it.operations.to_string()),
        answered,
    ]
}

/// `kick`: has the server disconnect a client.
pub(crate) fn kick(args: &Args, options: &args::Kick) -> anyhow::Result<ExitStatus> {
    let client = connect::writer(args)?;
    let admin = of_shard(&client, options.shard)?;
    if !admin.kick(options.id)? {
        output::print_message(format_args!("no client has the id {}", options.id));
        return Ok(ExitStatus::No);
    }
    Ok(ExitStatus::Done)
}

/// Returns what an operator does with this shard, which has to be given if there are several.
fn of_shard(client: &Client, shard: Option<u16>) -> anyhow::Result<Admin<'_>> {
    let shards = client.admin().shards();
    match shard {
        None if shards == 1 => Ok(client.admin()),
        None => Err(Usage::error(format!(
            "the cluster has {shards} shards, each with clients of its own: add --shard"
        ))),
        Some(shard) if shard < shards => Ok(client.admin().shard(shard)),
        Some(shard) => {
            Err(Usage::error(format!("there is no shard {shard}: the last one is {}", shards - 1)))
        }
    }
}

/// `ping`: sends a request to each server, and prints how long its thread took to answer.
pub(crate) fn ping(args: &Args) -> anyhow::Result<ExitStatus> {
    let client = connect::reader(args)?;
    let (mut stdout, mut status) = (output::stdout(), ExitStatus::Done);
    let shards = client.admin().shards();
    for number in 0..shards {
        let prefix = if shards > 1 { format!("shard {number}: ") } else { String::new() };
        let began = Instant::now();
        match client.admin().shard(number).statistics() {
            Ok(statistics) => {
                let (took_us, up_s) = (began.elapsed().as_micros(), statistics.uptime_ms / 1000);
                writeln!(stdout, "{prefix}answered in {took_us} us, up {up_s} s")?;
            }
            Err(error) => {
                output::print_message(format_args!("{prefix}{}", one_line(&error)));
                status = status.or_failed(exit_code::NO_SERVER);
            }
        }
    }
    output::finish(stdout)?;
    Ok(status)
}

/// `gc`: has all servers collect lost blocks at the same time, and waits until this is done. So a
/// server that does not answer delays the others by nothing.
pub(crate) fn gc(args: &Args) -> anyhow::Result<ExitStatus> {
    let client = connect::writer(args)?;
    let started = Instant::now();
    let shards = client.admin().shards();
    let results: Vec<farside::Result<(u64, u64)>> = std::thread::scope(|scope| {
        let admin = client.admin();
        let threads: Vec<_> =
            (0..shards).map(|shard| scope.spawn(move || collect(admin.shard(shard)))).collect();
        let joined = threads.into_iter().map(|thread| thread.join());
        joined.map(|result| result.unwrap_or_else(|panic| resume_unwind(panic))).collect()
    });
    let (mut found, mut since_start, mut status) = (0, 0, ExitStatus::Done);
    for (shard, result) in results.into_iter().enumerate() {
        match result {
            Ok((of_shard, since)) => (found, since_start) = (found + of_shard, since_start + since),
            Err(error) if shards == 1 => return Err(error.into()),
            Err(error) => {
                output::print_message(format_args!("shard {shard} was not collected: {error}"));
                status = status.or_failed(exit_code::NO_SERVER);
            }
        }
    }
    let mut stdout = output::stdout();
    writeln!(
        stdout,
        "{} found in {} ms; {since_start} since the server started",
        count(found, "lost block"),
        started.elapsed().as_millis(),
    )?;
    output::finish(stdout)?;
    Ok(status)
}

/// Has a server collect. Returns how many blocks it has found, now and since it started.
fn collect(admin: Admin<'_>) -> farside::Result<(u64, u64)> {
    let before = admin.statistics()?;
    let after = admin.collect()?;
    // A server that restarted meanwhile counts from 0.
    let has_restarted = after.uptime_ms < before.uptime_ms;
    let collected_before = if has_restarted { 0 } else { before.blocks_collected };
    Ok((after.blocks_collected.saturating_sub(collected_before), after.blocks_collected))
}

/// `compact`: moves blocks out of chunks that are mostly free.
pub(crate) fn compact(args: &Args) -> anyhow::Result<ExitStatus> {
    let client = connect::writer(args)?;
    let started = Instant::now();
    let compaction = client.admin().compact()?;
    let mut stdout = output::stdout();
    writeln!(
        stdout,
        "{} moved, {}, out of {}, in {} ms",
        count(compaction.blocks_moved, "block"),
        output::bytes(compaction.bytes_moved),
        count(compaction.chunks_thin, "mostly free chunk"),
        started.elapsed().as_millis()
    )?;
    output::finish(stdout)
}
