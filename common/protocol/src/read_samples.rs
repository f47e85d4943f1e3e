//! Samples of reads, for a server that wants to know which keys are read most.
//!
//! Reports of reads ([`ReadReports`]) do not tell: a cached location is in them once in T_word/16,
//! however often it is read. A sample has each read of a key with the same chance, one in
//! [`GAP_MEAN`]. The gaps between two reads of the sample are random, so that no cycle of keys that
//! a program reads is in step with them.
//!
//! The fast path of a cached GET compares the count of such reads, which it has at hand, with the
//! count at which the sample has its next read. Before the server asks for the first time, that is
//! a count that no session reaches.

use std::sync::atomic::{AtomicU64, Ordering};

use farside_layout::BlockAddress;

use crate::read_reports::ReadReports;

/// The mean number of reads from one read of the sample to the next.
const GAP_MEAN: u64 = 16;

/// The sample of one session's reads.
pub struct ReadSamples {
    /// The count of cached reads from which on the next one belongs to the sample.
    next_cached: AtomicU64,
    /// How many reads without a cached location there were, and which of them is the next of the
    /// sample. Only the session's thread uses both.
    uncached: AtomicU64,
    next_uncached: AtomicU64,
    blocks: ReadReports,
}

impl Default for ReadSamples {
    fn default() -> Self {
        Self {
            next_cached: AtomicU64::new(u64::MAX),
            uncached: AtomicU64::new(0),
            next_uncached: AtomicU64::new(0),
            blocks: ReadReports::default(),
        }
    }
}

/// Returns the next count of the sample after this one.
fn after(count: u64) -> u64 {
    // The finalizer of MurmurHash3: any bit of the count changes about half of the result.
    let mixed = (count ^ count >> 33).wrapping_mul(0xff51_afd7_ed55_8ccd);
    let mixed = (mixed ^ mixed >> 33).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    count + 1 + mixed % (2 * GAP_MEAN - 1)
}

impl ReadSamples {
    /// Whether the cached read with this count belongs to the sample.
    #[inline]
    pub(crate) fn is_due(&self, count: u64) -> bool {
        count >= self.next_cached.load(Ordering::Relaxed)
    }

    /// Adds the block of the cached read with this count. Only for the session's thread.
    #[cold]
    pub(crate) fn add(&self, count: u64, block: Option<BlockAddress>) {
        self.next_cached.store(after(count), Ordering::Relaxed);
        if let Some(block) = block {
            self.blocks.add(block);
        }
    }

    /// Adds the block of a read without a cached location, if the read belongs to the sample. Only
    /// for the session's thread.
    pub(crate) fn offer(&self, block: BlockAddress) {
        if !self.blocks.are_wanted() {
            return;
        }
        let count = self.uncached.load(Ordering::Relaxed) + 1;
        self.uncached.store(count, Ordering::Relaxed);
        if count >= self.next_uncached.load(Ordering::Relaxed) {
            self.next_uncached.store(after(count), Ordering::Relaxed);
            self.blocks.add(block);
        }
    }

    /// Appends the newest blocks of the sample since the last call, at most `max` of them. From the
    /// first call on, reads are sampled. Only for the control thread.
    pub fn take(&self, max: usize, into: &mut Vec<BlockAddress>) {
        let begins = !self.blocks.are_wanted();
        self.blocks.take(max, into);
        if begins {
            self.next_cached.store(0, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Lookups;

    fn taken(lookups: &Lookups) -> Vec<BlockAddress> {
        let mut blocks = Vec::new();
        lookups.samples.take(usize::MAX, &mut blocks);
        blocks
    }

    #[test]
    fn before_the_first_question_nothing_is_noted() {
        let lookups = Lookups::default();
        for _ in 0..1000 {
            lookups.note_cached_read(|| unreachable!());
            lookups.note_found(BlockAddress(7));
        }
        assert_eq!(taken(&lookups), []);
        lookups.note_cached_read(|| Some(BlockAddress(8)));
        lookups.note_found(BlockAddress(9));
        assert_eq!(taken(&lookups), [BlockAddress(8), BlockAddress(9)]);
        assert_eq!(taken(&lookups), []);
    }

    /// A sample of every 16th read would have one key of these only.
    #[test]
    fn the_share_of_a_key_in_the_sample_is_its_share_of_the_reads() {
        for is_cached in [true, false] {
            let (lookups, mut counts) = (Lookups::default(), [0u32; 16]);
            taken(&lookups);
            const ROUNDS: u32 = 16_000;
            for round in 0..ROUNDS {
                for key in 0..16 {
                    let block = BlockAddress(key);
                    match is_cached {
                        true => lookups.note_cached_read(|| Some(block)),
                        false => lookups.note_found(block),
                    }
                }
                if round % 100 == 99 {
                    taken(&lookups).iter().for_each(|block| counts[block.0 as usize] += 1);
                }
            }
            // One in 16 of each key's reads, give or take a tenth: three standard deviations.
            let expected = ROUNDS / GAP_MEAN as u32;
            let near = expected - expected / 10..=expected + expected / 10;
            assert!(counts.iter().all(|count| near.contains(count)), "{counts:?}");
        }
    }
}
