//! More subtables: a full one is split into two, and its place is used again.

use farside_control::SplitOutcome;
use farside_fabric::{ChainError, Nanos, boot_time_ns};
use farside_layout::hash::NO_HINT;
use farside_layout::{Format, HINT_OFFSET, SlotState, SlotWord, prefix_of};
use farside_protocol::split::{Split, SplitProgress};

use crate::collect::clear_linked;
use crate::depot::{Depot, RegionAccess};
use crate::error::Damage;
use crate::index::{Index, SubtableImage, places_of};
use crate::own_endpoint::OwnEndpoint;
use crate::rate_limited_warning::warn_rarely;

/// How long the server leaves a split alone that damage kept it from ending.
const STUCK_NS: Nanos = 100_000_000;

impl Index {
    /// Makes room for keys with this directory hash, which found none in a subtable that goes by so
    /// many bits of it; `None` if there is no place for two more, and GRACE brings none.
    pub(crate) fn grow(
        &mut self,
        (directory_hash, local_depth): (u32, u8),
        format: &Format,
        own: &OwnEndpoint,
        depot: &mut Depot,
        memory: &impl RegionAccess,
    ) -> Result<Option<SplitOutcome>, ChainError> {
        match self.try_to_grow((directory_hash, local_depth), format, own, depot, memory) {
            Ok(outcome) => Ok(outcome),
            Err(Damage::Access(error)) => Err(error),
            Err(damage) => {
                warn_rarely!(self.damaged, "cannot split a subtable: {damage}: see kv-cli verify");
                Ok(Some(SplitOutcome::Impossible))
            }
        }
    }

    fn try_to_grow(
        &mut self,
        (directory_hash, local_depth): (u32, u8),
        format: &Format,
        own: &OwnEndpoint,
        depot: &mut Depot,
        memory: &impl RegionAccess,
    ) -> Result<Option<SplitOutcome>, Damage> {
        let (entry, _) = self.subtable_at(prefix_of(directory_hash, self.depth).into())?;
        if entry.local_depth() > local_depth {
            return Ok(Some(SplitOutcome::Done));
        }
        let (old, local_depth) = (entry.offset(), entry.local_depth());
        let is_stuck = self.unfinished.get(&old).is_some_and(|again_at| boot_time_ns() < *again_at);
        if is_stuck || local_depth == self.geometry.directory_depth_max() {
            return Ok(Some(SplitOutcome::Impossible));
        }
        // What follows is written where the rows say: they are looked at as when the server starts.
        let prefix = prefix_of(directory_hash, local_depth);
        let split = match self.check_rows(entry, prefix)? {
            Some(_) if !self.unfinished.contains_key(&old) => {
                return Err(Damage::Row { offset: old });
            }
            Some(begun) => begun,
            // There is room by now, or the client has not looked: it looks again. Else any writer
            // could turn the whole heap into index, which never shrinks, by asking.
            None if !SubtableImage::read(&self.region, old)?.has_full_window() => {
                return Ok(Some(SplitOutcome::Done));
            }
            None => match self.take_pair(format, own, depot, memory)? {
                Some(new) => Split { prefix, local_depth, old, new },
                None if self.has_pair_soon() => return Ok(Some(SplitOutcome::Later)),
                None => return Ok(None),
            },
        };
        let ended = self.run(&split, format, own);
        for place in split.new {
            // A collection's walk may have been here before.
            let image = SubtableImage::read(&self.region, place)?;
            image.slots().for_each(|(_, slot)| clear_linked(depot, slot.word()));
        }
        Ok(Some(ended?))
    }

    /// Splits, from wherever an earlier attempt stopped.
    fn run(
        &mut self,
        split: &Split,
        format: &Format,
        own: &OwnEndpoint,
    ) -> Result<SplitOutcome, ChainError> {
        self.moves += 1;
        // Until it is done, and for ever should the endpoint fail.
        self.unfinished.insert(split.old, Nanos::MAX);
        let (progress, depth) = own.split(split, format, self.depth)?;
        self.depth = depth;
        match progress {
            SplitProgress::Done => {
                self.unfinished.remove(&split.old);
                self.in_use += 1;
                self.splits += 1;
                let grace = Nanos::from(format.grace_ms) * 1_000_000;
                self.resting.push_back((boot_time_ns().saturating_add(grace), split.old));
                Ok(SplitOutcome::Done)
            }
            SplitProgress::Busy => {
                self.unfinished.insert(split.old, 0);
                Ok(SplitOutcome::Later)
            }
            SplitProgress::Stuck { slot } => {
                self.unfinished.insert(split.old, boot_time_ns().saturating_add(STUCK_NS));
                tracing::warn!(
                    "cannot split a subtable: the entry in the slot at offset {slot:#x} is \
                     damaged: see kv-cli verify; deleting its key or storing a new value repairs it"
                );
                Ok(SplitOutcome::Impossible)
            }
        }
    }

    fn take_pair(
        &mut self,
        format: &Format,
        own: &OwnEndpoint,
        depot: &mut Depot,
        memory: &impl RegionAccess,
    ) -> Result<Option<[u64; 2]>, ChainError> {
        if self.free.len() < 2 {
            self.wake(format, own)?;
        }
        if self.free.len() < 2 {
            depot.refresh(boot_time_ns(), memory)?;
        }
        if self.free.len() < 2
            && let Some(chunk) = depot.take_chunk(memory)?
        {
            let places: Vec<u64> = places_of(&self.geometry, chunk).collect();
            for place in &places {
                self.clear(*place)?;
            }
            self.add_chunk(chunk);
            // The lowest on top.
            self.free.extend(places.iter().rev());
        }
        Ok(match self.free[..] {
            [.., second, first] => {
                self.free.truncate(self.free.len() - 2);
                Some([first, second])
            }
            _ => None,
        })
    }

    /// Whether places that have not rested long enough make up a pair. One that has, and is not
    /// free, is not counted: a stopped client may never clear what it left there.
    fn has_pair_soon(&self) -> bool {
        let now = boot_time_ns();
        let soon = self.resting.iter().filter(|(at, _)| *at > now);
        self.free.len() + soon.take(2).count() >= 2
    }

    /// Makes places free that have rested for GRACE (invariant I18). A client that has an
    /// unfinished INSERT in one will still come back to it: then it rests on.
    fn wake(&mut self, format: &Format, own: &OwnEndpoint) -> Result<(), ChainError> {
        let now = boot_time_ns();
        for _ in 0..self.resting.len() {
            let Some((_, place)) = self.resting.pop_front_if(|(at, _)| *at <= now) else { break };
            if own.vacate(place, format)? {
                self.free.push(place);
            } else {
                self.resting.push_back((now, place));
            }
        }
        Ok(())
    }

    /// Makes all words of a place MOVED that nothing leads to and no client uses: with the CPU, for
    /// clients swap words there only once a split has made some EMPTY.
    fn clear(&self, place: u64) -> Result<(), ChainError> {
        for (slot, content) in SubtableImage::read(&self.region, place)?.slots() {
            let word = content.word();
            let unused = SlotWord::default();
            let unused_moved = unused.with_state(SlotState::Moved);
            // A place that is new has slots that were never used (invariant I21).
            let is_unused = [unused, unused_moved].contains(&word);
            if word.state() != SlotState::Moved {
                let moved = if is_unused { unused_moved } else { word.moved() };
                self.region.store(slot, moved.bits())?;
            }
            if !is_unused {
                self.region.store(slot + HINT_OFFSET, NO_HINT)?;
            }
        }
        Ok(())
    }

    /// Before there are clients: ends the splits that a former server began, and clears the places
    /// that are free.
    pub(crate) fn resume(
        &mut self,
        splits: &[Split],
        format: &Format,
        own: &OwnEndpoint,
    ) -> Result<(), Damage> {
        for split in splits {
            // What its clients were inserting is not finished.
            for (slot, content) in SubtableImage::read(&self.region, split.old)?.slots() {
                if matches!(content.word().state(), SlotState::Pending | SlotState::Aborted) {
                    own.clear(slot, content.word())?;
                }
            }
            if self.run(split, format, own)? == SplitOutcome::Done {
                tracing::info!(subtable = split.old, "ended a split that was interrupted");
            }
        }
        // No client has read anything yet.
        self.free.extend(self.resting.drain(..).map(|(_, place)| place));
        for place in &self.free {
            self.clear_free_place(*place)?;
        }
        self.splits = 0;
        Ok(())
    }

    /// A word in a free place that leads to a block is damage: a split makes all words of a place
    /// MOVED or ABORTED before the place is free. No key is lost with it. Nothing leads there, so
    /// no client has found it since, and if its key is stored, it is in the subtable that the
    /// directory leads to. But rows that belong to a subtable say that the directory should lead
    /// there: then the directory is what is damaged, and the keys may be the only ones there are.
    fn clear_free_place(&self, place: u64) -> Result<(), Damage> {
        let image = SubtableImage::read(&self.region, place)?;
        let links = |state| matches!(state, SlotState::Live | SlotState::Frozen | SlotState::Copy);
        let mut linked = image.slots().filter(|(_, slot)| links(slot.word().state()));
        if let Some((slot, _)) = linked.next() {
            if image.is_somebodys() {
                return Err(Damage::Split { slot });
            }
            tracing::warn!(
                words = 1 + linked.count(),
                "cleared damaged words from {slot:#x} on, in a place that no key is looked for"
            );
        }
        Ok(self.clear(place)?)
    }
}
