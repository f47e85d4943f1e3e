//! The policy of a cache: which of some candidates goes first. Nothing else in the server decides
//! that, so another policy needs a change of this file only.

use farside_layout::{BlockAddress, BlockHeader};

/// How many candidates are looked at for each block that is evicted. With five, the evicted blocks
/// are from the first fifth of all, approximately.
pub(super) const CANDIDATES_PER_EVICTION: usize = 5;

/// A block that may be evicted, and what the policy knows of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    pub(super) address: BlockAddress,
    /// When the value was written, by the writer's clock, in milliseconds since 1970.
    written_at_ms: u64,
}

impl Candidate {
    pub(super) fn new(address: BlockAddress, header: &BlockHeader) -> Self {
        Self { address, written_at_ms: header.written_at_ms() }
    }

    /// The candidate with the lowest rank goes first. It is the one that was written first.
    fn rank(&self) -> u64 {
        self.written_at_ms
    }

    /// Returns for how long the candidate has been of no use, as far as the policy knows, in
    /// milliseconds. Memory moves from the class with the highest idle time to others.
    fn idle_ms(&self, wall_ms: u64) -> u64 {
        wall_ms.saturating_sub(self.written_at_ms)
    }
}

/// Returns the `count` candidates that go first.
pub(super) fn first_to_go(candidates: &mut [Candidate], count: usize) -> &[Candidate] {
    if count < candidates.len() && count > 0 {
        candidates.select_nth_unstable_by_key(count - 1, Candidate::rank);
    }
    &candidates[..count.min(candidates.len())]
}

/// Returns the idle time of the candidate that would be the last one to go if these were the
/// candidates of an eviction; `None` if there are none.
pub(super) fn idle_ms(candidates: &mut [Candidate], wall_ms: u64) -> Option<u64> {
    let count = candidates.len().div_ceil(CANDIDATES_PER_EVICTION);
    first_to_go(candidates, count).iter().map(|candidate| candidate.idle_ms(wall_ms)).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_first_goes_first() {
        let candidate = |at: u64| Candidate { address: BlockAddress(at as u32), written_at_ms: at };
        let mut candidates: Vec<_> = [70, 20, 50, 10, 90, 30].map(candidate).into();
        let mut gone: Vec<_> =
            first_to_go(&mut candidates, 2).iter().map(|found| found.address.0).collect();
        gone.sort_unstable();
        assert_eq!(gone, [10, 20]);
        assert_eq!(first_to_go(&mut candidates, 9).len(), 6);
        assert!(first_to_go(&mut candidates, 0).is_empty() && first_to_go(&mut [], 3).is_empty());
        assert_eq!(idle_ms(&mut candidates, 100), Some(80));
        assert_eq!(idle_ms(&mut [], 100), None);
    }
}
