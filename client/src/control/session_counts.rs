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

/// What all sessions of a connection have counted, those that have ended included.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Totals {
    /// The sessions that have not ended.
    pub(super) sessions: u32,
    /// The operations on keys.
    pub(super) operations: u64,
    pub(super) reads: ReadCounts,
}

/// The counts of all sessions of a connection, those that have ended included.
#[derive(Default)]
pub(super) struct SessionCounts {
    sessions: Vec<CountedSession>,
    /// The operations on keys, and how many of them were reported.
    operations: u64,
    operations_reported: u64,
    /// The reads, and how many of them were reported.
    reads: ReadCounts,
    reads_reported: ReadCounts,
    /// Whether the server has asked for reads.
    pub(super) reports_reads: bool,
}

impl SessionCounts {
    /// Adds a session that begins.
    pub(super) fn add(&mut self, lookups: Arc<Lookups>) {
        self.add_up();
        let reads = ReadCounts::default();
        self.sessions.push(CountedSession { lookups, operations: 0, reads });
    }

    /// Adds up what the sessions counted since the last call, and forgets those that have ended.
    fn add_up(&mut self) {
        let Self { sessions, operations, reads, .. } = self;
        sessions.retain_mut(|session| {
            // Looked at first: a session that has ended counts no more.
            let goes_on = !session.lookups.has_ended();
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
        advance(&mut self.operations_reported, self.operations)
    }

    /// Returns all counts of the connection.
    pub(super) fn totals(&mut self) -> Totals {
        self.add_up();
        let sessions = self.sessions.len() as u32;
        Totals { sessions, operations: self.operations, reads: self.reads }
    }

    /// Returns a report of the reads since the last one.
    pub(super) fn take_reads(&mut self) -> Request {
        self.reports_reads = true;
        let blocks = self.take_blocks(|lookups, max, into| lookups.take_reads(max, into));
        self.add_up();
        let found = advance(&mut self.reads_reported.found, self.reads.found);
        let absent = advance(&mut self.reads_reported.absent, self.reads.absent);
        Request::Reads { found, absent, blocks }
    }

    /// Returns a sample of the reads since the last one.
    pub(super) fn take_samples(&mut self) -> Request {
        let blocks = self.take_blocks(|lookups, max, into| lookups.samples.take(max, into));
        Request::Samples { blocks }
    }

    /// Takes blocks of all sessions. Each has a share of the message.
    fn take_blocks(
        &self,
        take: impl Fn(&Lookups, usize, &mut Vec<BlockAddress>),
    ) -> Vec<BlockAddress> {
        let mut blocks = Vec::new();
        let share = (READS_PER_MESSAGE_MAX / self.sessions.len().max(1)).min(REPORTS_MAX);
        for session in &self.sessions {
            take(&session.lookups, share, &mut blocks);
        }
        blocks
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
    use farside_protocol::SessionLookups;

    use super::*;

    fn reads(counts: &mut SessionCounts) -> (u64, u64) {
        let Request::Reads { found, absent, .. } = counts.take_reads() else { unreachable!() };
        (found, absent)
    }

    #[test]
    fn each_count_is_reported_once_also_after_its_session_has_ended() {
        let mut counts = SessionCounts::default();
        let [first, second] = [(); 2].map(|()| SessionLookups::default());
        counts.add(first.share());
        first.note_hit();
        first.note_cached_read(|| None);
        assert_eq!(reads(&mut counts), (1, 0));
        counts.add(second.share());
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
        let Totals { sessions, operations, reads } = counts.totals();
        assert_eq!((sessions, operations), (1, 4));
        assert_eq!(reads, ReadCounts { found: 1, absent: 2 });
    }
}
