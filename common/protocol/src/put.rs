//! PUT and UPDATE: replacing what is there.

use farside_fabric::{Fabric, Nanos};

use super::insert::{BlindInsert, Condition, Inserted};
use super::swing::{BlockFate, NewBlock, SwingResult};
use super::window::{BlockRead, KeyLookup, ObservedWindow};
use super::{ExaminedBlock, Operation, ProtocolResult, ProvenSlot, RetryState, is_moving};
use crate::Lifetime;

/// How often an INSERT looks whether others leave a slot of a full window, before it has the
/// subtable split.
const UNDECIDED_ATTEMPTS: u32 = 8;

/// How an attempt to store where the cache says the key is went.
enum Cached {
    Done,
    /// Another value of the key's was there.
    Replaced(ProvenSlot),
    /// Nothing was learned.
    Unknown,
}

impl<F: Fabric> Operation<'_, F> {
    /// Stores the value, whatever was there: one round trip if the key's location is cached, else
    /// two, three for a new key, or where others replaced a cached value since.
    pub async fn put(&self, lifetime: Lifetime) -> ProtocolResult<()> {
        self.store(Condition::None, lifetime).await.map(|_| ())
    }

    /// Stores the value if the key is there; whether it was. Round trips as for `put`, one more if
    /// the key's value may end some day.
    pub async fn update(&self, lifetime: Lifetime) -> ProtocolResult<bool> {
        self.store(Condition::Present, lifetime).await
    }

    /// Stores the value if the key is absent; whether it was. Two round trips where there is much
    /// room, else three; one if not, one more in that case if the key's value may end some day.
    pub async fn insert(&self, lifetime: Lifetime) -> ProtocolResult<bool> {
        self.store(Condition::Absent, lifetime).await
    }

    /// True if the store happened, or may be said to have.
    async fn store(&self, condition: Condition, lifetime: Lifetime) -> ProtocolResult<bool> {
        let taken = self.take_block().await?;
        // Not before there is a block: while this waits, other lanes change what the cache says.
        let cached = if condition == Condition::Absent { None } else { self.cached_target() };
        if let Some(target) = &cached {
            self.prefetch(target);
        }
        let new = self.seal_block(taken, lifetime)?;
        let mut condition_held = true;
        let outcome = self.store_block(&new, condition, cached, &mut condition_held).await;
        self.settle(&new, outcome)?;
        Ok(condition_held)
    }

    async fn store_block(
        &self,
        new: &NewBlock,
        condition: Condition,
        cached: Option<ProvenSlot>,
        condition_held: &mut bool,
    ) -> ProtocolResult<BlockFate> {
        let mut looked = None;
        if condition != Condition::Absent {
            match self.swing_cached(new, condition, cached).await? {
                Cached::Done => return Ok(BlockFate::Linked),
                Cached::Replaced(target) => {
                    looked = Some((target.proved_at, KeyLookup::Here(target)))
                }
                Cached::Unknown => {}
            }
        }
        let (mut damaged, mut tries) = (0, RetryState::default());
        let mut seen = ObservedWindow::nothing();
        if condition == Condition::Absent && self.region.may_claim_blindly(self.hash) {
            match self.insert_blindly(new, &mut seen, &mut damaged).await? {
                BlindInsert::Done => return Ok(BlockFate::Linked),
                BlindInsert::Looked(own) => looked = Some((seen.posted, own)),
                BlindInsert::Nothing => {}
            }
        }
        loop {
            let (mut seen_at, mut own) = match looked.take() {
                Some(looked) => looked,
                None => {
                    let own = self.locate(&mut seen, &mut damaged).await?;
                    (seen.posted, own)
                }
            };
            if let (KeyLookup::Absent, Condition::None | Condition::Absent) = (&own, condition) {
                match self.insert_block(&seen, new, condition).await? {
                    Inserted::Done => return Ok(BlockFate::Linked),
                    Inserted::Present(target, posted) => {
                        (own, seen_at) = (KeyLookup::Here(target), posted);
                    }
                    // What others are in the middle of may end as EMPTY; but they may be asleep.
                    Inserted::Undecided if tries.attempts < UNDECIDED_ATTEMPTS => {
                        own = KeyLookup::Stale
                    }
                    Inserted::Undecided | Inserted::Full => {
                        if !self.grow(&seen, &mut tries).await? {
                            continue;
                        }
                        own = KeyLookup::Stale;
                    }
                    Inserted::Again => own = KeyLookup::Stale,
                    Inserted::Filling => {
                        self.wait_or_grow(&seen, &mut tries).await?;
                        continue;
                    }
                }
            }
            if let KeyLookup::Here(target) = &mut own
                && condition != Condition::None
            {
                match self.ended(target, seen_at).await? {
                    None => own = KeyLookup::Stale,
                    // There is something for INSERT, or nothing for UPDATE.
                    Some(ended) if ended == (condition == Condition::Present) => {
                        if condition == Condition::Absent {
                            self.region.expect_no_room();
                        }
                        *condition_held = false;
                        return Ok(BlockFate::Unused);
                    }
                    Some(_) => {}
                }
            }
            match (own, condition) {
                (KeyLookup::Absent, _) => {
                    *condition_held = false;
                    return Ok(BlockFate::Unused);
                }
                (KeyLookup::Here(target), _) => {
                    match self.swing_to(&target, new, condition, self.now()).await? {
                        SwingResult::Done => return Ok(BlockFate::Linked),
                        // Overwritten before anybody could see it: linearized just before the PUT
                        // that did it.
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
                (KeyLookup::Stale, _) => {}
            }
            self.try_again(&mut tries).await?;
        }
    }

    /// Whether the value of a word that a READ posted at `seen_at` brought had ended; `None` if it
    /// took too long to find out. No round trip; one if only the block can tell.
    async fn ended(&self, target: &mut ProvenSlot, seen_at: Nanos) -> ProtocolResult<Option<bool>> {
        if target.expires_at_ms.is_none() {
            match self.read_and_examine(target.word, seen_at).await? {
                BlockRead::Examined(ExaminedBlock::Ours(found, header)) => {
                    *target = target.read(&found, header);
                }
                // The hint was exact, so it is the key's; a damaged block has no end.
                BlockRead::Examined(_) => {}
                BlockRead::Stale => return Ok(None),
            }
        }
        Ok(Some(self.has_ended(target.expires_at_ms.unwrap_or_default(), seen_at)))
    }

    /// One round trip, if the cache knows where the key is and is right; one more if the value was
    /// replaced since.
    async fn swing_cached(
        &self,
        new: &NewBlock,
        condition: Condition,
        mut cached: Option<ProvenSlot>,
    ) -> ProtocolResult<Cached> {
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
                    return Ok(Cached::Done);
                }
                SwingResult::Lost(found) => {
                    replaced = self.adopt_replacement(target, found, posted).await?
                }
                SwingResult::Late => {}
            }
        }
        self.region.lookups.note_miss();
        Ok(replaced.map_or(Cached::Unknown, Cached::Replaced))
    }

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
