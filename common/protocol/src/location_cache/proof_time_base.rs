//! The time of a proof, and the stamp of a few bits that an entry has for it.

use farside_fabric::Nanos;

/// Converts times to stamps and back. A stamp is the number of units from the base to the proof,
/// plus one; 0 is the stamp of a proof that is too old to be used.
#[derive(Clone, Copy)]
pub(super) struct ProofTimeBase {
    /// Log2 of a unit in nanoseconds.
    pub(super) unit_shift: u32,
    /// The base, in units since the clock's start.
    pub(super) base: u64,
}

/// The minimum number of units in the life of a proof, unless [`UNIT_SHIFT_MIN`] makes them longer.
/// A proof loses up to one unit of its life when it is stamped.
pub(super) const UNITS_PER_PROOF: Nanos = 16;
/// Log2 of the shortest unit in nanoseconds: 134 ms, so that a base lasts for a minute.
pub(super) const UNIT_SHIFT_MIN: u32 = 27;
/// The number of units before the present at which a new base is set. Older proofs lose their time.
pub(super) const UNITS_KEPT: u64 = 4 * UNITS_PER_PROOF;

impl ProofTimeBase {
    /// The width of a stamp.
    pub(super) const STAMP_BITS: u32 = 9;
    /// The largest stamp.
    pub(super) const STAMP_MAX: u64 = (1 << Self::STAMP_BITS) - 1;

    /// The stamp of a proof at `at`. If the base is too old, the proof looks older than it is.
    #[inline]
    pub(super) fn stamp(self, at: Nanos) -> u64 {
        self.since_base(at).min(Self::STAMP_MAX)
    }

    #[inline]
    pub(super) fn since_base(self, at: Nanos) -> u64 {
        ((at >> self.unit_shift) + 1).saturating_sub(self.base)
    }

    /// Returns the latest time before `at` with another stamp, unless a proof of that time would be
    /// too old to be used. Then returns `at`.
    pub(super) fn earlier(self, at: Nanos) -> Nanos {
        let unit_began_at = at >> self.unit_shift << self.unit_shift;
        if self.since_base(at) > 1 { unit_began_at.saturating_sub(1) } else { at }
    }

    /// The time of a proof with this stamp, rounded down to a full unit.
    #[inline]
    pub(super) fn at(self, stamp: u64) -> Nanos {
        if stamp == 0 { 0 } else { (self.base + stamp - 1) << self.unit_shift }
    }

    /// Returns the base to use from `now` on. All proofs from before that base are too old to be
    /// used.
    pub(super) fn later(self, now: Nanos) -> Self {
        let base = (now >> self.unit_shift).saturating_sub(UNITS_KEPT).max(self.base);
        Self { base, ..self }
    }
}
