//! GET.

use farside_common::fabric::{Buffer, Fabric, InFlight, Nanos, Verb};
use farside_common::layout::{HeaderWord, SlotState, SlotWord};

use super::window::{Beyond, Read, Seen};
use super::{Examined, Found, Operation, Outcome, Tries, read_block};
use crate::allocator::Depot;
use crate::location_cache::Location;

/// How often a GET looks again at a block that seems damaged, before it says so.
const DAMAGE_ATTEMPTS_MAX: u32 = 3;

/// A READ of the block where the cache says the key is.
#[derive(Clone, Copy, Default)]
pub(crate) struct CachedRead {
    location: Location,
    posted: Nanos,
}

enum Searched {
    Found(Found),
    Absent,
    Again,
}

impl<F: Fabric, D: Depot> Operation<'_, F, D> {
    /// The key's value: one round trip if its location is cached, else two, one if it is absent.
    pub(crate) async fn get(&self) -> Outcome<Option<Found>> {
        if let Some((cached, in_flight)) = self.post_cached()? {
            in_flight.await?;
            if let Some(found) = self.examine_cached(&cached) {
                return Ok(found);
            }
        }
        self.engine.cache().statistics.misses += 1;
        self.get_uncached().await
    }

    /// A value whose end has come is none.
    #[inline]
    fn unless_ended(&self, found: Found, posted: Nanos) -> Option<Found> {
        (!self.has_ended(found.expires_at_s, posted)).then_some(found)
    }

    /// If the cache knows where the key is, READs the block, nothing else. A poisoned block does
    /// not vouch for itself: ask its slot, in the same round trip.
    #[inline]
    pub(crate) fn post_cached(&self) -> Outcome<Option<(CachedRead, InFlight<'_>)>> {
        let Some(location) = self.engine.cache().get(self.hash) else { return Ok(None) };
        let posted = self.now();
        let read_block = read_block(location.word.block()?);
        let in_flight = if location.poisoned {
            let remote = self.window() + u64::from(location.in_window);
            let read_word = Verb::Read { remote, into: Buffer::Window, bytes: 8 };
            self.read(&[read_word, read_block])
        } else {
            self.read(&[read_block])
        };
        Ok(Some((CachedRead { location, posted }, in_flight)))
    }

    /// What a READ by [`Operation::post_cached`] found; `None` if it proves nothing, and what the
    /// cache knew is forgotten.
    #[inline]
    pub(crate) fn examine_cached(&self, read: &CachedRead) -> Option<Option<Found>> {
        let proved = self.prove_cached(read);
        if proved.is_none() {
            self.engine.cache().forget(self.hash);
        }
        proved.map(|found| self.unless_ended(found, read.posted))
    }

    /// The cached generation with a clear mark proves that the block is linked at the moment of the
    /// READ (invariants I2, I10).
    #[inline]
    fn prove_cached(&self, read: &CachedRead) -> Option<Found> {
        let CachedRead { location, posted } = *read;
        if !self.is_fresh(posted) || location.poisoned && self.first_word() != location.word {
            return None;
        }
        let block = location.word.block().ok()?;
        match self.examine(block) {
            Examined::Ours(found, HeaderWord { superseded, generation })
                if generation == location.generation && superseded <= location.poisoned =>
            {
                let mut cache = self.engine.cache();
                cache.statistics.hits += 1;
                cache.prove(self.hash, &location, posted);
                self.located.set(Some((Location { proved_at: posted, ..location }, None)));
                Some(found)
            }
            _ => None,
        }
    }

    /// The first word of the window buffer.
    fn first_word(&self) -> SlotWord {
        let fabric = self.engine.endpoint.fabric();
        let (words, _) = fabric.buffer(self.lane, Buffer::Window).as_chunks();
        SlotWord::from_bits(u64::from_le_bytes(words[0]))
    }

    async fn get_uncached(&self) -> Outcome<Option<Found>> {
        let (mut damaged, mut tries) = (0, Tries::default());
        let mut seen = Seen::nothing();
        loop {
            self.read_window(&mut seen).await?;
            // As often as there are splits of splits under way.
            loop {
                match self.search(&seen, &mut damaged).await? {
                    Searched::Found(found) => return Ok(self.unless_ended(found, seen.posted)),
                    Searched::Again => break,
                    Searched::Absent => match self.beyond(&mut seen).await? {
                        Beyond::Nowhere => return Ok(None),
                        Beyond::Window => {}
                        Beyond::Unknown => break,
                    },
                }
            }
            self.try_again(&mut tries).await?;
        }
    }

    /// READs the block whose hint matches; a hint that does not is another key's (invariant I12).
    /// `superseded` says nothing here: the word was LIVE during this operation. COPY is seen only
    /// where a split has brought the entry, by who found it gone from the old place, and then it
    /// holds what FROZEN held (invariant I15).
    async fn search(&self, seen: &Seen, damaged: &mut u32) -> Outcome<Searched> {
        let states = &[SlotState::Live, SlotState::Frozen, SlotState::Copy];
        for (at, slot) in seen.matching(states) {
            if !self.hint_matches(slot) {
                continue;
            }
            match self.read_and_examine(slot.word(), seen.posted).await? {
                Read::Examined(Examined::Ours(found, header)) => {
                    let location = Location {
                        in_window: Seen::in_window(at) as u16,
                        word: slot.word(),
                        generation: header.generation,
                        poisoned: header.superseded,
                        expires: found.expires_at_s != 0,
                        proved_at: seen.posted,
                    };
                    // Where a split is still filling, the directory does not lead: the entry would
                    // name a slot of the old subtable.
                    if self.window() == seen.base {
                        self.engine.cache().put(self.hash, location);
                    }
                    self.located.set(Some((location, Some(seen.base))));
                    return Ok(Searched::Found(found));
                }
                Read::Examined(Examined::Other) => {}
                Read::Stale => return Ok(Searched::Again),
                Read::Examined(Examined::Damaged(error)) => {
                    *damaged += 1;
                    if *damaged < DAMAGE_ATTEMPTS_MAX {
                        return Ok(Searched::Again);
                    }
                    return Err(error.into());
                }
            }
        }
        Ok(Searched::Absent)
    }
}
