//! Mutants that rely on words that they have not READ, or on constants without a margin.

use farside_fabric::{Nanos, Trust};
use farside_layout::{SlotState, SlotWord, WORD_GENERATIONS};
use farside_protocol::OpenRegion;

use crate::clock::TIMING;
use crate::mutant::Mutant;
use crate::mutant_fabric::inserts::with_incarnation;
use crate::mutant_fabric::{MutantFabric, swaps, window_words};
use crate::region::{hash, keys};

impl Mutant {
    /// Changes the constants of a session. Returns whether they differ now.
    pub(crate) fn change_constants(self, region: &mut OpenRegion) -> bool {
        if self == Self::TrustIgnored {
            region.trust = Trust::forever();
        }
        let constants = &mut region.constants;
        let grace = constants.grace_ns;
        let (constant, value) = match self {
            Self::PatienceWithoutEnd => (&mut constants.patience_ns, Nanos::MAX),
            Self::PatienceWithoutMargin => (&mut constants.patience_ns, grace),
            Self::ProofWithoutMargin => {
                (&mut constants.proof_age_ns_max, WORD_GENERATIONS * grace - TIMING.lateness_max_ns)
            }
            _ => return false,
        };
        std::mem::replace(constant, value) != value
    }
}

impl MutantFabric {
    /// If the slot no longer holds the cached word, shows the found word as EMPTY, so that the
    /// operation READs the window.
    pub(crate) fn lose_cached(
        &mut self,
        (slot, expected, desired): (u64, u64, u64),
        found: &mut u64,
    ) {
        let lost = swaps(expected, desired, SlotState::Live, SlotState::Live) && *found != expected;
        if matches!(self.mutant, Mutant::AbsorbedUnread(_)) && lost && self.words.is_empty() {
            self.words.insert(slot, (*found, expected));
            *found = SlotWord::from_bits(*found).emptied().bits();
        }
    }

    /// Shows the word in this window with another incarnation number. A word of the same
    /// incarnation would count as a later value anyway.
    pub(crate) fn show_another(&mut self, remote: u64, window: &mut [u64]) {
        let Mutant::AbsorbedUnread(key) = self.mutant else { return };
        for at in window_words() {
            let word = SlotWord::from_bits(window[at]);
            if word.state() == SlotState::Live
                && self.words.get(&(remote + at as u64 * 8)).is_some_and(|(real, _)| *real != 0)
            {
                let other = word.incarnation() ^ 1;
                window[at] = with_incarnation(window[at], other);
                window[at + 1] = hash(&keys()[key]).hint(other);
                // Only the first READ shows it.
                self.words.insert(remote + at as u64 * 8, (0, 0));
            }
        }
    }
}
