//! The superblock, which is the first 4 KiB of a region, and the offsets that follow from it.
//! Behind it are three tables: clients, directory, chunks. Only the server writes them, with plain
//! stores of whole words: no client changes them by compare-and-swap.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, little_endian as le};

use super::{
    BlockAddress, BlockRef, CHUNK_BYTES, KEY_BYTES_LIMIT, LayoutError, NamedBlock, SUBTABLE_BYTES,
    SizeClass, SlotWord, VALUE_BYTES_LIMIT,
};

/// The version of the format. A region of another version is refused.
pub const FORMAT_VERSION: u32 = 6;
/// The size of the superblock, in bytes.
pub const SUPERBLOCK_BYTES: u64 = 4096;
/// The smallest region, in bytes: one chunk of metadata, one of index and two for values.
pub const REGION_BYTES_MIN: u64 = 4 * CHUNK_BYTES;
/// The largest region that block addresses can reach, in bytes.
pub const REGION_BYTES_MAX: u64 = 1 << 38;
// Rows name subtables by 32 bits.
const _: () = assert!(REGION_BYTES_MAX / SUBTABLE_BYTES <= u32::MAX as u64);
/// The number of client ids. It includes the id 0, which no client has.
pub const CLIENT_IDS: u32 = 1024;

const MAGIC: [u8; 8] = *b"FARSIDE\n";

/// The parameters that a region gets when it is formatted, and keeps for its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    /// The size of the region, in bytes: a multiple of [`CHUNK_BYTES`].
    pub region_bytes: u64,
    /// A random number that distinguishes this region from all others.
    pub region_id: [u8; 16],
    /// The random key of [`KeyHasher`](crate::hash::KeyHasher).
    pub hash_key: [u8; 16],
    /// How long an unlinked block stays untouched, in milliseconds.
    pub grace_ms: u32,
    /// The longest key, in bytes.
    pub key_bytes_max: u32,
    /// The longest value, in bytes.
    pub value_bytes_max: u32,
}

/// The largest incarnation of a region. The next server's, one higher, has to fit into the upper 32
/// bits of its clients' leases.
const REGION_INCARNATION_MAX: u64 = u32::MAX as u64 - 1;
/// The shortest and the longest GRACE, in milliseconds.
const GRACE_MS_RANGE: std::ops::RangeInclusive<u32> = 1..=60_000;

impl Format {
    /// Checks that a region can have these parameters.
    ///
    /// # Errors
    /// [`LayoutError::Bound`] or [`LayoutError::Field`] with the name of the wrong parameter.
    pub fn check(&self) -> Result<(), LayoutError> {
        bound("region_bytes", self.region_bytes, REGION_BYTES_MIN, REGION_BYTES_MAX)?;
        if !self.region_bytes.is_multiple_of(CHUNK_BYTES) {
            return Err(LayoutError::Field { field: "region_bytes", value: self.region_bytes });
        }
        let (min, max) = (u64::from(*GRACE_MS_RANGE.start()), u64::from(*GRACE_MS_RANGE.end()));
        bound("grace_ms", self.grace_ms.into(), min, max)?;
        bound("key_bytes_max", self.key_bytes_max.into(), 1, KEY_BYTES_LIMIT as u64)?;
        bound("value_bytes_max", self.value_bytes_max.into(), 0, VALUE_BYTES_LIMIT)
    }

    /// GRACE in nanoseconds.
    pub fn grace_ns(&self) -> u64 {
        u64::from(self.grace_ms) * 1_000_000
    }

    /// The offsets of such a region's parts.
    pub fn geometry(&self) -> Geometry {
        Geometry::new(self.region_bytes)
    }
}

fn bound(field: &'static str, value: u64, min: u64, max: u64) -> Result<(), LayoutError> {
    let outside = LayoutError::Bound { field, value, min, max };
    if (min..=max).contains(&value) { Ok(()) } else { Err(outside) }
}

/// The byte offsets of a region's parts. They follow from its length, and only this type computes
/// them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    region_bytes: u64,
    directory_depth_max: u8,
    heap_offset: u64,
}

impl Geometry {
    fn new(region_bytes: u64) -> Self {
        let subtables_max = (region_bytes / SUBTABLE_BYTES).max(1);
        let directory_depth_max = subtables_max.next_power_of_two().ilog2() as u8;
        let mut geometry = Self { region_bytes, directory_depth_max, heap_offset: 0 };
        let tables_end = geometry.chunk_table_offset()
            + region_bytes / CHUNK_BYTES * size_of::<ChunkEntry>() as u64;
        geometry.heap_offset = tables_end.next_multiple_of(CHUNK_BYTES);
        geometry
    }

    /// The size of the region, in bytes.
    pub fn region_bytes(&self) -> u64 {
        self.region_bytes
    }

    /// The offset of a client id's entry in the client table; `None` for an id beyond the table.
    pub fn client_entry(&self, client: u16) -> Option<u64> {
        (u32::from(client) < CLIENT_IDS)
            .then(|| SUPERBLOCK_BYTES + u64::from(client) * size_of::<ClientEntry>() as u64)
    }

    /// The depth of the region's largest directory: the number of hash bits that index it.
    pub fn directory_depth_max(&self) -> u8 {
        self.directory_depth_max
    }

    fn directories_offset(&self) -> u64 {
        SUPERBLOCK_BYTES + u64::from(CLIENT_IDS) * size_of::<ClientEntry>() as u64
    }

    /// The offset of the directory of this depth; `None` above [`Geometry::directory_depth_max`].
    /// Each depth has memory of its own, so a larger directory is built beside the one in use.
    pub fn directory_offset(&self, depth: u8) -> Option<u64> {
        let entry = size_of::<DirectoryEntry>() as u64;
        (depth <= self.directory_depth_max)
            .then(|| self.directories_offset() + (entry << depth) - entry)
    }

    fn chunk_table_offset(&self) -> u64 {
        let entry = size_of::<DirectoryEntry>() as u64;
        self.directories_offset() + (entry << (self.directory_depth_max + 1))
    }

    /// The number of chunks in the heap.
    pub fn chunks(&self) -> u32 {
        ((self.region_bytes - self.heap_offset) / CHUNK_BYTES) as u32
    }

    /// The offset of this chunk's entry in the chunk table; `None` if there is no such chunk.
    pub fn chunk_entry(&self, chunk: u32) -> Option<u64> {
        (chunk < self.chunks())
            .then(|| self.chunk_table_offset() + u64::from(chunk) * size_of::<ChunkEntry>() as u64)
    }

    /// The offset at which a chunk starts; `None` if there is no such chunk.
    pub fn chunk_offset(&self, chunk: u32) -> Option<u64> {
        (chunk < self.chunks()).then(|| self.heap_offset + u64::from(chunk) * CHUNK_BYTES)
    }

    /// The chunk that contains this byte offset; `None` outside the heap.
    pub fn chunk_of(&self, offset: u64) -> Option<u32> {
        (self.heap_offset..self.region_bytes)
            .contains(&offset)
            .then(|| ((offset - self.heap_offset) / CHUNK_BYTES) as u32)
    }

    /// The chunk in which a block at this address begins; `None` outside the heap.
    pub fn chunk_of_block(&self, address: BlockAddress) -> Option<u32> {
        self.chunk_of(address.claimed_offset())
    }

    /// Checks that a free block lies wholly in the heap. The server gives clients only blocks that
    /// it has cut from a span of their class, so where they start needs no check.
    ///
    /// # Errors
    /// [`LayoutError::BlockOutside`] with the block's offset.
    #[inline]
    pub fn check_free_block(&self, block: NamedBlock) -> Result<BlockRef, LayoutError> {
        let (start, bytes) = (block.address.claimed_offset(), block.class.block_bytes());
        if start < self.heap_offset || start + bytes > self.region_bytes {
            return Err(LayoutError::BlockOutside { offset: start, bytes });
        }
        Ok(BlockRef(block))
    }

    /// Checks that a block lies where blocks of its class can lie: wholly in the heap, and a
    /// multiple of their length behind the start of its chunk.
    ///
    /// # Errors
    /// [`LayoutError::BlockOutside`] or [`LayoutError::BlockStride`] with the block's offset.
    #[inline]
    pub fn check_block(&self, block: NamedBlock) -> Result<BlockRef, LayoutError> {
        let block = self.check_free_block(block)?;
        let start = block.offset();
        if !block.class.has_start(start % CHUNK_BYTES) {
            let bytes = block.class.block_bytes();
            return Err(LayoutError::BlockStride { offset: start, bytes });
        }
        Ok(block)
    }

    /// The block to which a word points, checked by [`Geometry::check_block`].
    ///
    /// # Errors
    /// As [`Geometry::check_block`].
    #[inline]
    pub fn block_of(&self, word: SlotWord) -> Result<BlockRef, LayoutError> {
        self.check_block(word.block()?)
    }

    /// The block of a class with this index in the span that begins at this chunk; `None` if a span
    /// there has no such block. Its generation is unknown.
    pub fn block_at(&self, chunk: u32, class: SizeClass, index: u64) -> Option<BlockRef> {
        let start = self.chunk_offset(chunk)? + index.checked_mul(class.block_bytes())?;
        let address = BlockAddress::from_offset(start)?;
        let block = self.check_block(NamedBlock { address, class, generation_low: 0 }).ok()?;
        (self.chunk_of(start) == Some(chunk)).then_some(block)
    }

    /// Checks that a subtable can start at this offset.
    ///
    /// # Errors
    /// [`LayoutError::SubtableOutside`] with the offset.
    pub fn check_subtable(&self, offset: u64) -> Result<(), LayoutError> {
        let aligned = offset.is_multiple_of(SUBTABLE_BYTES);
        if aligned && offset >= self.heap_offset && offset < self.region_bytes {
            Ok(())
        } else {
            Err(LayoutError::SubtableOutside { offset })
        }
    }
}

impl DirectoryEntry {
    /// The byte offset of the subtable.
    ///
    /// # Errors
    /// [`LayoutError::SubtableOutside`] if no subtable can start at this offset.
    pub fn subtable(self, geometry: &Geometry) -> Result<u64, LayoutError> {
        let offset = self.offset();
        geometry.check_subtable(offset)?;
        Ok(offset)
    }
}

/// Whether the last server of the region closed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum RegionState {
    /// The last server shut down cleanly: no server uses the region.
    Clean = 1,
    /// A server uses the region, or died while it did.
    InUse = 2,
}

/// The superblock, as stored in the region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Superblock {
    pub(super) magic: [u8; 8],
    pub(super) format_version: le::U32,
    /// Covers all fields before `incarnation`, with 0 for this field.
    pub(super) crc32: le::U32,
    pub(super) region_id: [u8; 16],
    pub(super) hash_key: [u8; 16],
    pub(super) region_bytes: le::U64,
    pub(super) grace_ms: le::U32,
    pub(super) key_bytes_max: le::U32,
    pub(super) value_bytes_max: le::U32,
    pub(super) reserved: le::U32,
    /// Each server that starts raises this by one, before it changes anything else in the region.
    pub(super) incarnation: le::U64,
    /// A [`RegionState`].
    pub(super) state: le::U32,
    /// The depth of the directory in use. The server switches directories by a store to this field.
    pub(super) directory_depth: le::U32,
    /// By these numbers a cluster tells the region from copies of its file: the record of the shard
    /// has one of the two. 0 without a number. Not covered by a checksum, because any other bytes
    /// are a number that no record has.
    pub(super) servings: [[u8; 16]; 2],
}
const _: () = assert!(size_of::<Superblock>() as u64 <= SUPERBLOCK_BYTES);
/// The length of the part that does not change after formatting, in bytes.
const CONSTANT_BYTES: usize = std::mem::offset_of!(Superblock, incarnation);

/// The offset of the incarnation in a region, in bytes.
pub const INCARNATION_OFFSET: u64 = std::mem::offset_of!(Superblock, incarnation) as u64;
/// The offset of the word with state and directory depth in a region, in bytes.
pub const STATE_OFFSET: u64 = std::mem::offset_of!(Superblock, state) as u64;
/// The offset of the two numbers that [`Superblock::servings`] returns, in bytes.
pub const SERVINGS_OFFSET: u64 = std::mem::offset_of!(Superblock, servings) as u64;

impl Superblock {
    /// The superblock of a new region.
    ///
    /// # Errors
    /// Those of [`Format::check`].
    pub fn new(format: &Format, directory_depth: u8) -> Result<Self, LayoutError> {
        format.check()?;
        let mut superblock = Self {
            magic: MAGIC,
            format_version: FORMAT_VERSION.into(),
            crc32: 0.into(),
            region_id: format.region_id,
            hash_key: format.hash_key,
            region_bytes: format.region_bytes.into(),
            grace_ms: format.grace_ms.into(),
            key_bytes_max: format.key_bytes_max.into(),
            value_bytes_max: format.value_bytes_max.into(),
            reserved: 0.into(),
            incarnation: 0.into(),
            state: (RegionState::Clean as u32).into(),
            directory_depth: u32::from(directory_depth).into(),
            servings: [[0; 16]; 2],
        };
        superblock.crc32 = superblock.checksum().into();
        Ok(superblock)
    }

    /// Returns the superblock at the start of these bytes, with every field checked.
    ///
    /// # Errors
    /// [`LayoutError`] about the first field that is wrong.
    pub fn decode(bytes: &[u8], region_bytes: u64) -> Result<(Self, Format), LayoutError> {
        if !bytes.starts_with(&MAGIC) {
            return Err(LayoutError::NotARegion);
        }
        let Ok((superblock, _)) = Self::read_from_prefix(bytes) else {
            return Err(LayoutError::Truncated { what: "superblock", bytes: bytes.len() as u64 });
        };
        let version = superblock.format_version.get();
        if version != FORMAT_VERSION {
            return Err(LayoutError::FormatVersion { found: version, known: FORMAT_VERSION });
        }
        if superblock.checksum() != superblock.crc32.get() {
            return Err(LayoutError::Checksum { what: "superblock", offset: 0 });
        }
        let format = Format {
            region_bytes: superblock.region_bytes.get(),
            region_id: superblock.region_id,
            hash_key: superblock.hash_key,
            grace_ms: superblock.grace_ms.get(),
            key_bytes_max: superblock.key_bytes_max.get(),
            value_bytes_max: superblock.value_bytes_max.get(),
        };
        format.check()?;
        if format.region_bytes != region_bytes {
            return Err(LayoutError::RegionLength { says: format.region_bytes, is: region_bytes });
        }
        bound("incarnation", superblock.incarnation(), 0, REGION_INCARNATION_MAX)?;
        superblock.state()?;
        superblock.directory_depth(&format.geometry())?;
        Ok((superblock, format))
    }

    fn checksum(&self) -> u32 {
        let without_checksum = Self { crc32: 0.into(), ..*self };
        crc32fast::hash(&without_checksum.as_bytes()[..CONSTANT_BYTES])
    }

    /// How many times a server has started on this region.
    pub fn incarnation(&self) -> u64 {
        self.incarnation.get()
    }

    /// Whether the last server closed the region.
    ///
    /// # Errors
    /// [`LayoutError::Field`] for an unknown state.
    pub fn state(&self) -> Result<RegionState, LayoutError> {
        match self.state.get() {
            1 => Ok(RegionState::Clean),
            2 => Ok(RegionState::InUse),
            other => Err(LayoutError::Field { field: "state", value: other.into() }),
        }
    }

    /// The depth of the directory in use: the number of hash bits that index it.
    ///
    /// # Errors
    /// [`LayoutError::Bound`] if the region has no directory of this depth.
    pub fn directory_depth(&self, geometry: &Geometry) -> Result<u8, LayoutError> {
        let depth = self.directory_depth.get();
        bound("directory_depth", depth.into(), 0, geometry.directory_depth_max().into())?;
        Ok(depth as u8)
    }

    /// The numbers that tell the region from copies of its file: the one that the record of its
    /// shard had, and the one that its last server was about to commit. 0 for none.
    pub fn servings(&self) -> [[u8; 16]; 2] {
        self.servings
    }

    /// The word with state and directory depth, which the server stores at [`STATE_OFFSET`].
    pub const fn state_word(state: RegionState, directory_depth: u8) -> u64 {
        state as u64 | (directory_depth as u64) << 32
    }
}

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

    fn format() -> Format {
        Format {
            region_bytes: 64 << 20,
            region_id: [1; 16],
            hash_key: [2; 16],
            grace_ms: 100,
            key_bytes_max: 1024,
            value_bytes_max: 1 << 20,
        }
    }

    #[test]
    fn a_superblock_decodes_to_its_format() {
        let superblock = Superblock::new(&format(), 5).unwrap();
        let (decoded, its_format) = Superblock::decode(superblock.as_bytes(), 64 << 20).unwrap();
        assert_eq!(its_format, format());
        assert_eq!(decoded.directory_depth(&format().geometry()).unwrap(), 5);
        assert_eq!(decoded.state().unwrap(), RegionState::Clean);
    }

    #[test]
    fn every_flipped_bit_of_the_constant_part_is_an_error() {
        let superblock = Superblock::new(&format(), 5).unwrap();
        for bit in 0..CONSTANT_BYTES * 8 {
            let mut bytes = superblock.as_bytes().to_vec();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(Superblock::decode(&bytes, 64 << 20).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn an_incarnation_that_no_lease_can_have_is_an_error() {
        let superblock = Superblock::new(&format(), 5).unwrap();
        for incarnation in [REGION_INCARNATION_MAX, REGION_INCARNATION_MAX + 1, u64::MAX] {
            let superblock = Superblock { incarnation: incarnation.into(), ..superblock };
            let decoded = Superblock::decode(superblock.as_bytes(), 64 << 20);
            assert_eq!(decoded.is_ok(), incarnation == REGION_INCARNATION_MAX, "{decoded:?}");
        }
    }

    #[test]
    fn a_truncated_superblock_is_an_error() {
        let superblock = Superblock::new(&format(), 5).unwrap();
        for bytes in 0..size_of::<Superblock>() {
            assert!(Superblock::decode(&superblock.as_bytes()[..bytes], 64 << 20).is_err());
        }
    }

    #[test]
    fn parts_of_a_region_do_not_overlap() {
        for region_bytes in [REGION_BYTES_MIN, 64 << 20, 1 << 30, REGION_BYTES_MAX] {
            let geometry = Geometry::new(region_bytes);
            let last_client = geometry.client_entry(CLIENT_IDS as u16 - 1).unwrap();
            let mut part_end = last_client + size_of::<ClientEntry>() as u64;
            for depth in 0..=geometry.directory_depth_max() {
                assert_eq!(geometry.directory_offset(depth), Some(part_end));
                part_end += 8 << depth;
            }
            assert_eq!(geometry.directory_offset(geometry.directory_depth_max() + 1), None);
            assert!(geometry.chunk_entry(0).unwrap() >= part_end);
            let last_chunk = geometry.chunks() - 1;
            let last_entry = geometry.chunk_entry(last_chunk).unwrap();
            assert!(last_entry + 8 <= geometry.chunk_offset(0).unwrap());
            assert_eq!(geometry.chunk_offset(last_chunk).unwrap() + CHUNK_BYTES, region_bytes);
            assert_eq!(geometry.chunk_of(region_bytes - 1), Some(last_chunk));
            assert_eq!(geometry.chunk_of(region_bytes), None);
        }
    }

    #[test]
    fn limits_that_no_value_can_reach_are_refused() {
        let largest = VALUE_BYTES_LIMIT as u32;
        assert!(Format { value_bytes_max: largest, ..format() }.check().is_ok());
        let too_large = Format { value_bytes_max: largest + 1, ..format() }.check();
        assert!(matches!(too_large, Err(LayoutError::Bound { field: "value_bytes_max", .. })));
        assert!(Format { key_bytes_max: 0, ..format() }.check().is_err());
        assert!(Format { region_bytes: (64 << 20) + 1, ..format() }.check().is_err());
        assert!(Format { grace_ms: 0, ..format() }.check().is_err());
    }

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
