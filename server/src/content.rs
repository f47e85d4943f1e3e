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
pub(crate) struct Reader {
    pub(crate) region: Arc<Region>,
    pub(crate) geometry: Geometry,
    hasher: KeyHasher,
}

impl Reader {
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
        let is_meant = |header: &BlockHeader| header.generation() as u8 == block.generation_low;
        let Some(words) = read_block(&self.region, block, budget, is_meant)? else {
            return Ok(None);
        };
        let Ok(content) = Block::decode(words.as_bytes(), block.address) else { return Ok(None) };
        let (word, hash) = (slot.word(), self.hasher.hash(content.key()));
        let generation = content.header_word().generation;
        let is_meant = generation as u8 == block.generation_low
            && class_for(content.key().len(), content.value().len()) == Some(block.class)
            && hash.fingerprint() == word.fingerprint()
            && hash.hint(word.incarnation()) == slot.hint();
        Ok(is_meant.then(|| Content {
            generation,
            written_at_ms: content.written_at_ms(),
            expires_at_ms: content.expires_at_ms(),
        }))
    }
}

#[cfg(test)]
mod tests;
