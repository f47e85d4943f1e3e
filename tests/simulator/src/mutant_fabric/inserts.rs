//! Mutants of INSERT.

use farside_fabric::{Buffer, Verb};
use farside_layout::hash::NO_HINT;
use farside_layout::{
    FIRST_INCARNATION, HINT_OFFSET, INCARNATION_MAX, INCARNATIONS, SlotState, SlotWord,
};

use crate::clock::TIMING;
use crate::mutant::Mutant;
use crate::mutant_fabric::splits::nothing;
use crate::mutant_fabric::{MutantFabric, swaps};
use crate::region::{hash, keys};

/// Returns the EMPTY word that follows `word` after this number of incarnations.
pub(crate) fn later(word: u64, incarnations: u64) -> u64 {
    let block = SlotWord::default().block().expect("there is a class 0");
    let next = |word: SlotWord, _| word.pending(0, block).emptied();
    (0..incarnations).fold(SlotWord::from_bits(word), next).bits()
}

/// Returns the word with another incarnation number.
pub(crate) fn with_incarnation(word: u64, incarnation: u8) -> u64 {
    word & !SlotWord::empty(INCARNATION_MAX).bits() | SlotWord::empty(incarnation).bits()
}

impl MutantFabric {
    /// Changes a chain that claims this slot by its hint.
    pub(crate) fn post_hint(
        &mut self,
        chain: &mut Vec<Verb>,
        (at, slot, expected): (usize, u64, u64),
    ) {
        match self.mutant {
            Mutant::NoClaim(_) => {
                self.words.insert(slot, (0, 0));
                self.reported = Some(expected);
                chain.remove(at);
            }
            Mutant::LooksTooEarly => chain.swap(at, at + 1),
            _ => {}
        }
    }

    /// Changes a chain with an INSERT's compare-and-swap of a word.
    pub(crate) fn post_insert(
        &mut self,
        chain: &mut Vec<Verb>,
        (at, slot, expected, desired): (usize, u64, u64, u64),
    ) {
        use SlotState::{Aborted, Empty, Live, Pending};
        let is = |from, to| swaps(expected, desired, from, to);
        let swap = |expected, desired| Verb::CompareSwap { remote: slot, expected, desired };
        match self.mutant {
            Mutant::NoClaim(_) if is(Empty, Pending) => {
                self.words.insert(slot, (expected, desired));
                self.reported = Some(expected);
                chain.remove(at);
            }
            Mutant::NoClaim(key) if is(Empty, Live) => {
                let value = hash(&keys()[key]).hint(FIRST_INCARNATION);
                chain.insert(at, Verb::WriteWord { remote: slot + HINT_OFFSET, value });
            }
            Mutant::NoClaim(_) if is(Pending, Live) => {
                let (real, _) = self.words[&slot];
                chain[at] = swap(real, desired);
            }
            Mutant::NoClaim(_) if is(Pending, Empty) || is(Aborted, Empty) => {
                self.reported = Some(expected);
                chain.clear();
                // A chain needs a verb.
                chain.push(Verb::Read { remote: slot, into: Buffer::Window, bytes: 8 });
            }
            Mutant::LooksTooEarly if is(Empty, Pending) => chain.swap(at, at + 1),
            Mutant::NoneAborted if is(Pending, Aborted) || is(Empty, Empty) => {
                self.reported = Some(expected);
                chain[at] = nothing(slot);
            }
            Mutant::HintBeforePending(key) if is(Empty, Pending) => {
                let incarnation = SlotWord::from_bits(desired).incarnation();
                let value = hash(&keys()[key]).hint(incarnation);
                chain.insert(at, Verb::WriteWord { remote: slot + HINT_OFFSET, value });
            }
            Mutant::WithdrawKeepsHint | Mutant::WithdrawOften if is(Pending, Empty) => {
                chain[at] = swap(expected, later(desired, INCARNATIONS - 2));
                self.delay = (INCARNATIONS - 2) * TIMING.round_trip_min_ns;
                if self.mutant == Mutant::WithdrawKeepsHint {
                    chain.remove(at - 1);
                }
            }
            Mutant::FirstIncarnationTwice(_) if is(Empty, Pending) && expected == 0 => {
                self.words.insert(slot, (0, 0));
                chain[at] = swap(expected, with_incarnation(desired, FIRST_INCARNATION));
            }
            Mutant::FirstIncarnationTwice(key) if self.words.contains_key(&slot) => {
                let first = |word| with_incarnation(word, FIRST_INCARNATION);
                chain[at] = swap(first(expected), first(desired));
                if let [Verb::CompareSwap { desired, .. }, _] = &mut chain[..]
                    && *desired != NO_HINT
                {
                    *desired = hash(&keys()[key]).hint(FIRST_INCARNATION);
                }
            }
            _ => {}
        }
    }
}
