//! GET.

use farside_fabric::{Buffer, Fabric, InFlight, Nanos, Verb};
use farside_layout::{BlockAddress, BlockRef, HeaderWord, SizeClass, Slot, SlotState, SlotWord};

use super::window::{BlockRead, ForwardWindow, ObservedWindow};
use super::{ExaminedBlock, Found, Operation, ProtocolResult, RetryState, read_block};
use crate::location_cache::Location;

/// How often a GET looks again at a block that seems damaged, before it says so.
const DAMAGE_ATTEMPTS_MAX: u32 = 3;
/// The largest block, in bytes, that is READ along as a guessed successor. A larger one that is the
/// wrong one would take longer than a round trip.
const SUCCESSOR_BYTES_MAX: u64 = 4096;
const SLOT_BYTES: u32 = size_of::<Slot>() as u32;

/// A READ of the block where the cache says the key is.
#[derive(Clone, Copy, Default)]
pub struct CachedRead {
    location: Location,
    posted: Nanos,
}

/// A block that was to take the place of the one where the cache said the key is.
#[derive(Clone, Copy)]
pub struct Successor {
    /// The slot's byte offset from the start of the key's window.
    in_window: u16,
    address: BlockAddress,
    /// Of the block before it: most likely its own, too.
    class: SizeClass,
}

enum WindowSearch {
    Found(Found),
    Absent,
    Again,
}

impl<F: Fabric> Operation<'_, F> {
    /// The key's value: one round trip if its location is cached, else two, one if it is absent.
    /// Where others replaced the value since: two, mostly, and three READs.
    pub async fn get(&self) -> ProtocolResult<Option<Found>> {
        let mut successor = self.successor;
        if successor.is_none()
            && let Some((cached, in_flight)) = self.post_cached()?
        {
            in_flight.await.map_err(|error| self.failed(error))?;
            if let Some(found) = self.complete_cached_read(&cached) {
                return Ok(found);
            }
            successor = self.successor(&cached);
        }
        self.get_missed(successor).await
    }

    /// The key's value, when what the cache knew led to nothing but this.
    async fn get_missed(&self, successor: Option<Successor>) -> ProtocolResult<Option<Found>> {
        self.region.lookups.note_miss();
        if let Some(successor) = successor
            && let Some((found, posted)) = self.read_successor(successor).await?
        {
            return Ok(self.unless_ended(found, posted));
        }
        self.get_uncached().await
    }

    /// A value whose end has come is none.
    #[inline]
    fn unless_ended(&self, found: Found, posted: Nanos) -> Option<Found> {
        (!self.has_ended(found.expires_at_ms, posted)).then_some(found)
    }

    /// If the cache knows where the key is, READs the block, nothing else. A linked block that has
    /// a mark does not prove that it is linked: ask its slot, in the same round trip.
    #[inline]
    pub fn post_cached(&self) -> ProtocolResult<Option<(CachedRead, InFlight<'_>)>> {
        let Some(location) = self.region.cache.get(self.hash) else { return Ok(None) };
        let posted = self.now();
        let block = location.word.block()?;
        let read_block = super::read_block(block, block.class.unpadded_bytes(location.padding));
        let in_flight = if location.has_stale_mark {
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
    pub fn complete_cached_read(&self, read: &CachedRead) -> Option<Option<Found>> {
        let proved = self.prove_cached(read);
        if proved.is_none() {
            self.region.cache.forget_word(self.hash, read.location.word);
        }
        proved.map(|found| self.unless_ended(found, read.posted))
    }

    /// The cached generation with a clear mark proves that the block is linked at the moment of the
    /// READ (invariants I2, I10).
    #[inline]
    fn prove_cached(&self, read: &CachedRead) -> Option<Found> {
        let CachedRead { location, posted } = *read;
        let word = [location.word.bits()];
        let is_unlinked = || self.first_words(Buffer::Window) != word;
        if !self.is_fresh(posted) || location.has_stale_mark && is_unlinked() {
            return None;
        }
        let block = location.word.block().ok()?;
        match self.examine(block, block.class.unpadded_bytes(location.padding)) {
            ExaminedBlock::Ours(found, HeaderWord { mark, generation })
                if generation == location.generation
                    && (!mark.is_set() || location.has_stale_mark) =>
            {
                self.region.lookups.note_hit();
                self.region.cache.prove(self.hash, &location, posted);
                self.located.set(Some((Location { proved_at: posted, ..location }, None)));
                Some(found)
            }
            _ => None,
        }
    }

    /// What was to take the place of the block that was READ, as far as its mark says.
    #[cold]
    pub fn successor(&self, read: &CachedRead) -> Option<Successor> {
        let CachedRead { location: Location { in_window, word, generation, .. }, .. } = *read;
        let [header] = self.first_words(Buffer::ReadBlock).map(HeaderWord::from_bits);
        let class = word.block().ok()?.class;
        let is_worth_it =
            header.generation == generation && class.block_bytes() <= SUCCESSOR_BYTES_MAX;
        let address = header.mark.successor().filter(|_| is_worth_it)?;
        Some(Successor { in_window, address, class })
    }

    /// READs the slot and, in the same round trip, the block to which it most likely leads; one
    /// more if it leads to another. As with a window, the slot is what is believed, and the block
    /// it names (invariant I22); `None` if it is not this key's, or not any more.
    async fn read_successor(&self, successor: Successor) -> ProtocolResult<Option<(Found, Nanos)>> {
        let Successor { in_window, address, class } = successor;
        let expected = BlockRef { address, class, generation_low: 0 };
        if self.region.geometry.check_block(expected).is_err() {
            return Ok(None);
        }
        let (base, posted) = (self.window(), self.now());
        let remote = base + u64::from(in_window);
        let read_slot = Verb::Read { remote, into: Buffer::Window, bytes: SLOT_BYTES };
        let read_block = read_block(expected, expected.class.block_bytes());
        self.handle().read(self.lane, &[read_slot, read_block]).await?;
        let [word, hint] = self.first_words(Buffer::Window);
        let word = SlotWord::from_bits(word);
        if !matches!(word.state(), SlotState::Live | SlotState::Frozen)
            || !Slot::new(word, hint).is_of(self.hash)
            || !self.is_fresh(posted)
        {
            return Ok(None);
        }
        let block = word.block()?;
        let examined = if (block.address, block.class) == (address, class) {
            self.examine(block, class.block_bytes())
        } else {
            match self.read_and_examine(word, posted).await? {
                BlockRead::Examined(examined) => examined,
                BlockRead::Stale => return Ok(None),
            }
        };
        let ExaminedBlock::Ours(found, header) = examined else { return Ok(None) };
        self.note_found((base, in_window), word, &found, header, posted);
        Ok(Some((found, posted)))
    }

    /// Remembers where a READ posted then found the key: in this slot of the window there.
    fn note_found(
        &self,
        (base, in_window): (u64, u16),
        word: SlotWord,
        found: &Found,
        header: HeaderWord,
        posted: Nanos,
    ) {
        let location = Location {
            in_window,
            word,
            generation: header.generation,
            has_stale_mark: header.mark.is_set(),
            expires: found.expires_at_ms != 0,
            padding: word.block().map_or(0, |block| found.padding(block.class)),
            proved_at: posted,
        };
        // Where a split is still filling, the directory does not lead: the entry would name a slot
        // of the old subtable.
        if self.window() == base {
            self.region.cache.put(self.hash, location);
        }
        self.located.set(Some((location, Some(base))));
    }

    /// The first words of a buffer.
    fn first_words<const N: usize>(&self, buffer: Buffer) -> [u64; N] {
        let fabric = self.engine.endpoint.fabric();
        let (words, _) = fabric.buffer(self.lane, buffer).as_chunks();
        std::array::from_fn(|at| u64::from_le_bytes(words[at]))
    }

    pub(super) async fn get_uncached(&self) -> ProtocolResult<Option<Found>> {
        let (mut damaged, mut tries) = (0, RetryState::default());
        let mut seen = ObservedWindow::nothing();
        loop {
            self.read_window(&mut seen).await?;
            // As often as there are splits of splits under way.
            loop {
                match self.search(&seen, &mut damaged).await? {
                    WindowSearch::Found(found) => return Ok(self.unless_ended(found, seen.posted)),
                    WindowSearch::Again => break,
                    WindowSearch::Absent => match self.read_forward_window(&mut seen).await? {
                        ForwardWindow::Nowhere => return Ok(None),
                        ForwardWindow::Window => {}
                        ForwardWindow::Unknown => break,
                    },
                }
            }
            self.try_again(&mut tries).await?;
        }
    }

    /// READs the block whose hint matches; a hint that does not is another key's (invariant I12).
    /// `superseded` says nothing here: the word was LIVE during this operation. COPY is seen only
    /// where a split has brought the entry, after it was found gone from the old place. Then it
    /// holds what FROZEN held (invariant I15).
    async fn search(
        &self,
        seen: &ObservedWindow,
        damaged: &mut u32,
    ) -> ProtocolResult<WindowSearch> {
        let states = &[SlotState::Live, SlotState::Frozen, SlotState::Copy];
        for (at, slot) in seen.matching(states) {
            if !self.hint_matches(slot) {
                continue;
            }
            match self.read_and_examine(slot.word(), seen.posted).await? {
                BlockRead::Examined(ExaminedBlock::Ours(found, header)) => {
                    let place = (seen.base, ObservedWindow::in_window(at) as u16);
                    self.note_found(place, slot.word(), &found, header, seen.posted);
                    return Ok(WindowSearch::Found(found));
                }
                BlockRead::Examined(ExaminedBlock::Other) => {}
                BlockRead::Stale => return Ok(WindowSearch::Again),
                BlockRead::Examined(ExaminedBlock::Damaged(error)) => {
                    *damaged += 1;
                    if *damaged < DAMAGE_ATTEMPTS_MAX {
                        return Ok(WindowSearch::Again);
                    }
                    return Err(error.into());
                }
            }
        }
        Ok(WindowSearch::Absent)
    }
}
