//! The last steps of a split in the new subtables.

use farside_fabric::{ChainError, Fabric};
use farside_layout::{SlotState, SlotWord};

use super::chains::Chain;
use super::{Split, SubtableSplitter, Words, slot_offset, swap};

impl<F: Fabric> SubtableSplitter<'_, F> {
    /// Makes COPY words LIVE whose old slot is MOVED, which an interrupted split can leave.
    pub(super) async fn finish_copies(
        &self,
        split: &Split,
        words: &mut Words,
    ) -> Result<(), ChainError> {
        let mut chains = Vec::new();
        for (subtable, new) in split.new.into_iter().zip(&mut words.new) {
            for (at, word) in new.iter_mut().enumerate() {
                if word.state() == SlotState::Copy && words.old[at].state() == SlotState::Moved {
                    let live = word.with_state(SlotState::Live);
                    chains.push(Chain::of(&[swap(subtable + slot_offset(at), *word, live)]));
                    *word = live;
                }
            }
        }
        self.execute_all(chains.into_iter()).await
    }

    /// Empties the slots to which no entry has moved.
    pub(super) async fn release(&self, split: &Split, words: &Words) -> Result<(), ChainError> {
        let empty_unused = |(subtable, new): (u64, &Vec<SlotWord>)| {
            let unused = |(at, word): &(usize, &SlotWord)| {
                word.state() == SlotState::Moved && self.slots.contains(at)
            };
            let chain = |(at, word): (usize, &SlotWord)| {
                Chain::of(&[swap(subtable + slot_offset(at), *word, word.emptied())])
            };
            new.iter().enumerate().filter(unused).map(chain).collect::<Vec<_>>()
        };
        self.execute_all(split.new.into_iter().zip(&words.new).flat_map(empty_unused)).await
    }
}
