//! PUT and UPDATE: replacing what is there.

use farside_common::fabric::Fabric;

use super::insert::Inserted;
use super::swing::{Linked, NewBlock, Swung, absorbs};
use super::window::Own;
use super::{Operation, Outcome, Target, Tries};
use crate::allocator::Depot;

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

impl<F: Fabric, D: Depot> Operation<'_, F, D> {
    /// Stores the value, whatever was there: one round trip if the key's location is cached, else
    /// two, three for a new key.
    pub(crate) async fn put(&self) -> Outcome<()> {
        self.store(Condition::None).await.map(|_| ())
    }

    /// Stores the value if the key is there; whether it was. Round trips as for `put`.
    pub(crate) async fn update(&self) -> Outcome<bool> {
        self.store(Condition::Present).await
    }

    /// Stores the value if the key is absent; whether it was. Three round trips, one if not.
    pub(crate) async fn insert(&self) -> Outcome<bool> {
        self.store(Condition::Absent).await
    }

    /// True if the store happened, or may be said to have.
    async fn store(&self, condition: Condition) -> Outcome<bool> {
        let new = self.new_block().await?;
        let mut met = true;
        let outcome = self.store_block(&new, condition, &mut met).await;
        self.settle(&new, outcome)?;
        Ok(met)
    }

    async fn store_block(
        &self,
        new: &NewBlock,
        condition: Condition,
        met: &mut bool,
    ) -> Outcome<Linked> {
        if condition != Condition::Absent && self.swing_cached(new, condition).await? {
            return Ok(Linked::Yes);
        }
        let (mut damaged, mut tries) = (0, Tries::default());
        loop {
            let (mut own, seen) = self.locate(&mut damaged).await?;
            let mut seen_at = seen.posted;
            if let (Own::Absent, Condition::None | Condition::Absent) = (&own, condition) {
                match self.insert_block(&seen, new, condition).await? {
                    Inserted::Done => return Ok(Linked::Yes),
                    Inserted::Present(target, posted) => {
                        (own, seen_at) = (Own::Here(target), posted);
                    }
                    Inserted::Again => own = Own::Stale,
                    Inserted::Full => {
                        self.grow(&seen).await?;
                        own = Own::Stale;
                    }
                    Inserted::Filling => {
                        self.wait_or_grow(&seen, &mut tries).await?;
                        continue;
                    }
                }
            }
            match (own, condition) {
                (Own::Here(_), Condition::Absent) | (Own::Absent, _) => {
                    *met = false;
                    return Ok(Linked::No);
                }
                (Own::Here(target), _) => {
                    match self.swing_to(target, new, condition).await? {
                        Swung::Done => return Ok(Linked::Yes),
                        // Overwritten before anybody could see it: linearized just before whoever
                        // replaced the word this operation read.
                        Swung::Lost(found)
                            if condition == Condition::None
                                && absorbs(found)
                                && self.is_fresh(seen_at) =>
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

    /// One round trip, if the cache knows where the key is and is right.
    async fn swing_cached(&self, new: &NewBlock, condition: Condition) -> Outcome<bool> {
        if let Some(target) = self.cached_target()
            && let Swung::Done = self.swing_to(target, new, condition).await?
        {
            self.engine.cache().statistics.hits += 1;
            return Ok(true);
        }
        self.engine.cache().statistics.misses += 1;
        Ok(false)
    }

    async fn swing_to(
        &self,
        target: Target,
        new: &NewBlock,
        condition: Condition,
    ) -> Outcome<Swung> {
        let desired = target.word.live(new.block, condition != Condition::None);
        self.swing(target, Some(new), desired).await
    }
}
