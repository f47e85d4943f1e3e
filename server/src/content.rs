//! What slots lead to, looked at before the server takes one out of service.

use std::sync::Arc;

use farside_common::fabric::ChainError;
use farside_common::fabric::shm::Region;
use farside_common::hash::KeyHasher;
use farside_common::layout::{Block, BlockRef, Format, Geometry, Slot, class_for};
use zerocopy::IntoBytes;

/// What matters of a block.
pub(crate) struct Content {
    pub(crate) generation: u32,
    pub(crate) written_at_ns: u64,
    pub(crate) expires_at_s: u32,
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
    pub(crate) fn read(&self, slot: &Slot, block: BlockRef) -> Result<Option<Content>, ChainError> {
        if self.geometry.check_block(block).is_err() {
            return Ok(None);
        }
        let mut words = vec![0u64; (block.class.block_bytes() / 8) as usize];
        self.region.read(block.address.offset(), &mut words)?;
        let Ok(content) = Block::decode(words.as_bytes(), block.address) else { return Ok(None) };
        let (word, hash) = (slot.word(), self.hasher.hash(content.key()));
        let generation = content.header_word().generation;
        let is_meant = generation as u8 == block.generation_low
            && class_for(content.key().len(), content.value().len()) == Some(block.class)
            && hash.fingerprint() == word.fingerprint()
            && hash.hint(word.incarnation()) == slot.hint();
        Ok(is_meant.then(|| Content {
            generation,
            written_at_ns: content.written_at_ns(),
            expires_at_s: content.expires_at_s(),
        }))
    }
}
