//! The tables of the heads that a session has seen or written.

use std::hash::{BuildHasher, RandomState};

use farside_fabric::LaneId;
use farside_layout::{BlockAddress, Extent, ExtentTable};
use zerocopy::IntoBytes;

/// How many tables of extents a session remembers.
const TABLES: usize = 256;

/// The table of a head.
#[derive(Default)]
pub(super) struct Table {
    pub(super) head: BlockAddress,
    pub(super) generation: u32,
    pub(super) value_bytes: u64,
    pub(super) extents: Vec<Extent>,
}

/// The tables of the heads that a session has seen, and those with which its lanes work.
pub(crate) struct ExtentTables {
    /// By the address of the head. Two heads may have the same place.
    seen: Vec<Table>,
    by_lane: Vec<Table>,
    /// The heads that the session has written and linked, by their addresses.
    own: Vec<OwnHead>,
    /// Makes the digests of their tables, which no other client can foresee.
    digests: RandomState,
}

/// A head that the session has written.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct OwnHead {
    head: BlockAddress,
    generation: u32,
    digest: u64,
}

impl ExtentTables {
    pub(crate) fn new(lanes: u16) -> Self {
        let by_lane = (0..lanes).map(|_| Table::default()).collect();
        let (seen, own) = (Vec::new(), Vec::new());
        Self { seen, by_lane, own, digests: RandomState::new() }
    }

    /// Mixes the heads whose tables are known into a hash.
    pub(crate) fn hash_state(&self, hasher: &mut impl std::hash::Hasher) {
        for seen in &self.seen {
            hasher.write_u64(u64::from(seen.head.0) << 32 | u64::from(seen.generation));
        }
        for own in &self.own {
            hasher.write_u64(u64::from(own.head.0) << 32 | u64::from(own.generation));
        }
    }

    fn own_head(&self, (head, generation): (BlockAddress, u32), extents: &[Extent]) -> OwnHead {
        OwnHead { head, generation, digest: self.digests.hash_one(extents.as_bytes()) }
    }

    /// Notes that the session has written and linked this head.
    pub(super) fn note_own(&mut self, head: (BlockAddress, u32), table: &ExtentTable<'_>) {
        let own = self.own_head(head, table.extents);
        if self.own.is_empty() {
            self.own.resize(TABLES, OwnHead::default());
        }
        self.own[Self::place(head.0)] = own;
    }

    /// Whether the session has written this head, with the table that the lane has.
    pub(super) fn is_own(&self, lane: LaneId, head: BlockAddress) -> bool {
        let table = &self.by_lane[usize::from(lane.0)];
        let own = self.own_head((table.head, table.generation), &table.extents);
        table.head == head && self.own.get(Self::place(head)) == Some(&own)
    }

    fn place(head: BlockAddress) -> usize {
        (head.0 / 64) as usize % TABLES
    }

    pub(super) fn lane(&mut self, lane: LaneId) -> &mut Table {
        &mut self.by_lane[usize::from(lane.0)]
    }

    /// Gives the lane the table of this head, if it was seen. Returns whether it was.
    pub(super) fn recall(&mut self, lane: LaneId, head: BlockAddress, generation: u32) -> bool {
        let seen = self.seen.get(Self::place(head));
        let seen = seen.filter(|seen| (seen.head, seen.generation) == (head, generation));
        let Some(seen) = seen else { return false };
        self.by_lane[usize::from(lane.0)].copy(seen);
        true
    }

    /// Gives the lane this table, and remembers it.
    pub(super) fn learn(
        &mut self,
        lane: LaneId,
        head: (BlockAddress, u32),
        table: &ExtentTable<'_>,
    ) {
        let mine = self.lane(lane);
        (mine.head, mine.generation) = head;
        mine.value_bytes = table.value_bytes;
        mine.extents.clear();
        mine.extents.extend_from_slice(table.extents);
        if self.seen.is_empty() {
            self.seen.resize_with(TABLES, Table::default);
        }
        let Self { seen, by_lane, .. } = self;
        seen[Self::place(head.0)].copy(&by_lane[usize::from(lane.0)]);
    }
}

impl Table {
    fn copy(&mut self, other: &Self) {
        (self.head, self.generation) = (other.head, other.generation);
        self.value_bytes = other.value_bytes;
        self.extents.clear();
        self.extents.extend_from_slice(&other.extents);
    }
}
