//! Operations that depend on the key's present value: exchange, increment, append, touch, take, and
//! DELETE by version.
//!
//! All are one loop: a GET finds the value and proves its slot, and a swing replaces exactly the
//! word that led to it. If another client changed the word meanwhile, the swing fails and the loop
//! starts again. So the change takes effect at the CAS, on the value that the GET found (invariant
//! I4). The new word is conditional, so that no PUT counts as overwritten by it (invariant I23).
//!
//! | [`Change`] | present | absent, with `creates` |
//! |---|---|---|
//! | `Store` | the staged value, if the condition holds | the staged value |
//! | `Add` | the number in the value, plus another one | the other number |
//! | `Append` | the value, then the staged value | the staged value |
//! | `Retain` | the same value and pin, with another lifetime | |
//! | `Remove` | nothing: the key is absent afterwards, if the condition holds | |
//! | `Leave` | no change: the value is only returned | the staged value |
//! | `Refuse` | the same, but the INSERT comes before the GET | the staged value |

use std::io::Write;

use farside_fabric::{Buffer, Fabric};
use farside_layout::BlockHeader;
use zerocopy::FromBytes;

use super::insert::Condition;
use super::swing::SwingResult;
use super::{
    ATTEMPTS_MAX, Answer, Found, Operation, ProtocolResult, ProvenSlot, RetryState, is_moving,
};
use crate::image::{Image, image_behind};
use crate::new_block::BlockFate;
use crate::{Change, Expected, Lifetime, Modification, OperationError};

/// The longest decimal number of 64 bits with a sign, in bytes.
const NUMBER_BYTES_MAX: usize = 20;
/// How many bytes are copied at once from one buffer of the lane to the other.
const COPY_BYTES: usize = 256;

impl<F: Fabric> Operation<'_, F> {
    /// Performs the modification. A value that it returns is in [`Buffer::ReadBlock`]. One round
    /// trip more than a GET. If the key is absent:
    /// the round trips of an INSERT after those of the GET, or none.
    pub async fn modify(&self, modification: Modification<'_>) -> ProtocolResult<Answer> {
        let Modification { change, creates, lifetime, returns } = modification;
        let (mut tries, mut inserts_refused) = (RetryState::default(), 0);
        // The others need not see the value's extents.
        let reads_value = returns
            || matches!(
                change,
                Change::Add(_)
                    | Change::Append
                    | Change::Retain
                    | Change::Store(Some(Expected::Value(_)))
            );
        let mut found = match change {
            Change::Refuse => None,
            _ if reads_value => self.get().await?,
            _ => self.find().await?,
        };
        loop {
            let Some((present, target)) = found.zip(self.located_target()) else {
                if !creates {
                    return Ok(Answer::default());
                }
                let (image, number) = self.make_image(change, None)?;
                let inserted = self.store(Condition::Absent, lifetime, image).await?;
                if inserted.applied {
                    return Ok(Answer { number, ..inserted });
                }
                // The key was present at the INSERT, so this needs no pause before the GET.
                inserts_refused += 1;
                if inserts_refused == ATTEMPTS_MAX {
                    return Err(self.contended());
                }
                found = self.get().await?;
                continue;
            };
            if self.leaves(change, &present) {
                let (version, found) = (Some(present.version), returns.then_some(present));
                return Ok(Answer { version, found, ..Answer::default() });
            }
            if is_moving(target.word) {
                self.wait_for_split(&mut tries).await?;
            } else {
                // The expiry is known, so no chain has to READ the block again.
                let target = ProvenSlot { expires_at_ms: Some(present.expires_at_ms), ..target };
                let modified = match change {
                    Change::Remove(_) => self.remove(&target).await?,
                    _ => {
                        let (image, number) = self.make_image(change, Some(&present))?;
                        let keeps_pin = lifetime.is_kept() || matches!(change, Change::Retain);
                        let is_pinned = lifetime.is_pinned || keeps_pin && self.found_is_pinned();
                        let lifetime = lifetime.after(present.expires_at_ms).pinned(is_pinned);
                        let stored = self.replace(&target, image, lifetime).await?;
                        stored.map(|stored| Answer { number, ..stored })
                    }
                };
                if let Some(modified) = modified {
                    return Ok(Answer { found: returns.then_some(present), ..modified });
                }
                self.try_again(&mut tries).await?;
            }
            // This GET goes by the window, because another session may have cached the location by
            // an older directory.
            found = if reads_value { self.get_again().await? } else { self.get_uncached().await? };
        }
    }

    /// Whether a present value stays as it is.
    fn leaves(&self, change: Change<'_>, present: &Found) -> bool {
        match change {
            Change::Leave | Change::Refuse => true,
            Change::Store(Some(Expected::Version(version))) | Change::Remove(Some(version)) => {
                present.version != version
            }
            Change::Store(Some(Expected::Value(value))) => {
                let block = self.engine.endpoint.buffer(self.lane, Buffer::ReadBlock);
                present.value_in(&block) != value
            }
            _ => false,
        }
    }

    /// Unlinks the block. Returns `None` if another client changed the slot.
    async fn remove(&self, target: &ProvenSlot) -> ProtocolResult<Option<Answer>> {
        let removed = self.swing(target, None, target.word.emptied(), self.now()).await?;
        let is_done = matches!(removed, SwingResult::Done);
        Ok(is_done.then_some(Answer { applied: true, ..Answer::default() }))
    }

    /// Stores the value of this image in place of the target's. Returns `None` if another client
    /// changed the slot.
    async fn replace(
        &self,
        target: &ProvenSlot,
        image: Image,
        lifetime: Lifetime,
    ) -> ProtocolResult<Option<Answer>> {
        let (taken, image) = self.take_block(image, lifetime).await?;
        let new = self.seal_block(taken, image, lifetime)?;
        // Conditional also because the value may have a TTL (invariant I19).
        let desired = target.word.live(*new.block, true);
        let swung = self.swing(target, Some(&new), desired, self.now()).await;
        let outcome = swung.map(|result| match result {
            SwingResult::Done => BlockFate::Linked,
            SwingResult::Lost(_) | SwingResult::Late => BlockFate::Unused,
        });
        let linked = self.release_new_block(&new, outcome)? == BlockFate::Linked;
        Ok(linked.then(|| Answer::stored(Some(new.version()))))
    }

    /// Returns the image of the new value, and the number that the value stands for. A value that
    /// depends on the present one is assembled behind the input, which stays as it is: the
    /// operation may be run again (invariant I28).
    fn make_image(
        &self,
        change: Change<'_>,
        present: Option<&Found>,
    ) -> ProtocolResult<(Image, i64)> {
        Ok(match (change, present) {
            (Change::Add(addend), _) => {
                let number = present.map_or(Ok(0), |present| self.number_in(present))?;
                let number = number.checked_add(addend).ok_or(OperationError::NumberOverflow)?;
                let (text, bytes) = digits(number);
                let image = self.image_behind_input(bytes)?;
                self.fill_image(image, 0, &text[..bytes]);
                (image, number)
            }
            (Change::Append, Some(present)) => (self.append_to(present, self.value_bytes)?, 0),
            (Change::Retain, Some(present)) => (self.append_to(present, 0)?, 0),
            _ => (self.input(), 0),
        })
    }

    /// Begins the image of a value of this length behind the input.
    fn image_behind_input(&self, value_bytes: usize) -> ProtocolResult<Image> {
        self.region.check_value_bytes(value_bytes)?;
        let image = Image { at: image_behind(self.input_end()), value_bytes };
        let bytes = self.key_end() + value_bytes;
        let mut fabric = self.engine.endpoint.fabric_mut();
        fabric.reserve(self.lane, Buffer::NewBlock, image.at + bytes);
        self.begin_image(&mut *fabric, self.lane, image.at, bytes)?;
        Ok(image)
    }

    /// Returns the image of the value that a GET found, followed by the first bytes of the input's.
    fn append_to(&self, found: &Found, input_bytes: usize) -> ProtocolResult<Image> {
        let found_bytes = found.value_bytes as usize;
        let image = self.image_behind_input(found_bytes + input_bytes)?;
        let value_start = found.value_start as usize;
        self.copy_to(image, 0, (Buffer::ReadBlock, value_start, found_bytes));
        self.copy_to(image, found_bytes, (Buffer::NewBlock, self.key_end(), input_bytes));
        Ok(image)
    }

    /// Copies bytes of a buffer to an image's value, behind its first `start` bytes.
    fn copy_to(&self, image: Image, start: usize, (buffer, from, bytes): (Buffer, usize, usize)) {
        let mut part = [0; COPY_BYTES];
        for done in (0..bytes).step_by(COPY_BYTES) {
            let part = &mut part[..COPY_BYTES.min(bytes - done)];
            {
                let source = self.engine.endpoint.buffer(self.lane, buffer);
                part.copy_from_slice(&source[from + done..][..part.len()]);
            }
            self.fill_image(image, start + done, part);
        }
    }

    /// Writes these bytes to an image's value, behind its first `start` bytes.
    fn fill_image(&self, image: Image, start: usize, bytes: &[u8]) {
        let mut fabric = self.engine.endpoint.fabric_mut();
        let image = self.image_mut(&mut *fabric, self.lane, image.at);
        image[self.key_end() + start..][..bytes.len()].copy_from_slice(bytes);
    }

    /// Whether the value that the last GET found is pinned.
    fn found_is_pinned(&self) -> bool {
        let block = self.engine.endpoint.buffer(self.lane, Buffer::ReadBlock);
        BlockHeader::ref_from_prefix(&block).is_ok_and(|(header, _)| header.is_pinned())
    }

    /// Returns the number in a value that a GET found.
    fn number_in(&self, found: &Found) -> ProtocolResult<i64> {
        let block = self.engine.endpoint.buffer(self.lane, Buffer::ReadBlock);
        let value = found.value_in(&block);
        let number = str::from_utf8(value).ok().and_then(|text| text.parse().ok());
        // Only the text that an increment itself would write: no plus sign, no leading zeros.
        number
            .filter(|number| is_text_of(value, *number))
            .ok_or_else(|| OperationError::NotANumber.into())
    }
}

/// Whether these bytes are the number's decimal text.
fn is_text_of(bytes: &[u8], number: i64) -> bool {
    let (text, text_bytes) = digits(number);
    *bytes == text[..text_bytes]
}

/// The number as decimal text, and the text's length in bytes.
fn digits(number: i64) -> ([u8; NUMBER_BYTES_MAX], usize) {
    let mut text = [0; NUMBER_BYTES_MAX];
    let mut rest = text.as_mut_slice();
    // Twenty bytes have room for every number of 64 bits.
    let _ = write!(rest, "{number}");
    let bytes = NUMBER_BYTES_MAX - rest.len();
    (text, bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_in_full() {
        for number in [0, 7, -7, i64::MAX, i64::MIN] {
            let (text, bytes) = digits(number);
            assert_eq!(str::from_utf8(&text[..bytes]), Ok(&*number.to_string()));
        }
    }
}
