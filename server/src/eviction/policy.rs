//! The policy of a cache: which of the visited blocks go. The hand chooses the order of visits
//! (`hand.rs`), the depot counts reads (`server/src/depot/reads.rs`), and blocks with pinned values
//! never become candidates.
//!
//! The policy is SIEVE (NSDI'24) with counts to two. A block that clients have read since the hand
//! came by is spared, and loses one of its reads. A block without reads goes. Values that have
//! expired go before all others.

use farside_layout::{BlockAddress, BlockHeader};

use crate::depot::VisitedBlock;

/// If the values of at least this share of the candidates have expired, a batch evicts only those:
/// an eighth.
const EXPIRED_SHARE_DIVISOR: usize = 8;
/// The share of a class's blocks that shows its idle time: the fifth that has been idle for
/// longest.
const IDLE_SHARE_DIVISOR: usize = 5;

/// What becomes of a candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// It goes before all others, because its value has expired.
    Expired,
    /// It goes, because it was not read.
    Unread,
    /// It stays for another round, because it was read.
    Spared,
}

/// A block with a key, and what the policy knows of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    block: VisitedBlock,
    /// When the value was written, by the writer's clock, in milliseconds since 1970.
    written_at_ms: u64,
    /// When the value expires, in milliseconds since 1970; 0 for never.
    expires_at_ms: u64,
}

impl Candidate {
    pub(super) fn new(block: VisitedBlock, header: &BlockHeader) -> Self {
        // A marked block is most likely free, so what it had should not go first.
        let expires_at_ms = if header.is_marked() { 0 } else { header.expires_at_ms() };
        Self { block, written_at_ms: header.written_at_ms(), expires_at_ms }
    }

    /// Decides about the candidate.
    fn fate(&self, wall_ms: u64) -> Fate {
        if self.expires_at_ms != 0 && self.expires_at_ms <= wall_ms {
            Fate::Expired
        } else if self.block.reads == 0 {
            Fate::Unread
        } else {
            Fate::Spared
        }
    }

    /// Returns for how long the candidate has been of no use, as far as the policy knows, in
    /// milliseconds. Memory moves from the class with the highest idle time to others.
    fn idle_ms(&self, wall_ms: u64) -> u64 {
        match self.fate(wall_ms) {
            Fate::Expired | Fate::Unread => wall_ms.saturating_sub(self.written_at_ms),
            Fate::Spared => 0,
        }
    }
}

/// The candidates of one batch of evictions.
pub(super) struct Batch {
    wall_ms: u64,
    /// How many keys should go.
    wanted: usize,
    candidates: usize,
    expired: Vec<BlockAddress>,
    unread: Vec<BlockAddress>,
}

impl Batch {
    /// A batch of `wanted` evictions at this time of the wall clock.
    pub(super) fn new(wanted: usize, wall_ms: u64) -> Self {
        let (expired, unread) = (Vec::new(), Vec::with_capacity(wanted));
        Self { wall_ms, wanted, candidates: 0, expired, unread }
    }

    pub(super) fn add(&mut self, candidate: Candidate) {
        self.candidates += 1;
        match candidate.fate(self.wall_ms) {
            Fate::Expired => self.expired.push(candidate.block.address),
            Fate::Unread => self.unread.push(candidate.block.address),
            Fate::Spared => {}
        }
    }

    /// The number of candidates so far.
    pub(super) fn candidates(&self) -> usize {
        self.candidates
    }

    /// Whether no more candidates are needed.
    pub(super) fn is_complete(&self) -> bool {
        self.expired.len() + self.unread.len() >= self.wanted
    }

    /// Returns the blocks that go, those with expired values first. They may be more than wanted.
    pub(super) fn into_evictions(self) -> Vec<BlockAddress> {
        let only_expired = !self.expired.is_empty()
            && self.expired.len() >= self.candidates.div_ceil(EXPIRED_SHARE_DIVISOR);
        let unread = if only_expired { Vec::new() } else { self.unread };
        self.expired.into_iter().chain(unread).collect()
    }
}

/// Returns for how long a class's keys have been idle, by some of its blocks: the shortest idle
/// time of the fifth that has been idle for longest. `None` if there are no blocks.
pub(super) fn idle_ms(candidates: &[Candidate], wall_ms: u64) -> Option<u64> {
    let count = candidates.len().div_ceil(IDLE_SHARE_DIVISOR);
    let mut idle_ms: Vec<_> =
        candidates.iter().map(|candidate| candidate.idle_ms(wall_ms)).collect();
    idle_ms.sort_unstable_by(|a, b| b.cmp(a));
    idle_ms.get(count.checked_sub(1)?).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    const WALL_MS: u64 = 1000;

    fn candidate(address: u32, reads: u8, (written_at_ms, expires_at_ms): (u64, u64)) -> Candidate {
        let block = VisitedBlock { address: BlockAddress(address), reads };
        Candidate { block, written_at_ms, expires_at_ms }
    }

    /// Makes a batch of `expired` blocks with expired values that were read, then of `spared` other
    /// blocks that were read, then of 7 blocks without reads. Returns whether it is complete, and
    /// the addresses of its first `wanted` evictions.
    fn evictions(expired: u32, spared: u32, wanted: usize) -> (bool, Vec<u32>) {
        let mut batch = Batch::new(wanted, WALL_MS);
        (0..expired).for_each(|n| batch.add(candidate(100 + n, 2, (1, WALL_MS))));
        (0..spared).for_each(|n| batch.add(candidate(200 + n, 1, (1, WALL_MS + 1))));
        (0..7).for_each(|n| batch.add(candidate(n, 0, (1, 0))));
        let is_complete = batch.is_complete();
        let first = batch.into_evictions().into_iter().take(wanted);
        (is_complete, first.map(|address| address.0).collect())
    }

    #[test]
    fn blocks_without_reads_go_and_others_are_spared() {
        assert_eq!(evictions(0, 50, 7), (true, (0..7).collect()));
        assert_eq!(evictions(0, 50, 3).1, [0, 1, 2]);
        assert_eq!(evictions(0, 50, 8), (false, (0..7).collect()));
    }

    #[test]
    fn what_has_expired_goes_first_and_alone_if_it_is_an_eighth() {
        assert_eq!(evictions(1, 0, 5).1, [100]);
        assert_eq!(evictions(1, 1, 5).1, [100, 0, 1, 2, 3]);
        assert_eq!(evictions(9, 0, 4).1, [100, 101, 102, 103]);
        assert!(Batch::new(5, WALL_MS).into_evictions().is_empty());
    }

    #[test]
    fn idle_times_are_those_of_the_fifth_that_is_idle_for_longest() {
        let unread = |written_at_ms| candidate(1, 0, (written_at_ms, 0));
        let mut candidates: Vec<_> = [700, 200, 500, 100, 900, 300].map(unread).into();
        assert_eq!(idle_ms(&candidates, WALL_MS), Some(800));
        // The two oldest ones were read since.
        candidates[1].block.reads = 1;
        candidates[3].block.reads = 2;
        assert_eq!(idle_ms(&candidates, WALL_MS), Some(500));
        assert_eq!(idle_ms(&[candidate(1, 1, (1, 0))], WALL_MS), Some(0));
        assert_eq!(idle_ms(&[], WALL_MS), None);
    }
}
