//! `clients` and `kick`: the clients of a server, and the end of one.

use std::io::Write;
use std::time::{Duration, Instant};

use farside::{Admin, Client, ClientDescription, ConnectedClient};
use farside_cli::encoding::{printable, to_json};
use farside_config::command_line::{exit_code, one_line};
use serde::Serialize;

use crate::args::{self, Args};
use crate::connect;
use crate::output::{self, ExitStatus, Usage, duration};

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
