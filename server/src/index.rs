//! The index as the server sees it: which subtables there are, and what their slots say.

use std::sync::Arc;

use farside_common::fabric::shm::{Region, ShmFabric};
use farside_common::fabric::verbs::{Loopback, LoopbackPeer, VerbsFabric};
use farside_common::fabric::{ChainError, Endpoint, Fabric, LaneId, Nanos, Verb};
use farside_common::layout::{
    BlockRef, ChunkUse, DirectoryEntry, Geometry, HINT_OFFSET, ROW_BYTES, Row, SUBTABLE_BYTES,
    SUPERSEDED, Slot, SlotState, SlotWord, WORD_GENERATIONS, slot_in_subtable,
};
use zerocopy::{FromBytes, IntoBytes};

use crate::error::Damage;

const SUBTABLE_WORDS: usize = (SUBTABLE_BYTES / 8) as usize;
/// The one lane of the server's own endpoint.
const LANE: LaneId = LaneId(0);

/// The subtables of a region.
pub(crate) struct Index {
    region: Arc<Region>,
    subtables: Vec<u64>,
}

/// A subtable's bytes, read at one moment.
pub(crate) struct SubtableImage {
    offset: u64,
    words: Box<[u64; SUBTABLE_WORDS]>,
}

impl Index {
    /// Follows the directory of this depth, and checks every row's header.
    pub(crate) fn read(
        region: &Arc<Region>,
        geometry: &Geometry,
        depth: u8,
        uses: &[ChunkUse],
    ) -> Result<Self, Damage> {
        let mut index = Self { region: region.clone(), subtables: Vec::new() };
        let Some(directory) = geometry.directory_offset(depth) else {
            return Err(Damage::DirectoryEntry { entry: 0 });
        };
        let entry_at = |entry: u64| region.load(directory + entry * 8);
        let mut entry = 0;
        while entry < 1 << depth {
            let first = DirectoryEntry::from_bits(entry_at(entry)?);
            let offset =
                first.subtable(geometry).map_err(|source| Damage::Directory { entry, source })?;
            let local_depth = first.local_depth();
            let in_index = geometry
                .chunk_of(offset)
                .is_some_and(|chunk| uses.get(chunk as usize) == Some(&ChunkUse::Subtables));
            if local_depth > depth || !in_index {
                return Err(Damage::DirectoryEntry { entry });
            }
            // A subtable of fewer bits stands in all the entries that share them.
            let group = 1u64 << (depth - local_depth);
            if !entry.is_multiple_of(group) {
                return Err(Damage::DirectoryEntry { entry });
            }
            for other in entry + 1..entry + group {
                if entry_at(other)? != first.bits() {
                    return Err(Damage::DirectoryEntry { entry: other });
                }
            }
            index.check_rows(offset, (entry / group) as u32, local_depth)?;
            index.subtables.push(offset);
            entry += group;
        }
        Ok(index)
    }

    fn check_rows(&self, subtable: u64, prefix: u32, local_depth: u8) -> Result<(), Damage> {
        let image = SubtableImage::read(&self.region, subtable)?;
        for (row, offset) in image.rows().iter().zip((subtable..).step_by(ROW_BYTES as usize)) {
            let header = &row.header;
            let right = header.prefix.get() == prefix && header.local_depth == local_depth;
            if !header.is_valid() || !right {
                return Err(Damage::Row { offset });
            }
        }
        Ok(())
    }

    /// How many subtables there are.
    pub(crate) fn subtables(&self) -> usize {
        self.subtables.len()
    }

    /// The subtable with this number; `None` beyond the last.
    pub(crate) fn subtable(&self, number: usize) -> Option<Result<SubtableImage, ChainError>> {
        let offset = *self.subtables.get(number)?;
        Some(SubtableImage::read(&self.region, offset))
    }
}

impl SubtableImage {
    fn read(region: &Region, offset: u64) -> Result<Self, ChainError> {
        let mut words = Box::new([0; SUBTABLE_WORDS]);
        region.read(offset, &mut words[..])?;
        Ok(Self { offset, words })
    }

    fn rows(&self) -> &[Row] {
        <[Row]>::ref_from_bytes(self.words.as_bytes()).unwrap_or_default()
    }

    /// Every slot with its offset in the region.
    pub(crate) fn slots(&self) -> impl Iterator<Item = (u64, &Slot)> {
        let start = self.offset;
        self.rows().iter().enumerate().flat_map(move |(number, row)| {
            let offset = move |slot| start + slot_in_subtable(number, slot);
            row.slots.iter().enumerate().map(move |(slot, content)| (offset(slot), content))
        })
    }
}

/// The server's own way to change slots: verbs like everybody's (invariant I11), never fenced.
pub(crate) enum SlotCleaner {
    Memory(Endpoint<ShmFabric>),
    /// With the other end, which lives as long.
    Device(Box<Endpoint<VerbsFabric>>, #[allow(dead_code, reason = "only kept")] LoopbackPeer),
}

impl SlotCleaner {
    pub(crate) fn over_memory(region: &Arc<Region>) -> Self {
        Self::Memory(Endpoint::new(ShmFabric::new(region.clone(), None, 1), 1))
    }

    pub(crate) fn over(Loopback { fabric, peer }: Loopback) -> Self {
        Self::Device(Box::new(Endpoint::new(fabric, 1)), peer)
    }

    /// How long after it was fenced a client's verbs can still take effect.
    pub(crate) fn settles_ns(&self) -> Nanos {
        match self {
            Self::Memory(endpoint) => endpoint.fabric().timing().lateness_max_ns,
            // Its queue pairs were destroyed.
            Self::Device(..) => 0,
        }
    }

    /// How old a word may be for a compare-and-swap to rely on (invariant I4).
    pub(crate) fn word_ns(&self, grace: Nanos) -> Nanos {
        let lateness = match self {
            Self::Memory(endpoint) => endpoint.fabric().timing().lateness_max_ns,
            Self::Device(endpoint, _) => endpoint.fabric().timing().lateness_max_ns,
        };
        (WORD_GENERATIONS * grace).saturating_sub(lateness)
    }

    /// Empties a slot whose owner is gone; false if somebody else changed it meanwhile.
    ///
    /// The hint goes first, so that it never stands beside another incarnation (invariant I6). No
    /// deadline: with its owner gone nobody but the server takes the slot out of PENDING and
    /// ABORTED, so the chain cannot be late.
    pub(crate) fn clear(&self, slot: u64, word: SlotWord) -> Result<bool, ChainError> {
        if self.clear_once(slot, word)? {
            return Ok(true);
        }
        // Another INSERT of the fingerprint may have aborted it. Nothing follows ABORTED.
        match word.state() {
            SlotState::Pending => self.clear_once(slot, word.with_state(SlotState::Aborted)),
            _ => Ok(false),
        }
    }

    /// Takes a LIVE slot out of service if it still holds this word, at the latest at `deadline`;
    /// false if it does not. The mark goes first (invariant I2). TOMB absorbs nobody: the key is
    /// removed because of its value, so a PUT that lost to this must not call itself overwritten.
    pub(crate) fn entomb(
        &self,
        slot: u64,
        word: SlotWord,
        block: BlockRef,
        deadline: Nanos,
    ) -> Result<bool, ChainError> {
        let tomb = word.with_state(SlotState::Tomb);
        let chain = [
            Verb::WriteHalf { remote: block.address.offset(), value: SUPERSEDED },
            Verb::CompareSwap { remote: slot, expected: word.bits(), desired: tomb.bits() },
        ];
        match self.run(&chain, deadline) {
            Ok(found) => Ok(found == word.bits()),
            Err(ChainError::Late) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Empties a slot that was taken out of service GRACE ago. Its hint may stay (invariant I6).
    pub(crate) fn clear_tomb(&self, slot: u64, tomb: SlotWord) -> Result<(), ChainError> {
        let (expected, desired) = (tomb.bits(), tomb.emptied().bits());
        self.run(&[Verb::CompareSwap { remote: slot, expected, desired }], Nanos::MAX).map(drop)
    }

    /// The time, on the clock of deadlines.
    pub(crate) fn now(&self) -> Nanos {
        match self {
            Self::Memory(endpoint) => endpoint.fabric().now(),
            Self::Device(endpoint, _) => endpoint.fabric().now(),
        }
    }

    fn run(&self, chain: &[Verb], deadline: Nanos) -> Result<u64, ChainError> {
        match self {
            Self::Memory(own) => own.drive(own.chain(LANE, chain, deadline)),
            Self::Device(own, _) => own.drive(own.chain(LANE, chain, deadline)),
        }
    }

    fn clear_once(&self, slot: u64, word: SlotWord) -> Result<bool, ChainError> {
        let chain = [
            Verb::WriteWord { remote: slot + HINT_OFFSET, value: 0 },
            Verb::CompareSwap {
                remote: slot,
                expected: word.bits(),
                desired: word.emptied().bits(),
            },
        ];
        Ok(self.run(&chain, Nanos::MAX)? == word.bits())
    }
}
