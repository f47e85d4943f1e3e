//! DELETE. It reports whether the key was present, so it never counts as overwritten by a PUT.

use farside_fabric::{Fabric, Nanos};
use farside_layout::{SlotState, SlotWord};

use super::swing::SwingResult;
use super::window::{KeyLookup, ObservedWindow};
use super::{ATTEMPTS_MAX, Operation, ProtocolResult, ProvenSlot, RetryState};

/// The next step of a DELETE whose compare-and-swap found another word.
enum Next {
    /// None: the key was deleted during this operation.
    Absent,
    /// Unlink this word, which replaced the other one and is the key's too.
    Retry(SlotWord),
    /// Read the window again.
    Restart,
}

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
        let mut seen = ObservedWindow::nothing();
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
                KeyLookup::Stale => {}
            }
            self.try_again(&mut tries).await?;
        }
    }

    /// Unlinks a word that this operation READ. `None`: the window has to be read again.
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
                SwingResult::Lost(found) => match self.after_loss(target.word, found, seen_at) {
                    Next::Absent => return Ok(Some(false)),
                    Next::Retry(word) => {
                        target = ProvenSlot::unread(target.slot, word, target.proved_at);
                    }
                    Next::Restart => return Ok(None),
                },
            }
        }
        Ok(None)
    }

    /// Decides what follows a compare-and-swap that found `found` instead of `word`.
    fn after_loss(&self, word: SlotWord, found: SlotWord, seen_at: Nanos) -> Next {
        if !self.is_fresh(seen_at) {
            return Next::Restart;
        }
        let same_incarnation = found.incarnation() == word.incarnation();
        match found.state() {
            // The incarnation that this operation saw LIVE has ended since.
            SlotState::Empty | SlotState::Pending | SlotState::Aborted => Next::Absent,
            SlotState::Live if !same_incarnation => Next::Absent,
            SlotState::Live if self.was_replaced(word, found, seen_at) => Next::Retry(found),
            _ => Next::Restart,
        }
    }

    async fn unlink(&self, target: &ProvenSlot, posted: Nanos) -> ProtocolResult<SwingResult> {
        self.swing(target, None, target.word.emptied(), posted).await
    }
}
