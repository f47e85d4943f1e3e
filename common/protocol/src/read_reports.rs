//! Reports of reads: the blocks that a session has read lately, for a server that evicts what is
//! not read.
//!
//! The session's thread adds the addresses to a ring, which the control thread takes them from when
//! the server asks. The server asks only while it evicts, and the ring has no memory before it asks
//! for the first time. A full ring loses its oldest addresses. They are guesses: a lost or wrong
//! address makes a block look less or more popular than it is. `ReadSamples` has a second ring of
//! this kind, for the commands of operators.
//!
//! A cached GET adds its block when it stamps the proof of the location anew, about once in
//! T_word/16, so its fast path does not know of the ring. A location that a store has just proved
//! gets an older stamp than it could have, so that the first GET after the store adds its block. An
//! uncached GET adds the block that it finds.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use farside_layout::BlockAddress;

use crate::shared_word::SharedWord;

/// The maximum number of addresses that a session keeps.
pub const REPORTS_MAX: usize = 4096;

/// A ring of addresses. One thread adds to it, and one takes from it.
struct Ring<W> {
    /// The addresses, by their number modulo the length, which is a power of two.
    addresses: Box<[W]>,
    /// The number of addresses that were added, modulo 2^32. Only the adding thread writes it.
    added: W,
    /// The value of `added` up to which addresses were taken. Only the taking thread uses it.
    taken: W,
}

impl<W: SharedWord> Ring<W> {
    fn new(length: usize, word: impl Fn() -> W) -> Self {
        debug_assert!(length.is_power_of_two());
        let addresses = (0..length).map(|_| word()).collect();
        Self { addresses, added: word(), taken: word() }
    }

    fn at(&self, number: u32) -> &W {
        &self.addresses[number as usize & (self.addresses.len() - 1)]
    }

    fn add(&self, address: u32) {
        let added = self.added.load(Ordering::Relaxed);
        self.at(added).store(address, Ordering::Relaxed);
        // Release: a thread that sees the count also sees the address.
        self.added.store(added.wrapping_add(1), Ordering::Release);
    }

    /// Takes the newest addresses, at most `max` of them. Older ones are lost.
    ///
    /// An address that is added meanwhile may be taken in place of the one that it overwrites, and
    /// once more later.
    fn take(&self, max: usize) -> impl Iterator<Item = u32> {
        let added = self.added.load(Ordering::Acquire);
        let new = added.wrapping_sub(self.taken.load(Ordering::Relaxed)) as usize;
        self.taken.store(added, Ordering::Relaxed);
        let count = new.min(max).min(self.addresses.len()) as u32;
        let numbers = (1..=count).rev().map(move |before| added.wrapping_sub(before));
        numbers.map(|number| self.at(number).load(Ordering::Relaxed))
    }
}

/// The blocks that a session has read lately, shared with the control thread.
#[derive(Default)]
pub struct ReadReports(OnceLock<Ring<AtomicU32>>);

impl ReadReports {
    /// Notes that this block was read, if the server wants to know. Only for the session's thread.
    pub(crate) fn add(&self, block: BlockAddress) {
        if let Some(ring) = self.0.get() {
            ring.add(block.0);
        }
    }

    /// Whether the server wants to know which blocks are read.
    #[inline]
    pub(crate) fn are_wanted(&self) -> bool {
        self.0.get().is_some()
    }

    /// Appends the blocks that were read last since the last call, at most `max` of them. From the
    /// first call on, reads are noted. Only for the control thread.
    pub fn take(&self, max: usize, into: &mut Vec<BlockAddress>) {
        let ring = self.0.get_or_init(|| Ring::new(REPORTS_MAX, AtomicU32::default));
        into.extend(ring.take(max).map(BlockAddress));
    }
}

#[cfg(test)]
mod tests;
