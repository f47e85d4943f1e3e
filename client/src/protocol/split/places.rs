//! Places of subtables that splits have emptied.

use farside_common::fabric::{ChainError, Fabric};
use farside_common::layout::SlotState;

use super::chains::Chain;
use super::{Mover, slot_offset, swap};

impl<F: Fabric> Mover<'_, F> {
    /// Makes a place free that has rested for GRACE since its split ended (invariant I18). False
    /// while somebody has an unfinished INSERT in it: he will still come back to it, so it rests
    /// on.
    ///
    /// # Errors
    /// [`ChainError`] when the endpoint does not reach the region any more.
    pub async fn vacate(&self, place: u64) -> Result<bool, ChainError> {
        let words = self.words_of(place).await?;
        let mut is_empty = true;
        for at in self.slots.clone() {
            let word = words[at];
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
