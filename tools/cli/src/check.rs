//! The region checker: walks a whole region with READs alone, and reports all that is invalid
//! there.
//!
//! Clients may continue to work, so a problem is reported only if a second READ confirms it:
//!
//! - A slot whose word has changed was only in use. If its word has not changed, the problem is
//!   real, because a block stays untouched for GRACE after its unlink.
//! - A table must have the same problem twice, with a pause between the READs.

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

/// Limit on the READs of a slot or table entry that keeps changing. Then it counts as unsettled.
const REREADS_MAX: u32 = 8;
/// The pause before a table with a problem is read again: the server may be between two stores.
const PAUSE_NS: Nanos = 2_000_000;
/// Limit on walks. A walk during which the directory is replaced is repeated.
const WALKS_MAX: u32 = 4;
/// How much of a table one READ reads, in bytes.
const TABLE_READ_BYTES: u64 = 64 << 10;
/// The deadline of all READs of the checker, which need no deadline.
const NO_DEADLINE: Nanos = Nanos::MAX;

/// How much of a region is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// The tables and the index: enough for statistics. Takes a READ for each subtable.
    Index,
    /// Also every linked block. Takes a READ for each block.
    Blocks,
    /// Also the free places for subtables. Only while no server runs on the region, because a
    /// server may use a free place at any moment.
    File,
}

/// Receives the progress of a check.
pub trait Observer {
    /// `done` of `total` directory entries are checked.
    fn progress(&mut self, _done: u64, _total: u64) {}

    /// A LIVE or FROZEN slot links this block, and both are valid. While clients work, a block may
    /// be reported more than once.
    fn linked(&mut self, _block: BlockRef) {}
}

/// Ignores the progress.
impl Observer for () {}

/// Why a check has no report.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CheckError {
    /// The superblock is invalid, so nothing else can be found.
    #[error("the superblock cannot be used: {0}")]
    Superblock(#[from] LayoutError),
    /// The region cannot be read.
    #[error("the region cannot be read: {0}")]
    Chain(#[from] ChainError),
    /// The directory was replaced during every walk.
    #[error("the directory was replaced during each of {walks} walks: check again later")]
    DirectoryReplaced {
        /// The number of walks.
        walks: u32,
    },
}

/// Checks a region of this length through a lane of the endpoint, with READs alone. If
/// `is_at_rest`, nothing changes the region meanwhile, so the check does not pause.
///
/// # Errors
/// [`CheckError`] if there is no report. Damage is not an error: it is in the report.
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
        Err(CheckError::DirectoryReplaced { walks: WALKS_MAX })
    })
}

/// The lane that a check READs through.
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

    /// Returns the first `N` bytes of a buffer.
    fn bytes<const N: usize>(&self, buffer: Buffer) -> Result<[u8; N], LayoutError> {
        let buffer = self.endpoint.buffer(self.lane, buffer);
        let short = LayoutError::Truncated { what: "READ", bytes: buffer.len() as u64 };
        buffer.first_chunk::<N>().copied().ok_or(short)
    }

    async fn superblock(&self) -> Result<[u8; size_of::<Superblock>()], CheckError> {
        const _: () = assert!(size_of::<Superblock>().is_multiple_of(8));
        const _: () = assert!(size_of::<Superblock>() as u64 <= SUPERBLOCK_BYTES);
        self.read(0, Buffer::Window, size_of::<Superblock>() as u64).await?;
        Ok(self.bytes(Buffer::Window)?)
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

    /// READs consecutive words of a table into a slice.
    async fn words(&self, remote: u64, into: &mut [u64]) -> Result<(), CheckError> {
        let word_bytes = size_of::<u64>() as u64;
        let mut remote = remote;
        for words in into.chunks_mut((TABLE_READ_BYTES / word_bytes) as usize) {
            let bytes = words.len() as u64 * word_bytes;
            self.read(remote, Buffer::ReadBlock, bytes).await?;
            let buffer = self.endpoint.buffer(self.lane, Buffer::ReadBlock);
            let (read, _) = buffer.as_chunks();
            for (word, read) in words.iter_mut().zip(read) {
                *word = u64::from_le_bytes(*read);
            }
            remote += bytes;
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
    /// The entries of the chunk table and of the directory, as last read.
    chunks: Vec<u64>,
    directory: Vec<u64>,
    /// The subtables that were visited.
    subtables: HashSet<slots::Subtable>,
    /// The LIVE slots of the subtable that is being visited, and of those to which a split moves
    /// its keys. A key can be in no other subtable, so these show keys that occur twice.
    keys: HashMap<KeyHash, LinkedSlot>,
    /// All slots that link a block.
    linked: Vec<LinkedSlot>,
    report: Report,
}

/// A slot that links a block: its own, or an extent of it.
#[derive(Clone, Copy)]
struct LinkedSlot {
    word: SlotWord,
    offset: u64,
    /// The byte offset of the block.
    block: u64,
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
        // No other READ reaches the end of the region. This READ fails if the region is shorter
        // than stated.
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
        self.report.classes.retain(|class| class.blocks_linked > 0 || class.chunks > 0);
        self.report
    }

    /// Pauses, so that a change of the server can end. Does nothing once the report is full:
    /// otherwise the check of a region full of problems would take hours.
    async fn pause(&self) {
        if !self.report.is_full() {
            let until = self.reads.endpoint.now() + self.pause_ns;
            self.reads.endpoint.sleep_until(self.reads.lane, until).await;
        }
    }

    /// Whether both slots had, at one moment, the words that were read before.
    async fn are_unchanged(
        &self,
        first: LinkedSlot,
        second: LinkedSlot,
    ) -> Result<bool, CheckError> {
        // Words do not recur within a check. So the first slot did not change between two READs
        // that show the same word, and the READ of the second slot lies between them.
        for slot in [first, second, first] {
            if self.reads.word(slot.offset).await? != slot.word.bits() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Checks that no two slots lead to the same block. Different blocks cannot overlap, because
    /// each starts at a multiple of its size in a chunk of its class.
    async fn check_blocks_linked_once(&mut self) -> Result<(), CheckError> {
        let mut linked = std::mem::take(&mut self.linked);
        linked.sort_unstable_by_key(|slot| (slot.block, slot.offset));
        for pair in linked.windows(2) {
            let &[first, second] = pair else { continue };
            if first.block == second.block && self.are_unchanged(first, second).await? {
                self.report.add_problem(Problem::BlockTwice {
                    first: first.offset,
                    second: second.offset,
                    block: first.block,
                });
            }
        }
        Ok(())
    }
}

/// Whether a slot in this state leads to a block that holds its key.
fn links_block(state: SlotState) -> bool {
    matches!(state, SlotState::Live | SlotState::Frozen)
}
