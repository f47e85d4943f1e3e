//! What a session counts: its lookups in the location cache, and its reads of keys.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use farside_layout::BlockAddress;

use crate::read_reports::ReadReports;

/// Counts of the location cache's hits and misses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct CacheStatistics {
    /// Operations whose key's location was cached and right.
    pub hits: u64,
    /// Operations whose key's location was not cached, or wrong.
    pub misses: u64,
}

/// Counts of reads of keys: GETs, and the reads with which other operations begin. GETs that were
/// combined count as one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadCounts {
    /// Reads that found the key.
    pub found: u64,
    /// Reads that did not find the key, or only an expired value.
    pub absent: u64,
}

/// Metrics count PUTs at cached locations.
pub(crate) const METRICS_WATCH: u8 = 1;
/// Such a PUT proves its location a little earlier, because the server asks for reads.
const READS_WATCH: u8 = 2;

/// The running counts of one session, and its reports of reads. Only the session's thread changes
/// the counts. Other threads may read them.
#[derive(Default)]
pub struct Lookups {
    /// Reads whose key's location was cached and right. A cached GET changes no other count.
    reads_cached: AtomicU64,
    /// Other operations whose key's location was cached and right.
    changes_cached: AtomicU64,
    misses: AtomicU64,
    /// Those of `reads_cached` that found an expired value.
    expired_cached: AtomicU64,
    /// Reads that found the key without a cached location.
    found_uncached: AtomicU64,
    absent: AtomicU64,
    /// What watches PUTs at cached locations, as a sum: `reads`, once they are wanted, and metrics.
    put_watchers: AtomicU8,
    /// The blocks that were read lately.
    pub(crate) reads: ReadReports,
}

/// Counts one more. Not atomic, because a count has one writer.
#[inline]
fn add_one(count: &AtomicU64) {
    count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
}

impl Lookups {
    /// Counts an operation that is no read, and whose key's location was cached and right.
    #[inline]
    pub fn note_hit(&self) {
        add_one(&self.changes_cached);
    }

    /// Counts a read whose key's location was cached and right.
    #[inline]
    pub fn note_cached_read(&self) {
        add_one(&self.reads_cached);
    }

    /// Corrects the counts after [`Lookups::note_cached_read`]: the value had expired.
    #[cold]
    pub fn note_expired(&self) {
        add_one(&self.absent);
        add_one(&self.expired_cached);
    }

    /// Counts an operation whose key's location was not cached, or wrong.
    #[inline]
    pub fn note_miss(&self) {
        add_one(&self.misses);
    }

    /// Counts the end of a read that [`Lookups::note_miss`] has counted: whether it found the key.
    #[inline]
    pub fn note_uncached_read(&self, is_found: bool) {
        add_one(if is_found { &self.found_uncached } else { &self.absent });
    }

    /// Adds one of [`METRICS_WATCH`] and [`READS_WATCH`] to what watches PUTs.
    pub(crate) fn watch_puts(&self, watcher: u8) {
        self.put_watchers.fetch_or(watcher, Ordering::Relaxed);
    }

    /// What watches PUTs at cached locations: 0 if they need not do more than they must.
    #[inline(always)]
    pub(crate) fn put_watchers(&self) -> u8 {
        self.put_watchers.load(Ordering::Relaxed)
    }

    /// As [`ReadReports::take`].
    pub fn take_reads(&self, max: usize, into: &mut Vec<BlockAddress>) {
        self.reads.take(max, into);
        self.watch_puts(READS_WATCH);
    }

    /// The lookups so far.
    pub fn statistics(&self) -> CacheStatistics {
        let hits = read(&self.reads_cached) + read(&self.changes_cached);
        CacheStatistics { hits, misses: read(&self.misses) }
    }

    /// The reads so far. `found` may be lower than before while the session's thread corrects it.
    pub fn read_counts(&self) -> ReadCounts {
        let found = read(&self.reads_cached).saturating_sub(read(&self.expired_cached));
        ReadCounts { found: found + read(&self.found_uncached), absent: read(&self.absent) }
    }
}

fn read(count: &AtomicU64) -> u64 {
    count.load(Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_read_counts_once_as_found_or_absent() {
        let lookups = Lookups::default();
        lookups.note_hit();
        (0..5).for_each(|_| lookups.note_cached_read());
        lookups.note_expired();
        for is_found in [true, true, false] {
            lookups.note_miss();
            lookups.note_uncached_read(is_found);
        }
        assert_eq!(lookups.statistics(), CacheStatistics { hits: 6, misses: 3 });
        assert_eq!(lookups.read_counts(), ReadCounts { found: 4 + 2, absent: 1 + 1 });
    }
}
