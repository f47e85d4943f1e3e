//! Chunks for others than blocks.

use farside_common::fabric::ChainError;
use farside_common::layout::ChunkUse;

use super::{Chunk, Depot, Memory};

impl Depot {
    /// A chunk for subtables; `None` if none is free.
    pub(crate) fn take_chunk(&mut self, memory: &impl Memory) -> Result<Option<u32>, ChainError> {
        let Some(chunk) = self.free.first().copied() else { return Ok(None) };
        memory.set_use(chunk, ChunkUse::Subtables)?;
        self.free.remove(&chunk);
        self.chunks[chunk as usize] = Chunk::Subtables;
        Ok(Some(chunk))
    }
}
