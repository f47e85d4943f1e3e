//! The depot: the free blocks of each size class, which no client holds and no slot links.
//!
//! It reaches the chunk table and the block headers only through [`RegionAccess`]. So it works over
//! any memory: the server's region, or a simulated one.

mod cache;
mod chunks;
mod class_pool;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::ops::Range;

pub(crate) use class_pool::VisitedBlock;
use class_pool::{Bits, BlockSpan, ClassPool, RestingBatch, RestingBlocks};
use farside_control::{BLOCKS_PER_MESSAGE_MAX, ClassStatistics, FreeBlock};
use farside_fabric::{ChainError, Nanos};
use farside_layout::{
    BlockAddress, BlockRef, ChunkEntry, ChunkUse, Geometry, HeaderWord, NamedBlock, SizeClass,
    WORD_GENERATIONS,
};

/// One request gets at most a quarter of the blocks that its class could still give, so that one
/// client does not take all of the remaining memory.
const REQUEST_SHARE_DIVISOR: u64 = 4;
/// In a cache it gets at most a half, because eviction makes more available.
pub(crate) const CACHE_SHARE_DIVISOR: u64 = 2;

/// Limit on the rested blocks that one refresh makes available. Clients wait while a refresh runs.
/// The last batch may exceed the limit.
const BLOCKS_PER_REFRESH: usize = 1 << 16;
/// Limit on the spans whose chunks one refresh frees. The refresh reads every block header of these
/// spans.
const SPANS_PER_REFRESH: usize = 8;

/// The depot's access to the region.
pub trait RegionAccess {
    /// Returns a chunk's entry in the chunk table.
    fn entry(&self, chunk: u32) -> Result<ChunkEntry, ChainError>;

    /// Writes a chunk's entry in the chunk table.
    fn set_entry(&self, chunk: u32, entry: ChunkEntry) -> Result<(), ChainError>;

    /// Returns the header word of a block, or of a future block.
    fn header(&self, block: BlockRef) -> Result<HeaderWord, ChainError>;

    /// Writes the header word of a future block, in memory that has no other user.
    fn set_header(&self, block: BlockRef, header: HeaderWord) -> Result<(), ChainError>;

    /// Fills a chunk that has no other user with zeros.
    fn clear(&self, chunk: u32) -> Result<(), ChainError>;
}

/// Why a block that a client or a slot names is not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum BlockError {
    #[error("the block at offset {offset:#x} lies outside the heap")]
    Outside { offset: u64 },
    #[error("there is no block of class {class} at offset {offset:#x}")]
    NoSuchBlock { offset: u64, class: u8 },
    #[error("the depot already has the block at offset {offset:#x}, so no client can give it back")]
    InDepot { offset: u64 },
    #[error("the block at offset {offset:#x} is linked twice")]
    LinkedTwice { offset: u64 },
}

/// Counts of memory that became free since the server started. If they have changed since a request
/// found none, the request may succeed now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ReturnCounts {
    /// Blocks of the class, if the request is for blocks.
    pub(crate) blocks: u64,
    /// Chunks that have lost their class.
    pub(crate) chunks: u64,
}

enum Chunk {
    Free,
    Subtables,
    /// The first chunk of a span.
    Span(Box<BlockSpan>),
    /// The second chunk of a span.
    Continued,
}

/// Parameters of a depot.
#[derive(Clone, Copy, Debug)]
pub struct DepotOptions {
    /// How long an unlinked block rests.
    pub grace: Nanos,
    /// How long a chunk keeps its class after its last block has rested. Until then a client may
    /// still name one of its blocks (invariant I13).
    pub chunk_rest: Nanos,
    /// The generation before the first of a block in unused memory. It is random for each region,
    /// so that a version of one region is not valid in another.
    pub unused_generation: u32,
}

/// [`DepotOptions::chunk_rest`] in multiples of GRACE. T_word + L ends before 256 x GRACE by the
/// server's clock, whatever the drift of the clients' clocks. This is an eighth more.
const CHUNK_REST_GRACES: u64 = WORD_GENERATIONS / 8 * 9;

impl DepotOptions {
    /// Returns the options for this GRACE.
    pub fn new(grace: Nanos, unused_generation: u32) -> Self {
        let chunk_rest = grace.saturating_mul(CHUNK_REST_GRACES);
        Self { grace, chunk_rest, unused_generation }
    }
}

/// Free blocks, by class, and chunks without a use.
pub struct Depot {
    geometry: Geometry,
    options: DepotOptions,
    chunks: Vec<Chunk>,
    free_chunks: BTreeSet<u32>,
    /// One pool for each size class.
    pools: Vec<ClassPool>,
    /// The spans all of whose blocks are available: the time since when, and their first chunk.
    whole_spans: BTreeSet<(Nanos, u32)>,
    /// How many chunks have lost their class since the server started.
    pub(crate) chunks_emptied: u64,
    /// How many chunks have subtables.
    chunks_index: u64,
    /// In a cache: how many free chunks are kept for classes that have few.
    reserve: Option<u64>,
    /// In a cache: the class that can store the values of all classes without a chunk.
    last_resort: Option<SizeClass>,
    /// The first chunks of all spans that drain.
    draining: BTreeSet<u32>,
    /// How many chunks these spans have.
    chunks_draining: u64,
}

impl Depot {
    /// Creates a depot that has every block of the chunks in use. [`Depot::note_linked`] then
    /// removes the linked blocks. `uses` is the chunk table, in which every span of two chunks is
    /// complete.
    pub fn new(geometry: Geometry, uses: &[ChunkUse], options: DepotOptions, now: Nanos) -> Self {
        let mut depot = Self {
            geometry,
            options,
            chunks: uses.iter().map(|_| Chunk::Continued).collect(),
            free_chunks: BTreeSet::new(),
            pools: (0..SizeClass::COUNT).map(|_| ClassPool::default()).collect(),
            whole_spans: BTreeSet::new(),
            chunks_emptied: 0,
            chunks_index: 0,
            reserve: None,
            last_resort: None,
            draining: BTreeSet::new(),
            chunks_draining: 0,
        };
        for (chunk, chunk_use) in (0..).zip(uses) {
            match chunk_use {
                ChunkUse::Free => {
                    depot.free_chunks.insert(chunk);
                    depot.chunks[chunk as usize] = Chunk::Free;
                }
                ChunkUse::Subtables => {
                    depot.chunks[chunk as usize] = Chunk::Subtables;
                    depot.chunks_index += 1;
                }
                ChunkUse::Continued => {}
                ChunkUse::Blocks(class) => depot.add_span(chunk, *class, now),
            }
        }
        depot
    }

    fn pool(&mut self, class: SizeClass) -> &mut ClassPool {
        &mut self.pools[usize::from(class.index())]
    }

    /// Adds a span, all of whose blocks the depot has, to its class.
    fn add_span(&mut self, chunk: u32, class: SizeClass, now: Nanos) {
        let mut span = Box::new(BlockSpan::new(class));
        let pool = self.pool(class);
        pool.blocks += class.blocks_per_span();
        pool.in_depot += class.blocks_per_span();
        pool.spans.push(chunk);
        pool.list(chunk, &mut span, 0);
        span.whole_since = Some(now);
        self.whole_spans.insert((now, chunk));
        self.chunks[chunk as usize] = Chunk::Span(span);
    }

    /// Returns the span that begins at this chunk, if one does.
    fn span(&self, chunk: u32) -> Option<&BlockSpan> {
        match self.chunks.get(chunk as usize) {
            Some(Chunk::Span(span)) => Some(span),
            _ => None,
        }
    }

    /// Changes a span, then updates its level in the pool and its entry in `whole_spans`. Returns
    /// `None` if no span starts at this chunk.
    fn change_span<T>(
        &mut self,
        chunk: u32,
        now: Nanos,
        change: impl FnOnce(&mut BlockSpan, &mut ClassPool) -> T,
    ) -> Option<T> {
        let Some(Chunk::Span(span)) = self.chunks.get_mut(chunk as usize) else { return None };
        let pool = &mut self.pools[usize::from(span.class.index())];
        let before = span.offered();
        let output = change(span, pool);
        pool.list(chunk, span, before);
        span.changed_at = span.changed_at.max(now);
        let is_whole = span.available() == span.class.blocks_per_span();
        match span.whole_since {
            Some(since) if !is_whole => {
                self.whole_spans.remove(&(since, chunk));
                span.whole_since = None;
            }
            None if is_whole => {
                self.whole_spans.insert((span.changed_at, chunk));
                span.whole_since = Some(span.changed_at);
            }
            _ => {}
        }
        Some(output)
    }

    /// Notes that a slot links this block, so that the depot does not have it. To be called only
    /// before the first [`Depot::take`].
    pub fn note_linked(&mut self, block: NamedBlock, now: Nanos) -> Result<(), BlockError> {
        let (chunk, index) = self.locate(block.address, block.class)?;
        let linked = self.change_span(chunk, now, |span, pool| {
            if !span.in_depot.has(index) {
                return Err(BlockError::LinkedTwice { offset: block.address.claimed_offset() });
            }
            span.in_depot.clear(index);
            span.uncarved.clear(index);
            span.uncarved_count -= 1;
            pool.in_depot -= 1;
            Ok(())
        });
        linked.unwrap_or(Ok(()))
    }

    /// Notes that a damaged word names the block at this address, of whatever class. As
    /// [`Depot::note_linked`]; ignores an address at which no block starts.
    pub(crate) fn note_linked_at(&mut self, address: BlockAddress, now: Nanos) {
        if let Some((_, class)) = self.span_of(address) {
            let block = NamedBlock { address, class, generation_low: 0 };
            // An error: the block is noted already, or does not start there.
            let _ = self.note_linked(block, now);
        }
    }

    /// Returns the first chunk of the block's span, and the block's index in the span.
    fn locate(&self, address: BlockAddress, class: SizeClass) -> Result<(u32, u64), BlockError> {
        let offset = address.claimed_offset();
        let outside = BlockError::Outside { offset };
        let chunk = self.geometry.chunk_of(offset).ok_or(outside)?;
        let start = self.geometry.chunk_offset(chunk).ok_or(outside)?;
        // A block of two chunks starts in the first one, so an address in the second names no
        // block.
        if self.span(chunk).is_none_or(|span| span.class != class) {
            return Err(BlockError::NoSuchBlock { offset, class: class.index() });
        }
        let index = (offset - start) / class.block_bytes();
        let fits = (offset - start).is_multiple_of(class.block_bytes());
        if fits && index < class.blocks_per_span() {
            Ok((chunk, index))
        } else {
            Err(BlockError::NoSuchBlock { offset, class: class.index() })
        }
    }

    /// Takes up to `count` blocks of a class from the depot: at most those of one message, and at
    /// most a quarter of the available ones (`REQUEST_SHARE_DIVISOR`), in a cache a half. Returns
    /// at least one block if any is available.
    pub fn take(
        &mut self,
        class: SizeClass,
        count: u32,
        now: Nanos,
        memory: &impl RegionAccess,
    ) -> Result<Vec<FreeBlock>, ChainError> {
        self.refresh(now, memory)?;
        let is_cache = self.reserve.is_some();
        let divisor = if is_cache { CACHE_SHARE_DIVISOR } else { REQUEST_SHARE_DIVISOR };
        let share = (self.available(class) / divisor).max(1);
        let grant = u64::from(count).min(BLOCKS_PER_MESSAGE_MAX as u64).min(share) as usize;
        let mut blocks = Vec::with_capacity(grant);
        while blocks.len() < grant {
            match self.pool(class).first() {
                Some(chunk) => self.take_from(chunk, grant, &mut blocks, now, memory)?,
                None if self.grow(class, now, memory)? => {}
                None => break,
            }
        }
        Ok(blocks)
    }

    /// Makes rested blocks available, and frees the chunks that have rested. One call does a
    /// bounded part of this work, because all clients wait while it runs.
    pub(crate) fn refresh(
        &mut self,
        now: Nanos,
        memory: &impl RegionAccess,
    ) -> Result<(), ChainError> {
        let mut blocks_left = BLOCKS_PER_REFRESH;
        for class in SizeClass::all() {
            while blocks_left > 0
                && let Some(RestingBatch { ready_at, blocks }) = self.pool(class).next_rested(now)
            {
                blocks_left = blocks_left.saturating_sub(blocks.count() as usize);
                match blocks {
                    RestingBlocks::Given(blocks) => self.make_ready(class, blocks, ready_at),
                    RestingBlocks::Lost { chunk, blocks, .. } => {
                        self.change_span(chunk, ready_at, |span, _| {
                            span.add_uncarved(blocks.iter());
                        });
                    }
                }
            }
        }
        for _ in 0..SPANS_PER_REFRESH {
            let has_rested = |since: Nanos| since.saturating_add(self.options.chunk_rest) <= now;
            match self.whole_spans.first().copied() {
                Some((since, chunk)) if has_rested(since) => self.empty(chunk, memory)?,
                _ => break,
            }
        }
        Ok(())
    }

    fn make_ready(&mut self, class: SizeClass, blocks: Vec<FreeBlock>, now: Nanos) {
        for block in blocks {
            // This is never an error, because `accept` has located every one of these blocks.
            if let Ok((chunk, _)) = self.locate(block.address, class) {
                self.change_span(chunk, now, |span, _| span.ready.push(block));
            }
        }
    }

    /// Moves available blocks of a span to `blocks`, until there are `grant`.
    fn take_from(
        &mut self,
        chunk: u32,
        grant: usize,
        blocks: &mut Vec<FreeBlock>,
        now: Nanos,
        memory: &impl RegionAccess,
    ) -> Result<(), ChainError> {
        let Some(start) = self.geometry.chunk_offset(chunk) else { return Ok(()) };
        let (geometry, unused) = (self.geometry, self.options.unused_generation);
        let taken = self.change_span(chunk, now, |span, pool| {
            while blocks.len() < grant {
                let block = match span.ready.pop() {
                    Some(block) => block,
                    None => match carve(span, (&geometry, chunk), unused, memory)? {
                        Some(block) => block,
                        None => break,
                    },
                };
                let index = (block.address.claimed_offset() - start) / span.class.block_bytes();
                span.in_depot.clear(index);
                span.clear_suspect(index);
                span.forget_reads(index);
                pool.in_depot -= 1;
                blocks.push(block);
            }
            Ok(())
        });
        taken.unwrap_or(Ok(()))
    }

    /// Puts blocks back into the depot. They are available at once if they have `rested`, otherwise
    /// after GRACE.
    ///
    /// Stops at the first wrong block. The depot accepts the blocks before it and no block after
    /// it, because a client that gives a wrong block cannot be trusted.
    pub fn give(
        &mut self,
        class: SizeClass,
        blocks: Vec<FreeBlock>,
        rested: bool,
        now: Nanos,
    ) -> Result<(), BlockError> {
        let mut accepted = blocks;
        let mut result = Ok(());
        for index in 0..accepted.len() {
            if let Err(error) = self.accept(accepted[index], class) {
                accepted.truncate(index);
                result = Err(error);
                break;
            }
        }
        if rested {
            self.make_ready(class, accepted, now);
        } else {
            self.rest(class, accepted, now);
        }
        result
    }

    /// As [`Depot::give`], for blocks that were just unlinked and that the region names. Skips
    /// wrong ones, and returns the error of the last one.
    pub(crate) fn give_found(
        &mut self,
        class: SizeClass,
        blocks: Vec<FreeBlock>,
        now: Nanos,
    ) -> Result<(), BlockError> {
        let (mut accepted, mut result) = (blocks, Ok(()));
        accepted.retain(|block| match self.accept(*block, class) {
            Ok(()) => true,
            Err(error) => {
                result = Err(error);
                false
            }
        });
        self.rest(class, accepted, now);
        result
    }

    fn rest(&mut self, class: SizeClass, accepted: Vec<FreeBlock>, now: Nanos) {
        if !accepted.is_empty() {
            let ready_at = now.saturating_add(self.options.grace);
            let blocks = RestingBlocks::Given(accepted);
            self.pool(class).rest(RestingBatch { ready_at, blocks });
        }
    }

    /// Notes that the depot has this block again. An error if no client can have had the block.
    fn accept(&mut self, block: FreeBlock, class: SizeClass) -> Result<(), BlockError> {
        let (chunk, index) = self.locate(block.address, class)?;
        let Chunk::Span(span) = &mut self.chunks[chunk as usize] else { return Ok(()) };
        if span.in_depot.has(index) {
            return Err(BlockError::InDepot { offset: block.address.claimed_offset() });
        }
        span.in_depot.set(index);
        span.clear_suspect(index);
        span.forget_reads(index);
        let pool = self.pool(class);
        pool.in_depot += 1;
        pool.returned += 1;
        Ok(())
    }
}

impl Depot {
    /// Returns the counts for a request for blocks of a class, or for a chunk.
    pub(crate) fn returned(&self, class: Option<SizeClass>) -> ReturnCounts {
        let blocks = class.map(|class| self.pools[usize::from(class.index())].returned);
        ReturnCounts { blocks: blocks.unwrap_or_default(), chunks: self.chunks_emptied }
    }

    /// Whether a class without available blocks may have a block at the time `then`. If `class` is
    /// `None`: whether a chunk may be free at that time.
    pub(crate) fn may_have_free_by(&self, class: Option<SizeClass>, then: Nanos) -> bool {
        let resting = class.map(|class| self.pools[usize::from(class.index())].resting_count);
        resting.is_some_and(|count| count > 0) || self.chunk_free_at().is_some_and(|at| at <= then)
    }

    /// When the next chunk can serve another class; `None` if none is on its way.
    pub(crate) fn chunk_free_at(&self) -> Option<Nanos> {
        let (since, _) = self.whole_spans.first()?;
        Some(since.saturating_add(self.options.chunk_rest))
    }

    /// Returns the number of chunks without a use.
    pub(crate) fn chunks_free(&self) -> u64 {
        self.free_chunks.len() as u64
    }

    /// Returns the number of chunks that still have a class although all of their blocks are
    /// available.
    pub(crate) fn chunks_emptying(&self) -> u64 {
        self.whole_spans.iter().map(|(_, chunk)| self.chunks_of_span(*chunk)).sum()
    }

    /// Returns the number of chunks with subtables.
    pub(crate) fn chunks_index(&self) -> u64 {
        self.chunks_index
    }

    /// Returns the block counts of each class that has chunks.
    pub(crate) fn classes(&self) -> Vec<ClassStatistics> {
        let pools = SizeClass::all().zip(&self.pools).filter(|(_, pool)| pool.blocks > 0);
        pools
            .map(|(class, pool)| ClassStatistics {
                class,
                blocks: pool.blocks,
                blocks_free: pool.in_depot,
                blocks_resting: pool.resting_count,
                evicted: 0,
                evicted_after_ms: 0,
            })
            .collect()
    }
}

/// Returns the next uncarved block of the span that begins at this chunk.
fn carve(
    span: &mut BlockSpan,
    (geometry, chunk): (&Geometry, u32),
    unused_generation: u32,
    memory: &impl RegionAccess,
) -> Result<Option<FreeBlock>, ChainError> {
    while let Some(index) = span.next_uncarved() {
        let Some(block) = geometry.block_at(chunk, span.class, index) else { continue };
        let header = memory.header(block)?;
        // Memory that never had a header is all zeros.
        let previous = if header.bits() == 0 { unused_generation } else { header.generation };
        let generation = previous.wrapping_add(1);
        return Ok(Some(FreeBlock { address: block.address, generation }));
    }
    Ok(None)
}

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
