//! How often clients have read each block of a cache lately, as far as they reported it: 0, 1 or 2
//! times. Eviction takes these counts away again.
//!
//! A span has no counts before the first report of one of its blocks. Reports are guesses: an
//! address that names no block, or a block that the depot has, is ignored.

use farside_layout::{BlockAddress, SizeClass};

use super::class_pool::{Bits, BlockSpan};
use super::{Chunk, Depot};

/// The reads of each block of a span, in two bits: the block was read once, or twice or more often.
pub(super) struct ReadCounts {
    once: Bits,
    twice: Bits,
}

impl ReadCounts {
    fn new(blocks: u64) -> Self {
        Self { once: Bits::none(blocks), twice: Bits::none(blocks) }
    }

    fn count(&self, index: u64) -> u8 {
        if self.twice.has(index) { 2 } else { self.once.has(index).into() }
    }

    fn add(&mut self, index: u64) {
        if self.once.has(index) {
            self.once.clear(index);
            self.twice.set(index);
        } else if !self.twice.has(index) {
            self.once.set(index);
        }
    }

    fn take_away(&mut self, index: u64) {
        if self.twice.has(index) {
            self.twice.clear(index);
            self.once.set(index);
        } else {
            self.once.clear(index);
        }
    }

    fn clear(&mut self, index: u64) {
        self.once.clear(index);
        self.twice.clear(index);
    }
}

impl BlockSpan {
    /// Returns how often the block was read: 0, 1 or 2 times.
    fn reads(&self, index: u64) -> u8 {
        self.read_counts.as_ref().map_or(0, |counts| counts.count(index))
    }

    /// Forgets the reads of a block that is about to have another content.
    pub(super) fn forget_reads(&mut self, index: u64) {
        if let Some(counts) = &mut self.read_counts {
            counts.clear(index);
        }
    }
}

/// A block that eviction visits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct VisitedBlock {
    pub(crate) address: BlockAddress,
    /// How often it was read before the visit: 0, 1 or 2 times.
    pub(crate) reads: u8,
}

impl Depot {
    /// Notes that a client has read the block at this address.
    pub(crate) fn note_read(&mut self, address: BlockAddress) {
        let Some((chunk, index)) = self.locate_outside(address) else { return };
        if let Some(Chunk::Span(span)) = self.chunks.get_mut(chunk as usize) {
            let new = || Box::new(ReadCounts::new(span.class.blocks_per_span()));
            span.read_counts.get_or_insert_with(new).add(index);
        }
    }

    /// Returns the first chunk of the span, and the index there, of a block that the depot does not
    /// have. `None` if the address, which may be any, names no such block.
    fn locate_outside(&self, address: BlockAddress) -> Option<(u32, u64)> {
        let chunk = self.geometry.chunk_of_block(address)?;
        let span = self.span(chunk)?;
        let (chunk, index) = self.locate(address, span.class).ok()?;
        (!span.in_depot.has(index)).then_some((chunk, index))
    }

    /// Returns a block that the depot does not have, as a visit would, without a change.
    pub(crate) fn look(&self, address: BlockAddress) -> Option<VisitedBlock> {
        let (chunk, index) = self.locate_outside(address)?;
        Some(VisitedBlock { address, reads: self.reads(chunk, index) })
    }

    /// Returns the class of a block that the depot does not have. `None` if the address, which may
    /// be any, names no such block.
    pub(crate) fn class_at(&self, address: BlockAddress) -> Option<SizeClass> {
        let (chunk, _) = self.locate_outside(address)?;
        self.span(chunk).map(|span| span.class)
    }

    /// Returns how often the block with this index was read: 0, 1 or 2 times.
    pub(crate) fn reads(&self, chunk: u32, index: u64) -> u8 {
        self.span(chunk).map_or(0, |span| span.reads(index))
    }

    /// Visits the block with this index in the span: takes one of its reads away. Returns `None` if
    /// the depot has the block, or if there is no such block.
    pub(crate) fn visit(&mut self, chunk: u32, index: u64) -> Option<VisitedBlock> {
        let Some(Chunk::Span(span)) = self.chunks.get_mut(chunk as usize) else { return None };
        if index >= span.class.blocks_per_span() || span.in_depot.has(index) {
            return None;
        }
        let (class, reads) = (span.class, span.reads(index));
        if let Some(counts) = span.read_counts.as_mut().filter(|_| reads > 0) {
            counts.take_away(index);
        }
        let block = self.geometry.block_at(chunk, class, index)?;
        Some(VisitedBlock { address: block.address, reads })
    }

    /// Forgets the reads of all blocks of the class.
    pub(crate) fn forget_reads(&mut self, class: SizeClass) {
        let Self { chunks, pools, .. } = self;
        for chunk in &pools[usize::from(class.index())].spans {
            if let Some(Chunk::Span(span)) = chunks.get_mut(*chunk as usize) {
                span.read_counts = None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{FakeMemory, class, depot, take_all};
    use super::*;

    const BYTES: u64 = 64 << 20;

    /// Returns the reads of the block at this address.
    fn reads(depot: &Depot, address: BlockAddress, class: SizeClass) -> u8 {
        let (chunk, index) = depot.locate(address, class).unwrap();
        depot.reads(chunk, index)
    }

    #[test]
    fn reads_count_to_two_and_visits_take_them_away() {
        let (mut depot, class) = (depot(BYTES), class(4096));
        let address = take_all(&mut depot, class, 0)[7].address;
        let (chunk, index) = depot.locate(address, class).unwrap();
        for count in [1, 2, 2] {
            depot.note_read(address);
            assert_eq!(depot.look(address), Some(VisitedBlock { address, reads: count }));
        }
        for count in [2, 1, 0, 0] {
            let visited = VisitedBlock { address, reads: count };
            assert_eq!(depot.visit(chunk, index), Some(visited));
        }
        let others = (0..class.blocks_per_span()).filter(|other| *other != index);
        assert!(others.into_iter().all(|other| depot.reads(chunk, other) == 0));
        depot.note_read(address);
        depot.forget_reads(class);
        assert_eq!(reads(&depot, address, class), 0);
    }

    #[test]
    fn a_block_that_changes_hands_has_no_reads() {
        let (mut depot, memory, class) = (depot(BYTES), FakeMemory::default(), class(4096));
        let block = depot.take(class, 1, 0, &memory).unwrap()[0];
        depot.note_read(block.address);
        depot.give(class, vec![block], true, 0).unwrap();
        // A late report of a block that the depot has.
        depot.note_read(block.address);
        let (chunk, index) = depot.locate(block.address, class).unwrap();
        assert_eq!((depot.reads(chunk, index), depot.visit(chunk, index)), (0, None));
        assert_eq!(depot.look(block.address), None);
        let again = depot.take(class, 1, 0, &memory).unwrap()[0];
        assert_eq!((again.address, reads(&depot, block.address, class)), (block.address, 0));
    }

    #[test]
    fn an_address_that_names_no_block_is_ignored() {
        let mut depot = depot(BYTES);
        let (small, large) = (class(1280), class(4 << 20));
        let blocks = take_all(&mut depot, large, 0);
        let heap = depot.geometry.chunk_offset(0).unwrap();
        let other = (heap / 64) as u32 + 3;
        let second_chunk = blocks[0].address.0 + (2 << 20) / 64;
        for junk in [0, 1, other, second_chunk, u32::MAX] {
            depot.note_read(BlockAddress(junk));
        }
        assert!(blocks.iter().all(|block| reads(&depot, block.address, large) == 0));
        assert!(depot.visit(u32::MAX, 0).is_none() && depot.visit(0, u64::MAX).is_none());
        assert_eq!(depot.reads(u32::MAX, 0), 0);
        depot.forget_reads(small);
    }
}
