//! Which blocks are lost: neither with the depot, nor linked, nor with a client that lives.
//!
//! Every block that is not with the depot is suspected first. Whoever finds out that it is not lost
//! clears it; so do its coming and going through the depot.

use farside_common::control::FreeBlock;
use farside_common::fabric::{ChainError, Nanos};
use farside_common::layout::{BlockAddress, HeaderWord, SizeClass};

use super::{Chunk, Depot, Memory, Span, used_generation};

/// A block that nobody has been found to have, and its header when it was noted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Suspect {
    pub(crate) address: BlockAddress,
    class: SizeClass,
    header: HeaderWord,
}

impl Depot {
    fn spans(&mut self) -> impl Iterator<Item = &mut Span> {
        self.chunks.iter_mut().filter_map(|chunk| match chunk {
            Chunk::Span(span) => Some(&mut **span),
            _ => None,
        })
    }

    /// Suspects every block that is not here.
    pub(crate) fn suspect_all(&mut self) {
        for span in self.spans() {
            span.suspects = Some(span.held.inverted(span.class.blocks_per_span()));
        }
    }

    /// The collection is over.
    pub(crate) fn suspect_none(&mut self) {
        self.spans().for_each(|span| span.suspects = None);
    }

    /// A slot or a client has the block there. Whatever is no block is nobody's. Not by its class:
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

    /// Who is still suspected.
    pub(crate) fn suspects(&self, memory: &impl Memory) -> Result<Vec<Suspect>, ChainError> {
        let mut found = Vec::new();
        for (chunk, state) in (0..).zip(&self.chunks) {
            let Chunk::Span(span) = state else { continue };
            let Some(suspects) = &span.suspects else { continue };
            for index in suspects.iter() {
                let class = span.class;
                let Some(address) = self.address(chunk, class, index) else { continue };
                found.push(Suspect { address, class, header: memory.header(address)? });
            }
        }
        Ok(found)
    }

    /// Takes in those that are still suspected and whose headers have not changed since they were
    /// noted; returns how many there are. They rest for GRACE, and their generation rises: they
    /// may have been linked once (invariant I2).
    pub(crate) fn recover(
        &mut self,
        noted: &[Suspect],
        now: Nanos,
        memory: &impl Memory,
    ) -> Result<u64, ChainError> {
        let mut recovered = 0;
        for suspect in noted {
            let Suspect { address, class, header } = *suspect;
            let Ok((chunk, index)) = self.locate(address, class) else { continue };
            let Chunk::Span(span) = &self.chunks[chunk as usize] else { continue };
            let is_suspect = span.suspects.as_ref().is_some_and(|bits| bits.has(index));
            if !is_suspect || span.held.has(index) || memory.header(address)? != header {
                continue;
            }
            let last = used_generation(header, self.options.unused_generation);
            let block = FreeBlock { address, generation: last.wrapping_add(1) };
            recovered += u64::from(self.give(class, vec![block], false, now).is_ok());
        }
        Ok(recovered)
    }
}
