//! The depot: blocks that no client holds and no slot links, by class.
//!
//! A data structure only; the chunk table and the block headers are reached through
//! [`RegionAccess`]. So it works over any memory: the server's region, or that of a simulator.

mod chunks;
mod class_pool;
mod lost;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;

use farside_control::{BLOCKS_PER_MESSAGE_MAX, ClassStatistics, FreeBlock};
use farside_fabric::{ChainError, Nanos};
use farside_layout::{
    BlockAddress, BlockRef, ChunkEntry, ChunkUse, Geometry, HeaderWord, SizeClass, WORD_GENERATIONS,
};

use class_pool::{BlockSpan, ClassPool, Rested, Resting};
pub(crate) use lost::Noted;

/// One client gets at most one in so many of the blocks that a class could still give, so that it
/// does not take the last memory away from the others.
const HOARD_SHARE: u64 = 4;

/// How many blocks are made ready at a time, some more at the end ...
const BLOCKS_PER_REFRESH: usize = 1 << 16;
/// ... and how many chunks lose their class, each of whose headers is looked at.
const CHUNKS_PER_REFRESH: usize = 8;

/// What the depot needs of the region.
pub trait RegionAccess {
    /// A chunk's entry in the chunk table.
    fn entry(&self, chunk: u32) -> Result<ChunkEntry, ChainError>;

    /// Writes a chunk's entry in the chunk table.
    fn set_entry(&self, chunk: u32, entry: ChunkEntry) -> Result<(), ChainError>;

    /// The header word of the block there, or of what may become one.
    fn header(&self, address: BlockAddress) -> Result<HeaderWord, ChainError>;

    /// Makes a header where there was none: the memory has no other user.
    fn set_header(&self, address: BlockAddress, header: HeaderWord) -> Result<(), ChainError>;

    /// Makes a chunk all zeros that has no other user.
    fn clear(&self, chunk: u32) -> Result<(), ChainError>;
}

/// Why a block cannot be what a client says it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum BlockError {
    #[error("the block at offset {offset:#x} lies outside the heap")]
    Outside { offset: u64 },
    #[error("there is no block of class {class} at offset {offset:#x}")]
    NoSuchBlock { offset: u64, class: u8 },
    #[error("the block at offset {offset:#x} is not with a client: it was given back before")]
    NotOut { offset: u64 },
    #[error("the block at offset {offset:#x} is linked twice")]
    LinkedTwice { offset: u64 },
}

/// What has come back since the server started, for a class or for a request for a chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Returned {
    /// Blocks of the class.
    pub(crate) blocks: u64,
    /// Chunks that lost their class.
    pub(crate) chunks: u64,
}

enum Chunk {
    Free,
    Subtables,
    /// The first chunk of a span.
    Span(Box<BlockSpan>),
    Continued,
}

/// Times and numbers that a depot goes by.
#[derive(Clone, Copy, Debug)]
pub struct DepotOptions {
    /// How long an unlinked block rests.
    pub grace: Nanos,
    /// How long after its last block became free a chunk keeps its class: until then a client may
    /// still name one of its blocks (invariant I13).
    pub chunk_rest: Nanos,
    /// The last generation, so to say, of memory that was never a block: random by region, so that
    /// a version of one region is not one of another.
    pub unused_generation: u32,
}

/// [`DepotOptions::chunk_rest`] in multiples of GRACE: by this clock T_word + L is over before 256
/// of them, however clocks drift, and this is an eighth more.
const CHUNK_REST_GRACES: u64 = WORD_GENERATIONS / 8 * 9;

impl DepotOptions {
    /// The right ones for this GRACE.
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
    free: BTreeSet<u32>,
    pools: Vec<ClassPool>,
    /// Spans all of whose blocks can be handed out, and since when.
    whole: BTreeSet<(Nanos, u32)>,
    emptied: u64,
    /// Blocks leave the index as many chunks as it needs for a key in each of them.
    is_cache: bool,
}

impl Depot {
    /// A depot that holds every block of the chunks in use, until [`Depot::link`] says otherwise.
    /// `uses` is the chunk table; a span of two chunks is there as a whole.
    pub fn new(geometry: Geometry, uses: &[ChunkUse], options: DepotOptions, now: Nanos) -> Self {
        let mut depot = Self {
            geometry,
            options,
            chunks: uses.iter().map(|_| Chunk::Continued).collect(),
            free: BTreeSet::new(),
            pools: (0..SizeClass::COUNT).map(|_| ClassPool::default()).collect(),
            whole: BTreeSet::new(),
            emptied: 0,
            is_cache: false,
        };
        for (chunk, chunk_use) in (0..).zip(uses) {
            match chunk_use {
                ChunkUse::Free => {
                    depot.free.insert(chunk);
                    depot.chunks[chunk as usize] = Chunk::Free;
                }
                ChunkUse::Subtables => depot.chunks[chunk as usize] = Chunk::Subtables,
                ChunkUse::Continued => {}
                ChunkUse::Blocks(class) => depot.open(chunk, *class, now),
            }
        }
        depot
    }

    /// The region is a cache, all of whose blocks get used: without this they would take what the
    /// index needs to grow.
    pub(crate) fn reserve_for_index(&mut self) {
        self.is_cache = true;
    }

    fn pool(&mut self, class: SizeClass) -> &mut ClassPool {
        &mut self.pools[usize::from(class.index())]
    }

    /// Puts a span on its pool, all of its blocks with the depot.
    fn open(&mut self, chunk: u32, class: SizeClass, now: Nanos) {
        let mut span = Box::new(BlockSpan::new(class));
        let pool = self.pool(class);
        pool.blocks += class.blocks_per_span();
        pool.held += class.blocks_per_span();
        pool.list(chunk, &mut span, 0);
        span.whole_since = Some(now);
        self.whole.insert((now, chunk));
        self.chunks[chunk as usize] = Chunk::Span(span);
    }

    /// Changes a span, and notes what that means for where it is listed.
    fn change<T>(
        &mut self,
        chunk: u32,
        now: Nanos,
        change: impl FnOnce(&mut BlockSpan, &mut ClassPool) -> T,
    ) -> Option<T> {
        let Some(Chunk::Span(span)) = self.chunks.get_mut(chunk as usize) else { return None };
        let pool = &mut self.pools[usize::from(span.class.index())];
        let before = span.available();
        let output = change(span, pool);
        pool.list(chunk, span, before);
        span.changed_at = span.changed_at.max(now);
        let is_whole = span.available() == span.class.blocks_per_span();
        match span.whole_since {
            Some(since) if !is_whole => {
                self.whole.remove(&(since, chunk));
                span.whole_since = None;
            }
            None if is_whole => {
                self.whole.insert((span.changed_at, chunk));
                span.whole_since = Some(span.changed_at);
            }
            _ => {}
        }
        Some(output)
    }

    /// Notes that a slot links this block. Only before the first [`Depot::take`].
    pub fn link(&mut self, block: BlockRef, now: Nanos) -> Result<(), BlockError> {
        let (chunk, index) = self.locate(block.address, block.class)?;
        let linked = self.change(chunk, now, |span, pool| {
            if !span.held.has(index) {
                return Err(BlockError::LinkedTwice { offset: block.address.offset() });
            }
            span.held.clear(index);
            span.uncarved.clear(index);
            span.uncarved_count -= 1;
            pool.held -= 1;
            Ok(())
        });
        linked.unwrap_or(Ok(()))
    }

    /// Which block this is: the first chunk of its span, and its number in it.
    fn locate(&self, address: BlockAddress, class: SizeClass) -> Result<(u32, u64), BlockError> {
        let offset = address.offset();
        let outside = BlockError::Outside { offset };
        let chunk = self.geometry.chunk_of(offset).ok_or(outside)?;
        let start = self.geometry.chunk_offset(chunk).ok_or(outside)?;
        // A block of two chunks starts at the first one's start, so its span is never entered
        // through the second.
        match self.chunks.get(chunk as usize) {
            Some(Chunk::Span(span)) if span.class == class => {}
            _ => return Err(BlockError::NoSuchBlock { offset, class: class.index() }),
        }
        let index = (offset - start) / class.block_bytes();
        let fits = (offset - start).is_multiple_of(class.block_bytes());
        if fits && index < class.blocks_per_span() {
            Ok((chunk, index))
        } else {
            Err(BlockError::NoSuchBlock { offset, class: class.index() })
        }
    }

    /// Where the block with this number stands; `None` beyond the heap.
    fn address(&self, chunk: u32, class: SizeClass, index: u64) -> Option<BlockAddress> {
        let start = self.geometry.chunk_offset(chunk)?;
        BlockAddress::from_offset(start + index * class.block_bytes())
    }

    /// Hands out blocks of a class: as many as asked for, within the bounds of a message and of
    /// `HOARD_SHARE`; one at least if there is one.
    pub fn take(
        &mut self,
        class: SizeClass,
        count: u32,
        now: Nanos,
        memory: &impl RegionAccess,
    ) -> Result<Vec<FreeBlock>, ChainError> {
        self.refresh(now, memory)?;
        let share = (self.available(class) / HOARD_SHARE).max(1);
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

    /// Makes ready what has rested long enough, and empties unused chunks: some of it,
    /// where there is much, for all clients wait meanwhile.
    pub(crate) fn refresh(
        &mut self,
        now: Nanos,
        memory: &impl RegionAccess,
    ) -> Result<(), ChainError> {
        let mut left = BLOCKS_PER_REFRESH;
        for class in SizeClass::all() {
            while left > 0
                && let Some(Resting { ready_at, blocks }) = self.pool(class).next_rested(now)
            {
                left = left.saturating_sub(blocks.count() as usize);
                match blocks {
                    Rested::Given(blocks) => self.make_ready(class, blocks, ready_at),
                    Rested::Uncarved { chunk, blocks, .. } => {
                        self.change(chunk, ready_at, |span, _| span.add_uncarved(&blocks));
                    }
                }
            }
        }
        for _ in 0..CHUNKS_PER_REFRESH {
            let due = |since: Nanos| since.saturating_add(self.options.chunk_rest) <= now;
            match self.whole.first().copied() {
                Some((since, chunk)) if due(since) => self.empty(chunk, memory)?,
                _ => break,
            }
        }
        Ok(())
    }

    fn make_ready(&mut self, class: SizeClass, blocks: Vec<FreeBlock>, now: Nanos) {
        for block in blocks {
            // Only what `locate` accepted comes here.
            if let Ok((chunk, _)) = self.locate(block.address, class) {
                self.change(chunk, now, |span, _| span.ready.push(block));
            }
        }
    }

    /// Takes blocks of a span that has some, until there are `grant`.
    fn take_from(
        &mut self,
        chunk: u32,
        grant: usize,
        blocks: &mut Vec<FreeBlock>,
        now: Nanos,
        memory: &impl RegionAccess,
    ) -> Result<(), ChainError> {
        let Some(start) = self.geometry.chunk_offset(chunk) else { return Ok(()) };
        let unused = self.options.unused_generation;
        let taken = self.change(chunk, now, |span, pool| {
            while blocks.len() < grant {
                let block = match span.ready.pop() {
                    Some(block) => block,
                    None => match carve(span, start, unused, memory)? {
                        Some(block) => block,
                        None => break,
                    },
                };
                let index = (block.address.offset() - start) / span.class.block_bytes();
                span.held.clear(index);
                span.clear_suspect(index);
                pool.held -= 1;
                blocks.push(block);
            }
            Ok(())
        });
        taken.unwrap_or(Ok(()))
    }

    /// Takes blocks back, to be handed out again at once (`rested`) or after GRACE. Stops at the
    /// first that cannot be: a client that gives such a block is not to be believed any further.
    pub fn give(
        &mut self,
        class: SizeClass,
        blocks: Vec<FreeBlock>,
        rested: bool,
        now: Nanos,
    ) -> Result<(), BlockError> {
        let mut accepted = blocks;
        let mut outcome = Ok(());
        for at in 0..accepted.len() {
            if let Err(error) = self.accept(accepted[at], class) {
                accepted.truncate(at);
                outcome = Err(error);
                break;
            }
        }
        if rested {
            self.make_ready(class, accepted, now);
        } else if !accepted.is_empty() {
            let ready_at = now.saturating_add(self.options.grace);
            self.pool(class).rest(Resting { ready_at, blocks: Rested::Given(accepted) });
        }
        outcome
    }

    fn accept(&mut self, block: FreeBlock, class: SizeClass) -> Result<(), BlockError> {
        let (chunk, index) = self.locate(block.address, class)?;
        let Chunk::Span(span) = &mut self.chunks[chunk as usize] else { return Ok(()) };
        if span.held.has(index) {
            return Err(BlockError::NotOut { offset: block.address.offset() });
        }
        span.held.set(index);
        span.clear_suspect(index);
        let pool = self.pool(class);
        pool.held += 1;
        pool.returned += 1;
        Ok(())
    }
}

impl Depot {
    /// Whether any block of the class is linked or with a client.
    pub(crate) fn has_out(&self, class: SizeClass) -> bool {
        let pool = &self.pools[usize::from(class.index())];
        pool.held < pool.blocks
    }

    /// What has come back of a class, or for a request for a chunk.
    pub(crate) fn returned(&self, class: Option<SizeClass>) -> Returned {
        let blocks = class.map(|class| self.pools[usize::from(class.index())].returned);
        Returned { blocks: blocks.unwrap_or_default(), chunks: self.emptied }
    }

    /// Whether the class, which has none now, may have a block by then; or a request for a chunk
    /// may have one.
    pub(crate) fn has_some_by(&self, class: Option<SizeClass>, then: Nanos) -> bool {
        let resting = class.map(|class| self.pools[usize::from(class.index())].resting_count);
        let whole = self.whole.first();
        let emptied = whole.map(|(since, _)| since.saturating_add(self.options.chunk_rest));
        resting.is_some_and(|count| count > 0) || emptied.is_some_and(|at| at <= then)
    }

    /// Chunks without a use.
    pub(crate) fn chunks_free(&self) -> u64 {
        self.free.len() as u64
    }

    /// Chunks of spans all of whose blocks are free, which still keep their class.
    pub(crate) fn chunks_whole(&self) -> u64 {
        let chunks = |chunk: u32| match self.chunks.get(chunk as usize) {
            Some(Chunk::Span(span)) => span.class.chunks_per_span(),
            _ => 0,
        };
        self.whole.iter().map(|(_, chunk)| chunks(*chunk)).sum()
    }

    /// Chunks that lost their class since the server started.
    pub(crate) fn chunks_emptied(&self) -> u64 {
        self.emptied
    }

    /// Chunks with subtables.
    pub(crate) fn chunks_index(&self) -> u64 {
        self.chunks.iter().filter(|chunk| matches!(chunk, Chunk::Subtables)).count() as u64
    }

    /// What there is of each class that has chunks.
    pub(crate) fn classes(&self) -> Vec<ClassStatistics> {
        let pools = SizeClass::all().zip(&self.pools).filter(|(_, pool)| pool.blocks > 0);
        pools
            .map(|(class, pool)| ClassStatistics {
                class,
                blocks: pool.blocks,
                blocks_free: pool.held,
                blocks_resting: pool.resting_count,
            })
            .collect()
    }
}

/// The next block of a span, that starts there, that has been in no list yet.
fn carve(
    span: &mut BlockSpan,
    start: u64,
    unused_generation: u32,
    memory: &impl RegionAccess,
) -> Result<Option<FreeBlock>, ChainError> {
    while let Some(index) = span.next_uncarved() {
        let offset = start + index * span.class.block_bytes();
        let Some(address) = BlockAddress::from_offset(offset) else { continue };
        let last = used_generation(memory.header(address)?, unused_generation);
        return Ok(Some(FreeBlock { address, generation: last.wrapping_add(1) }));
    }
    Ok(None)
}

/// The generation of what a header stands before; memory that never had one is all zeros.
fn used_generation(header: HeaderWord, unused_generation: u32) -> u32 {
    if header.bits() == 0 { unused_generation } else { header.generation }
}
