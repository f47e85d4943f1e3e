//! What a session counts: its lookups in the location cache, and its reads of keys.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use farside_layout::BlockAddress;

use crate::read_reports::ReadReports;
use crate::read_samples::ReadSamples;

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
    /// The bits `METRICS_WATCH` and `READS_WATCH` that are set.
    put_watchers: AtomicU8,
    /// The blocks that were read lately.
    pub(crate) reads: ReadReports,
    /// The blocks of a sample of the reads.
    pub samples: ReadSamples,
    has_ended: AtomicBool,
}

/// A session's own lookups of a region. The session counts no more when this is dropped.
#[derive(Default)]
pub struct SessionLookups(Arc<Lookups>);

impl SessionLookups {
    /// Returns the lookups for another thread, which adds up those of all sessions.
    pub fn share(&self) -> Arc<Lookups> {
        self.0.clone()
    }
}

impl Deref for SessionLookups {
    type Target = Lookups;

    #[inline(always)]
    fn deref(&self) -> &Lookups {
        &self.0
    }
}

impl Drop for SessionLookups {
    fn drop(&mut self) {
        self.0.has_ended.store(true, Ordering::Release);
    }
}

/// Counts one more. Not atomic, because a count has one writer.
#[inline]
fn add_one(count: &AtomicU64) {
    count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
}

impl Lookups {
    /// Whether the session counts no more. Then what is read afterwards is its last count.
    pub fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Acquire)
    }

    /// Counts an operation that is no read, and whose key's location was cached and right.
    #[inline]
    pub fn note_hit(&self) {
        add_one(&self.changes_cached);
    }

    /// Counts a read whose key's location was cached and right. Now and then, if samples are
    /// wanted, notes the block that was read.
    #[inline]
    pub fn note_cached_read(&self, block: impl FnOnce() -> Option<BlockAddress>) {
        let count = read(&self.reads_cached) + 1;
        self.reads_cached.store(count, Ordering::Relaxed);
        if self.samples.is_due(count) {
            self.samples.add(count, block());
        }
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

    /// Notes that a read without a cached location found this block.
    pub(crate) fn note_found(&self, block: BlockAddress) {
        self.reads.add(block);
        self.samples.offer(block);
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

    /// What watches PUTs at cached locations: 0 if such a PUT needs no extra step.
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
        (0..5).for_each(|_| lookups.note_cached_read(|| None));
        lookups.note_expired();
        for is_found in [true, true, false] {
            lookups.note_miss();
            lookups.note_uncached_read(is_found);
        }
        assert_eq!(lookups.statistics(), CacheStatistics { hits: 6, misses: 3 });
        assert_eq!(lookups.read_counts(), ReadCounts { found: 4 + 2, absent: 1 + 1 });
    }
}
