//! The blocks of one size class: the spans that contain them, and the batches that rest.

use std::collections::{BTreeSet, VecDeque};

use farside_control::FreeBlock;
use farside_fabric::Nanos;
use farside_layout::SizeClass;

use super::reads::ReadCounts;

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
