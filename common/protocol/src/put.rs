//! PUT, UPDATE and INSERT: the choice of the chain that stores a value.

use farside_fabric::{Fabric, Nanos};

use super::insert::{BlindInsert, Condition, Inserted};
use super::swing::{BlockFate, NewBlock, SwingResult};
use super::window::{BlockRead, KeyLookup, ObservedWindow};
use super::{Answer, ExaminedBlock, Operation, ProtocolResult, ProvenSlot, RetryState, is_moving};
use crate::Lifetime;

/// The number of attempts in which an INSERT waits for unfinished INSERTs to leave slots of a full
/// window. After these attempts it requests a split of the subtable.
const UNDECIDED_ATTEMPTS: u32 = 8;

/// The result of a store at the cached location.
enum CachedSwing {
    Done,
    /// Another session has replaced the value: this slot has the key.
    Replaced(ProvenSlot),
    /// The location was not cached, or is not the key's any more.
    Unknown,
}

impl<F: Fabric> Operation<'_, F> {
    /// Stores the value, whether or not the key is present. One round trip if the key's location is
    /// cached; two if not; three for a new key, or if another session replaced a cached value.
    pub async fn put(&self, lifetime: Lifetime) -> ProtocolResult<Answer> {
        self.store(Condition::None, lifetime, self.value_bytes).await
    }

    /// Stores the value if the key is present. Round trips as for
    /// `put`, and one more if the old value may expire.
    pub async fn update(&self, lifetime: Lifetime) -> ProtocolResult<Answer> {
        self.store(Condition::Present, lifetime, self.value_bytes).await
    }

    /// Stores the value if the key is absent. Three round trips, or two
    /// where the index has much room. One if the key is present, and one more if its value may
    /// expire.
    pub async fn insert(&self, lifetime: Lifetime) -> ProtocolResult<Answer> {
        self.store(Condition::Absent, lifetime, self.value_bytes).await
    }

    /// Stores the value of this length behind the key in the lane's buffer, if the condition holds.
    /// A store also counts if another PUT has overwritten it at once; then it has no version.
    pub(super) async fn store(
        &self,
        condition: Condition,
        lifetime: Lifetime,
        value_bytes: usize,
    ) -> ProtocolResult<Answer> {
        let taken = self.take_block(value_bytes).await?;
        // Only after the wait for a block, during which other lanes may change the cached location.
        let cached = if condition == Condition::Absent { None } else { self.cached_target() };
        if let Some(target) = &cached {
            self.prefetch(target);
        }
        let new = self.seal_block(taken, value_bytes, lifetime)?;
        let mut condition_held = true;
        let outcome = self.store_block(&new, condition, cached, &mut condition_held).await;
        Ok(match self.release_new_block(&new, outcome)? {
            BlockFate::Linked => Answer::stored(&new),
            BlockFate::Unused => Answer { applied: condition_held, ..Answer::default() },
        })
    }

    async fn store_block(
        &self,
        new: &NewBlock,
        condition: Condition,
        cached: Option<ProvenSlot>,
        condition_held: &mut bool,
    ) -> ProtocolResult<BlockFate> {
        let mut first_lookup = None;
        if condition != Condition::Absent {
            match self.swing_cached(new, condition, cached).await? {
                CachedSwing::Done => return Ok(BlockFate::Linked),
                CachedSwing::Replaced(target) => {
                    first_lookup = Some((target.proved_at, KeyLookup::Present(target)))
                }
                CachedSwing::Unknown => {}
            }
        }
        let (mut damaged, mut tries) = (0, RetryState::default());
        let mut seen = ObservedWindow::unread();
        if condition == Condition::Absent && self.region.may_claim_blindly(self.hash) {
            match self.insert_blindly(new, &mut seen, &mut damaged).await? {
                BlindInsert::Done => return Ok(BlockFate::Linked),
                BlindInsert::LookedUp(lookup) => first_lookup = Some((seen.posted, lookup)),
                BlindInsert::Retry => {}
            }
        }
        loop {
            let (mut seen_at, mut lookup) = match first_lookup.take() {
                Some(first_lookup) => first_lookup,
                None => {
                    let lookup = self.locate(&mut seen, &mut damaged).await?;
                    (seen.posted, lookup)
                }
            };
            if let (KeyLookup::Absent, Condition::None | Condition::Absent) = (&lookup, condition) {
                match self.insert_block(&seen, new, condition).await? {
                    Inserted::Done => return Ok(BlockFate::Linked),
                    Inserted::Present(target, posted) => {
                        (lookup, seen_at) = (KeyLookup::Present(target), posted);
                    }
                    // Look again: an unfinished INSERT may leave its slot EMPTY. The attempts are
                    // limited, because its client may be stopped.
                    Inserted::Undecided if tries.attempts < UNDECIDED_ATTEMPTS => {
                        lookup = KeyLookup::Retry
                    }
                    Inserted::Undecided | Inserted::Full => {
                        if !self.grow(&seen, &mut tries).await? {
                            continue;
                        }
                        lookup = KeyLookup::Retry;
                    }
                    Inserted::Retry => lookup = KeyLookup::Retry,
                    Inserted::Filling => {
                        self.wait_or_grow(&seen, &mut tries).await?;
                        continue;
                    }
                }
            }
            if let KeyLookup::Present(target) = &mut lookup
                && condition != Condition::None
            {
                match self.target_has_expired(target, seen_at).await? {
                    None => lookup = KeyLookup::Retry,
                    // An INSERT found a value, or an UPDATE found an expired one.
                    Some(expired) if expired == (condition == Condition::Present) => {
                        if condition == Condition::Absent {
                            // Blind claims would be in vain for such keys. So the next INSERTs
                            // READ first.
                            self.region.unused_share.set(0);
                        }
                        *condition_held = false;
                        return Ok(BlockFate::Unused);
                    }
                    Some(_) => {}
                }
            }
            match (lookup, condition) {
                (KeyLookup::Absent, _) => {
                    *condition_held = false;
                    return Ok(BlockFate::Unused);
                }
                (KeyLookup::Present(target), _) => {
                    match self.swing_to(&target, new, condition, self.now()).await? {
                        SwingResult::Done => return Ok(BlockFate::Linked),
                        // Overwritten before any GET could see it: this PUT is linearized just
                        // before the one that overwrote it.
                        SwingResult::Lost(found)
                            if condition == Condition::None
                                && self.was_overwritten(&target, found, seen_at) =>
                        {
                            return Ok(BlockFate::Unused);
                        }
                        SwingResult::Lost(_) | SwingResult::Late => {}
                    }
                }
                (KeyLookup::Moving, _) => {
                    self.wait_for_split(&mut tries).await?;
                    continue;
                }
                (KeyLookup::Retry, _) => {}
            }
            self.try_again(&mut tries).await?;
        }
    }

    /// Whether the value of a word from a READ posted at `seen_at` had expired. One round trip if
    /// the word leaves it open, none otherwise. `None` if the READ took too long.
    async fn target_has_expired(
        &self,
        target: &mut ProvenSlot,
        seen_at: Nanos,
    ) -> ProtocolResult<Option<bool>> {
        if target.expires_at_ms.is_none() {
            match self.read_and_examine(target.word, seen_at).await? {
                BlockRead::Examined(ExaminedBlock::Ours(found, header)) => {
                    *target = target.read(&found, header);
                }
                // The hint was exact, so the slot is the key's. A damaged block counts as one
                // without an expiry.
                BlockRead::Examined(_) => {}
                BlockRead::Stale => return Ok(None),
            }
        }
        Ok(Some(self.has_expired(target.expires_at_ms.unwrap_or_default(), seen_at)))
    }

    /// Stores the value at the cached location. One round trip if the location is right; one more
    /// if another session has replaced the value. An UPDATE must not replace an expired value: one
    /// more round trip if the value may expire.
    async fn swing_cached(
        &self,
        new: &NewBlock,
        condition: Condition,
        mut cached: Option<ProvenSlot>,
    ) -> ProtocolResult<CachedSwing> {
        let may_expire = |target: ProvenSlot| target.expires_at_ms.is_none();
        if condition == Condition::Present && cached.is_some_and(may_expire) {
            let located = self.get().await?.and(self.located_target());
            cached = located.filter(|target| !is_moving(target.word));
        }
        let mut replaced = None;
        if let Some(target) = &cached {
            let posted = self.now();
            match self.swing_to(target, new, condition, posted).await? {
                SwingResult::Done => {
                    self.region.lookups.note_hit();
                    return Ok(CachedSwing::Done);
                }
                SwingResult::Lost(found) => {
                    replaced = self.adopt_replacement(target, found, posted).await?
                }
                SwingResult::Late => {}
            }
        }
        self.region.lookups.note_miss();
        Ok(replaced.map_or(CachedSwing::Unknown, CachedSwing::Replaced))
    }

    /// Swings the slot to the new block.
    async fn swing_to(
        &self,
        target: &ProvenSlot,
        new: &NewBlock,
        condition: Condition,
        posted: Nanos,
    ) -> ProtocolResult<SwingResult> {
        let conditional = condition != Condition::None || new.expires();
        let desired = target.word.live(new.block, conditional);
        self.swing(target, Some(new), desired, posted).await
    }
}
