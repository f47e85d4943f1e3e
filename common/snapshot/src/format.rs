//! The structures of a snapshot file.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, little_endian as le};

use crate::Limits;

pub(crate) const MAGIC: [u8; 8] = *b"farsnap\0";
pub(crate) const VERSION: u32 = 2;
/// The version before: an upgrade takes its snapshots with the older program.
pub(crate) const VERSION_WITH_SECONDS: u32 = 1;

/// When a chunk is full, in bytes before compression.
pub(crate) const CHUNK_RAW_BYTES: usize = 1 << 20;
/// The longest key and value together, in bytes: what a block can hold, and some more.
pub(crate) const RECORD_BYTES_MAX: usize = 6 << 20;
/// The most a chunk can have before compression: readers never reserve more than this.
pub(crate) const RAW_BYTES_MAX: usize = CHUNK_RAW_BYTES + RECORD_BYTES_MAX;
/// The most it can have after, for bytes that cannot be compressed: zstd adds 1/256 and a little.
pub(crate) const PACKED_BYTES_MAX: usize = RAW_BYTES_MAX + RAW_BYTES_MAX / 256 + 1024;

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Header {
    pub(crate) magic: [u8; 8],
    pub(crate) version: le::U32,
    pub(crate) crc32: le::U32,
    pub(crate) created_at_s: le::U64,
    /// 0 in files of before they were kept here.
    pub(crate) key_bytes_max: le::U32,
    pub(crate) value_bytes_max: le::U32,
}
const _: () = assert!(size_of::<Header>() == 32);

impl Header {
    pub(crate) fn new(created_at_s: u64, limits: Option<Limits>) -> Self {
        let limits = limits.unwrap_or_default();
        let mut header = Self {
            magic: MAGIC,
            version: VERSION.into(),
            crc32: 0.into(),
            created_at_s: created_at_s.into(),
            key_bytes_max: limits.key_bytes_max.into(),
            value_bytes_max: limits.value_bytes_max.into(),
        };
        header.crc32 = header.checksum().into();
        header
    }

    pub(crate) fn checksum(&self) -> u32 {
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(self.created_at_s.as_bytes());
        hasher.update(self.key_bytes_max.as_bytes());
        hasher.update(self.value_bytes_max.as_bytes());
        hasher.finalize()
    }
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct ChunkHeader {
    pub(crate) packed_bytes: le::U32,
    pub(crate) raw_bytes: le::U32,
    pub(crate) records: le::U32,
    pub(crate) crc32: le::U32,
}
const _: () = assert!(size_of::<ChunkHeader>() == 16);

impl ChunkHeader {
    /// Over the checksum before it, its own lengths, and what is packed.
    pub(crate) fn checksum(&self, before: u32, packed: &[u8]) -> u32 {
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&before.to_le_bytes());
        for field in [self.packed_bytes, self.raw_bytes, self.records] {
            hasher.update(field.as_bytes());
        }
        hasher.update(packed);
        hasher.finalize()
    }
}

/// What a record starts with; its end follows, and then key and value.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct RecordHeader {
    pub(crate) key_bytes: le::U16,
    pub(crate) reserved: [u8; 2],
    pub(crate) value_bytes: le::U32,
}
const _: () = assert!(size_of::<RecordHeader>() == 8);

/// How a record says when its value ends.
#[derive(Clone, Copy)]
pub(crate) struct EndFormat {
    pub(crate) bytes: usize,
    unit_ms: u64,
}

impl EndFormat {
    pub(crate) fn of_version(version: u32) -> Option<Self> {
        match version {
            VERSION => Some(Self { bytes: 8, unit_ms: 1 }),
            VERSION_WITH_SECONDS => Some(Self { bytes: 4, unit_ms: 1000 }),
            _ => None,
        }
    }

    /// The end in these bytes, as many as there have to be, in milliseconds since 1970.
    pub(crate) fn decode_ms(self, end: &[u8]) -> u64 {
        let mut number = [0; 8];
        number[..self.bytes].copy_from_slice(end);
        u64::from_le_bytes(number) * self.unit_ms
    }
}
