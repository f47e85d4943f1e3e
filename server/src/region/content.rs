//! Reads and checks the block of a slot before the server removes it, within the budget of a step.

use std::sync::Arc;

use farside_fabric::ChainError;
use farside_fabric::memory::Region;
use farside_layout::hash::{KeyHash, KeyHasher};
use farside_layout::{
    BLOCK_HEADER_BYTES, Block, BlockHeader, BlockRef, Extent, ExtentShape, ExtentTable, Format,
    FreeBlock, Geometry, HeaderWord, KEY_BYTES_LIMIT, SizeClass, Slot, VALUE_BYTES_LIMIT,
    block_bytes, extent_table_bytes,
};
use zerocopy::{FromBytes, IntoBytes};

/// How many bytes of blocks a step of a chore reads. Reading them takes some milliseconds.
const STEP_BYTES: u64 = 8 << 20;

/// How many subtables and how many bytes of blocks a step may still read.
///
/// The number of subtables does not bound the time of a step, because damaged slots can all lead to
/// the same block of 4 MiB. So bytes of blocks count, too. The last block may exceed the budget.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Budget {
    pub(crate) subtables: usize,
    pub(crate) bytes: u64,
}

impl Budget {
    /// The budget of a walk before there are clients.
    pub(crate) const UNLIMITED: Self = Self::new(usize::MAX, u64::MAX);

    const fn new(subtables: usize, bytes: u64) -> Self {
        Self { subtables, bytes }
    }

    /// The budget of a step of a chore.
    pub(crate) const fn of_step(subtables: usize) -> Self {
        Self::new(subtables, STEP_BYTES)
    }

    /// Subtracts from the budget the bytes of a block that was read.
    pub(crate) fn spend(&mut self, bytes: u64) {
        self.bytes = self.bytes.saturating_sub(bytes);
    }
}

/// The bytes of header and key that are read at once. Longer keys take a second reading.
const HEADER_AND_SHORT_KEY_BYTES: usize = 128;
/// The length of the shortest heads, in words.
const SHORT_HEAD_WORDS: usize = SizeClass::FIRST_HEAD.block_bytes() as usize / 8;
/// The length of the longest head: that of the longest value of the longest key.
const HEAD_WORDS_MAX: usize = {
    let extents = ExtentShape::OF_REGIONS.count(KEY_BYTES_LIMIT, VALUE_BYTES_LIMIT);
    block_bytes(KEY_BYTES_LIMIT, extent_table_bytes(extents)).div_ceil(8) as usize
};

/// The fields of a block on which its removal depends.
pub(crate) struct BlockFields {
    pub(crate) generation: u32,
    pub(crate) expires_at_ms: u64,
}

/// A block that was found by its address.
pub(crate) struct FoundBlock {
    pub(crate) hash: KeyHash,
    pub(crate) generation: u32,
    pub(crate) written_at_ms: u64,
}

/// Reads the header of a block, then the bytes that are in use according to it. Returns `None` if
/// the caller does not want a block with this header, or if the header is damaged.
pub(crate) fn read_block(
    region: &Region,
    block: BlockRef,
    budget: &mut Budget,
    is_wanted: impl FnOnce(&BlockHeader) -> bool,
) -> Result<Option<Vec<u64>>, ChainError> {
    let mut words = vec![0u64; BLOCK_HEADER_BYTES as usize / 8];
    region.read(block.offset(), &mut words)?;
    budget.spend(BLOCK_HEADER_BYTES);
    let Ok(header) = BlockHeader::ref_from_bytes(words.as_bytes()) else { return Ok(None) };
    let bytes = header.block_bytes().next_multiple_of(8);
    if bytes > block.class.block_bytes() || !is_wanted(header) {
        return Ok(None);
    }
    words.resize((bytes / 8) as usize, 0);
    region.read(block.offset(), &mut words)?;
    budget.spend(bytes);
    Ok(Some(words))
}

/// Calls `visit` with the head's content and each extent that its table names. There is none if the
/// block is no head, if it was rewritten meanwhile, or if it is damaged: its checksum, which also
/// covers the key, is compared before the first call. Allocates nothing, because a collection calls
/// this for each head.
///
/// A writer can make a head that names any blocks, so none of them may be freed before
/// [`for_each_owned_extent`] has looked at it.
pub(crate) fn for_each_extent<E: From<ChainError>>(
    region: &Region,
    head: BlockRef,
    visit: impl FnMut(&Block<'_>, &Extent) -> Result<(), E>,
) -> Result<(), E> {
    if !head.class.is_head() {
        return Ok(());
    }
    // To clear the longer memory takes as long as to read a usual head.
    match head.class == SizeClass::FIRST_HEAD {
        true => visit_extents::<SHORT_HEAD_WORDS, E>(region, head, visit),
        false => visit_extents::<HEAD_WORDS_MAX, E>(region, head, visit),
    }
}

/// [`for_each_extent`], with memory for a head of so many words.
fn visit_extents<const WORDS: usize, E: From<ChainError>>(
    region: &Region,
    head: BlockRef,
    mut visit: impl FnMut(&Block<'_>, &Extent) -> Result<(), E>,
) -> Result<(), E> {
    let mut words = [0u64; WORDS];
    let (first, _) = words.split_at_mut(BLOCK_HEADER_BYTES as usize / 8);
    region.read(head.offset(), first)?;
    let Ok(header) = BlockHeader::ref_from_bytes(first.as_bytes()) else { return Ok(()) };
    let bytes = header.block_bytes().next_multiple_of(8);
    if bytes > head.class.block_bytes() || !head.has_generation(header.generation()) {
        return Ok(());
    }
    let Some(words) = words.get_mut(..(bytes / 8) as usize) else { return Ok(()) };
    region.read(head.offset(), words)?;
    let Ok(block) = Block::decode(words.as_bytes(), head.address) else { return Ok(()) };
    let table = ExtentTable::of(&block, ExtentShape::OF_REGIONS);
    let Ok(table) = table else { return Ok(()) };
    table.extents.iter().try_for_each(|extent| visit(&block, extent))
}

/// Calls `visit` with each extent of a head that was unlinked and has not been used again. An
/// extent is the head's if its own header says so: it has the key of the head, and the generation
/// that the table names (invariant I27). All others are left alone, since the table may name blocks
/// of other keys.
pub(crate) fn for_each_owned_extent<E: From<ChainError>>(
    region: &Region,
    geometry: &Geometry,
    head: BlockRef,
    mut visit: impl FnMut(FreeBlock) -> Result<(), E>,
) -> Result<(), E> {
    for_each_extent(region, head, |content, extent| {
        let Ok(block) = geometry.check_block(extent.block()) else { return Ok(()) };
        let mut header = [0u64; BLOCK_HEADER_BYTES as usize / 8];
        region.read(block.offset(), &mut header)?;
        let key = content.key();
        let is_of_key = BlockHeader::ref_from_bytes(header.as_bytes())
            .is_ok_and(|header| header.is_of_extent(extent, key.len()))
            && has_key(region, block, key)?;
        if is_of_key { visit(extent.unlinked()) } else { Ok(()) }
    })
}

/// Whether this key is behind the header of a block.
fn has_key(region: &Region, block: BlockRef, key: &[u8]) -> Result<bool, ChainError> {
    const PART_BYTES: usize = 256;
    let mut offset = block.offset() + BLOCK_HEADER_BYTES;
    for part in key.chunks(PART_BYTES) {
        let mut words = [0u64; PART_BYTES / 8];
        region.read(offset, &mut words[..part.len().div_ceil(8)])?;
        if !words.as_bytes().starts_with(part) {
            return Ok(false);
        }
        offset += PART_BYTES as u64;
    }
    Ok(true)
}

/// Reads the blocks of slots.
pub(crate) struct BlockReader {
    pub(crate) region: Arc<Region>,
    pub(crate) geometry: Geometry,
    hasher: KeyHasher,
}

impl BlockReader {
    pub(crate) fn new(region: &Arc<Region>, format: &Format) -> Self {
        let hasher = KeyHasher::new(&format.hash_key);
        Self { region: region.clone(), geometry: format.geometry(), hasher }
    }

    /// Reads the slot's block. Returns `None` if the block was rewritten meanwhile, or if the slot
    /// or the block is damaged. A slot's word has no checksum, so all of its fields are compared
    /// with the block: a damaged word must not remove the block of another key.
    pub(crate) fn read(
        &self,
        slot: &Slot,
        block: BlockRef,
        budget: &mut Budget,
    ) -> Result<Option<BlockFields>, ChainError> {
        let is_wanted = |header: &BlockHeader| block.has_generation(header.generation());
        let Some(words) = read_block(&self.region, block, budget, is_wanted)? else {
            return Ok(None);
        };
        let Ok(content) = Block::decode(words.as_bytes(), block.address) else { return Ok(None) };
        let hash = self.hasher.hash(content.key());
        let generation = content.header_word().generation;
        let fits_slot = block.has_generation(generation)
            && content.is_of_class(block.class)
            && slot.is_of(hash);
        Ok(fits_slot.then(|| BlockFields { generation, expires_at_ms: content.expires_at_ms() }))
    }

    /// Reads header and key of a block whose slot is not known. Returns `None` if the lengths do
    /// not go with the class.
    ///
    /// The value is not read, so the checksum is not compared. As for a client that unlinks a
    /// block, the slot is the check: its word names the block, and stands beside the hint of the
    /// key.
    pub(crate) fn read_key_at(&self, block: BlockRef) -> Result<Option<FoundBlock>, ChainError> {
        let class = block.class;
        let mut words = [0; HEADER_AND_SHORT_KEY_BYTES / 8];
        let in_class = (class.block_bytes() as usize).min(HEADER_AND_SHORT_KEY_BYTES) / 8;
        self.region.read(block.offset(), &mut words[..in_class])?;
        let header = header_of_class(&words, class);
        let Some(header) = header else { return Ok(None) };
        let end = BLOCK_HEADER_BYTES as usize + header.key_bytes();
        let found = |words: &[u64]| FoundBlock {
            hash: self.hasher.hash(&words.as_bytes()[BLOCK_HEADER_BYTES as usize..end]),
            generation: header.generation(),
            written_at_ms: header.written_at_ms(),
        };
        if end <= HEADER_AND_SHORT_KEY_BYTES {
            return Ok(Some(found(&words)));
        }
        let mut words = vec![0; end.div_ceil(8)];
        self.region.read(block.offset(), &mut words)?;
        let is_same = header_of_class(&words, class) == Some(header);
        Ok(is_same.then(|| found(&words)))
    }

    /// Returns the generation in the header of the block.
    pub(crate) fn generation_of(&self, block: BlockRef) -> Result<u32, ChainError> {
        Ok(HeaderWord::from_bits(self.region.load(block.offset())?).generation)
    }

    /// Whether the header of the block says that its value is pinned.
    pub(crate) fn is_pinned(&self, block: BlockRef) -> Result<bool, ChainError> {
        let mut words = [0u64; BLOCK_HEADER_BYTES as usize / 8];
        self.region.read(block.offset(), &mut words)?;
        Ok(BlockHeader::ref_from_bytes(words.as_bytes()).is_ok_and(BlockHeader::is_pinned))
    }
}

/// Returns the header at the start of these words, if it is that of a block of this class.
fn header_of_class(words: &[u64], class: SizeClass) -> Option<BlockHeader> {
    let (header, _) = BlockHeader::read_from_prefix(words.as_bytes()).ok()?;
    let fits = match class {
        SizeClass::EXTENT => header.fits_extent(),
        _ => header.is_of_class(class),
    };
    fits.then_some(header)
}

#[cfg(test)]
mod tests {
    //! Checks the bounds of a step of expiry: how much it reads, removes and walks. Guards against
    //! slots that all lead to one large block: the server read gigabytes and answered no client
    //! meanwhile. Also checks what is read of a block that is evicted.

    use farside_config::ServerConfig;
    use farside_config::size::ByteSize;
    use farside_fabric::memory::{HugePages, RegionMemory};
    use farside_layout::{
        BLOCK_BYTES_MAX, BlockAddress, BlockStamp, Extent, HINT_OFFSET, NamedBlock,
        SLOTS_PER_SUBTABLE, SlotWord, class_for, seal, set_extent, set_value_bytes,
    };

    use super::*;
    use crate::chores::expiry::Reaper;
    use crate::region::index::SubtableImage;
    use crate::region::own_endpoint::OwnEndpoint;
    use crate::region::recovery;
    use crate::region::served::ServedRegion;

    const SUBTABLES_PER_CHUNK: usize = 256;
    /// A time that is longer than these tests run.
    const HOUR: u64 = 3_600_000_000_000;

    fn expired(address: BlockAddress, generation: u32) -> BlockStamp {
        let (written_at_ms, expires_at_ms) = (1, 1);
        let is_pinned = false;
        BlockStamp { address, generation, writer: 1, written_at_ms, expires_at_ms, is_pinned }
    }

    /// A region in which many LIVE words lead to the same block, whose value has expired.
    struct OneBlockRegion {
        opened: ServedRegion,
        own: OwnEndpoint,
        _memory: RegionMemory,
    }

    impl OneBlockRegion {
        /// Stores `words` words from subtable `first_subtable` on. The block has `block_bytes`.
        fn new(block_bytes: u64, words: usize, first_subtable: usize, index_bytes: u64) -> Self {
            let memory =
                RegionMemory::anonymous((16 << 20) + 2 * index_bytes, HugePages::Never).unwrap();
            let config = ServerConfig { index: Some(ByteSize(index_bytes)), ..Default::default() };
            let opened = recovery::open(&memory, &config).unwrap();
            let ServedRegion { region, geometry, format, index, .. } = &opened;
            let class = SizeClass::for_bytes(block_bytes).unwrap();
            // The last two chunks, because a large block takes two.
            let chunk = geometry.chunks() - 2;
            let address = BlockAddress::from_offset(geometry.chunk_offset(chunk).unwrap()).unwrap();
            let block = NamedBlock { address, class, generation_low: 1 };
            let mut image = vec![0u64; (block_bytes / 8) as usize];
            let value_bytes = block_bytes - BLOCK_HEADER_BYTES - 1;
            seal(image.as_mut_bytes(), 1, value_bytes as u32, expired(address, 1)).unwrap();
            region.write(address.claimed_offset(), &image).unwrap();
            let hash = KeyHasher::new(&format.hash_key).hash(&[0]);
            let word = SlotWord::live_in(2, hash.fingerprint(), block, true);
            let slot_offsets = index.places[first_subtable..].iter().flat_map(|place| {
                let image = SubtableImage::read(region, *place).unwrap();
                image.slots().map(|(slot, _)| slot).collect::<Vec<_>>()
            });
            for offset in slot_offsets.take(words) {
                region.store(offset, word.bits()).unwrap();
                region.store(offset + HINT_OFFSET, hash.hint(2)).unwrap();
            }
            let own = OwnEndpoint::over_memory(region);
            Self { opened, own, _memory: memory }
        }

        fn reader(&self) -> BlockReader {
            BlockReader::new(&self.opened.region, &self.opened.format)
        }

        fn reaper(&self) -> Reaper {
            Reaper::new(self.reader(), (HOUR, HOUR), false)
        }

        /// Returns how many values each step of a walk removes.
        fn reap(&self) -> Vec<usize> {
            let mut reaper = self.reaper();
            let mut steps = Vec::new();
            while reaper.next_step_at() == Some(0) {
                steps.push(reaper.step(&self.opened.index, &self.own).unwrap().len());
            }
            steps
        }
    }

    #[test]
    fn a_step_of_expiry_reads_no_more_than_two_large_blocks() {
        let steps = OneBlockRegion::new(BLOCK_BYTES_MAX, 40, 0, 2 << 20).reap();
        assert_eq!(steps.iter().max(), Some(&2), "{steps:?}");
        assert_eq!(steps.iter().sum::<usize>(), 40);
    }

    /// A step checks the limit of 256 after each subtable.
    #[test]
    fn a_step_of_expiry_ends_with_the_subtable_in_which_it_removes_256_values() {
        let words = 3 * SLOTS_PER_SUBTABLE;
        let steps = OneBlockRegion::new(64, words, 0, 2 << 20).reap();
        assert_eq!(steps.iter().max(), Some(&SLOTS_PER_SUBTABLE), "{steps:?}");
        assert_eq!(steps.iter().sum::<usize>(), words);
    }

    #[test]
    fn a_step_of_expiry_walks_64_subtables() {
        let steps = OneBlockRegion::new(64, 0, 0, 2 << 20).reap();
        assert_eq!(steps.len(), SUBTABLES_PER_CHUNK / 64);
    }

    /// The extents that [`for_each_extent`] visits.
    fn extents_of(region: &Region, head: BlockRef) -> Vec<FreeBlock> {
        let mut extents = Vec::new();
        let visit = |_: &Block<'_>, extent: &Extent| {
            extents.push(extent.unlinked());
            Ok::<_, ChainError>(())
        };
        for_each_extent(region, head, visit).unwrap();
        extents
    }

    #[test]
    fn the_extents_of_a_whole_head_are_visited_however_long_its_key_is() {
        let region = OneBlockRegion::new(64, 0, 0, 2 << 20).opened;
        let start = region.geometry.chunk_offset(region.geometry.chunks() - 2).unwrap();
        let address = BlockAddress::from_offset(start).unwrap();
        for key_bytes in [1, 1000, 5000, KEY_BYTES_LIMIT] {
            let count = ExtentShape::OF_REGIONS.count(key_bytes, VALUE_BYTES_LIMIT);
            let table_bytes = extent_table_bytes(count);
            let class = SizeClass::for_head(block_bytes(key_bytes, table_bytes)).unwrap();
            let mut image = vec![0u64; (class.block_bytes() / 8) as usize];
            let block = |n: usize| FreeBlock { address: BlockAddress(n as u32 + 5), generation: 7 };
            let table = &mut image.as_mut_bytes()[BLOCK_HEADER_BYTES as usize + key_bytes..];
            set_value_bytes(table, VALUE_BYTES_LIMIT).unwrap();
            for number in 0..count {
                set_extent(table, number, Extent::new(block(number), 1)).unwrap();
            }
            let stamp = expired(address, 9);
            seal(image.as_mut_bytes(), key_bytes as u16, table_bytes as u32, stamp).unwrap();
            region.region.write(address.claimed_offset(), &image).unwrap();
            let named = NamedBlock { address, class, generation_low: 9 };
            let checked = |named| region.geometry.check_block(named).unwrap();
            let head = checked(named);
            let unlinked = |n| FreeBlock { generation: 8, ..block(n) };
            let expected: Vec<_> = (0..count).map(unlinked).collect();
            assert_eq!(extents_of(&region.region, head), expected, "{key_bytes} bytes");
            let older = checked(NamedBlock { generation_low: 8, ..named });
            let no_head = checked(NamedBlock { class: SizeClass::LARGEST_OF_VALUES, ..named });
            assert_eq!(extents_of(&region.region, older), []);
            assert_eq!(extents_of(&region.region, no_head), []);
            // A key that another writer has begun to replace.
            region.region.store(address.claimed_offset() + BLOCK_HEADER_BYTES, u64::MAX).unwrap();
            assert_eq!(extents_of(&region.region, head), []);
        }
    }

    #[test]
    fn the_key_of_a_block_is_read_however_long_it_is() {
        let region = OneBlockRegion::new(64, 0, 0, 2 << 20).opened;
        let reader = BlockReader::new(&region.region, &region.format);
        let start = region.geometry.chunk_offset(region.geometry.chunks() - 2).unwrap();
        let address = BlockAddress::from_offset(start).unwrap();
        for (key_bytes, value_bytes) in [(1, 0), (32, 0), (33, 0), (95, 1), (96, 900), (1000, 5)] {
            let class = class_for(key_bytes, value_bytes).unwrap();
            let mut image = vec![0u64; (class.block_bytes() / 8) as usize];
            let key: Vec<u8> = (0..key_bytes).map(|byte| byte as u8 | 1).collect();
            image.as_mut_bytes()[BLOCK_HEADER_BYTES as usize..][..key_bytes].copy_from_slice(&key);
            let stamp = expired(address, 9);
            seal(image.as_mut_bytes(), key_bytes as u16, value_bytes as u32, stamp).unwrap();
            region.region.write(address.claimed_offset(), &image).unwrap();
            let hash = KeyHasher::new(&region.format.hash_key).hash(&key);
            let read_key_at = |class| {
                let block = NamedBlock { address, class, generation_low: 0 };
                reader.read_key_at(region.geometry.check_block(block).unwrap()).unwrap()
            };
            let found = read_key_at(class).unwrap();
            assert!(found.hash == hash && found.generation == 9, "{key_bytes} bytes");
            let other = SizeClass::for_bytes(class.block_bytes() * 2).unwrap();
            assert!(read_key_at(other).is_none());
        }
    }
}
