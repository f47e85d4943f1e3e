//! What the server tells about itself.

use farside_common::control::ServerStatistics;
use farside_common::fabric::Nanos;

use super::Service;

impl Service {
    pub(super) fn statistics(&self, now: Nanos) -> ServerStatistics {
        let index = &self.opened.index;
        ServerStatistics {
            chunks_index: self.opened.depot.chunks_index(),
            subtables: index.in_use,
            subtables_free: (index.free.len() + index.resting.len()) as u64,
            directory_depth: index.depth.into(),
            splits: index.splits,
            splits_stuck: index.unfinished.len() as u64,
            uptime_ms: now.saturating_sub(self.started_at) / 1_000_000,
            clients: self.clients.connected().into(),
            chunks_free: self.opened.depot.chunks_free(),
            classes: self.opened.depot.classes(),
            ..self.statistics.clone()
        }
    }
}
