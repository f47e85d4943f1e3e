//! What the servers of a cluster know of its views. Their maps only rise, so they show whether the
//! records went back.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::bail;
use farside::Role;
use farside_cluster::{Records, ShardRecord};
use farside_config::{ClientConfig, addresses_text};
use farside_control::address::Address;
use farside_control::attach::ConnectOptions;
use farside_control::cluster::{ClusterMap, ShardCopy, ShardView};

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

/// The answers of all servers that run and can be reached.
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
