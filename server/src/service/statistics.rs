//! What the server tells about itself.

use farside_control::{ClassStatistics, ServerStatistics};
use farside_fabric::Nanos;

use super::Service;
use crate::eviction::Evictor;
use crate::recovery::{Opened, RegionTables};

/// How long the depot's figures hold while readers alone ask for something.
const FIGURES_NS: Nanos = 100_000_000;

/// What takes a walk over all chunks to find out. Readers may ask for it without end, and nothing
/// that they ask for changes it; anything else drops it.
#[derive(Clone)]
pub(super) struct DepotFigures {
    at: Nanos,
    chunks_free: u64,
    chunks_index: u64,
    chunks_resting: u64,
    chunks_emptied: u64,
    classes: Vec<ClassStatistics>,
}

impl Service {
    fn depot_figures(&mut self, now: Nanos) -> DepotFigures {
        let is_recent = |figures: &&DepotFigures| now.saturating_sub(figures.at) < FIGURES_NS;
        if let Some(figures) = self.depot_figures.as_ref().filter(is_recent) {
            return figures.clone();
        }
        let Opened { region, geometry, depot, .. } = &mut self.opened;
        if let Err(error) = depot.refresh(now, &RegionTables { region, geometry }) {
            tracing::error!("cannot look after free chunks: {error}");
        }
        let figures = DepotFigures {
            at: now,
            chunks_free: depot.chunks_free(),
            chunks_index: depot.chunks_index(),
            chunks_resting: depot.chunks_whole(),
            chunks_emptied: depot.chunks_emptied(),
            classes: depot.classes(),
        };
        self.depot_figures.insert(figures).clone()
    }

    pub(super) fn statistics(&mut self, now: Nanos) -> ServerStatistics {
        let DepotFigures {
            chunks_free, chunks_index, chunks_resting, chunks_emptied, classes, ..
        } = self.depot_figures(now);
        let index = &self.opened.index;
        let snapshots = || self.peers.values().filter_map(|peer| peer.snapshot_permille);
        ServerStatistics {
            uptime_ms: now.saturating_sub(self.started_at) / 1_000_000,
            clients: self.clients.connected().into(),
            chunks_free,
            chunks_index,
            chunks_resting,
            chunks_emptied,
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
            classes,
            ..self.statistics.clone()
        }
    }
}
