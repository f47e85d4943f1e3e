//! Clients that rely on what they have not seen, or on constants without a margin.

use farside_fabric::Nanos;
use farside_layout::{SlotState, SlotWord, WORD_GENERATIONS};

use super::mutant::Mutant;
use super::mutant_fabric::{MutantFabric, swaps, window_words};
use super::mutant_inserts::with_incarnation;
use super::region::{hash, keys};

impl Mutant {
    /// The constants that a client of this mutant goes by (GRACE, patience, T_hint, T_word), if the
    /// right ones are these.
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
    /// The cached word was not there: what was is said to be no key's, so that the operation looks.
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

    /// Where the operation looks it is shown another word of the key's: of another incarnation, for
    /// of the same one it would take what it finds for a later value anyway.
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
                // Once.
                self.words.insert(remote + at as u64 * 8, (0, 0));
            }
        }
    }
}
