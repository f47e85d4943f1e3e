//! The blocks of one size class: the spans that contain them, the batches that rest, and how often
//! clients have read each block lately.
//!
//! Clients of a cache report what they have read: 0, 1 or 2 times are counted, and eviction takes
//! these counts away again. A span has no counts before the first report of one of its blocks.
//! Reports are guesses: an address that names no block, or a block that the depot has, is ignored.

use std::collections::{BTreeSet, VecDeque};

use farside_control::FreeBlock;
use farside_fabric::Nanos;
use farside_layout::{BlockAddress, SizeClass};

use super::{Chunk, Depot};

/// A pool sorts its spans by their share of available blocks, in this many levels.
const LEVELS: u64 = 16;

/// One bit for each block of a span.
#[derive(Clone)]
pub(super) struct Bits(Box<[u64]>);

impl Bits {
    pub(super) fn all(count: u64) -> Self {
        let mut words = vec![u64::MAX; count.div_ceil(64) as usize];
        let used = count % 64;
        if let Some(last) = words.last_mut()
            && used > 0
        {
            *last = (1 << used) - 1;
        }
        Self(words.into())
    }

    pub(super) fn none(count: u64) -> Self {
        Self(vec![0; count.div_ceil(64) as usize].into())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.iter().all(|word| *word == 0)
    }

    /// Returns `count` bits, each the inverse of that in `self`.
    pub(super) fn inverted(&self, count: u64) -> Self {
        let mut inverted = Self::all(count);
        inverted.0.iter_mut().zip(&self.0).for_each(|(word, mine)| *word &= !mine);
        inverted
    }

    pub(super) fn has(&self, index: u64) -> bool {
        self.0[(index / 64) as usize] >> (index % 64) & 1 == 1
    }

    pub(super) fn set(&mut self, index: u64) {
        self.0[(index / 64) as usize] |= 1 << (index % 64);
    }

    pub(super) fn clear(&mut self, index: u64) {
        self.0[(index / 64) as usize] &= !(1 << (index % 64));
    }

    /// Returns the index of the first set bit that is at least `from`.
    pub(super) fn next(&self, from: u64) -> Option<u64> {
        let start = (from / 64) as usize;
        self.0.iter().enumerate().skip(start).find_map(|(at, word)| {
            let hidden = if at == start { from % 64 } else { 0 };
            let rest = word >> hidden << hidden;
            (rest != 0).then(|| at as u64 * 64 + u64::from(rest.trailing_zeros()))
        })
    }

    /// Returns the indices of all set bits.
    pub(super) fn iter(&self) -> impl Iterator<Item = u64> {
        let mut next = self.next(0);
        std::iter::from_fn(move || {
            let found = next?;
            next = self.next(found + 1);
            Some(found)
        })
    }
}

/// One chunk or two, divided into blocks of one class.
pub(super) struct BlockSpan {
    pub(super) class: SizeClass,
    /// The blocks that the depot has: uncarved, ready or resting. All others are linked or lost, or
    /// a client has them.
    pub(super) in_depot: Bits,
    /// Available blocks that are in no list. Their generations are read from their headers when
    /// they are taken.
    pub(super) uncarved: Bits,
    pub(super) uncarved_count: u64,
    /// A lower bound of the index of the first uncarved block.
    pub(super) carve_from: u64,
    /// Available blocks with a known generation.
    pub(super) ready: Vec<FreeBlock>,
    /// During a collection: the blocks without a known owner.
    pub(super) suspects: Option<Bits>,
    /// In a cache: how often each block was read lately. `None` before the first report.
    pub(super) read_counts: Option<Box<ReadCounts>>,
    /// When a block was last added or taken.
    pub(super) changed_at: Nanos,
    /// Since when all of its blocks are available.
    pub(super) whole_since: Option<Nanos>,
    /// Whether its blocks are not given any more, so that its chunks become empty.
    pub(super) is_draining: bool,
    /// The level at which its pool lists it; `None` if it offers no block.
    level: Option<u64>,
}

impl BlockSpan {
    /// Creates a span all of whose blocks are uncarved.
    pub(super) fn new(class: SizeClass) -> Self {
        let count = class.blocks_per_span();
        Self {
            class,
            in_depot: Bits::all(count),
            uncarved: Bits::all(count),
            uncarved_count: count,
            carve_from: 0,
            ready: Vec::new(),
            suspects: None,
            read_counts: None,
            changed_at: 0,
            whole_since: None,
            is_draining: false,
            level: None,
        }
    }

    /// The number of blocks that have rested, and are with the depot.
    pub(super) fn available(&self) -> u64 {
        self.ready.len() as u64 + self.uncarved_count
    }

    /// The number of blocks that can be taken now.
    pub(super) fn offered(&self) -> u64 {
        if self.is_draining { 0 } else { self.available() }
    }

    /// Takes the next uncarved block and returns its index.
    pub(super) fn next_uncarved(&mut self) -> Option<u64> {
        let index = self.uncarved.next(self.carve_from)?;
        self.uncarved.clear(index);
        self.uncarved_count -= 1;
        self.carve_from = index + 1;
        Some(index)
    }

    /// Makes lost blocks that have rested available. They are uncarved: their generations are in
    /// their headers.
    pub(super) fn add_uncarved(&mut self, blocks: impl Iterator<Item = u64>) {
        for index in blocks {
            self.uncarved.set(index);
            self.uncarved_count += 1;
            self.carve_from = self.carve_from.min(index);
        }
    }

    /// Notes that the block is not lost.
    pub(super) fn clear_suspect(&mut self, index: u64) {
        if let Some(suspects) = &mut self.suspects {
            suspects.clear(index);
        }
    }
}

/// Blocks that must not be written before `ready_at`.
pub(super) struct RestingBatch {
    pub(super) ready_at: Nanos,
    pub(super) blocks: RestingBlocks,
}

/// The blocks of a batch.
pub(super) enum RestingBlocks {
    /// Blocks that clients gave back.
    Given(Vec<FreeBlock>),
    /// Lost blocks of the span at `chunk`, one bit each. Afterwards they are uncarved.
    Lost { chunk: u32, blocks: Bits, count: u64 },
}

impl RestingBlocks {
    pub(super) fn count(&self) -> u64 {
        match self {
            Self::Given(blocks) => blocks.len() as u64,
            Self::Lost { count, .. } => *count,
        }
    }
}

/// The depot's blocks of one size class.
#[derive(Default)]
pub(super) struct ClassPool {
    /// Sorted by `ready_at`.
    resting: VecDeque<RestingBatch>,
    /// The spans with available blocks: level and first chunk. The spans with the fewest available
    /// blocks come first, so blocks are taken from the fullest chunks. The other chunks become
    /// empty and can change their class.
    listed: BTreeSet<(u64, u32)>,
    /// The first chunks of all spans that do not drain, in no order.
    pub(super) spans: Vec<u32>,
    /// The number of blocks in all spans of the class.
    pub(super) blocks: u64,
    /// The number of blocks in the spans that drain.
    pub(super) blocks_draining: u64,
    /// The number of blocks that the depot has.
    pub(super) in_depot: u64,
    /// How many blocks have been returned since the server started.
    pub(super) returned: u64,
    /// The number of blocks that can be taken now.
    pub(super) available: u64,
    /// The number of blocks that rest.
    pub(super) resting_count: u64,
}

impl ClassPool {
    /// The first chunk of the span from which blocks are taken next.
    pub(super) fn first(&self) -> Option<u32> {
        self.listed.first().map(|(_, chunk)| *chunk)
    }

    /// Updates the count of available blocks and the span's level. `before` is the number of blocks
    /// that the span offered before the change.
    pub(super) fn list(&mut self, chunk: u32, span: &mut BlockSpan, before: u64) {
        let now = span.offered();
        self.available = self.available + now - before;
        let level = (now > 0).then(|| now * LEVELS / span.class.blocks_per_span());
        if level != span.level {
            self.unlist(chunk, span);
            self.listed.extend(level.map(|level| (level, chunk)));
            span.level = level;
        }
    }

    fn unlist(&mut self, chunk: u32, span: &BlockSpan) {
        if let Some(level) = span.level {
            self.listed.remove(&(level, chunk));
        }
    }

    /// Removes a span, all of whose blocks are available.
    pub(super) fn remove(&mut self, chunk: u32, span: &BlockSpan) {
        self.unlist(chunk, span);
        self.available -= span.offered();
        self.in_depot -= span.class.blocks_per_span();
        self.blocks -= span.class.blocks_per_span();
        if span.is_draining {
            self.blocks_draining -= span.class.blocks_per_span();
        } else {
            self.remove_lasting(chunk);
        }
    }

    /// Removes a span from those that do not drain.
    pub(super) fn remove_lasting(&mut self, chunk: u32) {
        if let Some(at) = self.spans.iter().position(|other| *other == chunk) {
            self.spans.swap_remove(at);
        }
    }

    /// Adds a batch of resting blocks.
    pub(super) fn rest(&mut self, batch: RestingBatch) {
        self.resting_count += batch.blocks.count();
        // This is nearly always the end of the queue, because all blocks rest for GRACE.
        let index = self.resting.partition_point(|other| other.ready_at <= batch.ready_at);
        self.resting.insert(index, batch);
    }

    /// Removes the next batch that has rested long enough.
    pub(super) fn next_rested(&mut self, now: Nanos) -> Option<RestingBatch> {
        let batch = self.resting.pop_front_if(|batch| batch.ready_at <= now)?;
        self.resting_count -= batch.blocks.count();
        Some(batch)
    }
}

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
