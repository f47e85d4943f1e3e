//! The times at which cached locations were proved, for all threads that share a cache.
//!
//! An entry has room only for a *stamp*: the time from a base to the proof. The base moves now and
//! then. A thread that sleeps for an hour between two steps must not make an old proof look like
//! a new one. A compare-and-swap would rely on a word that has recurred (invariant I4).
//!
//! So a writer locks an entry before it reads the base for the stamp. A thread that moves the base
//! first gives the new base to writers, then rewrites the stamp in every cell, then gives the new
//! base to readers. Meanwhile an entry with a new stamp looks older to readers than it is, which
//! costs only round trips. If a cell stays locked, readers keep the old base until the next
//! attempt.

use std::sync::atomic::{AtomicU64, Ordering};

use farside_fabric::Nanos;
use portable_atomic::AtomicU128;

use super::entry::PackedLocation;
use super::proof_time_base::{ProofTimeBase, UNIT_SHIFT_MIN, UNITS_KEPT, UNITS_PER_PROOF};

/// The memory of one entry. Generic, so that loom can run the same code on its own atomics.
pub(super) trait CacheCell {
    fn load(&self, order: Ordering) -> u128;
    fn store(&self, bits: u128, order: Ordering);
    /// Compare-and-swap from `known` to `bits`. Returns whether it succeeded.
    fn swap(&self, known: u128, bits: u128) -> bool;
    /// The maximum number of pauses while a cell is locked.
    const PAUSES_MAX: u32;
    fn pause();
}

impl CacheCell for AtomicU128 {
    #[inline]
    fn load(&self, order: Ordering) -> u128 {
        self.load(order)
    }

    #[inline]
    fn store(&self, bits: u128, order: Ordering) {
        self.store(bits, order);
    }

    #[inline]
    fn swap(&self, known: u128, bits: u128) -> bool {
        self.compare_exchange(known, bits, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// A lock lasts for a few instructions. Only a thread that is stopped within them holds it for
    /// longer than this many pauses.
    const PAUSES_MAX: u32 = 1000;

    fn pause() {
        std::thread::yield_now();
    }
}

/// The memory of a base, in units of time.
pub(super) trait Base {
    fn load(&self, order: Ordering) -> u64;
    fn store(&self, units: u64, order: Ordering);
}

impl Base for AtomicU64 {
    #[inline]
    fn load(&self, order: Ordering) -> u64 {
        self.load(order)
    }

    #[inline]
    fn store(&self, units: u64, order: Ordering) {
        self.store(units, order);
    }
}

/// Returns the entry of a cell. Acquire: the caller then sees all that the writer of the entry saw,
/// among it the block that the entry leads to.
#[inline]
pub(super) fn entry<P: CacheCell>(cell: &P) -> PackedLocation {
    PackedLocation::from_bits(cell.load(Ordering::Acquire))
}

/// Replaces an entry, unless it is locked or not `known` any more. Returns whether it did.
#[inline]
fn swap<P: CacheCell>(cell: &P, known: PackedLocation, new: PackedLocation) -> bool {
    !known.is_locked() && cell.swap(known.bits(), new.bits())
}

/// Locks an entry for this thread, unless it is locked or not `known` any more.
#[inline]
fn lock<P: CacheCell>(cell: &P, known: PackedLocation) -> bool {
    swap(cell, known, known.locked())
}

/// Removes an entry, unless it is locked or not `known` any more.
#[inline]
pub(super) fn empty<P: CacheCell>(cell: &P, known: PackedLocation) -> bool {
    swap(cell, known, PackedLocation::default())
}

/// Reduces an entry's stamp by `passed` units. Returns false if the entry stays locked.
///
/// An empty cell is swapped as well, although its value stays the same: a thread that locks it
/// later then sees the new base, which this thread stored before.
fn age_entry<P: CacheCell>(cell: &P, passed: u64) -> bool {
    (0..P::PAUSES_MAX).any(|_| {
        let known = entry(cell);
        let is_aged = swap(cell, known, known.stamped(known.stamp().saturating_sub(passed)));
        if !is_aged {
            P::pause();
        }
        is_aged
    })
}

/// The bases by which the stamps of a cache are written and read.
pub(super) struct ProofClock<B> {
    /// Log2 of a unit in nanoseconds.
    unit_shift: u32,
    /// The base for the stamps of new entries.
    writers: B,
    /// The base by which stamps are read.
    readers: B,
}

impl ProofClock<AtomicU64> {
    /// A clock for proofs that are good for `proof_ns`.
    pub(super) fn new(proof_ns: Nanos, now: Nanos) -> Self {
        let unit_shift = (proof_ns / UNITS_PER_PROOF).max(1).ilog2().max(UNIT_SHIFT_MIN);
        let base = || AtomicU64::new(now >> unit_shift);
        Self { unit_shift, writers: base(), readers: base() }
    }
}

impl<B: Base> ProofClock<B> {
    #[inline]
    fn time_base(&self, base: u64) -> ProofTimeBase {
        ProofTimeBase { unit_shift: self.unit_shift, base }
    }

    /// The base for entries that are loaded after this call. By this base no entry looks newer than
    /// it is.
    #[inline]
    pub(super) fn for_reading(&self) -> ProofTimeBase {
        self.time_base(self.readers.load(Ordering::Acquire))
    }

    /// Whether the stamp of a proof at `at` would be later than that of one at `before`.
    #[inline]
    pub(super) fn is_later(&self, at: Nanos, before: Nanos) -> bool {
        at >> self.unit_shift > before >> self.unit_shift
    }

    /// The base for the stamp of an entry that this thread has locked.
    #[inline]
    fn for_writing(&self) -> ProofTimeBase {
        self.time_base(self.writers.load(Ordering::Relaxed))
    }

    /// Whether the base is too old for a proof at `at`, and no thread tried to move it lately.
    #[inline]
    pub(super) fn needs_rebase(&self, at: Nanos) -> bool {
        self.for_reading().since_base(at) > ProofTimeBase::STAMP_MAX
            && self.for_writing().since_base(at) > UNITS_KEPT + 1
    }

    /// Replaces an entry by one that was proved at `at`, unless another thread has it locked or has
    /// changed it. Returns whether it did.
    #[inline]
    pub(super) fn replace<P: CacheCell>(
        &self,
        cell: &P,
        known: PackedLocation,
        new: PackedLocation,
        at: Nanos,
    ) -> bool {
        if !lock(cell, known) {
            return false;
        }
        let stamp = self.for_writing().stamp(at);
        cell.store(new.stamped(stamp).bits(), Ordering::Release);
        true
    }

    /// Moves the base, and rewrites all cells, which have an entry or may get one. One thread calls
    /// this at a time.
    ///
    /// An entry that has a stamp of the new base already looks older than it is afterwards. Other
    /// threads write such entries during the pass, and after an attempt that failed.
    pub(super) fn rebase<'p, P: CacheCell + 'p>(
        &self,
        now: Nanos,
        mut cells: impl Iterator<Item = &'p P>,
    ) {
        let before = self.for_reading();
        let later = before.later(now);
        self.writers.store(later.base, Ordering::Relaxed);
        if cells.all(|cell| age_entry(cell, later.base - before.base)) {
            self.readers.store(later.base, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests;
