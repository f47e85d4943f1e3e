//! What the server tells about itself.

use farside_common::control::ServerStatistics;
use farside_common::fabric::Nanos;

use super::Service;
use crate::eviction::Evictor;
use crate::recovery::{Opened, RegionTables};

impl Service {
    pub(super) fn statistics(&mut self, now: Nanos) -> ServerStatistics {
        let Opened { region, geometry, depot, index, .. } = &mut self.opened;
        let memory = RegionTables { region, geometry };
        if let Err(error) = depot.refresh(now, &memory) {
            tracing::error!("cannot look after free chunks: {error}");
        }
        let snapshots = || self.peers.values().filter_map(|peer| peer.snapshot_permille);
        ServerStatistics {
            uptime_ms: now.saturating_sub(self.started_at) / 1_000_000,
            clients: self.clients.connected().into(),
            chunks_free: depot.chunks_free(),
            chunks_index: depot.chunks_index(),
            chunks_resting: depot.chunks_whole(),
            chunks_emptied: depot.chunks_emptied(),
            subtables: index.in_use,
            subtables_free: (index.free.len() + index.resting.len()) as u64,
            directory_depth: index.depth.into(),
            splits: index.splits,
            splits_stuck: index.unfinished.len() as u64,
            collections: self.collector.finished(),
            collections_next: self.collector.next(),
            collecting: self.collector.activity(),
            blocks_collected: self.collector.recovered(),
            keys_expired: self.reaper.expired(),
            keys_evicted: self.evictor.as_ref().map_or(0, Evictor::evicted),
            snapshots: snapshots().count() as u64,
            snapshot_permille: snapshots().min().unwrap_or(0).into(),
            huge_page_bytes: self.memory.huge_bytes(),
            classes: depot.classes(),
            ..self.statistics.clone()
        }
    }
}
