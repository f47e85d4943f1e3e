//! DELETE. It reports whether the key was present, so it never counts as overwritten by a PUT.

use farside_fabric::{Fabric, Nanos};
use farside_layout::SlotState;

use super::swing::SwingResult;
use super::window::{KeyLookup, ObservedWindow};
use super::{ATTEMPTS_MAX, Operation, ProtocolResult, ProvenSlot, RetryState};

impl<F: Fabric> Operation<'_, F> {
    /// Removes the key, and returns whether it was present. One round trip if its location is
    /// cached; two if not; one if the key is absent.
    pub async fn delete(&self) -> ProtocolResult<bool> {
        if let Some(target) = self.cached_target() {
            let posted = self.now();
            if let SwingResult::Done = self.unlink(&target, posted).await? {
                self.region.lookups.note_hit();
                return Ok(self.was_present(&target, posted));
            }
        }
        self.region.lookups.note_miss();
        let (mut damaged, mut tries) = (0, RetryState::default());
        let mut seen = ObservedWindow::unread();
        loop {
            match self.locate(&mut seen, &mut damaged).await? {
                KeyLookup::Absent => return Ok(false),
                KeyLookup::Present(target) => {
                    if let Some(deleted) = self.unlink_seen(target, seen.posted).await? {
                        return Ok(deleted);
                    }
                }
                KeyLookup::Moving => {
                    self.wait_for_split(&mut tries).await?;
                    continue;
                }
                KeyLookup::Retry => {}
            }
            self.try_again(&mut tries).await?;
        }
    }

    /// Unlinks the block of a word that this operation READ. Returns whether the key was present;
    /// `None` if the window has to be READ again.
    async fn unlink_seen(
        &self,
        mut target: ProvenSlot,
        seen_at: Nanos,
    ) -> ProtocolResult<Option<bool>> {
        for _ in 0..ATTEMPTS_MAX {
            let posted = self.now();
            match self.unlink(&target, posted).await? {
                SwingResult::Done => return Ok(Some(self.was_present(&target, posted))),
                SwingResult::Late => return Ok(None),
                SwingResult::Lost(_) if !self.is_fresh(seen_at) => return Ok(None),
                SwingResult::Lost(found) => {
                    let has_new_key = found.incarnation() != target.word.incarnation();
                    match found.state() {
                        // The incarnation that this operation saw LIVE has ended since.
                        SlotState::Empty | SlotState::Pending | SlotState::Aborted => {
                            return Ok(Some(false));
                        }
                        SlotState::Live if has_new_key => return Ok(Some(false)),
                        // Another value of the key.
                        SlotState::Live if self.was_replaced(target.word, found, seen_at) => {
                            target = ProvenSlot::unread(target.slot, found, target.proved_at);
                        }
                        _ => return Ok(None),
                    }
                }
            }
        }
        Ok(None)
    }

    /// Makes the slot EMPTY, which unlinks its block.
    async fn unlink(&self, target: &ProvenSlot, posted: Nanos) -> ProtocolResult<SwingResult> {
        self.swing(target, None, target.word.emptied(), posted).await
    }
}
