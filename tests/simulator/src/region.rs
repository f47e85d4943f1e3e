//! The region of a scenario: one window with a few usable slots, and blocks of one class. The keys
//! could be confused, because they share the fingerprint and, except for the last, the window.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::OnceLock;

use farside_fabric::RegionIndex;
use farside_layout::hash::{KeyHash, KeyHasher, NO_HINT};
use farside_layout::{
    Block, BlockAddress, DirectoryEntry, ExtentShape, ExtentTable, Format, FreeBlock, Geometry,
    HINT_OFFSET, HeaderWord, NamedBlock, REGION_BYTES_MIN, ROW_BYTES, ROWS_PER_SUBTABLE, RowHeader,
    SLOTS_PER_ROW, STATE_OFFSET, SUBTABLE_BYTES, SizeClass, SlotState, SlotWord, Superblock,
    WINDOW_SLOTS, class_for, extent_data_offset, side_of, slot_in_subtable,
};
use farside_protocol::split::Split;
use zerocopy::IntoBytes;

use crate::memory::{Extent, Memory, global};

/// GRACE in simulations, in milliseconds.
pub const GRACE_MS: u32 = 100;
/// The number of keys. All have the same fingerprint. The first four share a window; the fifth
/// one's home row is the next row.
pub const KEYS: usize = 5;
/// A key by its number, below [`KEYS`].
pub type Key = usize;
/// The head of the two further regions, of one word each, that `RaiseBoth` changes. Each such
/// change reaches the head first; the head decides whether the change happens.
pub(crate) const HEAD: RegionIndex = RegionIndex(1);
/// The tail of the two further regions, which each such change reaches second.
pub(crate) const TAIL: RegionIndex = RegionIndex(2);
/// The largest value that fits into a block of 64 bytes with a key and the header.
const VALUE_BYTES_MAX: usize = 24;
/// The length of a larger value, whose block has 128 bytes.
pub(crate) const LARGE_BYTES: usize = 72;
/// How values are divided into extents, where a scenario has any: values with more than 24 bytes,
/// into parts of 40.
pub(crate) const SHAPE: ExtentShape =
    ExtentShape { class_max: class_of(VALUE_BYTES_MAX), part_bytes_max: 40 };
/// The number of heads and of extents that each client has at first.
const HEADS_EACH: u64 = 2;
const EXTENTS_EACH: u64 = 4;
/// The number of bytes of an extent that exist in the simulated memory.
const EXTENT_BYTES: u64 = 128;
/// From one extent to the next.
const EXTENT_STRIDE: u64 = SizeClass::EXTENT.block_bytes();
/// The smallest region, and room for the extents.
const REGION_BYTES: u64 = REGION_BYTES_MIN + 32 * EXTENT_STRIDE;
/// The number of bytes of the depot's chunk that exist in the simulated memory.
const DEPOT_BYTES: u64 = 1024;
const KEY_BYTES: usize = 8;

/// The class of a value of this length.
const fn class_of(value_bytes: usize) -> SizeClass {
    match class_for(KEY_BYTES, value_bytes) {
        Some(class) => class,
        None => panic!("a small class"),
    }
}

/// The number of slots in the rows of the keys' windows.
const SLOTS: usize = WINDOW_SLOTS + SLOTS_PER_ROW;
pub(crate) const HASH_KEY: [u8; 16] = *b"a simulated key.";

/// The layout of a scenario's region.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SimRegion {
    /// Its number in the fabric.
    index: RegionIndex,
    pub(crate) format: Format,
    pub(crate) geometry: Geometry,
    pub(crate) class: SizeClass,
    /// The subtable at the start, the two new ones of the first split, and one new one of the
    /// second split. The second split reuses the place of the first subtable.
    subtables: [u64; 4],
    /// The number of splits that the server makes.
    splits: usize,
    /// The offset of block 0.
    pub(crate) blocks_offset: u64,
    /// The number of blocks, and the number of blocks that each client has at first. The session
    /// that stores the first values has `blocks_each`, too.
    blocks_max: u64,
    blocks_each: u64,
    /// The offset of the depot's first block, if there is a depot.
    depot: Option<u64>,
    /// The offset of the first head, and the number of clients with heads and extents. 0 without
    /// extents.
    heads_offset: u64,
    /// The offset of the first extent.
    extents_offset: u64,
    clients_with_extents: u64,
    /// The home row of the keys.
    pub(crate) row: usize,
    /// The number of slots, from the start of the home row, that clients can use. The last `used`
    /// of these slots were used before the start.
    slots: usize,
    used: usize,
}

/// Returns the keys, by their numbers.
pub(crate) fn keys() -> &'static [Vec<u8>; KEYS] {
    static FOUND: OnceLock<[Vec<u8>; KEYS]> = OnceLock::new();
    FOUND.get_or_init(|| {
        let candidates = (0u32..).map(|n| format!("key{n:05}").into_bytes());
        let first = hash(b"key00000");
        let mut same_window = candidates.clone().filter(|key| {
            let hash = hash(key);
            (hash.window_offset(), hash.fingerprint())
                == (first.window_offset(), first.fingerprint())
        });
        let mut next_window = candidates.filter(|key| {
            let hash = hash(key);
            (hash.window_offset(), hash.fingerprint())
                == (first.window_offset() + ROW_BYTES, first.fingerprint())
        });
        let mut find = |key: usize| if key < 4 { same_window.next() } else { next_window.next() };
        std::array::from_fn(|key| find(key).expect("there are keys without end"))
    })
}

pub(crate) fn hash(key: &[u8]) -> KeyHash {
    KeyHasher::new(&HASH_KEY).hash(key)
}

impl SimRegion {
    /// Returns a region for `clients` clients with up to `blocks` blocks each.
    pub(crate) fn new(
        blocks: u64,
        clients: u64,
        (slots, used): (usize, usize),
        splits: usize,
        (has_depot, has_extents): (bool, bool),
    ) -> Self {
        let format = Format {
            region_bytes: REGION_BYTES,
            region_id: *b"simulated region",
            hash_key: HASH_KEY,
            grace_ms: GRACE_MS,
            key_bytes_max: KEY_BYTES as u32,
            value_bytes_max: LARGE_BYTES as u32,
        };
        let geometry = format.geometry();
        let chunk = |n| geometry.chunk_offset(n).expect("the region has more chunks");
        Self {
            index: RegionIndex::FIRST,
            format,
            geometry,
            class: class_of(VALUE_BYTES_MAX),
            subtables: [0, 1, 2, 3].map(|n| chunk(0) + n * SUBTABLE_BYTES),
            splits,
            blocks_offset: chunk(1),
            blocks_max: blocks.max(KEYS as u64) * (clients + 1) + 1,
            blocks_each: blocks.max(KEYS as u64),
            depot: has_depot.then(|| chunk(2)),
            heads_offset: chunk(2),
            extents_offset: chunk(3),
            clients_with_extents: if has_extents { clients + 1 } else { 0 },
            row: (hash(&keys()[0]).window_offset() / ROW_BYTES) as usize,
            slots,
            used,
        }
    }

    /// Returns the same region with another number in the fabric.
    pub(crate) fn at(self, index: RegionIndex) -> Self {
        Self { index, ..self }
    }

    /// Returns the memory of these regions, each formatted, with a directory of this depth.
    pub(crate) fn memory(&self, depth: u8, regions: &[RegionIndex]) -> Memory {
        let extents: Vec<_> = regions.iter().flat_map(|index| self.at(*index).extents()).collect();
        let further = [HEAD, TAIL].map(|index| Extent { first: global(index, 0) / 8, words: 1 });
        let mut memory = Memory::new(&[&extents[..], &further].concat());
        regions.iter().for_each(|index| self.at(*index).fill(depth, &mut memory));
        memory
    }

    fn heads_bytes(&self) -> u64 {
        self.clients_with_extents * HEADS_EACH * SizeClass::FIRST_HEAD.block_bytes()
    }

    /// The offsets of all extents.
    fn extent_offsets(&self) -> impl Iterator<Item = u64> + use<> {
        let first = self.extents_offset;
        (0..self.clients_with_extents * EXTENTS_EACH).map(move |n| first + n * EXTENT_STRIDE)
    }

    /// Whether clients store values with extents.
    pub(crate) fn has_extents(&self) -> bool {
        self.clients_with_extents > 0
    }

    /// Returns the heads and the extents that a client has at first.
    pub(crate) fn free_extents(&self, client: u64) -> [Vec<FreeBlock>; 2] {
        let free = |first: u64, bytes: u64, each: u64| {
            let numbers = client * each..(client + 1) * each;
            let address = |n| BlockAddress::from_offset(first + n * bytes).expect("aligned");
            let block = |n| FreeBlock { address: address(n), generation: 1 };
            if self.has_extents() { numbers.rev().map(block).collect() } else { Vec::new() }
        };
        [
            free(self.heads_offset, SizeClass::FIRST_HEAD.block_bytes(), HEADS_EACH),
            free(self.extents_offset, EXTENT_STRIDE, EXTENTS_EACH),
        ]
    }

    fn is_of_extents(&self, offset: u64) -> bool {
        (self.heads_offset..self.heads_offset + self.heads_bytes()).contains(&offset)
            || self.extent_offsets().any(|extent| (extent..extent + EXTENT_BYTES).contains(&offset))
    }

    fn directories(&self) -> [u64; 3] {
        let directories = [0, 1, 2].map(|depth| self.geometry.directory_offset(depth));
        directories.map(|offset| offset.expect("the smallest region has a directory of depth 2"))
    }

    /// Returns the parts that exist.
    fn extents(&self) -> Vec<Extent> {
        let directories = self.directories();
        let block_words = (self.class.block_bytes() / 8 * self.blocks_max) as usize;
        let subtable_words = (SUBTABLE_BYTES / 8) as usize * self.places().count();
        let directory_words = ((directories[2] - directories[0]) / 8) as usize + 4;
        let depot_words = self.depot.map_or(0, |_| DEPOT_BYTES as usize / 8);
        [
            (self.subtables[0], subtable_words),
            (self.blocks_offset, block_words),
            (0, 512),
            (self.depot.unwrap_or_default(), depot_words),
            (self.heads_offset, (self.heads_bytes() / 8) as usize),
            (directories[0], directory_words),
        ]
        .into_iter()
        .chain(self.extent_offsets().map(|offset| (offset, EXTENT_BYTES as usize / 8)))
        .map(|(offset, words)| Extent { first: global(self.index, offset) / 8, words })
        .collect()
    }

    /// Formats the region, with a directory of this depth. Unusable slots hold words of another
    /// fingerprint, so that no client reads their blocks.
    fn fill(&self, depth: u8, memory: &mut Memory) {
        let subtables: Vec<u64> = self.places().collect();
        let mut fill = |offset, bytes: &[u8]| memory.fill(global(self.index, offset), bytes);
        let superblock = Superblock::new(&self.format, depth).expect("a checked format");
        fill(0, superblock.as_bytes());
        let entry = DirectoryEntry::new(self.subtables[0], 0).bits();
        let directory = self.directories()[usize::from(depth)];
        for at in 0..1 << depth {
            fill(directory + at * 8, &entry.to_le_bytes());
        }
        let header = RowHeader::new(0, 0);
        for row in 0..ROWS_PER_SUBTABLE {
            fill(self.subtables[0] + row as u64 * ROW_BYTES, header.as_bytes());
        }
        let other_fingerprint = hash(&keys()[0]).fingerprint().wrapping_add(1);
        let block = self.block(self.blocks_max - 1);
        let block = NamedBlock { address: block, class: self.class, generation_low: 1 };
        let taken = SlotWord::empty(0).pending(other_fingerprint, block).live(block, false);
        for (subtable, at) in self.slots_of(&subtables) {
            let slot = self.slot(subtable, at);
            let usable = at < self.slots;
            let word = match subtable {
                // A split has no need to move the word of an INSERT that never continues.
                0 if self.splits > 0 && !usable => taken.with_state(SlotState::Aborted),
                _ if !usable => taken,
                0 if at >= self.slots.saturating_sub(self.used) => SlotWord::after_hint_claim(),
                0 => continue,
                _ => SlotWord::default().with_state(SlotState::Moved),
            };
            let hint = if word.incarnation() == 0 && usable { 0 } else { NO_HINT };
            fill(slot, &word.bits().to_le_bytes());
            fill(slot + HINT_OFFSET, &hint.to_le_bytes());
        }
    }

    /// Whether the server splits a subtable.
    pub(crate) fn has_splits(&self) -> bool {
        self.splits > 0
    }

    /// Returns the first split of the server.
    pub(crate) fn split(&self) -> Split {
        let [old, first, second, _] = self.subtables;
        Split { prefix: 0, local_depth: 0, old, new: [first, second] }
    }

    /// Returns the second split, of the subtable that key 0 is in after the first one. It moves one
    /// half of the keys into the place of the first subtable: key 0's half if `key_0_returns`.
    pub(crate) fn next_split(&self, key_0_returns: bool) -> Split {
        let directory = hash(&keys()[0]).directory();
        let prefix = side_of(directory, 0);
        let [emptied, .., unused] = self.subtables;
        let mut new = [emptied; 2];
        new[side_of(directory, 1) ^ usize::from(key_0_returns)] = unused;
        Split { prefix: prefix as u32, local_depth: 1, old: self.subtables[1 + prefix], new }
    }

    /// Returns the offsets of the subtables that exist.
    pub(crate) fn places(&self) -> impl Iterator<Item = u64> + use<> {
        self.subtables.into_iter().take([1, 3, 4][self.splits])
    }

    /// Returns the rows of the keys' windows. The fifth key's window reaches one row further.
    pub(crate) fn rows(&self) -> Range<usize> {
        self.row..self.row + SLOTS.div_ceil(SLOTS_PER_ROW)
    }

    /// Returns the numbers of a subtable's usable slots.
    pub(crate) fn usable(&self) -> Range<usize> {
        let first = self.row * SLOTS_PER_ROW;
        first..first + self.slots
    }

    fn slots_of(&self, subtables: &[u64]) -> impl Iterator<Item = (usize, usize)> + use<> {
        (0..subtables.len()).flat_map(|subtable| (0..SLOTS).map(move |at| (subtable, at)))
    }

    /// Returns the offset of a slot of a subtable, counted from the keys' home row.
    pub(crate) fn slot(&self, subtable: usize, at: usize) -> u64 {
        let (row, slot) = (self.row + at / SLOTS_PER_ROW, at % SLOTS_PER_ROW);
        self.subtables[subtable] + slot_in_subtable(row, slot)
    }

    /// Whether the word at this offset can change.
    pub(crate) fn can_change(&self, offset: u64) -> bool {
        let is_header_or_directory = self.header_at(offset).is_some()
            || self.directory_at(offset).is_some()
            || offset == STATE_OFFSET;
        self.block_at(offset).is_some()
            || self.is_of_extents(offset)
            || self.slot_at(offset).is_some_and(|(_, slot, _)| slot < self.slots)
            || self.splits > 0 && is_header_or_directory
    }

    /// Returns the subtable, the row and the word of the row's header at this offset. Rows count
    /// from the keys' home row.
    pub(crate) fn header_at(&self, offset: u64) -> Option<(usize, usize, u64)> {
        let subtable = self.subtable_at(offset)?;
        let within = offset - self.subtables[subtable];
        let row = (within / ROW_BYTES) as usize;
        let word = within % ROW_BYTES / 8;
        (self.rows().contains(&row) && word < 2).then(|| (subtable, row - self.row, word))
    }

    fn subtable_at(&self, offset: u64) -> Option<usize> {
        let holds = |subtable: &u64| (*subtable..subtable + SUBTABLE_BYTES).contains(&offset);
        self.subtables.iter().position(holds)
    }

    /// Returns the number of the directory entry at this offset, counted over the depths 0 to 2.
    pub(crate) fn directory_at(&self, offset: u64) -> Option<u64> {
        let entry = offset.checked_sub(self.geometry.directory_offset(0)?)? / 8;
        (entry < 7).then_some(entry)
    }

    /// Returns a subtable's name in traces. S is the old one; T and U are for keys whose next bit
    /// is 0 and 1; V is unused before the second split.
    pub(crate) fn name_of(&self, offset: u64) -> &'static str {
        self.subtable_at(offset).map_or("nowhere", |subtable| ["S", "T", "U", "V"][subtable])
    }

    /// Returns the subtable and the slot at this offset, and whether it is the slot's hint. Slots
    /// count from the keys' home row.
    pub(crate) fn slot_at(&self, offset: u64) -> Option<(usize, usize, bool)> {
        let subtable = self.subtable_at(offset)?;
        (0..SLOTS).find_map(|at| {
            let slot = self.slot(subtable, at);
            let is_hint = offset >= slot + HINT_OFFSET;
            (slot..slot + 16).contains(&offset).then_some((subtable, at, is_hint))
        })
    }

    fn block(&self, number: u64) -> BlockAddress {
        let offset = match (number, self.depot) {
            (0, Some(depot)) => depot + self.class.block_bytes(),
            _ => self.blocks_offset + number * self.class.block_bytes(),
        };
        BlockAddress::from_offset(offset).expect("blocks are aligned")
    }

    /// Returns the block that holds key 0 at the start.
    pub(crate) fn first_block(&self) -> NamedBlock {
        NamedBlock { address: self.block(0), class: self.class, generation_low: 1 }
    }

    /// Returns the block at this offset, and the word in it.
    pub(crate) fn block_at(&self, offset: u64) -> Option<(u64, u64)> {
        let bytes = self.class.block_bytes();
        if let Some(within) = self.depot.and_then(|depot| offset.checked_sub(depot))
            && within < DEPOT_BYTES
        {
            return Some((self.blocks_max + within / bytes, within % bytes / 8));
        }
        let within = offset.checked_sub(self.blocks_offset)?;
        (within < self.blocks_max * bytes).then_some((within / bytes, within % bytes / 8))
    }

    /// Returns the blocks that a client has at first. Client 0 is the session that stores the first
    /// values.
    pub(crate) fn free_blocks(&self, client: u64, count: u64) -> Vec<FreeBlock> {
        let first = client * self.blocks_each;
        let numbers = first..first + count;
        numbers.rev().map(|n| FreeBlock { address: self.block(n), generation: 1 }).collect()
    }

    fn load(&self, memory: &Memory, offset: u64) -> u64 {
        memory.word_at_offset(global(self.index, offset))
    }

    /// Returns the slots of all subtables: their offsets and words.
    fn words<'m>(&'m self, memory: &'m Memory) -> impl Iterator<Item = (u64, SlotWord)> + 'm {
        let slots = self.slots_of(&self.subtables).map(|(subtable, at)| self.slot(subtable, at));
        slots.map(|slot| (slot, SlotWord::from_bits(self.load(memory, slot))))
    }

    /// Returns the slots that lead to a block of a key: their words, hints and blocks.
    fn linked<'m>(
        &'m self,
        memory: &'m Memory,
    ) -> impl Iterator<Item = (SlotWord, u64, NamedBlock)> + 'm {
        let fingerprint = hash(&keys()[0]).fingerprint();
        self.words(memory).filter_map(move |(slot, word)| {
            let states = [SlotState::Live, SlotState::Frozen, SlotState::Copy];
            let linked = states.contains(&word.state()) && word.fingerprint() == fingerprint;
            let block = word.block().ok().filter(|_| linked)?;
            Some((word, self.load(memory, slot + HINT_OFFSET), block))
        })
    }

    /// Returns the slots with an unfinished INSERT: offset, word, and the client that wrote the
    /// block.
    pub(crate) fn unfinished<'m>(
        &'m self,
        memory: &'m Memory,
    ) -> impl Iterator<Item = (u64, SlotWord, Option<u16>)> + 'm {
        self.words(memory).filter_map(|(slot, word)| {
            let is_unfinished = matches!(word.state(), SlotState::Pending | SlotState::Aborted);
            let block = word.block().ok().filter(|_| is_unfinished)?;
            let bytes = self.bytes(memory, block);
            let writer = Block::decode(&bytes, block.address).ok().map(|found| found.writer());
            Some((slot, word, writer))
        })
    }

    /// Returns the extents of a linked head.
    pub(crate) fn extents_of(&self, memory: &Memory, head: NamedBlock) -> Vec<BlockAddress> {
        let bytes = self.bytes(memory, head);
        let found = Block::decode(&bytes, head.address).expect("a linked head is whole");
        let table = ExtentTable::of(&found, SHAPE).expect("a linked head has a table");
        table.extents.iter().map(|extent| extent.address()).collect()
    }

    fn bytes(&self, memory: &Memory, block: NamedBlock) -> Vec<u8> {
        let words = 0..block.class.block_bytes() / 8;
        let offset = block.address.claimed_offset();
        words.flat_map(|word| self.load(memory, offset + word * 8).to_le_bytes()).collect()
    }

    /// Returns the offset of the block that holds a key, or 0 if no block does.
    pub(crate) fn block_of(&self, memory: &Memory, key: usize) -> u64 {
        let holds = |block: &NamedBlock| {
            let bytes = self.bytes(memory, *block);
            Block::decode(&bytes, block.address).is_ok_and(|found| found.key() == keys()[key])
        };
        let mut blocks = self.linked(memory).map(|(_, _, block)| block);
        blocks.find(holds).map_or(0, |block| block.address.claimed_offset())
    }

    /// Checks that every linked block is whole, is linked once, is the only one of its key, and is
    /// in a slot with the key's hint.
    pub(crate) fn inspect(&self, memory: &Memory) -> Result<(), String> {
        let (mut seen, mut blocks) = (BTreeSet::new(), BTreeSet::new());
        for (word, hint, block) in self.linked(memory) {
            let bytes = self.bytes(memory, block);
            let found = Block::decode(&bytes, block.address);
            let found = found.map_err(|error| format!("{word:?}: {error}"))?;
            let problem = if word.state() != SlotState::Live {
                "the split has not completed its move"
            } else if !block.has_generation(found.header_word().generation) {
                "another generation"
            } else if hint != hash(found.key()).hint(word.incarnation()) {
                "another key's hint"
            } else if !seen.insert(found.key().to_vec()) {
                "another slot has its key, too"
            } else if !blocks.insert(block.address.0) {
                "its block is linked twice"
            } else {
                match self.inspect_extents(memory, block, &found, &mut blocks) {
                    None => continue,
                    Some(problem) => problem,
                }
            };
            return Err(format!("{word:?}: {problem}"));
        }
        Ok(())
    }

    /// Checks the extents of a head. Returns what is wrong.
    fn inspect_extents(
        &self,
        memory: &Memory,
        head: NamedBlock,
        found: &Block<'_>,
        blocks: &mut BTreeSet<u32>,
    ) -> Option<&'static str> {
        if !head.class.is_head() {
            return None;
        }
        let Ok(table) = ExtentTable::of(found, SHAPE) else { return Some("another table") };
        for (number, extent) in table.extents.iter().enumerate() {
            let offset = extent.address().claimed_offset();
            let header = HeaderWord::from_bits(self.load(memory, offset));
            let start = offset + extent_data_offset(KEY_BYTES);
            let words = 0..table.part_bytes(number).div_ceil(8);
            let part: Vec<u8> =
                words.flat_map(|word| self.load(memory, start + word * 8).to_le_bytes()).collect();
            if header.generation != extent.generation() || !extent.has_part(&part) {
                return Some("an extent has another part");
            }
            if !blocks.insert(extent.address().0) {
                return Some("its extent is linked twice");
            }
        }
        None
    }
}
