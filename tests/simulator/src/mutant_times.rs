//! Mutants that rely on words that they have not READ, or on constants without a margin.

use farside_fabric::Nanos;
use farside_layout::{SlotState, SlotWord, WORD_GENERATIONS};

use super::mutant::Mutant;
use super::mutant_fabric::{MutantFabric, swaps, window_words};
use super::mutant_inserts::with_incarnation;
use super::region::{hash, keys};

impl Mutant {
    /// Returns the mutant's constants (GRACE, patience, T_hint, T_word). `right` are the
    /// protocol's.
    pub(super) fn constants(self, right: [Nanos; 4], lateness_ns: Nanos) -> [Nanos; 4] {
        let [grace, patience, hint, word] = right;
        match self {
            Self::PatienceWithoutMargin => [grace, grace, hint, word],
            Self::ProofWithoutMargin => {
                [grace, patience, hint, WORD_GENERATIONS * grace - lateness_ns]
            }
            _ => right,
        }
    }
}

impl MutantFabric {
    /// If the slot no longer holds the cached word, shows the found word as EMPTY, so that the
    /// operation READs the window.
    pub(super) fn lose_cached(
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
    pub(super) fn show_another(&mut self, remote: u64, window: &mut [u64]) {
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
