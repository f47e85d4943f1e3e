//! The region that scenarios play on: one window, a few slots that are free, blocks of one class.
//! All keys could be each other's: the same row, the same fingerprint.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::OnceLock;

use farside_layout::hash::{KeyHash, KeyHasher, NO_HINT};
use farside_layout::{
    Block, BlockAddress, BlockRef, DirectoryEntry, Format, FreeBlock, Geometry, HINT_OFFSET,
    REGION_BYTES_MIN, ROW_BYTES, ROWS_PER_SUBTABLE, RowHeader, SLOTS_PER_ROW, STATE_OFFSET,
    SUBTABLE_BYTES, SizeClass, SlotState, SlotWord, Superblock, WINDOW_SLOTS, class_for, side_of,
    slot_in_subtable,
};
use farside_protocol::split::Split;
use zerocopy::IntoBytes;

use super::memory::{Extent, Memory, global};
use super::monitor::Violation;
use super::turns::{HEAD, TAIL};

/// GRACE in simulations, in milliseconds.
pub const GRACE_MS: u32 = 100;
/// How many keys there are: the first four share a window and a fingerprint; the fifth has the
/// fingerprint too, and its home row is the one behind theirs.
pub const KEYS: usize = 5;
/// Every block holds one such key and such a value: 64 bytes with the header.
const VALUE_BYTES_MAX: usize = 24;
/// A larger value: 128 bytes.
pub(super) const LARGE_BYTES: usize = 72;
/// How much of the depot's chunk there is, in bytes.
const DEPOT_BYTES: u64 = 1024;
const KEY_BYTES: usize = 8;
/// How many slots the rows have that keys can be in.
const SLOTS: usize = WINDOW_SLOTS + SLOTS_PER_ROW;
const HASH_KEY: [u8; 16] = *b"a simulated key.";

/// Where things are.
#[derive(Clone, Copy, Debug)]
pub(super) struct SimRegion {
    pub(super) format: Format,
    pub(super) geometry: Geometry,
    pub(super) class: SizeClass,
    /// The subtable that the directory leads to, the two that a split takes its keys to, and one of
    /// the two that another split takes theirs to.
    subtables: [u64; 4],
    /// How many splits there are.
    splits: usize,
    pub(super) blocks: u64,
    /// How many there are, and how many of them belong to each client at first, and as many to
    /// the session that stores the first values.
    blocks_max: u64,
    blocks_each: u64,
    /// Of the depot's blocks, if there is one: the first one.
    depot: Option<u64>,
    /// The home row of the keys.
    pub(super) row: usize,
    /// How many slots can be used, from the start of that row, and how many of them, the last ones,
    /// were used before.
    slots: usize,
    used: usize,
}

pub(super) fn keys() -> &'static [Vec<u8>; KEYS] {
    static FOUND: OnceLock<[Vec<u8>; KEYS]> = OnceLock::new();
    FOUND.get_or_init(|| {
        let all = (0u32..).map(|n| format!("key{n:05}").into_bytes());
        let first = hash(b"key00000");
        let mut same = all.clone().filter(|key| {
            let hash = hash(key);
            (hash.window_offset(), hash.fingerprint())
                == (first.window_offset(), first.fingerprint())
        });
        let mut next = all.filter(|key| {
            let hash = hash(key);
            (hash.window_offset(), hash.fingerprint())
                == (first.window_offset() + ROW_BYTES, first.fingerprint())
        });
        let mut one = |at: usize| if at < 4 { same.next() } else { next.next() };
        std::array::from_fn(|at| one(at).expect("keys do not run out"))
    })
}

pub(super) fn hash(key: &[u8]) -> KeyHash {
    KeyHasher::new(&HASH_KEY).hash(key)
}

impl SimRegion {
    /// For so many clients with at most so many blocks, and with so many slots, some of them used.
    pub(super) fn new(
        blocks: u64,
        clients: u64,
        (slots, used): (usize, usize),
        splits: usize,
        has_depot: bool,
    ) -> Self {
        let format = Format {
            region_bytes: REGION_BYTES_MIN,
            region_id: *b"simulated region",
            hash_key: HASH_KEY,
            grace_ms: GRACE_MS,
            key_bytes_max: KEY_BYTES as u32,
            value_bytes_max: LARGE_BYTES as u32,
        };
        let geometry = format.geometry();
        let chunk = |n| geometry.chunk_offset(n).expect("the smallest region has three chunks");
        Self {
            format,
            geometry,
            class: class_for(KEY_BYTES, VALUE_BYTES_MAX).expect("a small class"),
            subtables: [0, 1, 2, 3].map(|n| chunk(0) + n * SUBTABLE_BYTES),
            splits,
            blocks: chunk(1),
            blocks_max: blocks.max(KEYS as u64) * (clients + 1) + 1,
            blocks_each: blocks.max(KEYS as u64),
            depot: has_depot.then(|| chunk(2)),
            row: (hash(&keys()[0]).window_offset() / ROW_BYTES) as usize,
            slots,
            used,
        }
    }

    /// A formatted region, with a directory of this depth. Slots that cannot be used hold words of
    /// another fingerprint, which no client looks behind.
    pub(super) fn memory(&self, depth: u8) -> Memory {
        let directories = [0, 1, 2].map(|depth| self.geometry.directory_offset(depth));
        let directories = directories.map(|offset| offset.expect("there is one that deep"));
        let block_words = (self.class.block_bytes() / 8 * self.blocks_max) as usize;
        let subtables: Vec<u64> = self.places().collect();
        let subtable_words = (SUBTABLE_BYTES / 8) as usize * subtables.len();
        let directory_words = ((directories[2] - directories[0]) / 8) as usize + 4;
        let mut memory = Memory::new(&[
            Extent { first: self.subtables[0] / 8, words: subtable_words },
            Extent { first: self.blocks / 8, words: block_words },
            Extent { first: 0, words: 512 },
            Extent {
                first: self.depot.unwrap_or_default() / 8,
                words: self.depot.map_or(0, |_| DEPOT_BYTES as usize / 8),
            },
            Extent { first: directories[0] / 8, words: directory_words },
            Extent { first: global(HEAD, 0) / 8, words: 1 },
            Extent { first: global(TAIL, 0) / 8, words: 1 },
        ]);
        let superblock = Superblock::new(&self.format, depth).expect("a checked format");
        memory.fill(0, superblock.as_bytes());
        let entry = DirectoryEntry::new(self.subtables[0], 0).bits();
        let directory = directories[usize::from(depth)];
        for at in 0..1 << depth {
            memory.fill(directory + at * 8, &entry.to_le_bytes());
        }
        let header = RowHeader::new(0, 0);
        for row in 0..ROWS_PER_SUBTABLE {
            memory.fill(self.subtables[0] + row as u64 * ROW_BYTES, header.as_bytes());
        }
        let other = hash(&keys()[0]).fingerprint().wrapping_add(1);
        let block = self.block(self.blocks_max - 1);
        let block = BlockRef { address: block, class: self.class, generation_low: 1 };
        let taken = SlotWord::empty(0).pending(other, block).live(block, false);
        for (subtable, at) in self.slots_of(&subtables) {
            let slot = self.slot(subtable, at);
            let usable = at < self.slots;
            let word = match subtable {
                // Nothing to move: whose it is will never come back.
                0 if self.splits > 0 && !usable => taken.with_state(SlotState::Aborted),
                _ if !usable => taken,
                0 if at >= self.slots.saturating_sub(self.used) => SlotWord::unclaimed(),
                0 => continue,
                _ => SlotWord::default().with_state(SlotState::Moved),
            };
            let hint = if word.incarnation() == 0 && usable { 0 } else { NO_HINT };
            memory.fill(slot, &word.bits().to_le_bytes());
            memory.fill(slot + HINT_OFFSET, &hint.to_le_bytes());
        }
        memory
    }

    /// Whether there is more than one subtable.
    pub(super) fn splits(&self) -> bool {
        self.splits > 0
    }

    /// The split that the server makes first.
    pub(super) fn split(&self) -> Split {
        let [old, one, other, _] = self.subtables;
        Split { prefix: 0, local_depth: 0, old, new: [one, other] }
    }

    /// The split of key 0's subtable that comes next, and takes some of its keys to where the first
    /// one's were: key 0 and those on its side, or the others.
    pub(super) fn next_split(&self, returns: bool) -> Split {
        let directory = hash(&keys()[0]).directory();
        let prefix = side_of(directory, 0);
        let [again, .., unused] = self.subtables;
        let mut new = [again; 2];
        new[side_of(directory, 1) ^ usize::from(returns)] = unused;
        Split { prefix: prefix as u32, local_depth: 1, old: self.subtables[1 + prefix], new }
    }

    /// The subtables there are.
    pub(super) fn places(&self) -> impl Iterator<Item = u64> + use<> {
        self.subtables.into_iter().take([1, 3, 4][self.splits])
    }

    /// The rows that keys can be in: the window of the fifth key reaches one row further.
    pub(super) fn rows(&self) -> Range<usize> {
        self.row..self.row + SLOTS.div_ceil(SLOTS_PER_ROW)
    }

    /// The slots of a subtable that can be used, by their numbers.
    pub(super) fn usable(&self) -> Range<usize> {
        let first = self.row * SLOTS_PER_ROW;
        first..first + self.slots
    }

    fn slots_of(&self, subtables: &[u64]) -> impl Iterator<Item = (usize, usize)> + use<> {
        (0..subtables.len()).flat_map(|subtable| (0..SLOTS).map(move |at| (subtable, at)))
    }

    /// The offset of a slot of a subtable, counted from the keys' home row.
    pub(super) fn slot(&self, subtable: usize, at: usize) -> u64 {
        let (row, slot) = (self.row + at / SLOTS_PER_ROW, at % SLOTS_PER_ROW);
        self.subtables[subtable] + slot_in_subtable(row, slot)
    }

    /// Whether anything in the word at this offset can ever change.
    pub(super) fn can_change(&self, offset: u64) -> bool {
        let leads = self.header_at(offset).is_some()
            || self.directory_at(offset).is_some()
            || offset == STATE_OFFSET;
        self.block_at(offset).is_some()
            || self.slot_at(offset).is_some_and(|(_, slot, _)| slot < self.slots)
            || self.splits > 0 && leads
    }

    /// The subtable, the row, counted from the keys' home row, and the word of its header that an
    /// offset is in.
    pub(super) fn header_at(&self, offset: u64) -> Option<(usize, usize, u64)> {
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

    /// The number of the entry, counted over the directories of depth 0 to 2, an offset is in.
    pub(super) fn directory_at(&self, offset: u64) -> Option<u64> {
        let entry = offset.checked_sub(self.geometry.directory_offset(0)?)? / 8;
        (entry < 7).then_some(entry)
    }

    /// What a subtable is called: S is the old one, T and U are those for keys whose next bit is 0
    /// and 1, V is the one that was never used.
    pub(super) fn name_of(&self, offset: u64) -> &'static str {
        self.subtable_at(offset).map_or("nowhere", |subtable| ["S", "T", "U", "V"][subtable])
    }

    /// Which subtable and slot, counted from the keys' home row, and whether its hint, an offset is
    /// in.
    pub(super) fn slot_at(&self, offset: u64) -> Option<(usize, usize, bool)> {
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
            _ => self.blocks + number * self.class.block_bytes(),
        };
        BlockAddress::from_offset(offset).expect("blocks are aligned")
    }

    /// Where key 0 is stored at the start.
    pub(super) fn first_block(&self) -> BlockRef {
        BlockRef { address: self.block(0), class: self.class, generation_low: 1 }
    }

    /// Which block, and which of its words, an offset is in.
    pub(super) fn block_at(&self, offset: u64) -> Option<(u64, u64)> {
        let bytes = self.class.block_bytes();
        if let Some(within) = self.depot.and_then(|depot| offset.checked_sub(depot))
            && within < DEPOT_BYTES
        {
            return Some((self.blocks_max + within / bytes, within % bytes / 8));
        }
        let within = offset.checked_sub(self.blocks)?;
        (within < self.blocks_max * bytes).then_some((within / bytes, within % bytes / 8))
    }

    /// The first blocks of a client; 0 is the session that stores the first values.
    pub(super) fn free_blocks(&self, client: u64, count: u64) -> Vec<FreeBlock> {
        let first = client * self.blocks_each;
        let numbers = first..first + count;
        numbers.rev().map(|n| FreeBlock { address: self.block(n), generation: 1 }).collect()
    }

    /// The slots of the keys' rows that lead to a block of theirs.
    fn linked(&self, memory: &Memory) -> Vec<(SlotWord, u64, BlockRef)> {
        let fingerprint = hash(&keys()[0]).fingerprint();
        let states = [SlotState::Live, SlotState::Frozen, SlotState::Copy];
        self.slots_of(&self.subtables)
            .filter_map(|(subtable, at)| {
                let slot = self.slot(subtable, at);
                let word = SlotWord::from_bits(memory.word(slot));
                let linked = states.contains(&word.state()) && word.fingerprint() == fingerprint;
                linked.then(|| Some((word, memory.word(slot + HINT_OFFSET), word.block().ok()?)))?
            })
            .collect()
    }

    /// The slots in the middle of an INSERT, and whose they are.
    pub(super) fn unfinished<'m>(
        &'m self,
        memory: &'m Memory,
    ) -> impl Iterator<Item = (u64, SlotWord, Option<u16>)> + 'm {
        let slots = self.slots_of(&self.subtables).map(|(subtable, at)| self.slot(subtable, at));
        slots.filter_map(|slot| {
            let word = SlotWord::from_bits(memory.word(slot));
            let block = word.block().ok()?;
            let bytes = self.bytes(memory, block);
            let writer = Block::decode(&bytes, block.address).ok().map(|found| found.writer());
            let is_unfinished = matches!(word.state(), SlotState::Pending | SlotState::Aborted);
            is_unfinished.then_some((slot, word, writer))
        })
    }

    fn bytes(&self, memory: &Memory, block: BlockRef) -> Vec<u8> {
        let words = 0..block.class.block_bytes() / 8;
        let offset = block.address.offset();
        words.flat_map(|word| memory.word(offset + word * 8).to_le_bytes()).collect()
    }

    /// The offset of the block that holds a key.
    pub(super) fn block_of(&self, memory: &Memory, key: usize) -> u64 {
        let holds = |block: &BlockRef| {
            let bytes = self.bytes(memory, *block);
            Block::decode(&bytes, block.address).is_ok_and(|found| found.key() == keys()[key])
        };
        let mut blocks = self.linked(memory).into_iter().map(|(_, _, block)| block);
        blocks.find(holds).map_or(0, |block| block.address.offset())
    }

    /// That every linked block is whole, linked once, and the only one of its key, beside the
    /// key's hint.
    pub(super) fn inspect(&self, memory: &Memory) -> Result<(), Violation> {
        let (mut seen, mut blocks) = (BTreeSet::new(), BTreeSet::new());
        for (word, hint, block) in self.linked(memory) {
            let bytes = self.bytes(memory, block);
            let found = match Block::decode(&bytes, block.address) {
                Ok(found) => found,
                Err(error) => return Err(Violation::Damaged(format!("{word:?}: {error}"))),
            };
            let problem = if word.state() != SlotState::Live {
                "the split has left it"
            } else if found.header_word().generation as u8 != block.generation_low {
                "another generation"
            } else if hint != hash(found.key()).hint(word.incarnation()) {
                "another key's hint"
            } else if !seen.insert(found.key().to_vec()) {
                "its key is there twice"
            } else if !blocks.insert(block.address.0) {
                "its block is linked twice"
            } else {
                continue;
            };
            return Err(Violation::Damaged(format!("{word:?}: {problem}")));
        }
        Ok(())
    }
}
