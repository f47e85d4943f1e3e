use farside_layout::{BlockRef, ChunkUse, Format, LayoutError, SizeClass, SlotState, Superblock};

use super::slots::Entry;

/// How many problems a report keeps word by word; the rest is only counted.
pub const PROBLEMS_KEPT_MAX: usize = 100;

/// The states a slot can have.
const STATES: usize = 8;

/// Something in a region that cannot be. Offsets are bytes from the region's start.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum Problem {
    #[error("the chunk table's entry at offset {offset:#x}: {error}")]
    ChunkEntry { offset: u64, error: LayoutError },
    #[error(
        "the chunk table's entry at offset {offset:#x} says `{says:?}`, which does not go with \
         the entry before it"
    )]
    ChunkSpan { offset: u64, says: ChunkUse },
    #[error("the directory entry at offset {offset:#x}: {error}")]
    DirectoryEntry { offset: u64, error: LayoutError },
    #[error(
        "the directory entry at offset {offset:#x} goes by {local_depth} bits, but the directory \
         has only {depth}"
    )]
    DirectoryDepth { offset: u64, local_depth: u8, depth: u8 },
    #[error(
        "the directory entry at offset {offset:#x} differs from another for the same {local_depth} \
         bits"
    )]
    DirectoryGroup { offset: u64, local_depth: u8 },
    #[error("the subtable at offset {subtable:#x} lies in a chunk that is not for subtables")]
    SubtableChunk { subtable: u64 },
    #[error("the row at offset {offset:#x} has a damaged header")]
    RowHeader { offset: u64 },
    #[error(
        "the row at offset {offset:#x} is for the {local_depth} bits {prefix:#x}, not for those \
         that lead to it"
    )]
    RowPrefix { offset: u64, prefix: u32, local_depth: u8 },
    #[error(
        "the row at offset {offset:#x} sends readers to {:#x} and {:#x}, where no subtables are, \
         or elsewhere than the rows before it",
        .forward[0], .forward[1]
    )]
    RowForward { offset: u64, forward: [u64; 2] },
    #[error(
        "the row at offset {offset:#x} has a MOVED slot, but no forward pointer leads to the new \
         subtables"
    )]
    MovedNowhere { offset: u64 },
    #[error(
        "the slot at offset {offset:#x} leads to a block, in a place for a subtable that nothing \
         leads to: no client finds it, and a server that starts clears it"
    )]
    FreePlace { offset: u64 },
    #[error("the slot at offset {offset:#x} is empty but has the bits {bits:#x} left")]
    EmptyWord { offset: u64, bits: u64 },
    #[error("the slot at offset {offset:#x}: {error}")]
    SlotBlock { offset: u64, error: LayoutError },
    #[error(
        "the slot at offset {offset:#x} leads to a block of {bytes} bytes at {block:#x}, whose \
         chunk holds none of that size"
    )]
    BlockChunk { offset: u64, block: u64, bytes: u64 },
    #[error(
        "the slot at offset {offset:#x} leads to {block:#x}, where no block of {bytes} bytes starts"
    )]
    BlockStride { offset: u64, block: u64, bytes: u64 },
    #[error("the slot at offset {offset:#x} leads to a damaged block: {error}")]
    Block { offset: u64, error: LayoutError },
    #[error(
        "the slot at offset {offset:#x} expects generation {expected} (mod 256) of the block at \
         {block:#x}, which has {generation}"
    )]
    Generation { offset: u64, block: u64, expected: u8, generation: u32 },
    #[error("the slot at offset {offset:#x} has another fingerprint than its key")]
    Fingerprint { offset: u64 },
    #[error("the slot at offset {offset:#x} has another hint than its key")]
    Hint { offset: u64 },
    #[error("the slot at offset {offset:#x} holds a key that belongs elsewhere")]
    Window { offset: u64 },
    #[error("the slots at offsets {first:#x} and {second:#x} hold the same key")]
    KeyTwice { first: u64, second: u64 },
    #[error("the slots at offsets {first:#x} and {second:#x} lead to the same block at {block:#x}")]
    BlockTwice { first: u64, second: u64, block: u64 },
}

/// What a check found.
#[derive(Clone, Debug)]
pub struct Report {
    /// The region's fixed properties.
    pub format: Format,
    /// How many times a server started on the region.
    pub incarnation: u64,
    /// How many bits of the hash the directory goes by.
    pub directory_depth: u8,
    /// Subtables of the index.
    pub subtables: u64,
    /// Those of them that a split is emptying.
    pub subtables_splitting: u64,
    /// LIVE and FROZEN slots without a problem, which is how many keys there are.
    pub keys: u64,
    /// Keys whose block is marked as superseded though it is linked: a writer died between mark
    /// and swing, or is just between them. They only cost cached readers a round trip.
    pub poisoned: u64,
    /// Slots and entries of tables that changed under every look: they were in use, which is no
    /// problem.
    pub unsettled: u64,
    /// All keys together, in bytes; 0 if the check left out the blocks.
    pub key_bytes: u64,
    /// All values together, in bytes; 0 if the check left out the blocks.
    pub value_bytes: u64,
    /// The blocks that hold them, in bytes.
    pub block_bytes: u64,
    /// Classes that have chunks or linked blocks, smallest first.
    pub classes: Vec<ClassUse>,
    /// What the heap is used for.
    pub chunks: ChunkCounts,
    /// How many problems there are.
    pub problem_count: u64,
    /// The first [`PROBLEMS_KEPT_MAX`] of them.
    pub problems: Vec<Problem>,
    slots: [u64; STATES],
}

/// What a size class is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClassUse {
    /// Which.
    pub class: SizeClass,
    /// Blocks that hold a key.
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
    /// Without a use.
    pub free: u64,
    /// For subtables.
    pub subtables: u64,
    /// For blocks, continued ones included.
    pub blocks: u64,
    /// With an entry that says nothing.
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
            poisoned: 0,
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

    /// Whether the region is as it should be.
    pub fn is_clean(&self) -> bool {
        self.problem_count == 0
    }

    /// How many slots are in this state.
    pub fn slots(&self, state: SlotState) -> u64 {
        self.slots[state as usize]
    }

    /// All slots of the index.
    pub fn slots_total(&self) -> u64 {
        self.slots.iter().sum()
    }

    /// The part of the index's slots that hold a key, from 0 to 1.
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

    pub(super) fn count_entry(&mut self, entry: &Entry) {
        self.key_bytes += entry.key_bytes;
        self.value_bytes += entry.value_bytes;
        self.poisoned += u64::from(entry.superseded);
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

    pub(super) fn drop_unused_classes(&mut self) {
        self.classes.retain(|of| of.blocks_linked > 0 || of.chunks > 0);
    }
}
