//! `cluster repair`: makes records right that were restored from a backup.
//!
//! Numbers of views only rise, so servers and clients do not follow records whose numbers are lower
//! than what they know. The command raises all numbers beyond that, and takes what running servers
//! know better. Then a server writes the rest of its record itself.

use std::collections::BTreeSet;
use std::io::Write;
use std::time::Duration;

use anyhow::{Context, bail};
use farside::Role;
use farside_cluster::{Change, Commit, Condition, Memory, Records, ServedCopy, ShardRecord};
use farside_config::{ClientConfig, addresses_text};
use farside_control::address::Address;
use farside_control::attach::ConnectOptions;
use farside_control::cluster::{ClusterMap, ShardCopy, ShardView, VIEW_NUMBER_MAX};

use super::{COMMITS_MAX, open, read};
use crate::args::Args;
use crate::connect;
use crate::output::{self, ExitStatus};

/// By how much the numbers rise. Clients may know of more views than any server that still runs,
/// but not of so many more.
const RISE: u64 = 1 << 20;
/// For how long a client may trust a server of which only the address is known: the longest GRACE
/// and more.
const DISTRUST_UNKNOWN_MS: u64 = 75_000;

/// Runs the command.
pub(super) fn repair(args: &Args, uri: &str) -> anyhow::Result<ExitStatus> {
    let store = open(args, uri)?;
    let config = connect::config_without_server(args)?;
    for _ in 0..COMMITS_MAX {
        let records = read(&*store, uri)?;
        let shards = records.cluster()?.shards;
        let known = KnownViews::ask(&config, &records)?;
        let (mut conditions, mut changes, mut lines) = (Vec::new(), Vec::new(), Vec::new());
        let number = number_beyond(shards, &records, &known)?;
        for shard in 0..shards {
            let (record, runs) = repaired((shard, number), &records, &known)?;
            lines.push(describe(shard, &record, runs));
            let key = ShardRecord::key(shard);
            let revision = records.by_key.get(&key).map(|found| found.revision);
            let (condition, change): (Condition, Change) = ((key, revision), record.change(shard));
            conditions.push(condition);
            changes.push(change);
        }
        if store.commit(&conditions, &changes)? == Commit::Done {
            let mut stdout = output::stdout();
            lines.iter().try_for_each(|line| writeln!(stdout, "{line}"))?;
            return output::finish(stdout);
        }
    }
    bail!("the records of the cluster change all the time: try again")
}

/// Returns a number beyond those of all views that the records or servers have. It is the same for
/// all shards, so that it is also beyond what a damaged record had.
fn number_beyond(shards: u16, records: &Records, known: &KnownViews) -> anyhow::Result<u64> {
    let of_record = |shard| records.shard(shard).map_or(0, |(record, _)| record.number);
    let of_servers = |shard| known.newest(shard).map_or(0, |(view, _)| view.number);
    let highest = (0..shards).map(|shard| of_record(shard).max(of_servers(shard))).max();
    Some(highest.unwrap_or_default() + RISE).filter(|number| *number <= VIEW_NUMBER_MAX).context(
        "the numbers of the views are used up: make a new cluster, and restore a snapshot there",
    )
}

/// Returns the right record of a shard, with this number, and whether its server runs.
fn repaired(
    (shard, number): (u16, u64),
    records: &Records,
    known: &KnownViews,
) -> anyhow::Result<(ShardRecord, bool)> {
    let owner = known.owner(shard)?;
    let newest = known.newest(shard).map(|(view, _)| view);
    let newest_copy = newest.and_then(|view| Some((view.number, view.copies.first()?)));
    let mut record = match records.shard(shard) {
        Ok((record, _)) => record,
        Err(error) => {
            let readable = records.shard_of_any_number(shard);
            let unknown = || newest_copy.map(|_| ShardRecord::default());
            let why = || format!("{error}. No server that runs knows of the shard");
            readable.or_else(unknown).with_context(why)?
        }
    };
    if let Some((known_number, copy)) = owner.or(newest_copy)
        && known_number > record.number
    {
        let served = served_copy(&record, copy);
        (record.copies, record.revoked) = (vec![served], None);
    }
    let runs = owner.is_some_and(|(_, copy)| {
        record.copies.first().is_some_and(|served| served.copy.server == copy.server)
    });
    record.number = number;
    for served in &mut record.copies {
        served.serving = None;
    }
    Ok((record, runs))
}

/// A copy of which a map tells, with what the record may know of it.
fn served_copy(record: &ShardRecord, copy: &ShardCopy) -> ServedCopy {
    let known = record.copies.iter().find(|served| served.copy.server == copy.server);
    ServedCopy {
        copy: copy.clone(),
        memory: known.map_or_else(Memory::unknown, |served| served.memory.clone()),
        serving: None,
        is_stopped: false,
        distrust_ms: known.map_or(DISTRUST_UNKNOWN_MS, |served| served.distrust_ms),
    }
}

fn describe(shard: u16, record: &ShardRecord, runs: bool) -> String {
    let number = record.number;
    match record.copies.first() {
        Some(served) if runs => {
            let server = addresses_text(&served.copy.addresses);
            format!("shard {shard}: view {number}, its server at {server} runs")
        }
        Some(served) => format!(
            "shard {shard}: view {number}, no server runs. Any copy of the region {} continues it \
             now, so start its server with the file that was served last",
            served.copy.region_id
        ),
        None if record.revoked.is_some() => {
            format!("shard {shard}: view {number}, run `kv-cli cluster assign` again")
        }
        None => format!("shard {shard}: view {number}, vacant: a spare takes it"),
    }
}

/// How long the answers of all servers are awaited.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// Limit on the servers that are asked at once.
const ASKED_MAX: usize = 32;

/// A server's answer.
struct Answer {
    server: String,
    map: ClusterMap,
    /// The shard that it serves, and the number of its view.
    own: Option<(u16, u64)>,
}

/// What the servers of a cluster know of its views: the answers of all that run and can be reached.
/// Their maps only rise, so they show whether the records went back.
pub(super) struct KnownViews(Vec<Answer>);

impl KnownViews {
    /// Asks all servers that the records or the settings name.
    ///
    /// # Errors
    /// Those of the settings.
    pub(super) fn ask(config: &ClientConfig, records: &Records) -> anyhow::Result<Self> {
        let Ok(cluster) = records.cluster() else { return Ok(Self(Vec::new())) };
        let shards = (0..cluster.shards).filter_map(|shard| records.shard(shard).ok());
        let copies = shards.flat_map(|(record, _)| record.copies.into_iter().chain(record.revoked));
        let of_copies = copies.map(|served| served.copy.reachable().cloned().collect());
        let of_servers = records.servers().filter_map(Result::ok).map(|server| server.addresses);
        let seeds = match &config.server {
            Some(_) => Some(config.connect_options(Role::Reader)?),
            None => None,
        };
        let seeds = seeds.into_iter().flat_map(|it| [vec![it.address], it.others].concat());
        let servers: BTreeSet<Vec<String>> = of_copies
            .chain(of_servers)
            .chain(seeds.map(|seed| vec![seed]))
            .map(|addresses: Vec<Address>| addresses.iter().map(ToString::to_string).collect())
            .collect();
        let options = config.options_without_server(Role::Reader);
        let servers: Vec<_> =
            servers.into_iter().filter(|addresses| !addresses.is_empty()).collect();
        let mut answers = Vec::new();
        for some in servers.chunks(ASKED_MAX) {
            std::thread::scope(|scope| {
                let ask = |addresses: &Vec<String>| {
                    let (options, addresses) = (&options, addresses.clone());
                    scope.spawn(move || ask(options, &addresses))
                };
                let asked: Vec<_> = some.iter().map(ask).collect();
                answers.extend(asked.into_iter().filter_map(|thread| thread.join().ok()?));
            });
        }
        answers.retain(|it: &Answer| {
            it.map.cluster == cluster.cluster && it.map.shards.len() == usize::from(cluster.shards)
        });
        Ok(Self(answers))
    }

    /// The newest view of a shard that a server knows, and that server.
    pub(super) fn newest(&self, shard: u16) -> Option<(&ShardView, &str)> {
        let views = self.0.iter().map(|it| (&it.map.shards[usize::from(shard)], &*it.server));
        views.max_by_key(|(view, _)| view.number)
    }

    /// What a server knows that is newer than this record; `None` if no server does.
    pub(super) fn newer_than(&self, shard: u16, record: &ShardRecord) -> Option<String> {
        let (view, server) = self.newest(shard).filter(|(view, _)| view.number > record.number)?;
        Some(format!(
            "the server at {server} knows view {} of shard {shard}, and the records have view {}",
            view.number, record.number
        ))
    }

    /// The server that serves a shard and runs, with the number of its view.
    ///
    /// # Errors
    /// Several servers serve it.
    pub(super) fn owner(&self, shard: u16) -> anyhow::Result<Option<(u64, &ShardCopy)>> {
        let mut owners: Vec<(u64, &ShardCopy)> = Vec::new();
        for answer in &self.0 {
            let view = &answer.map.shards[usize::from(shard)];
            let Some(copy) = view.copies.first() else { continue };
            let is_known = owners.iter().any(|(_, known)| known.server == copy.server);
            if answer.own == Some((shard, view.number)) && !is_known {
                owners.push((view.number, copy));
            }
        }
        match &*owners {
            [] => Ok(None),
            [owner] => Ok(Some(*owner)),
            [(one, first), (two, second), ..] => bail!(
                "the servers at {} (view {one}) and at {} (view {two}) both serve shard {shard}: \
                 stop the one whose writes are less needed",
                addresses_text(&first.addresses),
                addresses_text(&second.addresses)
            ),
        }
    }
}

/// Asks a server at its addresses. `None` if it does not answer.
fn ask(options: &ConnectOptions, addresses: &[String]) -> Option<Answer> {
    let mut addresses = addresses.iter().filter_map(|address| address.parse().ok());
    let (address, others) = (addresses.next()?, addresses.collect());
    let options = ConnectOptions { address, others, ..options.clone() };
    let (map, _, own) = options.fetch_map_and_view(ANSWER_TIMEOUT).ok()?;
    Some(Answer { server: options.address.to_string(), map, own })
}
