//! `cluster`: makes, shows, checks, repairs and removes a cluster, and gives a shard's data up.

mod repair;

use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use farside::Role;
use farside_cli::check::Scope;
use farside_cli::formats::to_json;
use farside_cluster::{
    ClusterRecord, Commit, Condition, Memory, RecordStore, Records, ServedCopy, ServerRecord,
    ShardRecord, StoreOptions,
};
use farside_config::command_line::{exit_code, one_line};
use farside_config::{ClientConfig, ClusterStoreConfig, addresses_text};
use farside_control::attach::{ConnectError, ConnectOptions};
use farside_control::cluster::{ClusterMap, Id, SHARDS_MAX};
use farside_control::{Refusal, Request};
use repair::KnownViews;
use serde::Serialize;

use crate::args::{Args, Cluster};
use crate::connect;
use crate::output::{self, ExitStatus, Usage, bytes, count};
use crate::raw::RawRegion;

/// How long a client trusts a server that has answered, in a new cluster.
const TRUST_MS: u32 = 2000;
/// How long a server may stand still before it asks the records whose its shard is, and a margin.
const SERVER_GAP: Duration = Duration::from_millis(5000 + 2000);
/// How often `assign` asks the former server.
const ASK_INTERVAL: Duration = Duration::from_millis(250);
/// The timeout of one such question.
const ASK_TIMEOUT: Duration = Duration::from_millis(250);
/// Limit on commits that others are faster with.
const COMMITS_MAX: u32 = 16;

/// Runs one of the commands.
pub(crate) fn cluster(args: &Args, command: &Cluster) -> anyhow::Result<ExitStatus> {
    match command {
        Cluster::Create { uri, shards } => create(args, uri, *shards),
        Cluster::Show { uri, json } => show(args, uri, *json),
        Cluster::Check { uri } => check(args, uri),
        Cluster::Destroy { uri, force } => destroy(args, uri, *force),
        Cluster::Assign { uri, shard, .. } => assign(args, uri, *shard),
        Cluster::Repair { uri } => repair::repair(args, uri),
    }
}

fn open(args: &Args, uri: &str) -> anyhow::Result<Arc<dyn RecordStore>> {
    let ClusterStoreConfig { user, password, tls } =
        connect::config_without_server(args)?.cluster_store;
    let options = StoreOptions { user, password, tls };
    farside_cluster::open(uri, &options).map_err(|error| match error {
        farside_cluster::StoreError::Uri { .. } => Usage::error(error.to_string()),
        error => error.into(),
    })
}

/// Reads the records of a cluster, which must exist.
fn read(store: &dyn RecordStore, uri: &str) -> anyhow::Result<Records> {
    let records = store.read()?;
    if records.by_key.is_empty() {
        bail!(
            "there is no cluster at {uri}: make it with `kv-cli cluster create {uri} --shards N`"
        );
    }
    Ok(records)
}

fn create(args: &Args, uri: &str, shards: u16) -> anyhow::Result<ExitStatus> {
    if !(1..=SHARDS_MAX).contains(&shards) {
        return Err(Usage::error(format!(
            "--shards {shards}: write a number from 1 to {SHARDS_MAX}"
        )));
    }
    let store = open(args, uri)?;
    let random = || farside_cluster::random_id().context("cannot get random numbers");
    let record = ClusterRecord::new(random()?, random()?, shards, TRUST_MS);
    let shard_changes = (0..shards).map(|shard| ShardRecord::default().change(shard));
    let changes: Vec<_> = std::iter::once(record.change()).chain(shard_changes).collect();
    let absent = |(key, _): &(String, _)| (key.clone(), None);
    let conditions: Vec<Condition> = changes.iter().map(absent).collect();
    match store.commit(&conditions, &changes)? {
        Commit::Done => {}
        Commit::Refused => {
            bail!("there is a cluster at {uri} already: `kv-cli cluster show {uri}`")
        }
    }
    let mut stdout = output::stdout();
    writeln!(
        stdout,
        "made a cluster with {}; start its servers with",
        count(shards.into(), "shard")
    )?;
    writeln!(stdout, "  kv-server --cluster {uri} --listen ADDRESS --region-file FILE")?;
    output::finish(stdout)
}

/// A shard, for `show`. The field names are those of the JSON.
#[derive(Debug, Serialize)]
struct ShownShard {
    shard: u16,
    state: &'static str,
    view: u64,
    server: String,
    label: String,
    /// What the server and its region say; `None` if the server cannot be reached.
    #[serde(flatten)]
    load: Option<Load>,
}

/// The load of a shard.
#[derive(Debug, Serialize)]
struct Load {
    keys: u64,
    /// The bytes of the blocks that hold the keys and values.
    bytes: u64,
    /// The operations of all clients since the server started.
    operations: u64,
    /// The part of the region that is in use.
    used: f64,
    clients: u64,
}

/// The output of `show`.
#[derive(Debug, Serialize)]
struct Shown {
    cluster: Id,
    /// The sum of the numbers of all views, which rises with each change.
    map_number: u64,
    shards: Vec<ShownShard>,
    /// The addresses of the servers without a shard.
    spares: Vec<String>,
}

fn show(args: &Args, uri: &str, json: bool) -> anyhow::Result<ExitStatus> {
    let store = open(args, uri)?;
    let records = read(&*store, uri)?;
    let map = records.map()?;
    let servers: Vec<ServerRecord> = records.servers().filter_map(Result::ok).collect();
    let config = connect::config_without_server(args)?;
    let shards = (0..map.shards.len() as u16).map(|shard| {
        let (record, _) = records.shard(shard)?;
        Ok(show_shard(&config, shard, &record, &servers))
    });
    let shards = shards.collect::<anyhow::Result<Vec<_>>>()?;
    let spares = servers.iter().filter(|server| server.shard.is_none());
    let spares = spares.map(|server| addresses_text(&server.addresses)).collect();
    let shown = Shown { cluster: map.cluster, map_number: map.number(), shards, spares };
    let mut stdout = output::stdout();
    match json {
        true => writeln!(stdout, "{}", to_json(&shown)?)?,
        false => stdout.write_all(table(&shown).as_bytes())?,
    }
    output::finish(stdout)
}

fn show_shard(
    config: &ClientConfig,
    shard: u16,
    record: &ShardRecord,
    servers: &[ServerRecord],
) -> ShownShard {
    let copy = record.copies.first();
    let load = copy.filter(|served| !served.is_stopped).map(|_| load_of(config, shard, record));
    let state = match (&load, copy) {
        (Some(Ok(_)), _) => "serving",
        (Some(Err(_)), _) => "unreachable",
        (None, Some(_)) => "stopped",
        (None, None) if record.revoked.is_some() => "being assigned",
        (None, None) => "vacant",
    };
    let is_its =
        |server: &&ServerRecord| copy.is_some_and(|served| served.copy.server == server.server);
    ShownShard {
        shard,
        state,
        view: record.number,
        server: copy.map_or_else(String::new, |served| addresses_text(&served.copy.addresses)),
        label: servers.iter().find(is_its).and_then(|it| it.label.clone()).unwrap_or_default(),
        load: load.and_then(Result::ok),
    }
}

/// Asks the server of a shard, and reads the shard's index.
fn load_of(config: &ClientConfig, shard: u16, record: &ShardRecord) -> anyhow::Result<Load> {
    let options = config.options_without_server(Role::Reader);
    let options = options.of_shard(shard, &record.view(), |_| true);
    let mut region = RawRegion::attach(options.context("no address of it is for this host")?)?;
    let statistics = region.statistics(ASK_TIMEOUT)?;
    let report = region.check(Scope::Index, &output::progress("reading the index"))?;
    let chunks = statistics.chunks.max(1);
    Ok(Load {
        keys: report.keys,
        bytes: report.block_bytes,
        operations: statistics.operations,
        used: (chunks - report.chunks.free.min(chunks)) as f64 / chunks as f64,
        clients: statistics.clients.saturating_sub(1),
    })
}

fn table(shown: &Shown) -> String {
    let heads =
        ["shard", "state", "view", "keys", "bytes", "operations", "used", "clients", "server"];
    let mut rows = vec![heads.map(str::to_owned)];
    for shard in &shown.shards {
        let of_load = |text: fn(&Load) -> String| shard.load.as_ref().map_or("-".into(), text);
        let server = match shard.label.as_str() {
            "" => shard.server.clone(),
            label => format!("{} ({label})", shard.server),
        };
        rows.push([
            shard.shard.to_string(),
            shard.state.to_owned(),
            shard.view.to_string(),
            of_load(|load| load.keys.to_string()),
            of_load(|load| bytes(load.bytes)),
            of_load(|load| load.operations.to_string()),
            of_load(|load| format!("{:.0} %", load.used * 100.0)),
            of_load(|load| load.clients.to_string()),
            server,
        ]);
    }
    let mut text = format!("cluster {}, map {}\n", shown.cluster, shown.map_number);
    text += &output::aligned(&rows);
    if !shown.spares.is_empty() {
        text += &format!("spares: {}\n", shown.spares.join(" "));
    }
    text
}

/// Looks for everything that an operator has to do something about.
fn check(args: &Args, uri: &str) -> anyhow::Result<ExitStatus> {
    let store = open(args, uri)?;
    let mut problems = Vec::new();
    for health in store.health()? {
        problems.extend(health.problem.map(|problem| format!("{}: {problem}", health.subject)));
    }
    let config = connect::config_without_server(args)?;
    let known = KnownViews::ask(&config, &read(&*store, uri)?)?;
    // Read again after the servers have told what they know, so that these records are newer.
    let records = read(&*store, uri)?;
    let servers: Vec<_> = records.servers().collect();
    problems.extend(servers.iter().filter_map(|it| it.as_ref().err()).map(ToString::to_string));
    let shards = match records.cluster() {
        Ok(cluster) => cluster.shards,
        Err(error) => {
            problems.push(error.to_string());
            0
        }
    };
    for shard in 0..shards {
        match records.shard(shard) {
            Ok((record, _)) => {
                problems.extend(known.newer_than(shard, &record).map(|newer| {
                    format!(
                        "{newer}: the records were restored from a backup. Run `kv-cli cluster \
                         repair {uri}`"
                    )
                }));
                problems.extend(problem_of(&config, shard, &record));
            }
            Err(error) => problems.push(error.to_string()),
        }
    }
    let spares = servers.iter().filter(|it| it.as_ref().is_ok_and(|it| it.shard.is_none()));
    let spares = spares.count() as u64;
    let mut stdout = output::stdout();
    for problem in &problems {
        writeln!(stdout, "PROBLEM  {problem}")?;
    }
    let (shards, spares) = (count(shards.into(), "shard"), count(spares, "spare"));
    let verdict = match problems.len() as u64 {
        0 => "no problem".to_owned(),
        number => format!("{} found", count(number, "problem")),
    };
    writeln!(stdout, "verdict  {shards}, {spares}, {verdict}")?;
    output::finish(stdout)?;
    Ok(match problems.is_empty() {
        true => ExitStatus::Done,
        false => ExitStatus::Failed(exit_code::FAILED),
    })
}

fn problem_of(config: &ClientConfig, shard: u16, record: &ShardRecord) -> Option<String> {
    if let Some(former) = &record.revoked {
        let server = addresses_text(&former.copy.addresses);
        return Some(format!(
            "shard {shard} is being taken from the server at {server}, and that has not ended: if \
             no `cluster assign` runs, run it again"
        ));
    }
    let Some(served) = record.copies.first() else {
        return Some(format!(
            "shard {shard} is vacant and no spare has taken it: start a kv-server as a spare"
        ));
    };
    let server = addresses_text(&served.copy.addresses);
    if served.is_stopped {
        return Some(format!(
            "the server of shard {shard} has stopped: start it again with its region file, or give \
             its data up with `kv-cli cluster assign {shard} --empty`"
        ));
    }
    let error = load_of(config, shard, record).err()?;
    let advice = match served.memory {
        Memory::Process { .. } => "if its process has ended, its data is lost: give it up with",
        Memory::File { .. } => {
            "start it again with its region file, or, if that is lost, give its data up with"
        }
    };
    Some(format!(
        "the server of shard {shard} at {server} cannot be used: {}; {advice} `kv-cli cluster \
         assign {shard} --empty`",
        one_line(error.as_ref())
    ))
}

/// Removes the records of a cluster whose servers have stopped.
fn destroy(args: &Args, uri: &str, force: bool) -> anyhow::Result<ExitStatus> {
    let store = open(args, uri)?;
    for _ in 0..COMMITS_MAX {
        let records = read(&*store, uri)?;
        let running: Vec<_> = records.servers().filter_map(Result::ok).collect();
        if let Some(server) = running.first().filter(|_| !force) {
            bail!(
                "{} of the cluster still run, such as the one at {}: stop them first, or use \
                 --force, after which they serve their clients without records",
                count(running.len() as u64, "server"),
                addresses_text(&server.addresses)
            );
        }
        let conditions: Vec<Condition> =
            records.by_key.iter().map(|(key, it)| (key.clone(), Some(it.revision))).collect();
        let changes: Vec<_> = records.by_key.keys().map(|key| (key.clone(), None)).collect();
        if store.commit(&conditions, &changes)? == Commit::Done {
            let mut stdout = output::stdout();
            writeln!(stdout, "removed the records of the cluster; region files stay as they are")?;
            return output::finish(stdout);
        }
    }
    bail!("the records of the cluster change all the time: stop its servers first")
}

/// Gives up the data of a shard, so that a spare may take it.
fn assign(args: &Args, uri: &str, shard: u16) -> anyhow::Result<ExitStatus> {
    let store = open(args, uri)?;
    let config = connect::config_without_server(args)?;
    let mut stdout = output::stdout();
    let Some((former, map)) = revoke(&*store, uri, shard)? else {
        writeln!(stdout, "shard {shard} is vacant already: a spare takes it")?;
        return output::finish(stdout);
    };
    let server = addresses_text(&former.copy.addresses);
    let has_told = tell(&config, &former, (shard, &map), || {
        output::print_message(format_args!(
            "the server at {server} does not answer. If it may run where only other clients reach \
             it, turn it off now: they would go on with it"
        ));
    })?;
    make_vacant(&*store, uri, shard)?;
    writeln!(
        stdout,
        "shard {shard} is vacant: the server at {server} {}, and no client trusts it any more",
        if has_told { "has given it up" } else { "is silent" }
    )?;
    output::finish(stdout)
}

/// Commits that the copy of a shard is given up. Returns the copy, and the map after it; `None` if
/// the shard has none.
fn revoke(
    store: &dyn RecordStore,
    uri: &str,
    shard: u16,
) -> anyhow::Result<Option<(ServedCopy, ClusterMap)>> {
    for _ in 0..COMMITS_MAX {
        let records = read(store, uri)?;
        let shards = records.cluster()?.shards;
        if shard >= shards {
            return Err(Usage::error(format!(
                "there is no shard {shard}: the last one of this cluster is {}",
                shards - 1
            )));
        }
        let (mut record, revision) = records.shard(shard)?;
        if let Some(former) = record.revoked {
            // An earlier `assign` was interrupted.
            return Ok(Some((former, records.map()?)));
        }
        let Some(former) = record.copies.pop() else { return Ok(None) };
        record.number += 1;
        record.revoked = Some(former.clone());
        let condition = (ShardRecord::key(shard), Some(revision));
        if store.commit(&[condition], &[record.change(shard)])? == Commit::Done {
            let mut map = records.map()?;
            map.shards[usize::from(shard)] = record.view();
            return Ok(Some((former, map)));
        }
    }
    bail!("the record of shard {shard} changes all the time: try again")
}

/// Tells the former server of a shard that it lost the shard, and waits until no client trusts it
/// any more (invariant I25). Returns whether the server has answered. Otherwise calls `silent`
/// once.
///
/// # Errors
/// The server refuses the secret.
fn tell(
    config: &ClientConfig,
    former: &ServedCopy,
    (shard, map): (u16, &ClusterMap),
    silent: impl FnOnce(),
) -> anyhow::Result<bool> {
    let number = map.shards[usize::from(shard)].number;
    let distrust = Duration::from_millis(former.distrust_ms);
    let bar = output::progress("waiting until no client trusts the former server");
    let (started, mut told_at, mut silent) = (Instant::now(), None, Some(silent));
    let mut answered_at = None;
    loop {
        let waited = match (told_at, answered_at) {
            (Some(at), _) => Instant::elapsed(&at) >= distrust,
            // It was told, but cannot read the records, so it answers heartbeats for a while.
            (None, Some(at)) => Instant::elapsed(&at) >= SERVER_GAP + distrust,
            (None, None) if former.is_stopped => started.elapsed() >= distrust,
            (None, None) => started.elapsed() >= distrust.max(SERVER_GAP),
        };
        if waited {
            bar.finish_and_clear();
            return Ok(told_at.is_some() || former.is_stopped);
        }
        let asked = Instant::now();
        if told_at.is_none() && !former.is_stopped {
            match ask_former(config, former, map)? {
                Some(known)
                    if known
                        .shards
                        .get(usize::from(shard))
                        .is_some_and(|view| view.number >= number) =>
                {
                    told_at = Some(Instant::now())
                }
                Some(_) => answered_at = answered_at.or_else(|| Some(Instant::now())),
                None => {
                    if let Some(silent) = silent.take() {
                        silent();
                    }
                }
            }
        }
        bar.tick();
        std::thread::sleep(ASK_INTERVAL.saturating_sub(asked.elapsed()));
    }
}

/// Passes the former server of a shard the newer map: as a writer, because a server does not doubt
/// its view on a reader's word. Returns the map that it has; `None` if it does not answer.
///
/// # Errors
/// It refuses the secret.
fn ask_former(
    config: &ClientConfig,
    former: &ServedCopy,
    map: &ClusterMap,
) -> anyhow::Result<Option<ClusterMap>> {
    let mut addresses = former.copy.reachable().cloned();
    let Some(address) = addresses.next() else { return Ok(None) };
    let options = config.options_without_server(Role::Writer);
    let options = ConnectOptions { address, others: addresses.collect(), ..options };
    let (known, mut channel) = match options.fetch_map(ASK_TIMEOUT) {
        Err(error @ ConnectError::Refused { source: Refusal::Credentials, .. }) => {
            return Err(anyhow::Error::from(error).context(
                "the former server must be told by a writer, so give the writers' `secret` in the \
                 config file, and run this again",
            ));
        }
        Err(_) => return Ok(None),
        Ok(fetched) => fetched,
    };
    let mut message = Vec::new();
    Request::NewerMap { map: map.encode() }.encode(&mut message);
    // The answer shows in the next map.
    let is_sent = channel.send(&message).and_then(|()| channel.flush(ASK_TIMEOUT)).is_ok();
    Ok(is_sent.then_some(known))
}

/// Commits that a spare may take the shard.
fn make_vacant(store: &dyn RecordStore, uri: &str, shard: u16) -> anyhow::Result<()> {
    for _ in 0..COMMITS_MAX {
        let (mut record, revision) = read(store, uri)?.shard(shard)?;
        if record.revoked.take().is_none() {
            // Another `assign` was faster.
            return Ok(());
        }
        record.number += 1;
        let condition = (ShardRecord::key(shard), Some(revision));
        if store.commit(&[condition], &[record.change(shard)])? == Commit::Done {
            return Ok(());
        }
    }
    bail!("the record of shard {shard} changes all the time: try again")
}
