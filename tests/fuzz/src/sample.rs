//! A valid region that is written without the server, for the checker's tests and for fuzzing.
//! Target: the checker of regions, on a damaged region.
#![allow(clippy::unwrap_used, reason = "a sample that cannot be made is a failed test")]

use std::cell::OnceCell;
use std::sync::Arc;

use farside_cli::check::{CheckError, PROBLEMS_KEPT_MAX, Problem, Report, Scope, check};
use farside_fabric::memory::{HugePages, Region, RegionMemory};
use farside_fabric::shm::ShmFabric;
use farside_fabric::{Endpoint, LaneId};
use farside_layout::hash::{KeyHash, KeyHasher};
use farside_layout::{
    BLOCK_HEADER_BYTES, BlockAddress, BlockStamp, CHUNK_BYTES, ChunkEntry, ChunkUse,
    DirectoryEntry, Format, Geometry, HINT_OFFSET, NamedBlock, ROW_BYTES, ROWS_PER_SUBTABLE,
    RowHeader, SLOTS_PER_ROW, STATE_OFFSET, SUBTABLE_BYTES, SizeClass, SlotState, SlotWord,
    Superblock, class_for, seal, side_of, slot_in_subtable,
};
use zerocopy::IntoBytes;

use crate::decoded;

/// The sample's length, in bytes.
pub const REGION_BYTES: u64 = 6 * CHUNK_BYTES;
/// The depth of the sample's directory.
pub const DEPTH: u8 = 2;
/// The number of the sample's keys.
pub const KEYS: u64 = 40;
/// The lane of the checker's endpoint.
pub const LANE: LaneId = LaneId(0);
/// The length of the value that needs two chunks.
pub const LARGE_BYTES: u64 = 3 * CHUNK_BYTES / 2;

/// A slot in use and its block.
#[derive(Clone, Copy)]
pub struct UsedSlot {
    /// The slot's offset, in bytes.
    pub slot: u64,
    /// The block's offset, in bytes.
    pub block: u64,
}

/// A small region, and the offsets of its parts.
pub struct Sample {
    /// The region.
    pub region: Arc<Region>,
    /// The region's geometry.
    pub geometry: Geometry,
    /// The offsets of the region's subtables, in bytes.
    pub subtables: [u64; 3],
    /// The slots and blocks of the keys, in the order of the keys' numbers.
    pub used: Vec<UsedSlot>,
}

fn format() -> Format {
    Format {
        region_bytes: REGION_BYTES,
        region_id: [1; 16],
        hash_key: [2; 16],
        grace_ms: 100,
        key_bytes_max: 1024,
        value_bytes_max: 3 << 20,
    }
}

fn to_words(bytes: &[u8]) -> Vec<u64> {
    bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect()
}

impl Sample {
    /// Makes a region with a directory of four entries for three subtables, and only small blocks.
    pub fn small() -> Self {
        Self::with_value_of_key_7(7)
    }

    /// Makes the region of [`Sample::small`] with a block of two chunks, which takes longer to
    /// check.
    pub fn with_large_block() -> Self {
        Self::with_value_of_key_7(LARGE_BYTES)
    }

    fn with_value_of_key_7(bytes: u64) -> Self {
        let memory = RegionMemory::anonymous(REGION_BYTES, HugePages::Never).unwrap();
        let region = memory.region;
        let geometry = format().geometry();
        let index = geometry.chunk_offset(0).unwrap();
        let subtables = [1, 2, 3].map(|n| index + n * SUBTABLE_BYTES);
        let mut sample = Self { region, geometry, subtables, used: Vec::new() };
        sample.write_tables();
        for n in 0..KEYS {
            let value_bytes = if n == 7 { bytes } else { n };
            sample.store_key(&format!("key {n}"), &vec![n as u8; value_bytes as usize], n);
        }
        sample
    }

    fn write_tables(&self) {
        let superblock = Superblock::new(&format(), DEPTH).unwrap();
        self.region.write(0, &to_words(superblock.as_bytes())).unwrap();
        let small = class_for(6, 10).unwrap();
        let large = class_for(6, LARGE_BYTES as usize).unwrap();
        let uses = [
            ChunkUse::Subtables,
            ChunkUse::Blocks(small),
            ChunkUse::Blocks(SizeClass::from_index(1).unwrap()),
            ChunkUse::Blocks(large),
            ChunkUse::Continued,
        ];
        for (chunk, chunk_use) in uses.into_iter().enumerate() {
            let entry = self.geometry.chunk_entry(chunk as u32).unwrap();
            self.region.store(entry, ChunkEntry::new(chunk_use).bits()).unwrap();
        }
        let directory = self.geometry.directory_offset(DEPTH).unwrap();
        let entries = [(0, 1, 0), (0, 1, 0), (1, 2, 2), (2, 2, 3)];
        for (n, (subtable, local_depth, prefix)) in entries.into_iter().enumerate() {
            let subtable = self.subtables[subtable];
            let entry = DirectoryEntry::new(subtable, local_depth);
            self.region.store(directory + n as u64 * 8, entry.bits()).unwrap();
            let header = RowHeader::new(prefix, local_depth);
            for row in 0..ROWS_PER_SUBTABLE as u64 {
                let offset = subtable + row * ROW_BYTES;
                self.region.write(offset, &to_words(header.as_bytes())).unwrap();
            }
        }
    }

    /// Returns the hash of a key.
    pub fn hash(&self, key: &str) -> KeyHash {
        KeyHasher::new(&format().hash_key).hash(key.as_bytes())
    }

    /// Writes a block, at index `n` of the span of its class. Returns the reference to the block.
    pub fn store_block(&self, key: &str, value: &[u8], n: u64) -> NamedBlock {
        let class = class_for(key.len(), value.len()).unwrap();
        let mut chunk = 0;
        let chunk_use = |chunk| {
            let entry = self.region.load(self.geometry.chunk_entry(chunk).unwrap()).unwrap();
            ChunkEntry::from_bits(entry).chunk_use().unwrap()
        };
        while chunk_use(chunk) != ChunkUse::Blocks(class) {
            chunk += 1;
        }
        let index = n % class.blocks_per_span();
        let offset = self.geometry.chunk_offset(chunk).unwrap() + index * class.block_bytes();
        let address = BlockAddress::from_offset(offset).unwrap();
        let generation = n as u32 * 37 + 300;
        let mut image = vec![0; class.block_bytes() as usize];
        let header = BLOCK_HEADER_BYTES as usize;
        image[header..header + key.len()].copy_from_slice(key.as_bytes());
        image[header + key.len()..][..value.len()].copy_from_slice(value);
        let stamp = BlockStamp {
            address,
            generation,
            writer: 1,
            written_at_ms: 1,
            expires_at_ms: 0,
            is_pinned: false,
        };
        seal(&mut image, key.len() as u16, value.len() as u32, stamp).unwrap();
        self.region.write(offset, &to_words(&image)).unwrap();
        NamedBlock { address, class, generation_low: generation as u8 }
    }

    /// Returns the offset of the first empty slot of a key's window.
    pub fn free_slot(&self, key: &str) -> u64 {
        let hash = self.hash(key);
        let subtable = self.subtables[[0, 0, 1, 2][hash.directory_index(DEPTH) as usize]];
        let first_row = (hash.window_offset() / ROW_BYTES) as usize;
        (0..2 * SLOTS_PER_ROW)
            .map(|n| subtable + slot_in_subtable(first_row + n / SLOTS_PER_ROW, n % SLOTS_PER_ROW))
            .find(|slot| self.region.load(*slot).unwrap() == 0)
            .unwrap()
    }

    /// Links a block in a slot.
    pub fn link(&self, slot: u64, hash: KeyHash, block: NamedBlock, incarnation: u8) {
        let word = SlotWord::empty(incarnation).pending(hash.fingerprint(), block);
        let word = word.live(block, false);
        self.region.store(slot, word.bits()).unwrap();
        self.region.store(slot + HINT_OFFSET, hash.hint(word.incarnation())).unwrap();
    }

    fn store_key(&mut self, key: &str, value: &[u8], n: u64) {
        let block = self.store_block(key, value, n);
        let slot = self.free_slot(key);
        self.link(slot, self.hash(key), block, n as u8);
        self.used.push(UsedSlot { slot, block: block.address.claimed_offset() });
    }

    /// Checks the whole region once: no client changes it, so a problem does not disappear.
    ///
    /// # Errors
    /// [`CheckError`] if this is no region that can be checked.
    pub fn check(&self) -> Result<Report, CheckError> {
        check_region(Arc::clone(&self.region), REGION_BYTES)
    }

    /// Flips a bit of the region.
    pub fn flip(&self, offset: u64, bit: u64) {
        let word_offset = (offset + bit / 8) & !7;
        let word = self.region.load(word_offset).unwrap();
        let flipped = word ^ 1 << ((offset + bit / 8) % 8 * 8 + bit % 8);
        self.region.store(word_offset, flipped).unwrap();
    }

    /// Flips each of these bits, checks the region, and flips the bit back. The check must find the
    /// bits that matter.
    pub fn flip_each(
        &self,
        offset: u64,
        bits: std::ops::Range<u64>,
        matters: impl Fn(u64) -> bool,
    ) {
        for bit in bits {
            self.flip(offset, bit);
            let found = self.check().map_or(true, |report| !report.is_clean());
            assert!(found || !matters(bit), "bit {bit} at offset {offset:#x} was not found");
            self.flip(offset, bit);
        }
    }

    /// Returns the problems that the checker finds.
    pub fn problems(&self) -> Vec<Problem> {
        self.check().unwrap().problems
    }

    /// Begins to split the first subtable, and moves one entry to a new subtable. Returns the
    /// offsets of the entry's old slot and its new one.
    pub fn begin_split(&self) -> (u64, u64) {
        let old = self.subtables[0];
        let new = [4, 5].map(|n| self.geometry.chunk_offset(0).unwrap() + n * SUBTABLE_BYTES);
        for row in (0..ROWS_PER_SUBTABLE as u64).map(|row| row * ROW_BYTES) {
            for (side, subtable) in (0..).zip(new) {
                let header = RowHeader::new(side, 2).filling().words();
                self.region.write(subtable + row, &header).unwrap();
            }
            let header = RowHeader::new(0, 1).with_forward(new).words();
            self.region.write(old + row, &header).unwrap();
        }
        let is_here = |used: &UsedSlot| (old..old + SUBTABLE_BYTES).contains(&used.slot);
        let n = self.used.iter().position(is_here).unwrap();
        let used = &self.used[n];
        let hash = self.hash(&format!("key {n}"));
        let new_slot = new[side_of(hash.directory(), 1)] + (used.slot - old);
        let word = SlotWord::from_bits(self.region.load(used.slot).unwrap());
        let live = SlotWord::empty(6).moved().copy_of(word).with_state(SlotState::Live);
        self.region.write(new_slot, &[live.bits(), hash.hint(7)]).unwrap();
        self.region.store(used.slot, word.moved().bits()).unwrap();
        (used.slot, new_slot)
    }
}

/// Checks any region, as [`Sample::check`] does.
///
/// # Errors
/// [`CheckError`] if this is no region that can be checked.
pub fn check_region(region: Arc<Region>, region_bytes: u64) -> Result<Report, CheckError> {
    let endpoint = Endpoint::new(ShmFabric::new(region, None, 1), 1);
    check(&endpoint, LANE, region_bytes, (Scope::Blocks, true), &mut ())
}

/// Limit on the words that one input changes.
const CHANGES_MAX: usize = 64;

/// A sound region, and the offsets of the words that an input can change.
struct DamageableRegion {
    sample: Sample,
    offsets: Vec<u64>,
}

impl DamageableRegion {
    fn new() -> Self {
        let sample = Sample::small();
        let words = |start: u64, bytes: u64| (start..start + bytes).step_by(8);
        let directory = sample.geometry.directory_offset(DEPTH).unwrap();
        let chunks = sample.geometry.chunk_entry(0).unwrap();
        // A checksum covers the rest of the superblock, which has its own target.
        let mut offsets = vec![STATE_OFFSET];
        offsets.extend(words(directory, 4 * 8));
        offsets.extend(words(chunks, 5 * 8));
        for used in &sample.used {
            offsets.extend(words(used.slot, 16));
            offsets.extend(words(used.block, BLOCK_HEADER_BYTES + 8));
        }
        for subtable in sample.subtables {
            offsets.extend(words(subtable, SUBTABLE_BYTES));
        }
        Self { sample, offsets }
    }

    fn is_sound(&self) -> bool {
        self.sample.check().is_ok_and(|report| report.is_clean() && report.keys == KEYS)
    }
}

thread_local! {
    static REGION: OnceCell<DamageableRegion> = const { OnceCell::new() };
}

/// No damage, a plausible change of each kind of word, and many inverted words.
pub(crate) fn damages() -> Vec<Vec<u8>> {
    let change = |index: u16, xor: u64| [&index.to_le_bytes()[..], &xor.to_le_bytes()].concat();
    let many = (400..430).flat_map(|index| change(index, u64::MAX)).collect();
    vec![Vec::new(), change(0, 1 << 32), change(2, 1 << 8), change(7, 1), change(10, 7 << 61), many]
}

/// Changes words of the region. Each change takes 10 bytes: the index of the word, and the bits to
/// flip. Accepts every input: damage is only reported, and after it is undone the region is sound.
pub(crate) fn damaged(bytes: &[u8]) -> bool {
    REGION.with(|region| {
        let DamageableRegion { sample, offsets } = region.get_or_init(DamageableRegion::new);
        let mut before = Vec::new();
        for change in bytes.as_chunks::<10>().0.iter().take(CHANGES_MAX) {
            let &[low, high, ref xor @ ..] = change;
            let offset = offsets[usize::from(u16::from_le_bytes([low, high])) % offsets.len()];
            let word = sample.region.load(offset).unwrap();
            let xor = u64::from_le_bytes(*xor);
            sample.region.store(offset, word ^ xor).unwrap();
            before.push((offset, word));
        }
        if let Some(report) = decoded(sample.check()) {
            assert!(report.problems.len() <= PROBLEMS_KEPT_MAX);
            assert!(report.problem_count >= report.problems.len() as u64);
            for problem in &report.problems {
                assert!(!problem.to_string().contains(char::is_control), "{problem}");
            }
        }
        for (offset, word) in before.into_iter().rev() {
            sample.region.store(offset, word).unwrap();
        }
        assert!(region.get().is_some_and(DamageableRegion::is_sound));
        true
    })
}
