//! Mutants of the split, and of clients beside a split.

use std::collections::HashMap;

use farside_fabric::{Buffer, Verb};
use farside_layout::{
    HINT_OFFSET, ROW_BYTES, ROWS_PER_SUBTABLE, SLOTS_PER_ROW, SUBTABLE_BYTES, SlotState, SlotWord,
    WINDOW_BYTES,
};

use crate::memory::{Memory, mix};
use crate::mutant::Mutant;
use crate::mutant_fabric::{MutantFabric, is_claim, is_window, swap_of, swaps, window_words};

/// The memory of a mutant of a split.
#[derive(Default)]
pub(crate) struct MutantSplitState {
    /// The entry that is being moved: its slot in the old subtable, its LIVE and its FROZEN word.
    entry: Option<(u64, SlotWord, SlotWord)>,
    /// The WRITE of the hint that `HintAfterLive` held back.
    hint: Option<Verb>,
    /// The windows of the two new subtables when the old one's was READ, by their offset.
    windows: HashMap<u64, Vec<u64>>,
}

impl MutantSplitState {
    pub(crate) fn state(&self) -> u64 {
        let hash = |words: &Vec<u64>| words.iter().fold(0, |hash, word| mix(hash, *word));
        self.windows.iter().fold(0, |all, (at, words)| all ^ mix(*at, hash(words)))
    }
}

/// Whether a row header is that of a new subtable that is already filled.
fn is_released(header: u64) -> bool {
    let [local_depth, filling] = [header >> 32, header >> 40].map(|byte| byte as u8);
    local_depth > 0 && filling == 0
}

/// Returns a verb that does nothing.
pub(crate) fn nothing(remote: u64) -> Verb {
    Verb::Read { remote, into: Buffer::NewBlock, bytes: 0 }
}

impl MutantFabric {
    pub(crate) fn post_split(&mut self, chain: &mut Vec<Verb>, memory: &Memory) {
        match self.mutant {
            Mutant::NeverFilling => {
                for verb in chain {
                    if let Verb::WriteWord { remote, value } = verb
                        && remote.is_multiple_of(ROW_BYTES)
                    {
                        *value &= !(0xff << 40);
                    }
                }
            }
            Mutant::NewBeforeOld => self.save_new_windows(chain, memory),
            Mutant::FillsAgain => {
                if let [Verb::Read { remote, bytes, .. }] = &mut chain[..]
                    && u64::from(*bytes) == SUBTABLE_BYTES
                    && (0..ROWS_PER_SUBTABLE as u64)
                        .any(|row| is_released(memory.word_at_offset(*remote + row * ROW_BYTES)))
                {
                    // Shows the old subtable's rows instead, which do not look filled.
                    *remote -= SUBTABLE_BYTES;
                }
            }
            _ => {
                if let Some(swap) = swap_of(chain) {
                    self.post_move(chain, swap, memory);
                }
            }
        }
    }

    fn post_move(
        &mut self,
        chain: &mut Vec<Verb>,
        (at, slot, expected, desired): (usize, u64, u64, u64),
        memory: &Memory,
    ) {
        use SlotState::{Copy, Frozen, Live, Moved};
        let is = |from, to| swaps(expected, desired, from, to);
        let swap = |slot, from: SlotWord, to: SlotWord| Verb::CompareSwap {
            remote: slot,
            expected: from.bits(),
            desired: to.bits(),
        };
        if is(Live, Frozen) {
            let words = [expected, desired].map(SlotWord::from_bits);
            self.split.entry = Some((slot, words[0], words[1]));
        }
        let Some((old, live, frozen)) = self.split.entry else { return };
        match self.mutant {
            Mutant::NotFrozen if is(Live, Frozen) => {
                self.reported = Some(memory.word_at_offset(slot));
                chain[at] = nothing(slot);
            }
            Mutant::NotFrozen if is(Frozen, Moved) => {
                self.reported = Some(expected);
                chain[at] = swap(old, live, live.moved());
            }
            Mutant::MovedBeforeCopy if is(Moved, Copy) => {
                chain.insert(0, swap(old, frozen, frozen.moved()));
            }
            Mutant::MovedBeforeCopy if is(Frozen, Moved) => {
                self.reported = Some(expected);
                chain.truncate(at);
            }
            Mutant::LiveBeforeMoved if is(Frozen, Moved) => {
                let Verb::CompareSwap { remote, .. } = chain[0] else { return };
                let new = remote - HINT_OFFSET;
                let copy = SlotWord::from_bits(memory.word_at_offset(new));
                self.reported = Some(expected);
                chain[at] = swap(new, copy, copy.with_state(Live));
            }
            Mutant::LiveBeforeMoved if is(Copy, Live) => {
                self.reported = Some(expected);
                chain[at] = swap(old, frozen, frozen.moved());
            }
            Mutant::HintAfterLive if is(Frozen, Moved) => self.split.hint = Some(chain.remove(0)),
            Mutant::HintAfterLive if is(Copy, Live) => chain.extend(self.split.hint.take()),
            _ => {}
        }
    }

    /// Saves the windows of the new subtables, which follow the old one, when the old one is READ.
    fn save_new_windows(&mut self, chain: &[Verb], memory: &Memory) {
        let window = |remote| {
            let index = memory.index(remote, WINDOW_BYTES).ok()?;
            Some((remote, memory.slice(index, WINDOW_BYTES as usize / 8).to_vec()))
        };
        match *chain {
            [Verb::Read { remote, .. }] if is_window(&chain[0]) => {
                if !self.split.windows.contains_key(&remote) {
                    let new = [1, 2].map(|n| window(remote + n * SUBTABLE_BYTES));
                    self.split.windows = new.into_iter().flatten().collect();
                }
            }
            _ => self.split.windows.clear(),
        }
    }

    pub(crate) fn complete_split(&mut self, posted_chain: &[Verb], window: &mut [u64]) {
        match (self.mutant, posted_chain) {
            (Mutant::NotFrozen, [Verb::CompareSwap { .. }, Verb::Read { .. }, _]) => {
                if let Some((_, live, frozen)) = self.split.entry
                    && window[0] == live.bits()
                {
                    window[0] = frozen.bits();
                }
            }
            (Mutant::NewBeforeOld, [Verb::Read { remote, .. }]) if is_window(&posted_chain[0]) => {
                if let Some(before) = self.split.windows.remove(remote) {
                    window[..before.len()].copy_from_slice(&before);
                }
            }
            (Mutant::ForwardIgnored, _) if is_claim(posted_chain) => {
                for row in 0..window_words().count() / SLOTS_PER_ROW {
                    window[row * (ROW_BYTES / 8) as usize + 1] = 0;
                }
                for at in window_words() {
                    let word = SlotWord::from_bits(window[at]);
                    if word.state() == SlotState::Moved {
                        window[at] = word.emptied().bits();
                    }
                }
            }
            _ => {}
        }
    }
}
