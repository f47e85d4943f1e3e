//! What INFO and CONFIG say about the store.

use std::time::{Duration, Instant};

use farside::{Client, Result, ServerStatistics, Session};
use farside_layout::CHUNK_BYTES;

/// A count of all keys waits for so many times as long as the last one took. So questions of many
/// clients do not make the gateway count all the time.
const COUNT_PAUSES: u32 = 19;

/// Figures of the store.
#[derive(Clone, Debug, Default)]
pub(crate) struct StoreFigures {
    /// The memory of the index and of the blocks that clients have.
    pub(crate) used_bytes: u64,
    pub(crate) keys: u64,
    pub(crate) keys_evicted: u64,
    pub(crate) keys_expired: u64,
    /// Whether a server evicts keys to make room.
    pub(crate) is_cache: bool,
    /// When the keys were counted last, and how long that took.
    counted: Option<(Instant, Duration)>,
}

impl StoreFigures {
    /// Asks the store for the figures. After an error those that it did not tell are as before.
    pub(crate) fn ask(&mut self, client: &Client, opened: &mut Option<Session>) -> Result<()> {
        let statistics = client.admin().statistics()?;
        self.used_bytes = used_bytes(&statistics);
        self.keys_evicted = statistics.keys_evicted;
        self.keys_expired = statistics.keys_expired;
        self.is_cache = statistics.servers_evicting > 0;
        if self.counted.is_some_and(|(at, took)| at.elapsed() < took * COUNT_PAUSES) {
            return Ok(());
        }
        let session = match opened {
            Some(session) => session,
            None => opened.insert(client.session()?),
        };
        let began = Instant::now();
        self.keys = session.count_keys()?;
        self.counted = Some((Instant::now(), began.elapsed()));
        Ok(())
    }
}

fn used_bytes(statistics: &ServerStatistics) -> u64 {
    let of_blocks = statistics.classes.iter().map(|class| {
        class.blocks.saturating_sub(class.blocks_free).saturating_mul(class.class.block_bytes())
    });
    of_blocks.fold(statistics.chunks_index.saturating_mul(CHUNK_BYTES), u64::saturating_add)
}
