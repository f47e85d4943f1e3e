//! `cluster repair`: makes records right that were restored from a backup.
//!
//! Numbers of views only rise, so servers and clients do not follow records whose numbers are lower
//! than what they know. The command raises all numbers beyond that, and takes what running servers
//! know better. Then a server writes the rest of its record itself.

use std::io::Write;

use anyhow::{Context, bail};
use farside_cluster::{Change, Commit, Condition, Memory, Records, ServedCopy, ShardRecord};
use farside_config::addresses_text;
use farside_control::cluster::{ShardCopy, VIEW_NUMBER_MAX};

use super::known_views::KnownViews;
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
