//! The three tables between superblock and heap: clients, directory, chunks. Only the server writes
//! them, with plain stores of whole words: no client changes them by compare-and-swap.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, little_endian as le};

use super::{LayoutError, SUBTABLE_BYTES, SizeClass};

/// The client that has a client id now. On shared memory a client checks the entry before every
/// WRITE and compare-and-swap: another lease fences the client. Hence a cache line for each entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(64))]
pub struct ClientEntry {
    /// The number of the connection that has the id; 0 if none has it. No two connections with one
    /// id ever have the same lease.
    pub(super) lease: le::U64,
    pub(super) reserved: [u8; 56],
}
const _: () = assert!(size_of::<ClientEntry>() == 64);

/// The location of the subtable for some leading bits of the hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectoryEntry(u64);
const _: () = assert!(size_of::<DirectoryEntry>() == 8);

impl DirectoryEntry {
    /// The entry for a subtable whose keys share `local_depth` leading bits.
    pub const fn new(subtable_offset: u64, local_depth: u8) -> Self {
        Self(((subtable_offset / SUBTABLE_BYTES) << 8) | local_depth as u64)
    }

    /// The entry with exactly these bits.
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// The bits, as stored in the region.
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// How many leading bits of the hash the subtable's keys share.
    pub const fn local_depth(self) -> u8 {
        self.0 as u8
    }

    /// The byte offset of the subtable, which may lie outside the heap.
    pub const fn offset(self) -> u64 {
        (self.0 >> 8).saturating_mul(SUBTABLE_BYTES)
    }
}

/// What a chunk is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChunkUse {
    /// Nothing.
    Free,
    /// Subtables of the index.
    Subtables,
    /// Blocks of this class. The first one starts at the chunk's start.
    Blocks(SizeClass),
    /// The rest of a block that starts in the previous chunk.
    Continued,
}

/// A chunk's entry in the chunk table: its use, and its age.
///
/// The age is the highest generation of any block in this chunk when its use last changed, counted
/// from the region's first generation; 0 if its use never changed. Blocks of the next class start
/// above it, so that no two contents at one address ever have the same generation (invariant I10).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkEntry(u64);
const _: () = assert!(size_of::<ChunkEntry>() == 8);

impl ChunkEntry {
    /// The entry of a chunk with this use, at age 0.
    pub const fn new(chunk_use: ChunkUse) -> Self {
        match chunk_use {
            ChunkUse::Free => Self(0),
            ChunkUse::Subtables => Self(1),
            ChunkUse::Blocks(class) => Self(2 | (class.index() as u64) << 8),
            ChunkUse::Continued => Self(3),
        }
    }

    /// This entry with another age.
    pub const fn with_age(self, age: u32) -> Self {
        Self((self.0 & u32::MAX as u64) | ((age as u64) << 32))
    }

    /// The chunk's age; see [`ChunkEntry`].
    pub const fn age(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// The entry with exactly these bits.
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// The bits, as stored in the region.
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// What the chunk is used for.
    ///
    /// # Errors
    /// [`LayoutError::Field`] or [`LayoutError::SizeClass`] for bits that name no use.
    pub const fn chunk_use(self) -> Result<ChunkUse, LayoutError> {
        match (self.0 as u8, self.0 as u32 >> 8) {
            (0, 0) => Ok(ChunkUse::Free),
            (1, 0) => Ok(ChunkUse::Subtables),
            (2, class @ 0..=0xff) => match SizeClass::from_index(class as u8) {
                Ok(class) => Ok(ChunkUse::Blocks(class)),
                Err(error) => Err(error),
            },
            (3, 0) => Ok(ChunkUse::Continued),
            _ => Err(LayoutError::Field { field: "chunk use", value: self.0 }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunk_uses_and_ages_round_trip() {
        let classes = SizeClass::all().map(ChunkUse::Blocks);
        for chunk_use in
            [ChunkUse::Free, ChunkUse::Subtables, ChunkUse::Continued].into_iter().chain(classes)
        {
            assert_eq!(ChunkEntry::new(chunk_use).chunk_use().unwrap(), chunk_use);
            let aged = ChunkEntry::new(chunk_use).with_age(7).with_age(u32::MAX);
            assert_eq!((aged.chunk_use().unwrap(), aged.age()), (chunk_use, u32::MAX));
        }
        for bits in [4, 0x100, 2 | 64 << 8, u64::MAX] {
            assert!(ChunkEntry::from_bits(bits).chunk_use().is_err(), "{bits:#x}");
        }
    }

    #[test]
    fn directory_entries_round_trip_or_are_refused() {
        let format = super::super::Format {
            region_bytes: 64 << 20,
            region_id: [0; 16],
            hash_key: [0; 16],
            grace_ms: 100,
            key_bytes_max: 1024,
            value_bytes_max: 1024,
        };
        let geometry = format.geometry();
        let subtable = geometry.chunk_offset(1).unwrap() + SUBTABLE_BYTES;
        let entry = DirectoryEntry::from_bits(DirectoryEntry::new(subtable, 3).bits());
        assert_eq!(entry.subtable(&geometry).unwrap(), subtable);
        assert_eq!(entry.local_depth(), 3);
        for bits in [0, u64::MAX, DirectoryEntry::new(64 << 20, 0).bits()] {
            assert!(DirectoryEntry::from_bits(bits).subtable(&geometry).is_err(), "{bits:#x}");
        }
    }
}
