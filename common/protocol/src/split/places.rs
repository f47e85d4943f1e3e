//! Places of subtables that splits have emptied.

use farside_fabric::{ChainError, Fabric, Verb};
use farside_layout::hash::NO_HINT;
use farside_layout::{HINT_OFFSET, SlotState};

use super::chains::Chain;
use super::{SubtableSplitter, slot_offset, swap};

impl<F: Fabric> SubtableSplitter<'_, F> {
    /// Makes a place free that has rested for GRACE since its split ended (invariant I18). False
    /// while a client has an unfinished INSERT in it: that client will come back to it, so it rests
    /// on.
    ///
    /// # Errors
    /// [`ChainError`] when the endpoint does not reach the region any more.
    pub async fn vacate(&self, place: u64) -> Result<bool, ChainError> {
        let slots = self.slots_of(place).await?;
        // Used by now, whatever becomes of them (invariant I21).
        let unclaimed = self.slots.clone().filter(|at| slots[*at].hint() == 0);
        self.all(unclaimed.map(|at| {
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
                    self.batch(&[chain]).await? == [word.bits()]
                }
                _ => false,
            };
        }
        Ok(is_empty)
    }
}
