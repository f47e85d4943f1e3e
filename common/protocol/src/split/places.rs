//! Places: the memory of subtables that splits have emptied, which later splits use again.

use farside_fabric::{ChainError, Fabric, Verb};
use farside_layout::hash::NO_HINT;
use farside_layout::{HINT_OFFSET, SlotState};

use super::chains::Chain;
use super::{SubtableSplitter, slot_offset, swap};

impl<F: Fabric> SubtableSplitter<'_, F> {
    /// Prepares a place for another use after it has rested for GRACE since its split (invariant
    /// I18). Returns false if it has to rest on, because a client has an unfinished INSERT there
    /// and will still clear its word.
    ///
    /// # Errors
    /// [`ChainError`] if the endpoint cannot reach the region.
    pub async fn vacate(&self, place: u64) -> Result<bool, ChainError> {
        let slots = self.slots_of(place).await?;
        // A place that is used again has no hint of 0, which an INSERT could claim (invariant I21).
        let unclaimed = self.slots.clone().filter(|at| slots[*at].hint() == 0);
        self.execute_all(unclaimed.map(|at| {
            let remote = place + slot_offset(at) + HINT_OFFSET;
            Chain::of(&[Verb::CompareSwap { remote, expected: 0, desired: NO_HINT }])
        }))
        .await?;
        let mut is_empty = true;
        for at in self.slots.clone() {
            let word = slots[at].word();
            is_empty &= match word.state() {
                SlotState::Moved => true,
                SlotState::Empty => {
                    let chain = Chain::of(&[swap(place + slot_offset(at), word, word.moved())]);
                    self.execute_batch(&[chain]).await? == [word.bits()]
                }
                _ => false,
            };
        }
        Ok(is_empty)
    }
}
