//! Chunks: which class gets one, and when it loses it again.

use farside_control::BLOCKS_PER_MESSAGE_MAX;
use farside_fabric::{ChainError, Nanos};
use farside_layout::{CHUNK_BYTES, ChunkEntry, ChunkUse, HeaderWord, Mark, SizeClass};

use super::{Chunk, Depot, HOARD_SHARE, RegionAccess};

/// What the index takes for a key at most: 54 when all its subtables have just been split, and some
/// more for places that rest.
const INDEX_BYTES_PER_KEY: u64 = 60;

impl Depot {
    /// How many blocks the class could give now; a lower bound where that is more than decides.
    pub(super) fn available(&self, class: SizeClass) -> u64 {
        let pool = &self.pools[usize::from(class.index())];
        let spans = if class.chunks_per_span() == 1 {
            self.free.len() as u64
        } else {
            let enough = BLOCKS_PER_MESSAGE_MAX as u64 * HOARD_SHARE;
            self.free_pairs(enough)
        };
        pool.available + spans * class.blocks_per_span()
    }

    /// How many pairs of neighbours there are among the free chunks, up to `enough`.
    fn free_pairs(&self, enough: u64) -> u64 {
        let (mut pairs, mut single) = (0, None);
        for chunk in &self.free {
            if single.is_some_and(|left: u32| left + 1 == *chunk) {
                (pairs, single) = (pairs + 1, None);
            } else {
                single = Some(*chunk);
            }
            if pairs == enough {
                break;
            }
        }
        pairs
    }

    /// Gives a class another span; false when there is no room for one.
    pub(super) fn grow(
        &mut self,
        class: SizeClass,
        now: Nanos,
        memory: &impl RegionAccess,
    ) -> Result<bool, ChainError> {
        let chunk = if class.chunks_per_span() == 1 {
            self.free.first().copied()
        } else {
            // From the far end, so that single chunks break up few pairs.
            self.free.iter().rev().copied().find(|chunk| self.free.contains(&(chunk + 1)))
        };
        let Some(chunk) = chunk else { return Ok(false) };
        if self.is_cache && !self.leaves_enough(class) {
            return Ok(false);
        }
        let chunks = chunk..chunk + class.chunks_per_span() as u32;
        let mut age = 0;
        for chunk in chunks.clone() {
            age = age.max(memory.entry(chunk)?.age());
        }
        if age > 0 {
            self.format(chunk, class, age, memory)?;
        }
        // The last chunk first: a server that dies in between leaves a continuation of nothing,
        // which the next one takes for free.
        for chunk in chunks.clone().skip(1).rev() {
            memory.set_entry(chunk, ChunkEntry::new(ChunkUse::Continued).with_age(age))?;
            self.chunks[chunk as usize] = Chunk::Continued;
        }
        memory.set_entry(chunk, ChunkEntry::new(ChunkUse::Blocks(class)).with_age(age))?;
        for chunk in chunks {
            self.free.remove(&chunk);
        }
        self.open(chunk, class, now);
        Ok(true)
    }

    /// Whether the index can grow to hold a key for each block, with another span of this class.
    fn leaves_enough(&self, class: SizeClass) -> bool {
        let blocks: u64 = self.pools.iter().map(|pool| pool.blocks).sum();
        let blocks = blocks + class.blocks_per_span();
        let needed = (blocks * INDEX_BYTES_PER_KEY).div_ceil(CHUNK_BYTES);
        let left = (self.free.len() as u64).saturating_sub(class.chunks_per_span());
        self.chunks_index() + left >= needed
    }

    /// Makes headers in chunks that had another use: where the new class has its headers, anything
    /// may stand. Marked, so that no old location finds what it looks for there.
    fn format(
        &self,
        chunk: u32,
        class: SizeClass,
        age: u32,
        memory: &impl RegionAccess,
    ) -> Result<(), ChainError> {
        let generation = self.options.unused_generation.wrapping_add(age);
        for index in 0..class.blocks_per_span() {
            let Some(address) = self.address(chunk, class, index) else { continue };
            memory.set_header(address, HeaderWord { mark: Mark::SUPERSEDED, generation })?;
        }
        Ok(())
    }

    /// Takes its class from a span whose blocks are all here, and which no client can name any more
    /// (invariant I13).
    pub(super) fn empty(
        &mut self,
        chunk: u32,
        memory: &impl RegionAccess,
    ) -> Result<(), ChainError> {
        let unused = self.options.unused_generation;
        let Some(Chunk::Span(span)) = self.chunks.get(chunk as usize) else { return Ok(()) };
        let (class, since) = (span.class, span.whole_since);
        let mut age = memory.entry(chunk)?.age();
        for index in 0..class.blocks_per_span() {
            let Some(address) = self.address(chunk, class, index) else { continue };
            let header = memory.header(address)?;
            if header.bits() != 0 {
                age = age.max(header.generation.wrapping_sub(unused));
            }
        }
        for chunk in chunk..chunk + class.chunks_per_span() as u32 {
            memory.set_entry(chunk, ChunkEntry::new(ChunkUse::Free).with_age(age))?;
            self.free.insert(chunk);
            self.emptied += 1;
            if let Chunk::Span(span) =
                std::mem::replace(&mut self.chunks[chunk as usize], Chunk::Free)
            {
                self.pool(class).remove(chunk, &span);
            }
        }
        if let Some(since) = since {
            self.whole.remove(&(since, chunk));
        }
        Ok(())
    }

    /// A chunk for subtables, all zeros; `None` if none is free.
    pub(crate) fn take_chunk(
        &mut self,
        memory: &impl RegionAccess,
    ) -> Result<Option<u32>, ChainError> {
        let Some(chunk) = self.free.first().copied() else { return Ok(None) };
        let age = memory.entry(chunk)?.age();
        if age > 0 {
            // It had blocks once.
            memory.clear(chunk)?;
        }
        memory.set_entry(chunk, ChunkEntry::new(ChunkUse::Subtables).with_age(age))?;
        self.free.remove(&chunk);
        self.chunks[chunk as usize] = Chunk::Subtables;
        Ok(Some(chunk))
    }
}
