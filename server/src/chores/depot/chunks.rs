//! Chunks of the heap: gives them to a size class or to the index, and frees them again.

use farside_control::BLOCKS_PER_MESSAGE_MAX;
use farside_fabric::{ChainError, Nanos};
use farside_layout::{ChunkEntry, ChunkUse, HeaderWord, Mark, SizeClass};

use super::{Chunk, Depot, REQUEST_SHARE_DIVISOR, RegionAccess};

impl Depot {
    /// Returns how many blocks the class could give now. For blocks of two chunks this is a lower
    /// bound, large enough to grant a whole message.
    pub(super) fn available(&self, class: SizeClass) -> u64 {
        let pool = &self.pools[usize::from(class.index())];
        let spans = if class.chunks_per_span() == 1 {
            self.free_chunks.len() as u64
        } else {
            let pairs_max = BLOCKS_PER_MESSAGE_MAX as u64 * REQUEST_SHARE_DIVISOR;
            self.free_pairs(pairs_max)
        };
        pool.available + spans.min(self.spans_max(class)) * class.blocks_per_span()
    }

    /// Counts the pairs of neighbours among the free chunks, up to `pairs_max`.
    fn free_pairs(&self, pairs_max: u64) -> u64 {
        let (mut pairs, mut single) = (0, None);
        for chunk in &self.free_chunks {
            if single.is_some_and(|left: u32| left + 1 == *chunk) {
                (pairs, single) = (pairs + 1, None);
            } else {
                single = Some(*chunk);
            }
            if pairs == pairs_max {
                break;
            }
        }
        pairs
    }

    /// Gives a class another span. Returns false if there is no room for one.
    pub(super) fn grow(
        &mut self,
        class: SizeClass,
        now: Nanos,
        memory: &impl RegionAccess,
    ) -> Result<bool, ChainError> {
        let chunk = if class.chunks_per_span() == 1 {
            self.free_chunks.first().copied()
        } else {
            // Takes the last pair, because spans of one chunk take the first free chunk. So they
            // break up few pairs.
            self.free_chunks
                .iter()
                .rev()
                .copied()
                .find(|chunk| self.free_chunks.contains(&(chunk + 1)))
        };
        let Some(chunk) = chunk else { return Ok(false) };
        if self.spans_max(class) == 0 {
            return Ok(false);
        }
        let chunks = chunk..chunk + class.chunks_per_span() as u32;
        let mut age = 0;
        for chunk in chunks.clone() {
            age = age.max(memory.entry(chunk)?.age());
        }
        if age > 0 {
            self.write_headers(chunk, class, age, memory)?;
        }
        // Writes the last chunk first: a server that dies between the two stores leaves a second
        // chunk without a first one, and the next server frees that chunk.
        for chunk in chunks.clone().skip(1).rev() {
            memory.set_entry(chunk, ChunkEntry::new(ChunkUse::Continued).with_age(age))?;
            self.chunks[chunk as usize] = Chunk::Continued;
        }
        memory.set_entry(chunk, ChunkEntry::new(ChunkUse::Blocks(class)).with_age(age))?;
        for chunk in chunks {
            self.free_chunks.remove(&chunk);
        }
        self.add_span(chunk, class, now);
        Ok(true)
    }

    /// Writes the block headers of a new class into chunks that had another use, because any bytes
    /// may be there. The headers are marked, so that no old cached location is valid there. Their
    /// generation is behind every one that the chunk had (invariants I10, I13).
    fn write_headers(
        &self,
        chunk: u32,
        class: SizeClass,
        age: u32,
        memory: &impl RegionAccess,
    ) -> Result<(), ChainError> {
        let generation = self.options.unused_generation.wrapping_add(age);
        for index in 0..class.blocks_per_span() {
            let Some(block) = self.geometry.block_at(chunk, class, index) else { continue };
            memory.set_header(block, HeaderWord { mark: Mark::SUPERSEDED, generation })?;
        }
        Ok(())
    }

    /// Frees the chunks of a span whose blocks the depot has, and which no client can name any more
    /// (invariant I13).
    pub(super) fn empty(
        &mut self,
        chunk: u32,
        memory: &impl RegionAccess,
    ) -> Result<(), ChainError> {
        let unused = self.options.unused_generation;
        let Some(span) = self.span(chunk) else { return Ok(()) };
        let (class, since) = (span.class, span.whole_since);
        let mut age = memory.entry(chunk)?.age();
        for index in 0..class.blocks_per_span() {
            let Some(block) = self.geometry.block_at(chunk, class, index) else { continue };
            let header = memory.header(block)?;
            if header.bits() != 0 {
                age = age.max(header.generation.wrapping_sub(unused));
            }
        }
        for chunk in chunk..chunk + class.chunks_per_span() as u32 {
            memory.set_entry(chunk, ChunkEntry::new(ChunkUse::Free).with_age(age))?;
            self.free_chunks.insert(chunk);
            self.chunks_emptied += 1;
            if let Chunk::Span(span) =
                std::mem::replace(&mut self.chunks[chunk as usize], Chunk::Free)
            {
                self.pool(class).remove(chunk, &span);
            }
        }
        if self.draining.remove(&chunk) {
            self.chunks_draining -= class.chunks_per_span();
        }
        if let Some(since) = since {
            self.whole_spans.remove(&(since, chunk));
        }
        Ok(())
    }

    /// Takes a chunk for subtables and fills it with zeros; `None` if no chunk is free.
    pub(crate) fn take_chunk(
        &mut self,
        memory: &impl RegionAccess,
    ) -> Result<Option<u32>, ChainError> {
        let Some(chunk) = self.free_chunks.first().copied() else { return Ok(None) };
        let age = memory.entry(chunk)?.age();
        if age > 0 {
            // The chunk had blocks before. A chunk that never had blocks is all zeros.
            memory.clear(chunk)?;
        }
        memory.set_entry(chunk, ChunkEntry::new(ChunkUse::Subtables).with_age(age))?;
        self.free_chunks.remove(&chunk);
        self.chunks[chunk as usize] = Chunk::Subtables;
        self.chunks_index += 1;
        Ok(Some(chunk))
    }
}
