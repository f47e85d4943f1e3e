//! A region in use, and its chunk table and block headers as the depot reaches them.

use std::sync::Arc;

use farside_fabric::memory::Region;
use farside_fabric::{ChainError, Nanos};
use farside_layout::{
    BlockRef, CHUNK_BYTES, ChunkEntry, Format, FreeBlock, Geometry, HeaderWord, RegionState,
    STATE_OFFSET, SizeClass, SplitOutcome, Superblock,
};

use crate::chores::depot::{Depot, RegionAccess};
use crate::error::Damage;
use crate::rate_limited_warning::warn_rarely;
use crate::region::index::Index;
use crate::region::own_endpoint::OwnEndpoint;

/// A region in use, and the data structures of its server.
pub(crate) struct ServedRegion {
    pub(crate) region: Arc<Region>,
    pub(crate) format: Format,
    pub(crate) geometry: Geometry,
    pub(crate) incarnation: u64,
    pub(crate) index: Index,
    pub(crate) depot: Depot,
    /// Whether it was just formatted, so that it has no keys.
    pub(crate) is_new: bool,
    /// The number of keys when it was opened.
    pub(crate) keys: u64,
}

/// The server tells a session to ask again if a block or a chunk becomes free within this time.
/// Sessions stop asking one second later. A restore also asks again.
const WORTH_WAITING_NS: Nanos = 4_000_000_000;

impl ServedRegion {
    /// Takes up to `count` blocks from the depot; see [`Depot::take`] for the limits.
    pub(crate) fn take_blocks(
        &mut self,
        class: SizeClass,
        count: u32,
        now: Nanos,
    ) -> Result<Vec<FreeBlock>, ChainError> {
        let Self { region, geometry, depot, .. } = self;
        depot.take(class, count, now, &RegionTables { region, geometry })
    }

    /// Whether a block of the class is expected to become available soon.
    pub(crate) fn has_block_soon(&self, class: SizeClass, now: Nanos) -> bool {
        self.depot.may_have_free_by(Some(class), now.saturating_add(WORTH_WAITING_NS))
    }

    /// Splits the subtable for a request with a directory hash and a local depth. Returns `None` if
    /// there is no place for two more subtables.
    pub(crate) fn split(
        &mut self,
        wanted: (u32, u8),
        own: &OwnEndpoint,
    ) -> Result<Option<SplitOutcome>, ChainError> {
        let Self { region, geometry, format, depot, index, .. } = self;
        match index.grow(wanted, format, own, depot, &RegionTables { region, geometry }) {
            Ok(outcome) => Ok(outcome),
            Err(Damage::Access(error)) => Err(error),
            Err(damage) => {
                warn_rarely!(
                    index.damaged,
                    "FS-016 cannot split a subtable: {damage}: see kv-cli verify"
                );
                Ok(Some(SplitOutcome::Impossible))
            }
        }
    }

    /// Notes that no server uses the region any more.
    pub(crate) fn close(&self) -> Result<(), ChainError> {
        let word = Superblock::state_word(RegionState::Clean, self.index.depth);
        self.region.store(STATE_OFFSET, word)
    }

    /// Returns the answer to a split if no two places for subtables are free. It is `Later` if a
    /// chunk is expected to become free, or if any place rests.
    pub(crate) fn outcome_without_place(&self, now: Nanos) -> SplitOutcome {
        let has_chunk = self.depot.may_have_free_by(None, now.saturating_add(WORTH_WAITING_NS));
        let is_expected = has_chunk || !self.index.resting.is_empty();
        if is_expected { SplitOutcome::Later } else { SplitOutcome::Impossible }
    }
}

/// The chunk table and the block headers of a region, for the depot.
pub(crate) struct RegionTables<'a> {
    pub(crate) region: &'a Region,
    pub(crate) geometry: &'a Geometry,
}

impl RegionTables<'_> {
    fn offset(&self, chunk: u32) -> Result<u64, ChainError> {
        let outside = ChainError::Outside { remote: chunk.into(), bytes: 8 };
        self.geometry.chunk_entry(chunk).ok_or(outside)
    }
}

impl RegionAccess for RegionTables<'_> {
    fn entry(&self, chunk: u32) -> Result<ChunkEntry, ChainError> {
        Ok(ChunkEntry::from_bits(self.region.load(self.offset(chunk)?)?))
    }

    fn set_entry(&self, chunk: u32, entry: ChunkEntry) -> Result<(), ChainError> {
        self.region.store(self.offset(chunk)?, entry.bits())
    }

    fn header(&self, block: BlockRef) -> Result<HeaderWord, ChainError> {
        Ok(HeaderWord::from_bits(self.region.load(block.offset())?))
    }

    fn set_header(&self, block: BlockRef, header: HeaderWord) -> Result<(), ChainError> {
        self.region.store(block.offset(), header.bits())
    }

    fn clear(&self, chunk: u32) -> Result<(), ChainError> {
        let outside = ChainError::Outside { remote: chunk.into(), bytes: CHUNK_BYTES };
        let start = self.geometry.chunk_offset(chunk).ok_or(outside)?;
        self.region.write(start, &vec![0; (CHUNK_BYTES / 8) as usize])
    }
}
