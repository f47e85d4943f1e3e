//! What slots lead to, looked at before the server takes one out of service.

use std::sync::Arc;

use farside_fabric::ChainError;
use farside_fabric::shm::Region;
use farside_layout::hash::KeyHasher;
use farside_layout::{
    BLOCK_HEADER_BYTES, Block, BlockHeader, BlockRef, Format, Geometry, Slot, class_for,
};
use zerocopy::{FromBytes, IntoBytes};

use crate::walk::Budget;

/// What matters of a block.
pub(crate) struct Content {
    pub(crate) generation: u32,
    pub(crate) written_at_ms: u64,
    pub(crate) expires_at_ms: u64,
}

/// The block there, as far as its header says that it is in use. `None` if it is not what is looked
/// for, which its header says first, or cannot be whole.
pub(crate) fn read_block(
    region: &Region,
    block: BlockRef,
    budget: &mut Budget,
    is_wanted: impl FnOnce(&BlockHeader) -> bool,
) -> Result<Option<Vec<u64>>, ChainError> {
    let mut words = vec![0u64; BLOCK_HEADER_BYTES as usize / 8];
    region.read(block.address.offset(), &mut words)?;
    budget.spend(BLOCK_HEADER_BYTES);
    let Ok(header) = BlockHeader::ref_from_bytes(words.as_bytes()) else { return Ok(None) };
    let bytes = header.block_bytes().next_multiple_of(8);
    if bytes > block.class.block_bytes() || !is_wanted(header) {
        return Ok(None);
    }
    words.resize((bytes / 8) as usize, 0);
    region.read(block.address.offset(), &mut words)?;
    budget.spend(bytes);
    Ok(Some(words))
}

/// Reads blocks.
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

    /// What the slot leads to. `None` if the block was rewritten meanwhile or anything is damaged:
    /// nothing in a word is checksummed, and a block of another key must not go because of it.
    pub(crate) fn read(
        &self,
        slot: &Slot,
        block: BlockRef,
        budget: &mut Budget,
    ) -> Result<Option<Content>, ChainError> {
        if self.geometry.check_block(block).is_err() {
            return Ok(None);
        }
        let is_meant = |header: &BlockHeader| block.has_generation(header.generation());
        let Some(words) = read_block(&self.region, block, budget, is_meant)? else {
            return Ok(None);
        };
        let Ok(content) = Block::decode(words.as_bytes(), block.address) else { return Ok(None) };
        let hash = self.hasher.hash(content.key());
        let generation = content.header_word().generation;
        let is_meant = block.has_generation(generation)
            && class_for(content.key().len(), content.value().len()) == Some(block.class)
            && slot.is_of(hash);
        Ok(is_meant.then(|| Content {
            generation,
            written_at_ms: content.written_at_ms(),
            expires_at_ms: content.expires_at_ms(),
        }))
    }
}

#[cfg(test)]
mod tests {
    //! That a step of expiry and a request of eviction read, remove and walk a bounded amount,
    //! whatever the words of the index lead to. Guards against words that all lead to one large
    //! block, which had the server read gigabytes while no client was answered.

    use farside_config::ServerConfig;
    use farside_config::size::ByteSize;
    use farside_fabric::shm::{HugePages, RegionMemory};
    use farside_layout::{
        BLOCK_BYTES_MAX, BlockAddress, BlockStamp, HINT_OFFSET, SLOTS_PER_ROW, SizeClass, SlotWord,
        seal,
    };

    use super::*;
    use crate::eviction::Evictor;
    use crate::expiry::Reaper;
    use crate::index::SubtableImage;
    use crate::own_endpoint::OwnEndpoint;
    use crate::recovery::{self, Opened};

    const SUBTABLES_PER_CHUNK: usize = 256;
    const SLOTS_PER_SUBTABLE: usize = 64 * SLOTS_PER_ROW;
    /// Nothing here takes so long.
    const HOUR: u64 = 3_600_000_000_000;

    /// A region in which LIVE words of ended values all lead to one block.
    struct Crowded {
        opened: Opened,
        own: OwnEndpoint,
        class: SizeClass,
        _memory: RegionMemory,
    }

    impl Crowded {
        /// So many words, from this subtable on; the block fills its class of this many bytes.
        fn new(block_bytes: u64, words: usize, first_subtable: usize, index_bytes: u64) -> Self {
            let memory =
                RegionMemory::anonymous((16 << 20) + 2 * index_bytes, HugePages::Never).unwrap();
            let config = ServerConfig { index: Some(ByteSize(index_bytes)), ..Default::default() };
            let opened = recovery::open(&memory, &config).unwrap();
            let Opened { region, geometry, format, index, .. } = &opened;
            let class = SizeClass::for_bytes(block_bytes).unwrap();
            // The last two chunks.
            let chunk = geometry.chunks() - 2;
            let address = BlockAddress::from_offset(geometry.chunk_offset(chunk).unwrap()).unwrap();
            let block = BlockRef { address, class, generation_low: 1 };
            let mut image = vec![0u64; (block_bytes / 8) as usize];
            let value_bytes = block_bytes - BLOCK_HEADER_BYTES - 1;
            let stamp = BlockStamp {
                address,
                generation: 1,
                writer: 1,
                written_at_ms: 1,
                expires_at_ms: 1,
            };
            seal(image.as_mut_bytes(), 1, value_bytes as u32, stamp).unwrap();
            region.write(address.offset(), &image).unwrap();
            let hash = KeyHasher::new(&format.hash_key).hash(&[0]);
            let word = SlotWord::live_in(2, hash.fingerprint(), block, true);
            let slots = index.places[first_subtable..].iter().flat_map(|place| {
                let image = SubtableImage::read(region, *place).unwrap();
                image.slots().map(|(slot, _)| slot).collect::<Vec<_>>()
            });
            for slot in slots.take(words) {
                region.store(slot, word.bits()).unwrap();
                region.store(slot + HINT_OFFSET, hash.hint(2)).unwrap();
            }
            let own = OwnEndpoint::over_memory(region);
            Self { opened, own, class, _memory: memory }
        }

        fn reader(&self) -> BlockReader {
            BlockReader::new(&self.opened.region, &self.opened.format)
        }

        fn reaper(&self) -> Reaper {
            Reaper::new(self.reader(), (HOUR, HOUR), false)
        }

        /// How many values each step of a walk removes.
        fn reap(&self) -> Vec<usize> {
            let mut reaper = self.reaper();
            let mut steps = Vec::new();
            while reaper.next_step_at() == Some(0) {
                steps.push(reaper.step(&self.opened.index, &self.own).unwrap().len());
            }
            steps
        }

        /// How many keys each of two requests for as many blocks as can be removes.
        fn evict(&self) -> [usize; 2] {
            let (mut reaper, mut evictor) = (self.reaper(), Evictor::new(self.reader(), HOUR));
            let mut make_room = || {
                let Self { opened, own, class, .. } = self;
                evictor.make_room(*class, u32::MAX, &opened.index, own, &mut reaper).unwrap().len()
            };
            [make_room(), make_room()]
        }
    }

    #[test]
    fn a_step_of_expiry_reads_no_more_than_two_large_blocks() {
        let steps = Crowded::new(BLOCK_BYTES_MAX, 40, 0, 2 << 20).reap();
        assert_eq!(steps.iter().max(), Some(&2), "{steps:?}");
        assert_eq!(steps.iter().sum::<usize>(), 40);
    }

    /// It looks whether it has removed enough after each subtable.
    #[test]
    fn a_step_of_expiry_removes_no_more_than_a_subtable_has_or_256() {
        let words = 3 * SLOTS_PER_SUBTABLE;
        let steps = Crowded::new(64, words, 0, 2 << 20).reap();
        assert_eq!(steps.iter().max(), Some(&SLOTS_PER_SUBTABLE), "{steps:?}");
        assert_eq!(steps.iter().sum::<usize>(), words);
    }

    #[test]
    fn a_step_of_expiry_walks_64_subtables() {
        let steps = Crowded::new(64, 0, 0, 2 << 20).reap();
        assert_eq!(steps.len(), SUBTABLES_PER_CHUNK / 64);
    }

    /// One of five that are read goes, so of 32 MiB two.
    #[test]
    fn a_request_for_room_reads_no_more_than_32_mib_of_blocks() {
        assert_eq!(Crowded::new(BLOCK_BYTES_MAX, 40, 0, 2 << 20).evict()[0], 2);
    }

    #[test]
    fn a_request_for_room_removes_no_more_than_1024_keys() {
        let words = 16 * SLOTS_PER_SUBTABLE;
        assert_eq!(Crowded::new(64, words, 0, 2 << 20).evict()[0], 1024);
    }

    /// The next one goes on from there.
    #[test]
    fn a_request_for_room_looks_through_no_more_than_32_mib_of_index() {
        let subtables = 32 << 20 >> 13;
        assert_eq!(Crowded::new(64, 5, subtables, 64 << 20).evict(), [0, 1]);
    }
}
