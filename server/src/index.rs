//! The index as the server sees it: which subtables there are, what their slots say, and which are
//! free for splits to come.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::iter;
use std::sync::Arc;

use farside_fabric::shm::Region;
use farside_fabric::{ChainError, Nanos};
use farside_layout::{
    CHUNK_BYTES, ChunkUse, DirectoryEntry, Geometry, ROW_BYTES, Row, SLOTS_PER_ROW, SUBTABLE_BYTES,
    Slot, SlotState, slot_in_subtable,
};
use farside_protocol::split::Split;
use zerocopy::{FromBytes, IntoBytes};

use crate::error::Damage;
use crate::rate_limited_warning::RateLimitedWarning;

const SUBTABLE_WORDS: usize = (SUBTABLE_BYTES / 8) as usize;

/// The subtables of a region. `splits.rs` has how they become more.
pub(crate) struct Index {
    pub(crate) region: Arc<Region>,
    pub(crate) geometry: Geometry,
    /// How many bits of a hash the directory in use goes by.
    pub(crate) depth: u8,
    /// All places for subtables, in use or not. Only ever grows, so that a walk by
    /// number misses none.
    pub(crate) places: Vec<u64>,
    /// The chunks that they are in.
    chunks: HashSet<u32>,
    /// How many subtables the directory leads to.
    pub(crate) in_use: u64,
    /// Places nothing leads to, with all words MOVED.
    pub(crate) free: Vec<u64>,
    /// Places that a split has emptied, and when no READ from before counts any more.
    pub(crate) resting: VecDeque<(Nanos, u64)>,
    /// Splits that were begun and not ended, by their old subtable, and when to try again.
    pub(crate) unfinished: BTreeMap<u64, Nanos>,
    /// Splits since the start.
    pub(crate) splits: u64,
    /// How often a split began, or went on: whatever came of it, it may have moved entries.
    pub(crate) moves: u64,
    /// That something is damaged.
    pub(crate) damaged: RateLimitedWarning,
}

/// A subtable's bytes, read at one moment.
pub(crate) struct SubtableImage {
    offset: u64,
    words: Box<[u64; SUBTABLE_WORDS]>,
}

impl Index {
    /// Follows the directory of this depth, and checks every row's header. Returns also what splits
    /// a former server began and did not end.
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
        };
        for (chunk, _) in (0..).zip(uses).filter(|(_, of)| **of == ChunkUse::Subtables) {
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
                // What a split goes on to fill must be no other's.
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

    /// A chunk's places for subtables are this index's.
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

    /// What a directory entry leads to, and how many entries do.
    pub(crate) fn subtable_at(&self, entry: u64) -> Result<(DirectoryEntry, u64), Damage> {
        let first = self.entry(entry)?;
        let offset =
            first.subtable(&self.geometry).map_err(|source| Damage::Directory { entry, source })?;
        if first.local_depth() > self.depth || !self.is_place(offset) {
            return Err(Damage::DirectoryEntry { entry });
        }
        // A subtable of fewer bits stands in all the entries that share them.
        let entries = 1u64 << (self.depth - first.local_depth());
        if !entry.is_multiple_of(entries) {
            return Err(Damage::DirectoryEntry { entry });
        }
        Ok((first, entries))
    }

    /// That all entries lead to the same subtable, or to where a split takes its keys: they are
    /// changed from the last to the first.
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

    /// The split that was begun of this subtable, if one was.
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
            let right = header.prefix.get() == prefix && header.local_depth == local_depth;
            let leads = |new: [u64; 2]| {
                Some(new) == forward && new[0] != new[1] && new.iter().all(|to| self.is_place(*to))
            };
            let believable = right && header.is_valid() && !header.is_filling();
            if !believable || !header.forward().is_none_or(leads) {
                return Err(Damage::Row { offset });
            }
        }
        let moved = image.slots().find(|(_, slot)| slot.word().state() == SlotState::Moved);
        if let (None, Some((slot, _))) = (forward, moved) {
            return Err(Damage::Split { slot });
        }
        Ok(forward.map(|new| Split { prefix, local_depth, old, new }))
    }
}

/// The places for subtables in a chunk.
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

    /// Whether a key could find no room: in some window all words have a use. The last row is
    /// the home of no key.
    pub(crate) fn has_full_window(&self) -> bool {
        let is_full =
            |row: &Row| row.slots.iter().all(|slot| slot.word().state() != SlotState::Empty);
        self.rows().windows(2).any(|window| window.iter().all(is_full))
    }

    /// Whether a row says that it is part of a subtable in use.
    pub(crate) fn is_somebodys(&self) -> bool {
        self.rows().iter().any(|row| row.header.is_valid() && !row.header.is_filling())
    }

    /// Where a split takes the keys, by any row: it says so in one after the other.
    pub(crate) fn forward(&self) -> Option<[u64; 2]> {
        self.rows().iter().find_map(|row| row.header.forward())
    }

    /// The slot with this number, and its offset in the region; `None` beyond the last.
    pub(crate) fn slot(&self, number: usize) -> Option<(u64, &Slot)> {
        let (row, slot) = (number / SLOTS_PER_ROW, number % SLOTS_PER_ROW);
        let content = &self.rows().get(row)?.slots[slot];
        Some((self.offset + slot_in_subtable(row, slot), content))
    }

    /// Every slot with its offset in the region.
    pub(crate) fn slots(&self) -> impl Iterator<Item = (u64, &Slot)> {
        (0..).map_while(|number| self.slot(number))
    }
}
