//! The blocks of one class: the spans they stand in, and those that rest.

use std::collections::{BTreeSet, VecDeque};

use farside_control::FreeBlock;
use farside_fabric::Nanos;
use farside_layout::SizeClass;

/// How finely spans are told apart by how much of them is free.
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

    /// The same for those that are not set here.
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

    /// The first set bit at or behind `from`.
    pub(super) fn next(&self, from: u64) -> Option<u64> {
        let start = (from / 64) as usize;
        self.0.iter().enumerate().skip(start).find_map(|(at, word)| {
            let hidden = if at == start { from % 64 } else { 0 };
            let rest = word >> hidden << hidden;
            (rest != 0).then(|| at as u64 * 64 + u64::from(rest.trailing_zeros()))
        })
    }

    /// All set bits.
    pub(super) fn iter(&self) -> impl Iterator<Item = u64> {
        let mut next = self.next(0);
        std::iter::from_fn(move || {
            let found = next?;
            next = self.next(found + 1);
            Some(found)
        })
    }
}

/// Chunks in a row, carved into blocks of one class.
pub(super) struct BlockSpan {
    pub(super) class: SizeClass,
    /// Blocks with the depot. What is not here is linked or with a client.
    pub(super) held: Bits,
    /// Blocks with the depot that are in no list: not looked at since the server started.
    pub(super) uncarved: Bits,
    pub(super) uncarved_count: u64,
    /// No uncarved block stands before this one.
    pub(super) carve_from: u64,
    /// Blocks that can be handed out now, and were looked at.
    pub(super) ready: Vec<FreeBlock>,
    /// During a collection: blocks without a known owner.
    pub(super) suspects: Option<Bits>,
    /// When its last block came or went.
    pub(super) changed_at: Nanos,
    /// Since when all of its blocks can be handed out.
    pub(super) whole_since: Option<Nanos>,
    /// Under which level its pool lists it.
    level: Option<u64>,
}

impl BlockSpan {
    /// A span all of whose blocks are with the depot.
    pub(super) fn new(class: SizeClass) -> Self {
        let count = class.blocks_per_span();
        Self {
            class,
            held: Bits::all(count),
            uncarved: Bits::all(count),
            uncarved_count: count,
            carve_from: 0,
            ready: Vec::new(),
            suspects: None,
            changed_at: 0,
            whole_since: None,
            level: None,
        }
    }

    /// How many blocks it could give now.
    pub(super) fn available(&self) -> u64 {
        self.ready.len() as u64 + self.uncarved_count
    }

    /// The next block that has been in no list yet.
    pub(super) fn next_uncarved(&mut self) -> Option<u64> {
        let index = self.uncarved.next(self.carve_from)?;
        self.uncarved.clear(index);
        self.uncarved_count -= 1;
        self.carve_from = index + 1;
        Some(index)
    }

    /// Lost blocks can be handed out now, by way of their headers.
    pub(super) fn add_uncarved(&mut self, blocks: &Bits) {
        for index in blocks.iter() {
            self.uncarved.set(index);
            self.uncarved_count += 1;
            self.carve_from = self.carve_from.min(index);
        }
    }

    /// The block is not lost.
    pub(super) fn clear_suspect(&mut self, index: u64) {
        if let Some(suspects) = &mut self.suspects {
            suspects.clear(index);
        }
    }
}

/// Blocks that were given back and may not be written before a moment.
pub(super) struct Resting {
    pub(super) ready_at: Nanos,
    pub(super) blocks: Rested,
}

/// Which blocks rest.
pub(super) enum Rested {
    /// Those that were given back.
    Given(Vec<FreeBlock>),
    /// Lost blocks of a span: a bit each. Their generations stand in their headers, which are
    /// looked at when they are handed out, as those of blocks that no list ever had.
    Uncarved { chunk: u32, blocks: Bits, count: u64 },
}

impl Rested {
    pub(super) fn count(&self) -> u64 {
        match self {
            Self::Given(blocks) => blocks.len() as u64,
            Self::Uncarved { count, .. } => *count,
        }
    }
}

/// The blocks of a class.
#[derive(Default)]
pub(super) struct ClassPool {
    /// By `ready_at`.
    resting: VecDeque<Resting>,
    /// Spans with available blocks, those first of which least is free: so that the others empty,
    /// and can be used for another class.
    listed: BTreeSet<(u64, u32)>,
    pub(super) blocks: u64,
    pub(super) held: u64,
    /// Blocks that came back since the server started.
    pub(super) returned: u64,
    pub(super) available: u64,
    pub(super) resting_count: u64,
}

impl ClassPool {
    /// The span to take from next.
    pub(super) fn first(&self) -> Option<u32> {
        self.listed.first().map(|(_, chunk)| *chunk)
    }

    /// Lists a span according to what it has now, after it had `before` available.
    pub(super) fn list(&mut self, chunk: u32, span: &mut BlockSpan, before: u64) {
        let now = span.available();
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

    /// Takes a span off the pool.
    pub(super) fn remove(&mut self, chunk: u32, span: &BlockSpan) {
        self.unlist(chunk, span);
        self.available -= span.available();
        self.held -= span.class.blocks_per_span();
        self.blocks -= span.class.blocks_per_span();
    }

    /// Keeps blocks until then.
    pub(super) fn rest(&mut self, batch: Resting) {
        self.resting_count += batch.blocks.count();
        // Nearly always the last: every client's blocks rest equally long.
        let at = self.resting.partition_point(|other| other.ready_at <= batch.ready_at);
        self.resting.insert(at, batch);
    }

    /// The next batch that has rested long enough.
    pub(super) fn next_rested(&mut self, now: Nanos) -> Option<Resting> {
        let batch = self.resting.pop_front_if(|batch| batch.ready_at <= now)?;
        self.resting_count -= batch.blocks.count();
        Some(batch)
    }
}
