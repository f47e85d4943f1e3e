//! The depot: blocks that no client holds and no slot links, by class.
//!
//! A data structure only; the chunk table and the block headers are reached through [`Memory`].

use std::collections::{BTreeSet, VecDeque};

use farside_common::control::{BLOCKS_PER_MESSAGE_MAX, ClassStatistics, FreeBlock};
use farside_common::fabric::{ChainError, Nanos};
use farside_common::layout::{BlockAddress, BlockRef, ChunkUse, Geometry, HeaderWord, SizeClass};

/// One client gets at most one in so many of the blocks that a class could still give, so that it
/// does not take the last memory away from the others.
const HOARD_SHARE: u64 = 4;

/// What the depot needs of the region.
pub(crate) trait Memory {
    /// Writes a chunk's entry in the chunk table.
    fn set_use(&self, chunk: u32, chunk_use: ChunkUse) -> Result<(), ChainError>;

    /// The header word of the block there, or of what may become one.
    fn header(&self, address: BlockAddress) -> Result<HeaderWord, ChainError>;
}

/// Why a block cannot be what somebody says it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BlockError {
    #[error("the block at offset {offset:#x} lies outside the heap")]
    Outside { offset: u64 },
    #[error("there is no block of class {class} at offset {offset:#x}")]
    NoSuchBlock { offset: u64, class: u8 },
    #[error("the block at offset {offset:#x} is not with a client: it was given back before")]
    NotOut { offset: u64 },
    #[error("the block at offset {offset:#x} is linked twice")]
    LinkedTwice { offset: u64 },
}

/// One bit for each block of a span.
struct Bits(Box<[u64]>);

impl Bits {
    fn all(count: u64) -> Self {
        let mut words = vec![u64::MAX; count.div_ceil(64) as usize];
        let used = count % 64;
        if let Some(last) = words.last_mut()
            && used > 0
        {
            *last = (1 << used) - 1;
        }
        Self(words.into())
    }

    fn has(&self, index: u64) -> bool {
        self.0[(index / 64) as usize] >> (index % 64) & 1 == 1
    }

    fn set(&mut self, index: u64) {
        self.0[(index / 64) as usize] |= 1 << (index % 64);
    }

    fn clear(&mut self, index: u64) {
        self.0[(index / 64) as usize] &= !(1 << (index % 64));
    }

    /// The first set bit at or behind `from`.
    fn next(&self, from: u64) -> Option<u64> {
        let start = (from / 64) as usize;
        self.0.iter().enumerate().skip(start).find_map(|(at, word)| {
            let hidden = if at == start { from % 64 } else { 0 };
            let rest = word >> hidden << hidden;
            (rest != 0).then(|| at as u64 * 64 + u64::from(rest.trailing_zeros()))
        })
    }
}

/// Chunks in a row, carved into blocks of one class.
struct Span {
    class: SizeClass,
    /// Blocks with the depot. What is not here is linked or with a client.
    held: Bits,
    /// Blocks with the depot that are in no list: not looked at since the server started.
    uncarved: Bits,
}

enum Chunk {
    Free,
    Subtables,
    /// The first chunk of a span.
    Span(Span),
    Continued,
}

/// Blocks that were given back and may not be written before a moment.
struct Resting {
    ready_at: Nanos,
    blocks: Vec<FreeBlock>,
}

/// The blocks of a class.
#[derive(Default)]
struct Shelf {
    ready: Vec<FreeBlock>,
    /// By `ready_at`, for every batch rests equally long.
    resting: VecDeque<Resting>,
    /// Spans with uncarved blocks: first chunk, and the index to look from.
    spans: VecDeque<(u32, u64)>,
    blocks: u64,
    held: u64,
    uncarved: u64,
}

impl Shelf {
    /// Registers a span, all of whose blocks are with the depot.
    fn open(&mut self, chunk: u32, class: SizeClass) -> Span {
        let count = class.blocks_per_span();
        self.spans.push_back((chunk, 0));
        self.blocks += count;
        self.held += count;
        self.uncarved += count;
        Span { class, held: Bits::all(count), uncarved: Bits::all(count) }
    }

    /// Makes ready what has rested long enough.
    fn wake(&mut self, now: Nanos) {
        while self.resting.front().is_some_and(|batch| batch.ready_at <= now) {
            self.ready.extend(self.resting.pop_front().into_iter().flat_map(|batch| batch.blocks));
        }
    }
}

/// Free blocks, by class, and chunks without a use.
pub(crate) struct Depot {
    geometry: Geometry,
    grace: Nanos,
    /// The last generation, so to say, of memory that was never a block: random by region, so that
    /// a version of one region is not one of another.
    unused_generation: u32,
    chunks: Vec<Chunk>,
    free: BTreeSet<u32>,
    shelves: Vec<Shelf>,
}

impl Depot {
    /// A depot that holds every block of the chunks in use, until [`Depot::link`] says otherwise.
    /// `uses` is the chunk table; a span of two chunks is there as a whole.
    pub(crate) fn new(
        geometry: Geometry,
        uses: &[ChunkUse],
        grace: Nanos,
        unused_generation: u32,
    ) -> Self {
        let mut depot = Self {
            geometry,
            grace,
            unused_generation,
            chunks: Vec::with_capacity(uses.len()),
            free: BTreeSet::new(),
            shelves: (0..SizeClass::COUNT).map(|_| Shelf::default()).collect(),
        };
        for (chunk, chunk_use) in (0..).zip(uses) {
            let state = match chunk_use {
                ChunkUse::Free => {
                    depot.free.insert(chunk);
                    Chunk::Free
                }
                ChunkUse::Subtables => Chunk::Subtables,
                ChunkUse::Continued => Chunk::Continued,
                ChunkUse::Blocks(class) => Chunk::Span(depot.shelf(*class).open(chunk, *class)),
            };
            depot.chunks.push(state);
        }
        depot
    }

    fn shelf(&mut self, class: SizeClass) -> &mut Shelf {
        &mut self.shelves[usize::from(class.index())]
    }

    /// Notes that a slot links this block. Only before the first [`Depot::take`].
    pub(crate) fn link(&mut self, block: BlockRef) -> Result<(), BlockError> {
        let (chunk, index) = self.locate(block.address, block.class)?;
        let Chunk::Span(span) = &mut self.chunks[chunk as usize] else { return Ok(()) };
        if !span.held.has(index) {
            return Err(BlockError::LinkedTwice { offset: block.address.offset() });
        }
        span.held.clear(index);
        span.uncarved.clear(index);
        let shelf = self.shelf(block.class);
        shelf.held -= 1;
        shelf.uncarved -= 1;
        Ok(())
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

    /// Hands out blocks of a class: as many as asked for, within the bounds of a message and of
    /// [`HOARD_SHARE`]; one at least if there is one.
    pub(crate) fn take(
        &mut self,
        class: SizeClass,
        count: u32,
        now: Nanos,
        memory: &impl Memory,
    ) -> Result<Vec<FreeBlock>, ChainError> {
        self.shelf(class).wake(now);
        let share = (self.available(class) / HOARD_SHARE).max(1);
        let grant = u64::from(count).min(BLOCKS_PER_MESSAGE_MAX as u64).min(share) as usize;
        let mut blocks = Vec::with_capacity(grant);
        while blocks.len() < grant {
            let Some(block) = self.next_block(class, memory)? else { break };
            blocks.push(block);
        }
        Ok(blocks)
    }

    /// How many blocks the class could give now; a lower bound where that is more than decides.
    fn available(&self, class: SizeClass) -> u64 {
        let shelf = &self.shelves[usize::from(class.index())];
        let spans = if class.chunks_per_span() == 1 {
            self.free.len() as u64
        } else {
            let enough = BLOCKS_PER_MESSAGE_MAX as u64 * HOARD_SHARE;
            self.free_pairs(enough)
        };
        shelf.ready.len() as u64 + shelf.uncarved + spans * class.blocks_per_span()
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

    fn next_block(
        &mut self,
        class: SizeClass,
        memory: &impl Memory,
    ) -> Result<Option<FreeBlock>, ChainError> {
        let shelf = self.shelf(class);
        if let Some(block) = shelf.ready.pop() {
            // Only what `locate` accepted is in a list.
            if let Ok((chunk, index)) = self.locate(block.address, class) {
                self.hand_out(chunk, index);
            }
            return Ok(Some(block));
        }
        if self.shelf(class).uncarved == 0 && !self.grow(class, memory)? {
            return Ok(None);
        }
        self.carve(class, memory)
    }

    fn hand_out(&mut self, chunk: u32, index: u64) {
        if let Chunk::Span(span) = &mut self.chunks[chunk as usize] {
            span.held.clear(index);
            self.shelves[usize::from(span.class.index())].held -= 1;
        }
    }

    /// The next block that has been in no list yet.
    fn carve(
        &mut self,
        class: SizeClass,
        memory: &impl Memory,
    ) -> Result<Option<FreeBlock>, ChainError> {
        while let Some((chunk, from)) = self.shelf(class).spans.pop_front() {
            let Chunk::Span(span) = &mut self.chunks[chunk as usize] else { continue };
            let Some(index) = span.uncarved.next(from) else { continue };
            let Some(start) = self.geometry.chunk_offset(chunk) else { continue };
            let offset = start + index * class.block_bytes();
            let Some(address) = BlockAddress::from_offset(offset) else { continue };
            let header = memory.header(address)?;
            let is_unused = header == HeaderWord::from_bits(0);
            let last = if is_unused { self.unused_generation } else { header.generation };
            let generation = last.wrapping_add(1);
            span.uncarved.clear(index);
            let shelf = self.shelf(class);
            shelf.uncarved -= 1;
            shelf.spans.push_front((chunk, index + 1));
            self.hand_out(chunk, index);
            return Ok(Some(FreeBlock { address, generation }));
        }
        Ok(None)
    }

    /// Gives a class another span; false when there is no room for one.
    fn grow(&mut self, class: SizeClass, memory: &impl Memory) -> Result<bool, ChainError> {
        let chunk = if class.chunks_per_span() == 1 {
            self.free.first().copied()
        } else {
            // From the far end, so that single chunks break up few pairs.
            self.free.iter().rev().copied().find(|chunk| self.free.contains(&(chunk + 1)))
        };
        let Some(chunk) = chunk else { return Ok(false) };
        // The last chunk first: a server that dies in between leaves a continuation of nothing,
        // which the next one takes for free.
        for behind in (1..class.chunks_per_span() as u32).rev() {
            memory.set_use(chunk + behind, ChunkUse::Continued)?;
            self.free.remove(&(chunk + behind));
            self.chunks[(chunk + behind) as usize] = Chunk::Continued;
        }
        memory.set_use(chunk, ChunkUse::Blocks(class))?;
        self.free.remove(&chunk);
        self.chunks[chunk as usize] = Chunk::Span(self.shelf(class).open(chunk, class));
        Ok(true)
    }

    /// Takes blocks back, to be handed out again at once (`rested`) or after GRACE. Stops at the
    /// first that cannot be: whoever gives such a block is not to be believed any further.
    pub(crate) fn give(
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
        let ready_at = now.saturating_add(self.grace);
        let shelf = self.shelf(class);
        if rested {
            shelf.ready.extend(accepted);
        } else if !accepted.is_empty() {
            shelf.resting.push_back(Resting { ready_at, blocks: accepted });
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
        self.shelf(class).held += 1;
        Ok(())
    }

    /// Chunks without a use.
    pub(crate) fn chunks_free(&self) -> u64 {
        self.free.len() as u64
    }

    /// Chunks with subtables.
    pub(crate) fn chunks_index(&self) -> u64 {
        self.chunks.iter().filter(|chunk| matches!(chunk, Chunk::Subtables)).count() as u64
    }

    /// What there is of each class that has chunks.
    pub(crate) fn classes(&self) -> Vec<ClassStatistics> {
        let shelves = SizeClass::all().zip(&self.shelves).filter(|(_, shelf)| shelf.blocks > 0);
        shelves
            .map(|(class, shelf)| ClassStatistics {
                class,
                blocks: shelf.blocks,
                blocks_free: shelf.held,
            })
            .collect()
    }
}

mod chunks;
#[cfg(test)]
mod tests;
