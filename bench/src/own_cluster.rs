//! A cluster that is made for one run: its records in a temporary folder, and its servers.

use farside_cluster::{ClusterRecord, Commit, RecordStore, ShardRecord, StoreOptions, random_id};
use farside_control::cluster::ClusterMap;
use tempfile::TempDir;

use crate::command::Interrupt;
use crate::daemon::Daemon;
use crate::{Error, Result};

/// How long a client trusts a server that has answered: the default of `kv-cli cluster create`.
const TRUST_MS: u32 = 2000;

/// The cluster. Its servers are stopped when this is dropped, and its records are removed.
pub struct OwnCluster {
    /// One for each shard, not in their order. Declared before the records, which they still use.
    servers: Vec<Daemon>,
    map: ClusterMap,
    _records: TempDir,
}

impl OwnCluster {
    /// Makes a cluster of so many shards, and waits until each has a server. `spawn` starts a
    /// server for the cluster with this URI.
    pub fn start(
        shards: u16,
        spawn: impl Fn(&str) -> Result<Daemon>,
        interrupt: &Interrupt,
    ) -> Result<Self> {
        let records = tempfile::Builder::new()
            .prefix("kv-bench-")
            .tempdir()
            .map_err(Error::system("making a temporary folder"))?;
        interrupt.remove_at_exit(records.path());
        let uri = format!("file://{}", records.path().join("records").display());
        let store = farside_cluster::open(&uri, &StoreOptions::default())?;
        create(&*store, shards)?;
        let mut cluster = Self { servers: Vec::new(), map: map_of(&*store)?, _records: records };
        for _ in 0..shards {
            cluster.servers.push(spawn(&uri)?);
        }
        let have_servers =
            || Ok(map_of(&*store)?.shards.iter().all(|view| !view.copies.is_empty()));
        Daemon::wait_for(&mut cluster.servers, have_servers, interrupt)?;
        cluster.map = map_of(&*store)?;
        Ok(cluster)
    }

    /// The servers, not in the order of their shards.
    pub fn servers(&self) -> &[Daemon] {
        &self.servers
    }

    /// The map, in which each shard has its server.
    pub fn map(&self) -> &ClusterMap {
        &self.map
    }
}

impl Drop for OwnCluster {
    fn drop(&mut self) {
        self.servers.iter().for_each(Daemon::ask_to_stop);
    }
}

fn map_of(store: &dyn RecordStore) -> Result<ClusterMap> {
    Ok(store.read()?.map()?)
}

fn create(store: &dyn RecordStore, shards: u16) -> Result<()> {
    let random = || random_id().map_err(Error::system("getting random numbers"));
    let record = ClusterRecord::new(random()?, random()?, shards, TRUST_MS);
    let shards = (0..shards).map(|shard| ShardRecord::default().change(shard));
    let changes: Vec<_> = std::iter::once(record.change()).chain(shards).collect();
    match store.commit(&[], &changes)? {
        Commit::Done => Ok(()),
        // The folder is new, and no other process knows it.
        Commit::Refused => Err(Error::Panicked),
    }
}
