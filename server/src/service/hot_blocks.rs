//! Counts which blocks clients read most, from samples of their reads. The server asks for samples
//! only for a while after an operator asked what is hot.
//!
//! The counts are a summary of Misra and Gries: a table of bounded size, in which a block that has
//! more than a certain share of all reads is always present. When the table is full, the median of
//! its counts is subtracted from all of them, and those that reach 0 leave it. So at most
//! 2/[`COUNTS_MAX`] of the samples are missing from a count.

use std::cmp::Reverse;
use std::collections::HashMap;

use farside_control::{HOT_PER_MESSAGE_MAX, HotBlock};
use farside_fabric::Nanos;
use farside_layout::BlockAddress;

use crate::chores::depot::Depot;

/// Limit on the blocks that are counted at a time.
const COUNTS_MAX: usize = 8192;
/// How long a list of the hottest blocks serves all requests, so that requests cost little time.
const LIST_AGE_NS_MAX: Nanos = 100_000_000;
/// Limit on the time for which one request has the server ask for samples, in milliseconds. A
/// program that wants more asks again.
const FOR_MS_MAX: u32 = 10_000;
/// The server asks no sooner than this after the last time.
const PAUSE_NS_MIN: Nanos = 100_000_000;
/// The pause is longer if answers take long: so long for each client and for each block that was
/// reported. Then they take about an eighth of the thread's time.
const PAUSE_NS_PER_CLIENT: Nanos = 100_000;
const PAUSE_NS_PER_BLOCK: Nanos = 800;

/// The blocks that are read most, and when to ask for samples.
#[derive(Default)]
pub(super) struct HotBlocks {
    counts: HashMap<BlockAddress, u64>,
    /// The number of reads in all samples.
    samples: u64,
    /// Until when the server asks.
    until: Nanos,
    /// When the server asks next.
    ask_at: Nanos,
    /// Whether the server has asked since the counts started anew. The answers to the first
    /// question do not count, because they have reads from before.
    pub(super) has_asked: bool,
    /// The blocks that were reported since the server asked.
    reported: u64,
    /// The last list of the hottest blocks, and when it was made.
    hottest: Option<(Nanos, Vec<HotBlock>)>,
}

impl HotBlocks {
    /// Asks for samples until this time has passed. If sampling had ended, the counts start anew.
    pub(super) fn sample_for(&mut self, for_ms: u32, now: Nanos) {
        if for_ms == 0 {
            return;
        }
        if now >= self.until {
            // The pause after the last question holds, so that short requests cost no more.
            *self = Self { ask_at: self.ask_at.max(now), ..Self::default() };
        }
        let for_ns = Nanos::from(for_ms.min(FOR_MS_MAX)) * 1_000_000;
        self.until = self.until.max(now.saturating_add(for_ns));
    }

    /// When to ask all clients for samples; `None` if no request runs.
    pub(super) fn next_step_at(&self) -> Option<Nanos> {
        (self.ask_at < self.until).then_some(self.ask_at)
    }

    /// Notes that so many clients are asked now.
    pub(super) fn note_asked(&mut self, clients: usize, now: Nanos) {
        let cost = clients as u64 * PAUSE_NS_PER_CLIENT + self.reported * PAUSE_NS_PER_BLOCK;
        self.ask_at = now.saturating_add(cost.max(PAUSE_NS_MIN));
        (self.reported, self.has_asked) = (0, true);
    }

    /// Counts the blocks of a sample.
    pub(super) fn add(&mut self, blocks: &[BlockAddress]) {
        self.samples += blocks.len() as u64;
        self.reported += blocks.len() as u64;
        for block in blocks {
            if self.counts.len() == COUNTS_MAX && !self.counts.contains_key(block) {
                self.subtract_median();
            }
            *self.counts.entry(*block).or_default() += 1;
        }
    }

    fn subtract_median(&mut self) {
        let mut counts: Vec<u64> = self.counts.values().copied().collect();
        let middle = counts.len() / 2;
        let (_, median, _) = counts.select_nth_unstable(middle);
        let median = *median;
        self.counts.retain(|_, count| {
            *count = count.saturating_sub(median);
            *count > 0
        });
    }

    /// Returns the number of reads in all samples, and the blocks that were read most. Leaves out
    /// the addresses of no block: clients can report any.
    pub(super) fn hottest(&mut self, depot: &Depot, now: Nanos) -> (u64, Vec<HotBlock>) {
        if let Some((at, blocks)) = &self.hottest
            && now.saturating_sub(*at) < LIST_AGE_NS_MAX
        {
            return (self.samples, blocks.clone());
        }
        let block = |(address, reads): (&BlockAddress, &u64)| {
            let class = depot.class_at(*address)?;
            Some(HotBlock { address: *address, class, reads: *reads })
        };
        let mut blocks: Vec<_> = self.counts.iter().filter_map(block).collect();
        blocks.sort_unstable_by_key(|block| (Reverse(block.reads), block.address));
        blocks.truncate(HOT_PER_MESSAGE_MAX);
        self.hottest = Some((now, blocks.clone()));
        (self.samples, blocks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Nanos = 1_000_000;

    #[test]
    fn the_server_asks_only_for_as_long_as_a_request_named() {
        let mut hot = HotBlocks::default();
        assert_eq!(hot.next_step_at(), None);
        hot.sample_for(0, 5 * MS);
        assert_eq!(hot.next_step_at(), None);
        hot.sample_for(250, 5 * MS);
        assert_eq!(hot.next_step_at(), Some(5 * MS));
        hot.note_asked(1, 5 * MS);
        hot.add(&[BlockAddress(7)]);
        assert_eq!(hot.next_step_at(), Some(105 * MS));
        // A second request makes the time longer, never shorter, and keeps the counts.
        hot.sample_for(300, 105 * MS);
        hot.sample_for(1, 105 * MS);
        assert_eq!(hot.samples, 1);
        for at in [105, 205, 305] {
            hot.note_asked(1, at * MS);
        }
        assert_eq!(hot.next_step_at(), None);
        hot.sample_for(1, 405 * MS);
        assert_eq!((hot.samples, hot.next_step_at()), (0, Some(405 * MS)));
    }

    #[test]
    fn short_requests_make_no_more_questions() {
        let mut hot = HotBlocks::default();
        let mut asked = 0;
        for at in (0..200).map(|ms| ms * MS) {
            hot.sample_for(1, at);
            if hot.next_step_at().is_some_and(|due| due <= at) {
                hot.note_asked(1, at);
                asked += 1;
            }
        }
        assert_eq!(asked, 2);
    }

    #[test]
    fn many_clients_and_large_answers_make_questions_rare() {
        let mut hot = HotBlocks::default();
        hot.sample_for(u32::MAX, MS);
        hot.note_asked(4000, MS);
        assert_eq!(hot.next_step_at(), Some(401 * MS));
        (0..50).for_each(|_| hot.add(&[BlockAddress(7); 16_000]));
        hot.note_asked(1, 401 * MS);
        assert_eq!(hot.next_step_at(), Some(1041 * MS + MS / 10));
        assert_eq!(hot.until, MS + Nanos::from(FOR_MS_MAX) * MS);
    }

    #[test]
    fn hot_blocks_stay_in_the_table_among_any_number_of_others() {
        let mut hot = HotBlocks::default();
        let (mut cold, mut reads) = (1000u32, 0);
        for _ in 0..10_000 {
            hot.add(&[BlockAddress(1), BlockAddress(2), BlockAddress(1)]);
            // Each of these is read once only.
            let others: Vec<_> = (cold..cold + 20).map(BlockAddress).collect();
            (cold, reads) = (cold + 20, reads + 23);
            hot.add(&others);
            assert!(hot.counts.len() <= COUNTS_MAX);
        }
        assert_eq!(hot.samples, reads);
        let missing = 2 * reads / COUNTS_MAX as u64;
        for (address, count) in [(1, 20_000), (2, 10_000)] {
            let counted = hot.counts[&BlockAddress(address)];
            assert!((count - missing..=count).contains(&counted), "{counted} of {count}");
        }
    }
}
