//! The server's view of the index: its subtables and their slots, and the places that are free for
//! splits. Chores walk through it in short steps, so that no client waits long for them.
//!
//! A step ends when its [`Budget`] is spent. The next step continues at the walk's [`Cursor`]. The
//! chore, which calls [`Walk::next`], decides what it does with each slot.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashSet, VecDeque};
use std::fmt::Display;
use std::iter;
use std::sync::Arc;

use farside_fabric::memory::Region;
use farside_fabric::{ChainError, Nanos};
use farside_layout::hash::KeyHash;
use farside_layout::{
    BlockAddress, BlockRef, CHUNK_BYTES, ChunkUse, DirectoryEntry, Geometry, NamedBlock, ROW_BYTES,
    Row, SLOTS_PER_ROW, SLOTS_PER_SUBTABLE, SUBTABLE_BYTES, Slot, SlotState, SlotWord,
    WINDOW_BYTES, Window, slot_offset,
};
use farside_protocol::split::Split;
use zerocopy::{FromBytes, IntoBytes};

use crate::error::Damage;
use crate::rate_limited_warning::{RateLimitedWarning, warn_rarely};
use crate::region::content::{Budget, for_each_extent};

const SUBTABLE_WORDS: usize = (SUBTABLE_BYTES / 8) as usize;

/// The subtables of a region. `splits.rs` adds subtables.
pub(crate) struct Index {
    pub(crate) region: Arc<Region>,
    pub(crate) geometry: Geometry,
    /// How many bits of a hash select an entry of the current directory.
    pub(crate) depth: u8,
    /// All places for subtables, in use or free. The server never removes a place, so a walk by
    /// their numbers misses none.
    pub(crate) places: Vec<u64>,
    /// The chunks of these places.
    chunks: HashSet<u32>,
    /// The number of subtables to which the directory leads.
    pub(crate) in_use: u64,
    /// Places to which no directory entry leads, with all words MOVED.
    pub(crate) free: Vec<u64>,
    /// Places that a split has emptied, each with the time at which clients no longer use what they
    /// read there before.
    pub(crate) resting: VecDeque<(Nanos, u64)>,
    /// Unfinished splits, by their old subtable, each with the time of the next attempt.
    pub(crate) unfinished: BTreeMap<u64, Nanos>,
    /// The number of splits since the server started.
    pub(crate) splits: u64,
    /// How often a split was begun or continued. Each attempt may have moved entries.
    pub(crate) moves: u64,
    /// The warning of a damaged subtable.
    pub(crate) damaged: RateLimitedWarning,
    pub(crate) skipped: SkippedSlots,
}

/// How often the server skipped a slot because its word leads to no block.
#[derive(Default)]
pub(crate) struct SkippedSlots {
    count: Cell<u64>,
    warning: RefCell<RateLimitedWarning>,
}

impl SkippedSlots {
    pub(crate) fn count(&self) -> u64 {
        self.count.get()
    }

    /// Notes that the slot at this offset was skipped. Each walk skips it again.
    pub(crate) fn note(&self, slot: u64, why: impl Display) {
        self.count.set(self.count.get() + 1);
        warn_rarely!(
            self.warning.borrow_mut(),
            "FS-019 skipped the damaged slot at offset {slot:#x}: {why}: see kv-cli verify"
        );
    }
}

/// A copy of a subtable, read once.
pub(crate) struct SubtableImage {
    offset: u64,
    words: Box<[u64; SUBTABLE_WORDS]>,
}

impl Index {
    /// Reads the directory of this depth, and checks the header of every row. Returns the index and
    /// the unfinished splits of a former server.
    pub(crate) fn read(
        region: &Arc<Region>,
        geometry: &Geometry,
        depth: u8,
        uses: &[ChunkUse],
    ) -> Result<(Self, Vec<Split>), Damage> {
        let mut index = Self {
            region: region.clone(),
            geometry: *geometry,
            depth,
            places: Vec::new(),
            chunks: HashSet::new(),
            in_use: 0,
            free: Vec::new(),
            resting: VecDeque::new(),
            unfinished: BTreeMap::new(),
            splits: 0,
            moves: 0,
            damaged: RateLimitedWarning::default(),
            skipped: SkippedSlots::default(),
        };
        for (chunk, _) in
            (0..).zip(uses).filter(|(_, chunk_use)| **chunk_use == ChunkUse::Subtables)
        {
            index.add_chunk(chunk);
        }
        let mut used = HashSet::new();
        let mut splits = Vec::new();
        let mut entry = 0;
        while entry < 1 << depth {
            let (subtable, entries) = index.subtable_at(entry)?;
            let prefix = (entry / entries) as u32;
            let split = index.check_rows(subtable, prefix)?;
            index.check_group(entry, entries, subtable, split.as_ref())?;
            let new = split.iter().flat_map(|split| split.new);
            for place in iter::once(subtable.offset()).chain(new) {
                // A split would overwrite a subtable if two of them used the same place.
                if !used.insert(place) {
                    return Err(Damage::Row { offset: subtable.offset() });
                }
            }
            splits.extend(split);
            index.in_use += 1;
            entry += entries;
        }
        index.free = index.places.iter().copied().filter(|place| !used.contains(place)).collect();
        Ok((index, splits))
    }

    /// Adds the places of a chunk to the index.
    pub(crate) fn add_chunk(&mut self, chunk: u32) {
        self.chunks.insert(chunk);
        self.places.extend(places_of(&self.geometry, chunk));
    }

    fn is_place(&self, offset: u64) -> bool {
        offset.is_multiple_of(SUBTABLE_BYTES)
            && self.geometry.chunk_of(offset).is_some_and(|chunk| self.chunks.contains(&chunk))
    }

    fn entry(&self, entry: u64) -> Result<DirectoryEntry, ChainError> {
        let outside = ChainError::Outside { remote: entry, bytes: 8 };
        let directory = self.geometry.directory_offset(self.depth).ok_or(outside)?;
        Ok(DirectoryEntry::from_bits(self.region.load(directory + entry * 8)?))
    }

    /// Prefetches the directory entry of this hash.
    pub(crate) fn prefetch_entry(&self, hash: KeyHash) {
        if let Some(directory) = self.geometry.directory_offset(self.depth) {
            self.region.prefetch(directory + hash.directory_index(self.depth) * 8, 8);
        }
    }

    /// Prefetches the window of this hash.
    pub(crate) fn prefetch_window(&self, hash: KeyHash) -> Result<(), ChainError> {
        let subtable = self.entry(hash.directory_index(self.depth))?.offset();
        if self.is_place(subtable) {
            self.region.prefetch(subtable + hash.window_offset(), WINDOW_BYTES as u32);
        }
        Ok(())
    }

    /// The block to which the word of a slot leads. `None`, and counted, if there can be none: the
    /// word is damaged.
    pub(crate) fn block_of(&self, slot: u64, word: SlotWord) -> Option<BlockRef> {
        let block = self.geometry.block_of(word);
        block.inspect_err(|why| self.skipped.note(slot, why)).ok()
    }

    /// Returns the slot that leads to this block, and its word, if the key with this hash has it.
    /// `None` also while a split moves the key.
    pub(crate) fn find_linked(
        &self,
        hash: KeyHash,
        block: NamedBlock,
    ) -> Result<Option<(u64, SlotWord)>, ChainError> {
        self.find_live(hash, |found| found == block)
    }

    /// Returns the slot of the key with this hash, and its word, if it leads to a head with the
    /// extent at this address.
    pub(crate) fn find_head(
        &self,
        hash: KeyHash,
        extent: BlockAddress,
    ) -> Result<Option<(u64, SlotWord)>, ChainError> {
        let Some((slot, word)) = self.find_live(hash, |found| found.class.is_head())? else {
            return Ok(None);
        };
        let Some(head) = self.block_of(slot, word) else { return Ok(None) };
        let mut has_extent = false;
        for_each_extent(&self.region, head, |_, named| {
            has_extent |= named.address() == extent;
            Ok::<_, ChainError>(())
        })?;
        Ok(has_extent.then_some((slot, word)))
    }

    /// Returns the slot of the key with this hash, and its word, if it leads to such a block.
    fn find_live(
        &self,
        hash: KeyHash,
        is_wanted: impl Fn(NamedBlock) -> bool,
    ) -> Result<Option<(u64, SlotWord)>, ChainError> {
        let subtable = self.entry(hash.directory_index(self.depth))?.offset();
        if !self.is_place(subtable) {
            return Ok(None);
        }
        let offset = subtable + hash.window_offset();
        let mut words = [0; WINDOW_BYTES as usize / 8];
        self.region.read(offset, &mut words)?;
        let Ok(window) = Window::decode(words.as_bytes()) else { return Ok(None) };
        let slots = window.rows.iter().flat_map(|row| &row.slots).enumerate();
        let is_linked = |slot: &Slot| {
            let word = slot.word();
            word.state() == SlotState::Live
                && word.block().is_ok_and(&is_wanted)
                && slot.is_of(hash)
        };
        let mut found = slots.filter(|(_, slot)| is_linked(slot));
        Ok(found.next().map(|(number, slot)| (offset + slot_offset(number), slot.word())))
    }

    /// Returns a directory entry, and how many entries lead to its subtable. The entry must be the
    /// first of them.
    pub(crate) fn subtable_at(&self, entry: u64) -> Result<(DirectoryEntry, u64), Damage> {
        let first = self.entry(entry)?;
        let offset =
            first.subtable(&self.geometry).map_err(|source| Damage::Directory { entry, source })?;
        if first.local_depth() > self.depth || !self.is_place(offset) {
            return Err(Damage::DirectoryEntry { entry });
        }
        // All entries that share the leading bits of a subtable lead to it.
        let entries = 1u64 << (self.depth - first.local_depth());
        if !entry.is_multiple_of(entries) {
            return Err(Damage::DirectoryEntry { entry });
        }
        Ok((first, entries))
    }

    /// Checks that all entries of a subtable lead to it, or to the new subtables of its split. A
    /// split changes the entries from the last to the first.
    fn check_group(
        &self,
        first: u64,
        entries: u64,
        subtable: DirectoryEntry,
        split: Option<&Split>,
    ) -> Result<(), Damage> {
        for at in 1..entries {
            let bits = self.entry(first + at)?.bits();
            let side = usize::from(2 * at >= entries);
            let moved = split
                .map(|split| DirectoryEntry::new(split.new[side], split.local_depth + 1).bits());
            if bits != subtable.bits() && moved != Some(bits) {
                return Err(Damage::DirectoryEntry { entry: first + at });
            }
        }
        Ok(())
    }

    /// Checks the header of every row of a subtable. Returns its unfinished split, if there is one.
    pub(crate) fn check_rows(
        &self,
        subtable: DirectoryEntry,
        prefix: u32,
    ) -> Result<Option<Split>, Damage> {
        let (old, local_depth) = (subtable.offset(), subtable.local_depth());
        let image = SubtableImage::read(&self.region, old)?;
        let forward = image.forward();
        for (row, offset) in image.rows().iter().zip((old..).step_by(ROW_BYTES as usize)) {
            let header = &row.header;
            let fits_directory = header.prefix.get() == prefix && header.local_depth == local_depth;
            let is_split_target = |new: [u64; 2]| {
                Some(new) == forward && new[0] != new[1] && new.iter().all(|to| self.is_place(*to))
            };
            let is_whole = fits_directory && header.is_valid() && !header.is_filling();
            if !is_whole || !header.forward().is_none_or(is_split_target) {
                return Err(Damage::Row { offset });
            }
        }
        let moved = image.slots().find(|(_, slot)| slot.word().has_moved());
        if let (None, Some((slot, _))) = (forward, moved) {
            return Err(Damage::Split { slot });
        }
        Ok(forward.map(|new| Split { prefix, local_depth, old, new }))
    }
}

/// Returns the places for subtables in a chunk.
pub(crate) fn places_of(geometry: &Geometry, chunk: u32) -> impl Iterator<Item = u64> + use<> {
    let start = geometry.chunk_offset(chunk);
    start
        .into_iter()
        .flat_map(|start| (start..start + CHUNK_BYTES).step_by(SUBTABLE_BYTES as usize))
}

impl SubtableImage {
    pub(crate) fn read(region: &Region, offset: u64) -> Result<Self, ChainError> {
        let mut words = Box::new([0; SUBTABLE_WORDS]);
        region.read(offset, &mut words[..])?;
        Ok(Self { offset, words })
    }

    fn rows(&self) -> &[Row] {
        <[Row]>::ref_from_bytes(self.words.as_bytes()).unwrap_or_default()
    }

    /// Whether a key could find no room, because some window has no EMPTY slot. No window begins at
    /// the last row.
    pub(crate) fn has_full_window(&self) -> bool {
        let is_full =
            |row: &Row| row.slots.iter().all(|slot| slot.word().state() != SlotState::Empty);
        self.rows().windows(2).any(|window| window.iter().all(is_full))
    }

    /// Whether the header of some row says that it is part of a subtable in use.
    pub(crate) fn has_row_in_use(&self) -> bool {
        self.rows().iter().any(|row| row.header.is_valid() && !row.header.is_filling())
    }

    /// Returns the new subtables of a split, from any row, because a split writes them to one row
    /// after the other.
    pub(crate) fn forward(&self) -> Option<[u64; 2]> {
        self.rows().iter().find_map(|row| row.header.forward())
    }

    /// Returns the slot with this number, and its offset in the region; `None` after the last slot.
    pub(crate) fn slot(&self, number: usize) -> Option<(u64, &Slot)> {
        let content = &self.rows().get(number / SLOTS_PER_ROW)?.slots[number % SLOTS_PER_ROW];
        Some((self.offset + slot_offset(number), content))
    }

    /// Returns every slot with its offset in the region.
    pub(crate) fn slots(&self) -> impl Iterator<Item = (u64, &Slot)> {
        (0..).map_while(|number| self.slot(number))
    }
}

/// The next slot of a walk: the number of its place, and of the slot in the place.
///
/// An index only gains places, so a walk by the numbers of places misses none of them. A split can
/// move entries to places that the walk has passed: see [`Index::moves`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cursor {
    place: usize,
    slot: usize,
}

impl Cursor {
    /// Begins a step that ends at the end of the index at the latest.
    pub(crate) fn walk<'w>(&'w mut self, index: &'w Index, budget: Budget) -> Walk<'w> {
        Walk { index, cursor: self, budget, image: None }
    }
}

/// A step of a walk.
pub(crate) struct Walk<'w> {
    index: &'w Index,
    cursor: &'w mut Cursor,
    pub(crate) budget: Budget,
    /// The subtable of the cursor, if this step has read it.
    image: Option<SubtableImage>,
}

impl Walk<'_> {
    /// Returns the next slot, with its offset in the region; `None` at the end of the step.
    pub(crate) fn next(&mut self) -> Result<Option<(u64, Slot)>, ChainError> {
        if self.budget.bytes == 0 {
            return Ok(None);
        }
        let image = match self.image.take() {
            Some(image) => image,
            None if self.budget.subtables == 0 => return Ok(None),
            None => {
                let Some(place) = self.index.places.get(self.cursor.place) else { return Ok(None) };
                self.budget.subtables -= 1;
                SubtableImage::read(&self.index.region, *place)?
            }
        };
        let found = image.slot(self.cursor.slot).map(|(offset, slot)| (offset, *slot));
        self.cursor.slot += 1;
        if self.cursor.slot < SLOTS_PER_SUBTABLE {
            self.image = Some(image);
        } else {
            *self.cursor = Cursor { place: self.cursor.place + 1, slot: 0 };
        }
        Ok(found)
    }

    /// Whether the next slot is in a subtable that this step has not read yet.
    pub(crate) fn is_between_subtables(&self) -> bool {
        self.image.is_none()
    }

    /// Whether the walk, not only this step, has reached the end of the index.
    pub(crate) fn is_over(&self) -> bool {
        self.cursor.place >= self.index.places.len()
    }
}

#[cfg(test)]
mod tests {
    use farside_config::ServerConfig;
    use farside_fabric::memory::{HugePages, RegionMemory};
    use farside_layout::slot_offset;

    use super::*;
    use crate::region::recovery;
    use crate::region::served::ServedRegion;

    /// The walk also visits the slots of places that a split adds meanwhile.
    #[test]
    fn a_walk_in_steps_visits_every_slot_once() {
        let memory = RegionMemory::anonymous(8 << 20, HugePages::Never).unwrap();
        let ServedRegion { mut index, .. } =
            recovery::open(&memory, &ServerConfig::default()).unwrap();
        let (mut cursor, mut offsets) = (Cursor::default(), Vec::new());
        for step in 0.. {
            let mut walk = cursor.walk(&index, Budget::of_step(7));
            while let Some((offset, _)) = walk.next().unwrap() {
                offsets.push(offset);
                if offsets.len() % 1000 == 0 {
                    walk.budget.spend(u64::MAX);
                }
            }
            if walk.is_over() {
                break;
            }
            if step == 3 {
                index.add_chunk(1);
            }
        }
        let all = index.places.iter().flat_map(|place| {
            (0..SLOTS_PER_SUBTABLE).map(move |number| place + slot_offset(number))
        });
        assert!(offsets.iter().copied().eq(all), "{} slots", offsets.len());
    }
}
