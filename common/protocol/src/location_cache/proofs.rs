//! When the locations of a cache were proved, for all threads that share it.
//!
//! An entry has room for the time since a base, and the base moves. A thread that sleeps for an
//! hour between two steps must not make an old proof look like a new one. By it a compare-and-swap
//! would rely on a word that came again (invariant I4). So a writer locks an entry before it looks
//! at the base that it writes by, and a thread that moves the base passes by all places. Readers get
//! the new base once no entry is left that goes by the old one. Until then they take what is written
//! by the new one for older than it is, which costs round trips. If a place stays locked, that lasts
//! until the next try.

use std::sync::atomic::{AtomicU64, Ordering};

use farside_fabric::Nanos;
use portable_atomic::AtomicU128;

use super::entry::{PROVED, PackedLocation};

/// Where an entry stands; generic so that loom runs the same code on its own.
pub(super) trait Place {
    fn load(&self, order: Ordering) -> u128;
    fn store(&self, bits: u128, order: Ordering);
    /// Whether `known` stood there, in whose place `bits` is now.
    fn swap(&self, known: u128, bits: u128) -> bool;
    /// How often to wait for a place before it is given up.
    const PAUSES_MAX: u32;
    fn pause();
}

impl Place for AtomicU128 {
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

    /// Longer than the few instructions a lock is for, except in a thread that is stopped in them.
    const PAUSES_MAX: u32 = 1000;

    fn pause() {
        std::thread::yield_now();
    }
}

/// A base, in units.
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

/// The entry that stands there. Its reader sees what its writer saw: the block it leads to.
#[inline]
pub(super) fn entry<P: Place>(place: &P) -> PackedLocation {
    PackedLocation::from_bits(place.load(Ordering::Acquire))
}

/// Replaces an entry that has to be as it is known, and not locked.
#[inline]
fn swap<P: Place>(place: &P, known: PackedLocation, new: PackedLocation) -> bool {
    !known.is_locked() && place.swap(known.bits(), new.bits())
}

/// Takes an entry that has to be as it is known for this thread to replace.
#[inline]
fn lock<P: Place>(place: &P, known: PackedLocation) -> bool {
    swap(place, known, known.locked())
}

/// Removes an entry that has to be as it is known.
#[inline]
pub(super) fn empty<P: Place>(place: &P, known: PackedLocation) -> bool {
    swap(place, known, PackedLocation::default())
}

/// Makes an entry's stamp so much smaller, if there is one; false if it stays locked. Also where
/// there is none the place is changed, by what was there: a thread that locks it later sees what this one
/// did before.
fn age<P: Place>(place: &P, passed: u64) -> bool {
    (0..P::PAUSES_MAX).any(|_| {
        let known = entry(place);
        let is_aged = swap(place, known, known.stamped(known.stamp().saturating_sub(passed)));
        if !is_aged {
            P::pause();
        }
        is_aged
    })
}

/// What stamps mean in a cache.
pub(super) struct ProofClock<B> {
    unit_shift: u32,
    /// The base that entries are written by, and that by which they are read.
    writers: B,
    readers: B,
}

impl ProofClock<AtomicU64> {
    /// For proofs that are good for `proof_ns`.
    pub(super) fn new(proof_ns: Nanos, now: Nanos) -> Self {
        let unit_shift = (proof_ns / UNITS_PER_PROOF).max(1).ilog2().max(UNIT_SHIFT_MIN);
        let base = || AtomicU64::new(now >> unit_shift);
        Self { unit_shift, writers: base(), readers: base() }
    }
}

impl<B: Base> ProofClock<B> {
    #[inline]
    fn by(&self, base: u64) -> ProofTimeBase {
        ProofTimeBase { unit_shift: self.unit_shift, base }
    }

    /// When entries were proved that are loaded from now on, or an earlier time.
    #[inline]
    pub(super) fn for_reading(&self) -> ProofTimeBase {
        self.by(self.readers.load(Ordering::Acquire))
    }

    /// Whether a proof at `at` is worth writing down over one of `before`.
    #[inline]
    pub(super) fn is_later(&self, at: Nanos, before: Nanos) -> bool {
        at >> self.unit_shift > before >> self.unit_shift
    }

    /// How to write an entry that this thread has locked.
    #[inline]
    fn for_writing(&self) -> ProofTimeBase {
        self.by(self.writers.load(Ordering::Relaxed))
    }

    /// Whether the base is too long ago for a proof then, and no thread tried to move it lately.
    #[inline]
    pub(super) fn is_over(&self, at: Nanos) -> bool {
        self.for_reading().since_base(at) > ProofTimeBase::STAMP_MAX
            && self.for_writing().since_base(at) > UNITS_KEPT + 1
    }

    /// Replaces an entry that has to be as it is known by one that was proved at `at`, unless
    /// another thread replaces it at this moment: then that stays.
    #[inline]
    pub(super) fn replace<P: Place>(
        &self,
        place: &P,
        known: PackedLocation,
        new: PackedLocation,
        at: Nanos,
    ) -> bool {
        if !lock(place, known) {
            return false;
        }
        let stamp = self.for_writing().stamp(at);
        place.store(new.stamped(stamp).bits(), Ordering::Release);
        true
    }

    /// Moves the base, one caller at a time, with all places that have an entry or may get one.
    ///
    /// What is written by the new base already, by those who passed this place before, or when the
    /// last try was given up, is taken for older than it is.
    pub(super) fn rebase<'p, P: Place + 'p>(
        &self,
        now: Nanos,
        mut places: impl Iterator<Item = &'p P>,
    ) {
        let before = self.for_reading();
        let later = before.later(now);
        self.writers.store(later.base, Ordering::Relaxed);
        if places.all(|place| age(place, later.base - before.base)) {
            self.readers.store(later.base, Ordering::Release);
        }
    }
}

/// What entries write down instead of the time of a proof: how many units passed between a base
/// and then, and one; 0 for a proof that is too old for anything.
#[derive(Clone, Copy)]
pub(super) struct ProofTimeBase {
    /// Log2 of a unit in nanoseconds.
    unit_shift: u32,
    /// In units.
    base: u64,
}

/// A unit is at most this part of the time a proof is good for ...
pub(super) const UNITS_PER_PROOF: Nanos = 16;
/// ... but at least 134 ms, so that the base lasts for a minute.
pub(super) const UNIT_SHIFT_MIN: u32 = 27;
/// How many of them the base stays behind when it moves.
const UNITS_KEPT: u64 = 4 * UNITS_PER_PROOF;

impl ProofTimeBase {
    /// The largest stamp.
    pub(super) const STAMP_MAX: u64 = PROVED.max();

    /// What an entry proved then writes down, or of a proof before that when the base is too long
    /// ago.
    #[inline]
    pub(super) fn stamp(self, at: Nanos) -> u64 {
        self.since_base(at).min(Self::STAMP_MAX)
    }

    #[inline]
    fn since_base(self, at: Nanos) -> u64 {
        ((at >> self.unit_shift) + 1).saturating_sub(self.base)
    }

    /// When an entry with this stamp was proved, or earlier.
    #[inline]
    pub(super) fn at(self, stamp: u64) -> Nanos {
        if stamp == 0 { 0 } else { (self.base + stamp - 1) << self.unit_shift }
    }

    /// By the last base that all proofs that are still good at `now` can be told by.
    fn later(self, now: Nanos) -> Self {
        let base = (now >> self.unit_shift).saturating_sub(UNITS_KEPT).max(self.base);
        Self { base, ..self }
    }
}

#[cfg(test)]
mod tests;
