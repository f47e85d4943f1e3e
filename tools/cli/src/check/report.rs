//! The report of a check, and the problems in it.

use farside_layout::{BlockRef, ChunkUse, Format, LayoutError, SizeClass, SlotState, Superblock};

use super::slots::BlockContent;

/// Limit on the problems that a report keeps. Further ones are only counted.
pub const PROBLEMS_KEPT_MAX: usize = 100;

/// The number of states of a slot.
const STATES: usize = 8;

/// Something in a region that is invalid. Offsets are bytes from the region's start.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum Problem {
    #[error("the chunk table's entry at offset {offset:#x}: {error}")]
    ChunkEntry { offset: u64, error: LayoutError },
    #[error(
        "the chunk table's entry at offset {offset:#x} is `{chunk_use:?}`, which does not \
         fit the entry before it"
    )]
    ChunkSpan { offset: u64, chunk_use: ChunkUse },
    #[error("the directory entry at offset {offset:#x}: {error}")]
    DirectoryEntry { offset: u64, error: LayoutError },
    #[error(
        "the directory entry at offset {offset:#x} has a local depth of {local_depth} bits, but \
         the directory has only {depth}"
    )]
    DirectoryDepth { offset: u64, local_depth: u8, depth: u8 },
    #[error(
        "the directory entry at offset {offset:#x} differs from another one of the same subtable, \
         which has {local_depth} bits"
    )]
    DirectoryGroup { offset: u64, local_depth: u8 },
    #[error("the subtable at offset {subtable:#x} lies in a chunk that is not for subtables")]
    SubtableChunk { subtable: u64 },
    #[error("the row at offset {offset:#x} has a damaged header")]
    RowHeader { offset: u64 },
    #[error(
        "the row at offset {offset:#x} has the prefix {prefix:#x} of {local_depth} bits, which \
         does not lead to it"
    )]
    RowPrefix { offset: u64, prefix: u32, local_depth: u8 },
    #[error(
        "the row at offset {offset:#x} forwards readers to {:#x} and {:#x}, where no subtables \
         are, or elsewhere than the rows before it",
        .forward[0], .forward[1]
    )]
    RowForward { offset: u64, forward: [u64; 2] },
    #[error(
        "the row at offset {offset:#x} has a MOVED slot, but no forward pointer leads to the new \
         subtables"
    )]
    MovedNowhere { offset: u64 },
    #[error(
        "the slot at offset {offset:#x} leads to a block, but is in a free place for a subtable: \
         no client finds it, and a server that starts clears it"
    )]
    FreePlace { offset: u64 },
    #[error("the slot at offset {offset:#x} leads nowhere, but has the invalid bits {bits:#x}")]
    EmptyWord { offset: u64, bits: u64 },
    #[error("the slot at offset {offset:#x}: {error}")]
    SlotBlock { offset: u64, error: LayoutError },
    #[error(
        "the slot at offset {offset:#x} leads to a block of {bytes} bytes at {block:#x}, whose \
         chunk has no blocks of that size"
    )]
    BlockChunk { offset: u64, block: u64, bytes: u64 },
    #[error("the slot at offset {offset:#x} leads to a damaged block: {error}")]
    Block { offset: u64, error: LayoutError },
    #[error("the slot at offset {offset:#x} leads to a value whose extents are damaged: {error}")]
    ExtentTable { offset: u64, error: LayoutError },
    #[error(
        "the slot at offset {offset:#x} leads to a value whose extent at {block:#x} is damaged, or \
         holds another part"
    )]
    Extent { offset: u64, block: u64 },
    #[error(
        "the slot at offset {offset:#x} expects generation {expected} (mod 256) of the block at \
         {block:#x}, which has {generation}"
    )]
    Generation { offset: u64, block: u64, expected: u8, generation: u32 },
    #[error("the slot at offset {offset:#x} does not have its key's fingerprint")]
    Fingerprint { offset: u64 },
    #[error("the slot at offset {offset:#x} does not have its key's hint")]
    Hint { offset: u64 },
    #[error("the slot at offset {offset:#x} holds a key that does not belong in this row")]
    Window { offset: u64 },
    #[error("the slots at offsets {first:#x} and {second:#x} hold the same key")]
    KeyTwice { first: u64, second: u64 },
    #[error("the slots at offsets {first:#x} and {second:#x} lead to the same block at {block:#x}")]
    BlockTwice { first: u64, second: u64, block: u64 },
}

/// The result of a check.
#[derive(Clone, Debug)]
pub struct Report {
    /// The region's fixed properties.
    pub format: Format,
    /// How many times a server started on the region.
    pub incarnation: u64,
    /// How many bits of the hash the directory uses.
    pub directory_depth: u8,
    /// The number of subtables in the index.
    pub subtables: u64,
    /// The subtables that a split is emptying.
    pub subtables_splitting: u64,
    /// The number of keys: LIVE and FROZEN slots without a problem.
    pub keys: u64,
    /// Keys whose block is marked as superseded although it is linked: a writer died between mark
    /// and swing, or is between them now. They only cost cached readers a round trip.
    pub stale_marks: u64,
    /// Slots and entries of tables that changed at every READ: they were in use, which is not a
    /// problem.
    pub unsettled: u64,
    /// The length of all keys; 0 if the check did not read the blocks.
    pub key_bytes: u64,
    /// The length of all values; 0 if the check did not read the blocks.
    pub value_bytes: u64,
    /// The size of the blocks that hold keys.
    pub block_bytes: u64,
    /// Classes that have chunks or linked blocks, smallest first.
    pub classes: Vec<ClassUse>,
    /// The chunks of the heap by their use.
    pub chunks: ChunkCounts,
    /// The number of problems.
    pub problem_count: u64,
    /// The first problems, at most [`PROBLEMS_KEPT_MAX`].
    pub problems: Vec<Problem>,
    slots: [u64; STATES],
}

/// The use of a size class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClassUse {
    /// The class.
    pub class: SizeClass,
    /// Blocks that hold a key, or a part of its value.
    pub blocks_linked: u64,
    /// Chunks carved into blocks of this class.
    pub chunks: u64,
}

impl ClassUse {
    /// All blocks of the class, linked or not.
    pub fn blocks(&self) -> u64 {
        self.chunks / self.class.chunks_per_span() * self.class.blocks_per_span()
    }
}

/// Chunks of the heap by their use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChunkCounts {
    /// Free chunks.
    pub free: u64,
    /// Chunks for subtables.
    pub subtables: u64,
    /// Chunks for blocks, including the second chunks of large blocks.
    pub blocks: u64,
    /// Chunks with an invalid entry.
    pub unknown: u64,
}

impl Report {
    pub(super) fn new(superblock: &Superblock, format: Format, directory_depth: u8) -> Self {
        Self {
            format,
            incarnation: superblock.incarnation(),
            directory_depth,
            subtables: 0,
            subtables_splitting: 0,
            keys: 0,
            stale_marks: 0,
            unsettled: 0,
            key_bytes: 0,
            value_bytes: 0,
            block_bytes: 0,
            classes: SizeClass::all()
                .map(|class| ClassUse { class, blocks_linked: 0, chunks: 0 })
                .collect(),
            chunks: ChunkCounts::default(),
            problem_count: 0,
            problems: Vec::new(),
            slots: [0; STATES],
        }
    }

    /// Whether no problem was found.
    pub fn is_clean(&self) -> bool {
        self.problem_count == 0
    }

    /// How many slots are in this state.
    pub fn slots(&self, state: SlotState) -> u64 {
        self.slots[state as usize]
    }

    /// The number of slots in the index.
    pub fn slots_total(&self) -> u64 {
        self.slots.iter().sum()
    }

    /// The fraction of the index's slots that hold a key, from 0 to 1.
    pub fn load_factor(&self) -> f64 {
        self.keys as f64 / self.slots_total().max(1) as f64
    }

    pub(super) fn add_problem(&mut self, problem: Problem) {
        self.problem_count += 1;
        if self.problems.len() < PROBLEMS_KEPT_MAX {
            self.problems.push(problem);
        }
    }

    pub(super) fn is_full(&self) -> bool {
        self.problems.len() == PROBLEMS_KEPT_MAX
    }

    pub(super) fn count_slot(&mut self, state: SlotState) {
        self.slots[state as usize] += 1;
    }

    pub(super) fn count_key(&mut self, block: BlockRef) {
        self.keys += 1;
        self.block_bytes += block.class.block_bytes();
        self.classes[usize::from(block.class.index())].blocks_linked += 1;
    }

    pub(super) fn count_extent(&mut self, extent: BlockRef) {
        self.block_bytes += extent.class.block_bytes();
        self.classes[usize::from(extent.class.index())].blocks_linked += 1;
    }

    pub(super) fn count_content(&mut self, content: &BlockContent) {
        self.key_bytes += content.key_bytes;
        self.value_bytes += content.value_bytes;
        self.stale_marks += u64::from(content.superseded);
    }

    pub(super) fn count_chunk(&mut self, chunk_use: Option<ChunkUse>) {
        match chunk_use {
            Some(ChunkUse::Free) => self.chunks.free += 1,
            Some(ChunkUse::Subtables) => self.chunks.subtables += 1,
            Some(ChunkUse::Blocks(class)) => {
                self.chunks.blocks += 1;
                self.classes[usize::from(class.index())].chunks += class.chunks_per_span();
            }
            Some(ChunkUse::Continued) => self.chunks.blocks += 1,
            None => self.chunks.unknown += 1,
        }
    }
}
