//! PUT and UPDATE: replacing what is there.

use farside_fabric::{Fabric, Nanos};

use super::insert::{Inserted, Unseen};
use super::swing::{Linked, NewBlock, Swung};
use super::window::{Own, Read, Seen};
use super::{Examined, Operation, Outcome, Target, Tries, is_moving};
use crate::Lifetime;
use crate::allocator::Depot;

/// How often an INSERT looks whether others leave a slot of a full window, before it has the
/// subtable split.
const UNDECIDED_ATTEMPTS: u32 = 8;

/// What a store requires of the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Condition {
    /// Nothing.
    None,
    /// That it is absent.
    Absent,
    /// That it is there.
    Present,
}

/// How an attempt to store where the cache says the key is went.
enum Cached {
    Done,
    /// Another value of the key's was there.
    Replaced(Target),
    /// Nothing was learned.
    Unknown,
}

impl<F: Fabric, D: Depot> Operation<'_, F, D> {
    /// Stores the value, whatever was there: one round trip if the key's location is cached, else
    /// two, three for a new key, or where others replaced a cached value since.
    pub async fn put(&self, lifetime: Lifetime) -> Outcome<()> {
        self.store(Condition::None, lifetime).await.map(|_| ())
    }

    /// Stores the value if the key is there; whether it was. Round trips as for `put`, one more if
    /// the key's value may end some day.
    pub async fn update(&self, lifetime: Lifetime) -> Outcome<bool> {
        self.store(Condition::Present, lifetime).await
    }

    /// Stores the value if the key is absent; whether it was. Two round trips where there is much
    /// room, else three; one if not, one more in that case if the key's value may end some day.
    pub async fn insert(&self, lifetime: Lifetime) -> Outcome<bool> {
        self.store(Condition::Absent, lifetime).await
    }

    /// True if the store happened, or may be said to have.
    async fn store(&self, condition: Condition, lifetime: Lifetime) -> Outcome<bool> {
        let taken = self.take_block().await?;
        // Not before there is a block: while this waits, other lanes change what the cache says.
        let cached = if condition == Condition::Absent { None } else { self.cached_target() };
        if let Some(target) = &cached {
            self.expect(target);
        }
        let new = self.seal_block(taken, lifetime)?;
        let mut met = true;
        let outcome = self.store_block(&new, condition, cached, &mut met).await;
        self.settle(&new, outcome)?;
        Ok(met)
    }

    async fn store_block(
        &self,
        new: &NewBlock,
        condition: Condition,
        cached: Option<Target>,
        met: &mut bool,
    ) -> Outcome<Linked> {
        let mut looked = None;
        if condition != Condition::Absent {
            match self.swing_cached(new, condition, cached).await? {
                Cached::Done => return Ok(Linked::Yes),
                Cached::Replaced(target) => looked = Some((target.proved_at, Own::Here(target))),
                Cached::Unknown => {}
            }
        }
        let (mut damaged, mut tries) = (0, Tries::default());
        let mut seen = Seen::nothing();
        if condition == Condition::Absent && self.engine.expects_room(self.hash) {
            match self.insert_unseen(new, &mut seen, &mut damaged).await? {
                Unseen::Done => return Ok(Linked::Yes),
                Unseen::Looked(own) => looked = Some((seen.posted, own)),
                Unseen::Nothing => {}
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
            if let (Own::Absent, Condition::None | Condition::Absent) = (&own, condition) {
                match self.insert_block(&seen, new, condition).await? {
                    Inserted::Done => return Ok(Linked::Yes),
                    Inserted::Present(target, posted) => {
                        (own, seen_at) = (Own::Here(target), posted);
                    }
                    // What others are in the middle of may end as EMPTY; but they may be asleep.
                    Inserted::Undecided if tries.attempts < UNDECIDED_ATTEMPTS => own = Own::Stale,
                    Inserted::Undecided | Inserted::Full => {
                        if !self.grow(&seen, &mut tries).await? {
                            continue;
                        }
                        own = Own::Stale;
                    }
                    Inserted::Again => own = Own::Stale,
                    Inserted::Filling => {
                        self.wait_or_grow(&seen, &mut tries).await?;
                        continue;
                    }
                }
            }
            if let Own::Here(target) = &mut own
                && condition != Condition::None
            {
                match self.ended(target, seen_at).await? {
                    None => own = Own::Stale,
                    // There is something for INSERT, or nothing for UPDATE.
                    Some(ended) if ended == (condition == Condition::Present) => {
                        if condition == Condition::Absent {
                            self.engine.expect_no_room();
                        }
                        *met = false;
                        return Ok(Linked::No);
                    }
                    Some(_) => {}
                }
            }
            match (own, condition) {
                (Own::Absent, _) => {
                    *met = false;
                    return Ok(Linked::No);
                }
                (Own::Here(target), _) => {
                    match self.swing_to(target, new, condition, self.now()).await? {
                        Swung::Done => return Ok(Linked::Yes),
                        // Overwritten before anybody could see it: linearized just before the PUT
                        // that did it.
                        Swung::Lost(found)
                            if condition == Condition::None
                                && self.was_overwritten(&target, found, seen_at) =>
                        {
                            return Ok(Linked::No);
                        }
                        Swung::Lost(_) | Swung::Late => {}
                    }
                }
                (Own::Moving, _) => {
                    self.wait_for_split(&mut tries).await?;
                    continue;
                }
                (Own::Stale, _) => {}
            }
            self.try_again(&mut tries).await?;
        }
    }

    /// Whether the value of a word that a READ posted at `seen_at` brought had ended; `None` if it
    /// took too long to find out. No round trip; one if only the block can tell.
    async fn ended(&self, target: &mut Target, seen_at: Nanos) -> Outcome<Option<bool>> {
        if target.expires_at_ms.is_none() {
            match self.read_and_examine(target.word, seen_at).await? {
                Read::Examined(Examined::Ours(found, header)) => {
                    *target = target.read(&found, header);
                }
                // The hint was exact, so it is the key's; a damaged block has no end.
                Read::Examined(_) => {}
                Read::Stale => return Ok(None),
            }
        }
        Ok(Some(self.has_ended(target.expires_at_ms.unwrap_or_default(), seen_at)))
    }

    /// What the cache said, if that will do. An UPDATE has to know that the value has not ended:
    /// one round trip if it ends some day.
    async fn cached_for(
        &self,
        condition: Condition,
        cached: Option<Target>,
    ) -> Outcome<Option<Target>> {
        let knows = |target: Target| target.expires_at_ms.is_some();
        if condition == Condition::None || cached.is_none_or(knows) {
            return Ok(cached);
        }
        let located = self.get().await?.and(self.located_target());
        Ok(located.filter(|target| !is_moving(target.word)))
    }

    /// One round trip, if the cache knows where the key is and is right; one more if the value was
    /// replaced since.
    async fn swing_cached(
        &self,
        new: &NewBlock,
        condition: Condition,
        cached: Option<Target>,
    ) -> Outcome<Cached> {
        let mut replaced = None;
        if let Some(target) = self.cached_for(condition, cached).await? {
            let posted = self.now();
            match self.swing_to(target, new, condition, posted).await? {
                Swung::Done => {
                    self.engine.lookups.note_hit();
                    return Ok(Cached::Done);
                }
                Swung::Lost(found) => replaced = self.follow(target, found, posted).await?,
                Swung::Late => {}
            }
        }
        self.engine.lookups.note_miss();
        Ok(replaced.map_or(Cached::Unknown, Cached::Replaced))
    }

    async fn swing_to(
        &self,
        target: Target,
        new: &NewBlock,
        condition: Condition,
        posted: Nanos,
    ) -> Outcome<Swung> {
        let conditional = condition != Condition::None || new.expires();
        let desired = target.word.live(new.block, conditional);
        self.swing(target, Some(new), desired, posted).await
    }
}
