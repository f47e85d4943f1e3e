//! Lost blocks: the blocks that neither the depot nor a slot nor a living client has.
//!
//! Every block outside the depot is a suspect first. The suspicion is cleared when the collector
//! finds an owner, or when the block is given to the depot or taken from it.
//!
//! A client can die with every block of a region, 16 million in 1 GiB. So each step below checks a
//! bounded number of blocks. A suspect costs one bit, and eight bytes while its header is noted.
//! The collector bounds how many headers are noted at a time.

use std::ops::Range;

use farside_fabric::{ChainError, Nanos};
use farside_layout::{BlockAddress, HeaderWord};

use super::class_pool::{Bits, RestingBatch, RestingBlocks};
use super::{Chunk, Depot, RegionAccess};

/// The suspects of a span, and their headers when the collector noted them.
pub(crate) struct NotedSuspects {
    chunk: u32,
    suspects: Bits,
    /// One for each bit that is set in `suspects`.
    headers: Vec<HeaderWord>,
}

impl NotedSuspects {
    /// Returns the number of suspects.
    pub(crate) fn count(&self) -> usize {
        self.headers.len()
    }
}

impl Depot {
    /// Returns the number of chunks in the heap.
    pub(crate) fn chunks(&self) -> u32 {
        self.chunks.len() as u32
    }

    /// Turns the blocks of these chunks that the depot does not have into suspects.
    pub(crate) fn suspect(&mut self, chunks: Range<u32>) {
        let end = chunks.end.min(self.chunks());
        for state in &mut self.chunks[chunks.start as usize..end as usize] {
            let Chunk::Span(span) = state else { continue };
            let suspects = span.in_depot.inverted(span.class.blocks_per_span());
            span.suspects = (!suspects.is_empty()).then_some(suspects);
        }
    }

    /// Ends the collection for these chunks: none of their blocks is a suspect any more.
    pub(crate) fn clear_suspicions(&mut self, chunks: Range<u32>) {
        let end = chunks.end.min(self.chunks());
        for state in &mut self.chunks[chunks.start as usize..end as usize] {
            if let Chunk::Span(span) = state {
                span.suspects = None;
            }
        }
    }

    /// Clears the suspicion of the block at this address, because a slot or a client has it.
    /// Ignores an address at which no block starts. The size class in a slot is not compared: the
    /// block of a damaged slot is not lost.
    pub(crate) fn clear_suspicion(&mut self, address: BlockAddress) {
        let chunk = self.geometry.chunk_of_block(address);
        let Some(span) = chunk.and_then(|chunk| self.span(chunk)) else { return };
        if let Ok((chunk, index)) = self.locate(address, span.class)
            && let Chunk::Span(span) = &mut self.chunks[chunk as usize]
        {
            span.clear_suspect(index);
        }
    }

    /// Returns the suspects of this chunk with their headers; `None` if there are none.
    pub(crate) fn note(
        &self,
        chunk: u32,
        memory: &impl RegionAccess,
    ) -> Result<Option<NotedSuspects>, ChainError> {
        let Some(span) = self.span(chunk) else { return Ok(None) };
        let Some(suspects) = span.suspects.as_ref().filter(|bits| !bits.is_empty()) else {
            return Ok(None);
        };
        // Drops no suspect: every index of a span is that of a block.
        let block_of = |index| self.geometry.block_at(chunk, span.class, index);
        let headers = suspects.iter().filter_map(block_of).map(|block| memory.header(block));
        let headers = headers.collect::<Result<_, _>>()?;
        Ok(Some(NotedSuspects { chunk, suspects: suspects.clone(), headers }))
    }

    /// Puts lost blocks back into the depot: the suspects whose headers still are the noted ones.
    /// Returns the number of these blocks.
    ///
    /// They rest for GRACE and get another generation, because they may have been linked
    /// (invariants I2 and I3).
    pub(crate) fn recover(
        &mut self,
        noted: &NotedSuspects,
        now: Nanos,
        memory: &impl RegionAccess,
    ) -> Result<u64, ChainError> {
        let chunk = noted.chunk;
        let Some(span) = self.span(chunk) else { return Ok(0) };
        let (class, Some(suspects)) = (span.class, &span.suspects) else { return Ok(0) };
        let mut lost = Bits::none(class.blocks_per_span());
        for (index, header) in noted.suspects.iter().zip(&noted.headers) {
            let is_suspect = suspects.has(index) && !span.in_depot.has(index);
            let block = self.geometry.block_at(chunk, class, index);
            let Some(block) = block.filter(|_| is_suspect) else { continue };
            if memory.header(block)? == *header {
                lost.set(index);
            }
        }
        let Chunk::Span(span) = &mut self.chunks[chunk as usize] else { return Ok(0) };
        let mut count = 0;
        for index in lost.iter() {
            span.in_depot.set(index);
            span.clear_suspect(index);
            count += 1;
        }
        let ready_at = now.saturating_add(self.options.grace);
        let pool = self.pool(class);
        pool.in_depot += count;
        pool.returned += count;
        if count > 0 {
            let blocks = RestingBlocks::Lost { chunk, blocks: lost, count };
            pool.rest(RestingBatch { ready_at, blocks });
        }
        Ok(count)
    }
}
