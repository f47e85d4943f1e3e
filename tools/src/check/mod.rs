//! The region checker: walks a whole region with READs alone and says what in it cannot be.
//!
//! Clients may go on meanwhile, so what looks wrong is looked at again. A slot whose word changed
//! was only in use; a mismatch beside an unchanged word is real, because a block stays untouched
//! for GRACE after its unlink. A table has to be wrong in the same way twice, a pause apart.

mod report;
mod slots;
mod tables;

use std::collections::{HashMap, HashSet};

pub use report::*;

use farside_fabric::{Buffer, ChainError, Endpoint, Fabric, LaneId, Nanos, RegionIndex, Verb};
use farside_layout::hash::{KeyHash, KeyHasher};
use farside_layout::{
    BlockRef, Geometry, LayoutError, SUPERBLOCK_BYTES, Slot, SlotState, SlotWord, Superblock,
};

/// How often something that keeps changing is looked at before it is left alone.
const LOOKS_MAX: u32 = 8;
/// How long a table that looks wrong is given to settle: the server is between two stores.
const PAUSE_NS: Nanos = 2_000_000;
/// How often the walk starts over because the directory was replaced under it.
const WALKS_MAX: u32 = 4;
/// How much of a table one READ brings, in bytes.
const PIECE_BYTES: u64 = 64 << 10;
/// The longest deadline: READs have no need of one.
const NO_DEADLINE: Nanos = Nanos::MAX;

/// How much of a region is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// The tables and the index: enough for statistics. Takes a READ for each subtable.
    Index,
    /// Also every linked block: a READ for each.
    Blocks,
    /// Also the places for subtables that nothing leads to. Only while no server is at work, which
    /// takes such places into use.
    File,
}

/// Is told how a check goes on.
pub trait Observer {
    /// This much of the directory is done.
    fn progress(&mut self, _done: u64, _total: u64) {}

    /// A LIVE or FROZEN slot links this block, and nothing is wrong with either. A block may come
    /// again when clients are at work; without them each comes once.
    fn linked(&mut self, _block: BlockRef) {}
}

/// Does not want to know.
impl Observer for () {}

/// Why a check found nothing out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CheckError {
    /// The superblock does not check out, so nothing else can be found.
    #[error("the superblock cannot be used: {0}")]
    Superblock(#[from] LayoutError),
    /// The region cannot be read.
    #[error("the region cannot be read: {0}")]
    Chain(#[from] ChainError),
    /// The index was rebuilt under every attempt.
    #[error("the index was rebuilt under each of {walks} walks: check again later")]
    Restless {
        /// How many there were.
        walks: u32,
    },
}

/// Checks a region of this length through a lane of the endpoint, with READs alone. If the region
/// is at rest, what looks wrong is wrong at once.
///
/// # Errors
/// [`CheckError`] when there is nothing to report on. Damage is not an error: it is in the report.
pub fn check<F: Fabric>(
    endpoint: &Endpoint<F>,
    lane: LaneId,
    region_bytes: u64,
    (scope, is_at_rest): (Scope, bool),
    observer: &mut dyn Observer,
) -> Result<Report, CheckError> {
    let pause_ns = if is_at_rest { 0 } else { PAUSE_NS };
    endpoint.drive(async {
        for _ in 0..WALKS_MAX {
            let reads = Reads { endpoint, lane };
            let mut walk = Walk::begin(reads, region_bytes, scope, pause_ns).await?;
            walk.check_chunks().await?;
            walk.check_directory(observer).await?;
            if scope == Scope::File {
                walk.check_free_places().await?;
            }
            walk.check_blocks_linked_once().await?;
            if walk.is_current().await? {
                return Ok(walk.finish());
            }
        }
        Err(CheckError::Restless { walks: WALKS_MAX })
    })
}

/// The READs of a check.
struct Reads<'a, F> {
    endpoint: &'a Endpoint<F>,
    lane: LaneId,
}

impl<F: Fabric> Reads<'_, F> {
    async fn read(&self, remote: u64, into: Buffer, bytes: u64) -> Result<(), ChainError> {
        let verbs = [Verb::Read { remote, into, bytes: bytes as u32 }];
        let chain = self.endpoint.chain(self.lane, RegionIndex::FIRST, &verbs, NO_DEADLINE);
        chain.await.map(|_| ())
    }

    /// The first `N` bytes of a buffer.
    fn bytes<const N: usize>(&self, buffer: Buffer) -> Result<[u8; N], LayoutError> {
        let buffer = self.endpoint.buffer(self.lane, buffer);
        let short = LayoutError::Truncated { what: "READ", bytes: buffer.len() as u64 };
        buffer.first_chunk::<N>().copied().ok_or(short)
    }

    async fn word(&self, remote: u64) -> Result<u64, CheckError> {
        self.read(remote, Buffer::Window, size_of::<u64>() as u64).await?;
        Ok(u64::from_le_bytes(self.bytes(Buffer::Window)?))
    }

    async fn slot(&self, remote: u64) -> Result<Slot, CheckError> {
        self.read(remote, Buffer::Window, size_of::<Slot>() as u64).await?;
        let bytes: [u8; size_of::<Slot>()] = self.bytes(Buffer::Window)?;
        Ok(zerocopy::transmute!(bytes))
    }

    /// Replaces words of a table by those at `remote`.
    async fn words(&self, remote: u64, into: &mut [u64]) -> Result<(), CheckError> {
        let word_bytes = size_of::<u64>() as u64;
        let mut from = remote;
        for piece in into.chunks_mut((PIECE_BYTES / word_bytes) as usize) {
            let bytes = piece.len() as u64 * word_bytes;
            self.read(from, Buffer::ReadBlock, bytes).await?;
            let buffer = self.endpoint.buffer(self.lane, Buffer::ReadBlock);
            let (words, _) = buffer.as_chunks();
            for (target, word) in piece.iter_mut().zip(words) {
                *target = u64::from_le_bytes(*word);
            }
            from += bytes;
        }
        Ok(())
    }
}

/// A walk through a region.
struct Walk<'a, F> {
    reads: Reads<'a, F>,
    scope: Scope,
    pause_ns: Nanos,
    geometry: Geometry,
    hasher: KeyHasher,
    depth: u8,
    /// The chunk table and the directory as last read, as bits.
    chunks: Vec<u64>,
    directory: Vec<u64>,
    /// Subtables visited.
    subtables: HashSet<slots::Subtable>,
    /// LIVE keys of the subtable being visited, and of those to which a split takes them: all
    /// places of a key.
    keys: HashMap<KeyHash, Linked>,
    /// All slots that link a block.
    linked: Vec<Linked>,
    report: Report,
}

/// A slot that links a block.
#[derive(Clone, Copy)]
struct Linked {
    word: SlotWord,
    offset: u64,
}

impl<'a, F: Fabric> Walk<'a, F> {
    async fn begin(
        reads: Reads<'a, F>,
        region_bytes: u64,
        scope: Scope,
        pause_ns: Nanos,
    ) -> Result<Self, CheckError> {
        let superblock = reads.superblock().await?;
        let (superblock, format) = Superblock::decode(&superblock, region_bytes)?;
        let geometry = format.geometry();
        let depth = superblock.directory_depth(&geometry)?;
        // Nothing else looks at the end of the region, so nothing else would miss it.
        reads.word(region_bytes - size_of::<u64>() as u64).await?;
        Ok(Self {
            reads,
            scope,
            pause_ns,
            geometry,
            hasher: KeyHasher::new(&format.hash_key),
            depth,
            chunks: vec![0; geometry.chunks() as usize],
            directory: vec![0; 1 << depth],
            subtables: HashSet::new(),
            keys: HashMap::new(),
            linked: Vec::new(),
            report: Report::new(&superblock, format, depth),
        })
    }

    /// Whether the directory that was walked is still the one in use.
    async fn is_current(&self) -> Result<bool, CheckError> {
        let bytes = self.reads.superblock().await?;
        let (superblock, format) = Superblock::decode(&bytes, self.geometry.region_bytes())?;
        Ok(format == self.report.format
            && superblock.directory_depth(&self.geometry)? == self.depth)
    }

    fn finish(mut self) -> Report {
        for bits in &self.chunks {
            let entry = farside_layout::ChunkEntry::from_bits(*bits);
            self.report.count_chunk(entry.chunk_use().ok());
        }
        self.report.drop_unused_classes();
        self.report
    }

    /// Gives what looks wrong time to settle. Not once the report is full, so that a region full of
    /// nonsense does not take for ever.
    async fn pause(&self) {
        if !self.report.is_full() {
            let until = self.reads.endpoint.now() + self.pause_ns;
            self.reads.endpoint.sleep_until(self.reads.lane, until).await;
        }
    }

    /// Whether both slots are as they were seen, at one moment.
    async fn both_stand(&self, first: Linked, second: Linked) -> Result<bool, CheckError> {
        // Words do not recur within a check, so between two equal looks at the first it never
        // changed, and the look at the second lies between them.
        for seen in [first, second, first] {
            if self.reads.word(seen.offset).await? != seen.word.bits() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// That no two slots lead to the same block. Blocks cannot overlap otherwise: each starts on
    /// its class's stride in a chunk of its class.
    async fn check_blocks_linked_once(&mut self) -> Result<(), CheckError> {
        let mut linked = std::mem::take(&mut self.linked);
        let address = |of: &Linked| of.word.block().map_or(0, |block| block.address.offset());
        linked.sort_unstable_by_key(|of| (address(of), of.offset));
        for pair in linked.windows(2) {
            let &[first, second] = pair else { continue };
            if address(&first) == address(&second) && self.both_stand(first, second).await? {
                self.report.add_problem(Problem::BlockTwice {
                    first: first.offset,
                    second: second.offset,
                    block: address(&first),
                });
            }
        }
        Ok(())
    }
}

impl<F: Fabric> Reads<'_, F> {
    async fn superblock(&self) -> Result<[u8; size_of::<Superblock>()], CheckError> {
        const _: () = assert!(size_of::<Superblock>().is_multiple_of(8));
        const _: () = assert!(size_of::<Superblock>() as u64 <= SUPERBLOCK_BYTES);
        self.read(0, Buffer::Window, size_of::<Superblock>() as u64).await?;
        Ok(self.bytes(Buffer::Window)?)
    }
}

/// Whether a slot in this state leads to a block that holds its key.
fn links(state: SlotState) -> bool {
    matches!(state, SlotState::Live | SlotState::Frozen)
}
