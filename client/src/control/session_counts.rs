//! What the sessions of a connection count, and which blocks they read, for reports to the server.

use std::sync::Arc;

use farside_control::{READS_PER_MESSAGE_MAX, Request};
use farside_layout::BlockAddress;
use farside_protocol::{CacheStatistics, Lookups, REPORTS_MAX, ReadCounts};

/// The counts of one session, as far as [`SessionCounts`] has added them up.
struct CountedSession {
    lookups: Arc<Lookups>,
    operations: u64,
    reads: ReadCounts,
}

/// The counts of all sessions of a connection, those that have ended included.
#[derive(Default)]
pub(super) struct SessionCounts {
    sessions: Vec<CountedSession>,
    /// The operations on keys that were not reported yet.
    operations: u64,
    /// The reads that were not reported yet.
    reads: ReadCounts,
    /// Whether the server has asked for reads.
    pub(super) reports_reads: bool,
}

impl SessionCounts {
    /// Adds a session that begins.
    pub(super) fn add(&mut self, lookups: &Arc<Lookups>) {
        self.add_up();
        let (lookups, reads) = (lookups.clone(), ReadCounts::default());
        self.sessions.push(CountedSession { lookups, operations: 0, reads });
    }

    /// Adds up what the sessions counted since the last call, and forgets those that have ended.
    fn add_up(&mut self) {
        let Self { sessions, operations, reads, .. } = self;
        sessions.retain_mut(|session| {
            // Looked at first: a session that has ended counts no more.
            let goes_on = Arc::strong_count(&session.lookups) > 1;
            let CacheStatistics { hits, misses } = session.lookups.statistics();
            *operations += advance(&mut session.operations, hits + misses);
            let ReadCounts { found, absent } = session.lookups.read_counts();
            reads.found += advance(&mut session.reads.found, found);
            reads.absent += advance(&mut session.reads.absent, absent);
            goes_on
        });
    }

    /// Returns the number of operations that were not reported yet. They count as reported.
    pub(super) fn take_operations(&mut self) -> u64 {
        self.add_up();
        std::mem::take(&mut self.operations)
    }

    /// Returns a report of the reads since the last one.
    pub(super) fn take_reads(&mut self) -> Request {
        self.reports_reads = true;
        let mut blocks: Vec<BlockAddress> = Vec::new();
        // Each session has a share of the message. A sample of its reads is enough.
        let share = (READS_PER_MESSAGE_MAX / self.sessions.len().max(1)).min(REPORTS_MAX);
        for session in &self.sessions {
            session.lookups.take_reads(share, &mut blocks);
        }
        self.add_up();
        let ReadCounts { found, absent } = std::mem::take(&mut self.reads);
        Request::Reads { found, absent, blocks }
    }
}

/// Raises a count to `now`, and returns by how much.
fn advance(count: &mut u64, now: u64) -> u64 {
    let more = now.saturating_sub(*count);
    *count += more;
    more
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reads(counts: &mut SessionCounts) -> (u64, u64) {
        let Request::Reads { found, absent, .. } = counts.take_reads() else { unreachable!() };
        (found, absent)
    }

    #[test]
    fn each_count_is_reported_once_also_after_its_session_has_ended() {
        let mut counts = SessionCounts::default();
        let [first, second] = [(); 2].map(|()| Arc::<Lookups>::default());
        counts.add(&first);
        first.note_hit();
        first.note_cached_read();
        assert_eq!(reads(&mut counts), (1, 0));
        counts.add(&second);
        for lookups in [&first, &second] {
            lookups.note_miss();
            lookups.note_uncached_read(false);
        }
        drop(first);
        assert_eq!(counts.take_operations(), 4);
        assert_eq!(counts.take_operations(), 0);
        assert_eq!(counts.sessions.len(), 1);
        assert_eq!(reads(&mut counts), (0, 2));
        assert_eq!(reads(&mut counts), (0, 0));
    }
}
