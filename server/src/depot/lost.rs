//! Which blocks are lost: neither with the depot, nor linked, nor with a client that lives.
//!
//! Every block that is not with the depot is suspected first. A walk that finds that it is not lost
//! clears it; so do its coming and going through the depot.
//!
//! A client can leave with every block of a region, 16 million in 1 GiB. So each step below looks
//! at a bounded number of them. It keeps a bit of each block, and eight bytes more while the
//! block's header is noted. The collector bounds how many headers are noted at a time.

use std::ops::Range;

use farside_fabric::{ChainError, Nanos};
use farside_layout::{BlockAddress, HeaderWord};

use super::class_pool::{Bits, Rested, Resting};
use super::{Chunk, Depot, RegionAccess};

/// The blocks of a span without a known owner, and their headers when the collector noted them.
pub(crate) struct Noted {
    chunk: u32,
    suspects: Bits,
    /// One for each bit of `suspects`.
    headers: Vec<HeaderWord>,
}

impl Noted {
    /// How many headers it has.
    pub(crate) fn count(&self) -> usize {
        self.headers.len()
    }
}

impl Depot {
    /// How many chunks there are.
    pub(crate) fn chunks(&self) -> u32 {
        self.chunks.len() as u32
    }

    /// Suspects every block of these chunks that is not here.
    pub(crate) fn suspect(&mut self, chunks: Range<u32>) {
        let end = chunks.end.min(self.chunks());
        for state in &mut self.chunks[chunks.start as usize..end as usize] {
            let Chunk::Span(span) = state else { continue };
            let suspects = span.held.inverted(span.class.blocks_per_span());
            span.suspects = (!suspects.is_empty()).then_some(suspects);
        }
    }

    /// The collection is over for the blocks of these chunks.
    pub(crate) fn suspect_none(&mut self, chunks: Range<u32>) {
        let end = chunks.end.min(self.chunks());
        for state in &mut self.chunks[chunks.start as usize..end as usize] {
            if let Chunk::Span(span) = state {
                span.suspects = None;
            }
        }
    }

    /// A slot or a client has the block there. What is no block has no owner. Not by its class:
    /// a slot may be damaged, and what it leads to is not lost for that.
    pub(crate) fn clear(&mut self, address: BlockAddress) {
        let chunk = self.geometry.chunk_of(address.offset());
        let Some(Chunk::Span(span)) = chunk.and_then(|chunk| self.chunks.get(chunk as usize))
        else {
            return;
        };
        if let Ok((chunk, index)) = self.locate(address, span.class)
            && let Chunk::Span(span) = &mut self.chunks[chunk as usize]
        {
            span.clear_suspect(index);
        }
    }

    /// Which blocks of this chunk are still suspected; `None` if there are none.
    pub(crate) fn note(
        &self,
        chunk: u32,
        memory: &impl RegionAccess,
    ) -> Result<Option<Noted>, ChainError> {
        let Some(Chunk::Span(span)) = self.chunks.get(chunk as usize) else { return Ok(None) };
        let Some(suspects) = span.suspects.as_ref().filter(|bits| !bits.is_empty()) else {
            return Ok(None);
        };
        // A chunk of the depot has an address for each of its blocks.
        let of = |index| self.address(chunk, span.class, index);
        let headers = suspects.iter().filter_map(of).map(|address| memory.header(address));
        let headers = headers.collect::<Result<_, _>>()?;
        Ok(Some(Noted { chunk, suspects: suspects.clone(), headers }))
    }

    /// Takes in those that are still suspected and whose headers have not changed since they were
    /// noted; returns how many there are. They rest for GRACE, and their generation rises: they
    /// may have been linked once (invariant I2).
    pub(crate) fn recover(
        &mut self,
        noted: &Noted,
        now: Nanos,
        memory: &impl RegionAccess,
    ) -> Result<u64, ChainError> {
        let chunk = noted.chunk;
        let Some(Chunk::Span(span)) = self.chunks.get(chunk as usize) else { return Ok(0) };
        let (class, Some(suspects)) = (span.class, &span.suspects) else { return Ok(0) };
        let mut lost = Bits::none(class.blocks_per_span());
        for (index, header) in noted.suspects.iter().zip(&noted.headers) {
            let is_suspect = suspects.has(index) && !span.held.has(index);
            let Some(address) = self.address(chunk, class, index).filter(|_| is_suspect) else {
                continue;
            };
            if memory.header(address)? == *header {
                lost.set(index);
            }
        }
        let Chunk::Span(span) = &mut self.chunks[chunk as usize] else { return Ok(0) };
        let mut count = 0;
        for index in lost.iter() {
            span.held.set(index);
            span.clear_suspect(index);
            count += 1;
        }
        let ready_at = now.saturating_add(self.options.grace);
        let pool = self.pool(class);
        pool.held += count;
        pool.returned += count;
        if count > 0 {
            pool.rest(Resting {
                ready_at,
                blocks: Rested::Uncarved { chunk, blocks: lost, count },
            });
        }
        Ok(count)
    }
}
