//! Growth of the index: splits a full subtable into two new subtables, and later reuses its place.

use farside_control::SplitOutcome;
use farside_fabric::{ChainError, Nanos, boot_time_ns};
use farside_layout::hash::NO_HINT;
use farside_layout::{Format, HINT_OFFSET, SlotState, SlotWord, prefix_of};
use farside_protocol::split::{Split, SplitProgress};

use crate::chores::collect::clear_linked;
use crate::chores::depot::{Depot, RegionAccess};
use crate::error::Damage;
use crate::region::index::{Index, SubtableImage, places_of};
use crate::region::own_endpoint::OwnEndpoint;

/// Pause before the server retries a split that found damage.
const STUCK_PAUSE_NS: Nanos = 100_000_000;

impl Index {
    /// Splits the subtable of keys with this directory hash, unless it already uses more than
    /// `local_depth` bits of the hash. Returns `None` if there is no place for two more subtables,
    /// and none that only needs to rest for GRACE.
    pub(crate) fn grow(
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
        // A begun split writes to the places that the rows name. So the rows are checked as at the
        // start of a server.
        let prefix = prefix_of(directory_hash, local_depth);
        let split = match self.check_rows(entry, prefix)? {
            Some(_) if !self.unfinished.contains_key(&old) => {
                return Err(Damage::Row { offset: old });
            }
            Some(begun) => begun,
            // There is room, so the client must retry. Without this check any writer could turn the
            // whole heap into index, which never shrinks, by its requests.
            None if !SubtableImage::read(&self.region, old)?.has_full_window() => {
                return Ok(Some(SplitOutcome::Done));
            }
            None => match self.take_pair(format, own, depot, memory)? {
                Some(new) => Split { prefix, local_depth, old, new },
                None if self.has_pair_soon() => return Ok(Some(SplitOutcome::Later)),
                None => return Ok(None),
            },
        };
        let outcome = self.run(&split, format, own);
        for place in split.new {
            // The walk of a collection may have passed these places before the split filled them.
            let image = SubtableImage::read(&self.region, place)?;
            for (offset, slot) in image.slots() {
                clear_linked(depot, (offset, slot.word()), self)?;
            }
        }
        Ok(Some(outcome?))
    }

    /// Runs a split, or continues it where an earlier attempt stopped.
    fn run(
        &mut self,
        split: &Split,
        format: &Format,
        own: &OwnEndpoint,
    ) -> Result<SplitOutcome, ChainError> {
        self.moves += 1;
        // The entry stays until the split is done. It stays for the life of the server if the
        // endpoint fails.
        self.unfinished.insert(split.old, Nanos::MAX);
        let (progress, depth) = own.split(split, format, self.depth)?;
        self.depth = depth;
        match progress {
            SplitProgress::Done => {
                self.unfinished.remove(&split.old);
                self.in_use += 1;
                self.splits += 1;
                let rested_at = boot_time_ns().saturating_add(format.grace_ns());
                self.resting.push_back((rested_at, split.old));
                Ok(SplitOutcome::Done)
            }
            SplitProgress::Busy => {
                self.unfinished.insert(split.old, 0);
                Ok(SplitOutcome::Later)
            }
            SplitProgress::Stuck { slot } => {
                self.unfinished.insert(split.old, boot_time_ns().saturating_add(STUCK_PAUSE_NS));
                tracing::warn!(
                    "FS-016 cannot split a subtable: the entry in the slot at offset {slot:#x} is \
                     damaged: see kv-cli verify; deleting its key or storing a new value repairs it"
                );
                Ok(SplitOutcome::Impossible)
            }
        }
    }

    /// Takes two free places. If there are fewer, first frees rested places, then takes a chunk.
    fn take_pair(
        &mut self,
        format: &Format,
        own: &OwnEndpoint,
        depot: &mut Depot,
        memory: &impl RegionAccess,
    ) -> Result<Option<[u64; 2]>, ChainError> {
        if self.free.len() < 2 {
            self.free_rested(format, own)?;
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
            // The lowest place is taken first.
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

    /// Whether two places will be free once those that rest have rested for GRACE. A place that has
    /// rested and is still not free does not count: a stopped client may never clear its slots.
    fn has_pair_soon(&self) -> bool {
        let now = boot_time_ns();
        let soon = self.resting.iter().filter(|(at, _)| *at > now);
        self.free.len() + soon.take(2).count() >= 2
    }

    /// Frees the places that have rested for GRACE (invariant I18). A place with an unfinished
    /// INSERT continues to rest, because its client will still change the slot.
    fn free_rested(&mut self, format: &Format, own: &OwnEndpoint) -> Result<(), ChainError> {
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

    /// Makes all words MOVED in a place that no directory entry leads to and no client uses. The
    /// CPU may write here (invariant I11), because clients swap words there only after a split has
    /// made some EMPTY.
    fn clear(&self, place: u64) -> Result<(), ChainError> {
        for (slot, content) in SubtableImage::read(&self.region, place)?.slots() {
            let word = content.word();
            let unused = SlotWord::default();
            let unused_moved = unused.with_state(SlotState::Moved);
            // The slots of a new place were never used (invariant I21).
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

    /// Completes the splits that a former server began, and clears the free places. To be called
    /// only before there are clients.
    pub(crate) fn resume(
        &mut self,
        splits: &[Split],
        format: &Format,
        own: &OwnEndpoint,
    ) -> Result<(), Damage> {
        for split in splits {
            // These INSERTs of former clients will not be finished.
            for (slot, content) in SubtableImage::read(&self.region, split.old)?.slots() {
                if matches!(content.word().state(), SlotState::Pending | SlotState::Aborted) {
                    own.clear(slot, content.word())?;
                }
            }
            if self.run(split, format, own)? == SplitOutcome::Done {
                tracing::info!(subtable = split.old, "ended a split that was interrupted");
            }
        }
        // These places need no rest, because no client has read anything yet.
        self.free.extend(self.resting.drain(..).map(|(_, place)| place));
        for place in &self.free {
            self.clear_free_place(*place)?;
        }
        self.splits = 0;
        Ok(())
    }

    /// Clears a free place, and reports damage. A word there that leads to a block is damaged,
    /// because a split leaves no LIVE, FROZEN or COPY word in its old place.
    ///
    /// Clearing such a word loses no key. The directory does not lead to the place, so a stored key
    /// is in the subtable to which it does lead. But if a row header says that the place is in
    /// use, the directory is damaged, and the place may have the only copy of its keys: an error.
    fn clear_free_place(&self, place: u64) -> Result<(), Damage> {
        let image = SubtableImage::read(&self.region, place)?;
        let is_linked =
            |state| matches!(state, SlotState::Live | SlotState::Frozen | SlotState::Copy);
        let mut linked = image.slots().filter(|(_, slot)| is_linked(slot.word().state()));
        if let Some((slot, _)) = linked.next() {
            if image.has_row_in_use() {
                return Err(Damage::Split { slot });
            }
            tracing::warn!(
                words = 1 + linked.count(),
                "FS-017 cleared damaged words from {slot:#x} on, in a free place, where no client \
                 looks for keys"
            );
        }
        Ok(self.clear(place)?)
    }
}
