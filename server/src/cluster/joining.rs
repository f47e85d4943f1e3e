//! The start of a server of a cluster: it reads the records, and finds the shard of its region.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use farside_cluster::{
    ClusterRecord, Memory, RecordStore, Records, ServedCopy, ServerRecord, StoreError,
    StoreOptions, random_id,
};
use farside_config::ServerConfig;
use farside_control::cluster::{Id, ShardCopy};
use farside_fabric::boot_time_ns;
use farside_fabric::memory::RegionMemory;
use farside_layout::Superblock;

use super::error::ClusterError;
use super::identity;
use super::membership::{Membership, WatcherLink};
use super::serving::Servings;
use super::serving::{KnownRegion, may_continue};
use super::watcher::{OwnCopy, Watcher};
use crate::error::{ServerError, system};
use crate::event::new_event;
use crate::region::formatting::superblock_bytes;
use crate::region::served::ServedRegion;

/// The pause before the records are read again after a failure.
const RETRY: Duration = Duration::from_millis(500);
/// How often a server that waits for the records looks whether it was told to stop.
const STOP_INTERVAL: Duration = Duration::from_millis(20);

/// A server that has read the records, and has no region yet.
pub(crate) struct Joining {
    store: Arc<dyn RecordStore>,
    uri: String,
    records: Records,
    cluster: ClusterRecord,
}

/// Reads the records of the configured cluster, if any. While they cannot be reached it tries
/// again, unless `stop` becomes true: without them nothing can be decided.
pub(crate) fn join(
    config: &ServerConfig,
    stop: &AtomicBool,
) -> Result<Option<Joining>, ServerError> {
    let Some(uri) = config.cluster.clone() else { return Ok(None) };
    let access = config.cluster_store.clone();
    let options = StoreOptions { user: access.user, password: access.password, tls: access.tls };
    let store = farside_cluster::open(&uri, &options).map_err(ClusterError::from)?;
    let mut has_failed = false;
    let records = loop {
        match store.read() {
            Ok(records) => break records,
            Err(error @ (StoreError::Uri { .. } | StoreError::Denied { .. })) => {
                return Err(ClusterError::from(error).into());
            }
            Err(error) if !has_failed => {
                tracing::warn!("FS-041 {error}; the server waits for them");
                has_failed = true;
            }
            Err(error) => tracing::debug!("{error}"),
        }
        let mut waited = Duration::ZERO;
        while waited < RETRY {
            if stop.load(Ordering::Relaxed) {
                return Err(ClusterError::Stopped { uri }.into());
            }
            thread::sleep(STOP_INTERVAL);
            waited += STOP_INTERVAL;
        }
    };
    if !records.by_key.keys().any(|key| !key.starts_with(ServerRecord::PREFIX)) {
        return Err(ClusterError::NoCluster { uri }.into());
    }
    let unusable = |source| ClusterError::Records { uri: uri.clone(), source };
    let cluster = records.cluster().map_err(unusable)?;
    records.map().map_err(unusable)?;
    Ok(Some(Joining { store, uri, records, cluster }))
}

impl Joining {
    /// The hash key of new regions.
    pub(crate) fn hash_key(&self) -> [u8; 16] {
        self.cluster.hash_key.0
    }

    /// Returns the shard of an existing region, before anything is changed there. `None` for a new
    /// region, and for one that no shard has.
    ///
    /// # Errors
    /// [`ClusterError`] if the region must not be served.
    pub(crate) fn shard_of(
        &self,
        memory: &RegionMemory,
        config: &ServerConfig,
    ) -> Result<Option<u16>, ServerError> {
        if memory.is_new {
            return Ok(None);
        }
        let bytes = superblock_bytes(memory)?;
        // Opening the region reports a superblock that cannot be decoded.
        let Ok((superblock, format)) = Superblock::decode(&bytes, memory.region.bytes()) else {
            return Ok(None);
        };
        let file = config.region_file.clone().unwrap_or_default();
        if format.hash_key != self.hash_key() {
            return Err(ClusterError::OtherHashKey { file, uri: self.uri.clone() }.into());
        }
        let region = KnownRegion {
            region_id: Id(format.region_id),
            incarnation: superblock.incarnation(),
            memory: &memory_of(memory, config)?,
            servings: superblock.servings().map(Id),
        };
        for shard in 0..self.cluster.shards {
            let unusable = |source| ClusterError::Records { uri: self.uri.clone(), source };
            let (record, _) = self.records.shard(shard).map_err(unusable)?;
            if may_continue(&record, &region, (&file, shard))? {
                return Ok(Some(shard));
            }
        }
        Ok(None)
    }

    /// Makes both threads' parts, after the region was opened.
    ///
    /// # Errors
    /// [`ClusterError::NoShard`] for a region with keys that no shard has; errors of the system.
    pub(crate) fn complete(
        self,
        config: &ServerConfig,
        shard: Option<u16>,
        memory: &RegionMemory,
        opened: &ServedRegion,
    ) -> Result<(Membership, Watcher), ServerError> {
        let region_file = config.region_file.clone();
        if shard.is_none() && opened.keys > 0 {
            let file = region_file.unwrap_or_default();
            return Err(ClusterError::NoShard { file, uri: self.uri }.into());
        }
        let named = || system("learn the names of the process and its host");
        let grace_ms = u64::from(opened.format.grace_ms);
        let lateness_ms = config.lateness_max_ns().div_ceil(1_000_000);
        let copy = ShardCopy {
            server: random_id().map_err(named())?,
            region_id: Id(opened.format.region_id),
            incarnation: opened.incarnation,
            addresses: config.listen.clone(),
            host: identity::boot_id().map_err(named())?,
        };
        let bytes = superblock_bytes(memory)?;
        let decoded = Superblock::decode(&bytes, memory.region.bytes());
        let written = decoded.map_or([Id::default(); 2], |(found, _)| found.servings().map(Id));
        let serving = random_id().map_err(named())?;
        let served = ServedCopy {
            copy,
            memory: memory_of(memory, config)?,
            serving: Some(serving),
            is_stopped: false,
            distrust_ms: distrust_ms(self.cluster.trust_ms.into(), grace_ms.max(lateness_ms)),
        };
        let unusable = |source| ClusterError::Records { uri: self.uri.clone(), source };
        let map = self.records.map().map_err(unusable)?;
        let event = Arc::new(new_event().map_err(system("create an event"))?);
        let ((commands, received), (news, taken)) = (channel(), channel());
        let link = WatcherLink { commands: commands.clone(), news: taken, event: event.clone() };
        let own = OwnCopy {
            served,
            servings: Servings::new(written, serving),
            region_file,
            shard,
            label: config.label.clone(),
            region_bytes: opened.format.region_bytes,
        };
        let Self { store, uri, cluster, .. } = self;
        let watcher = Watcher::new((store, uri), cluster, own, (commands, received), (news, event));
        Ok((Membership::new(link, map, boot_time_ns()), watcher))
    }
}

/// For how long any client may still change a region, or return what it read there, after its
/// server has last answered: a client posts chains for `trust_ms`, and each takes effect or is
/// returned within `late_ms`. An eighth more is for clocks that do not run equally fast.
fn distrust_ms(trust_ms: u64, late_ms: u64) -> u64 {
    let sum = trust_ms.saturating_add(late_ms);
    sum.saturating_add(sum.div_ceil(8))
}

fn memory_of(memory: &RegionMemory, config: &ServerConfig) -> Result<Memory, ServerError> {
    let named = match &config.region_file {
        Some(_) => identity::file(&memory.file).map(|file| Memory::File { file }),
        None => identity::own_process().map(|process| Memory::Process { process }),
    };
    named.map_err(system("learn the name of the region's memory"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distrust_lasts_longer_than_trust_and_late_verbs_on_slow_clocks() {
        assert_eq!(distrust_ms(2000, 100), 2363);
        assert_eq!(distrust_ms(2000, 8200), 11_475);
    }
}
