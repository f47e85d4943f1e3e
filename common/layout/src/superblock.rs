//! The superblock: the first 4 KiB of a region, and the geometry that follows from it.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, little_endian as le};

use super::{
    BLOCK_BYTES_MAX, BLOCK_HEADER_BYTES, BlockRef, CHUNK_BYTES, ChunkEntry, ClientEntry,
    DirectoryEntry, KEY_BYTES_LIMIT, LayoutError, SUBTABLE_BYTES,
};

/// The version of the bytes in a region. A region of another version is refused.
pub const FORMAT_VERSION: u32 = 5;
/// The superblock, in bytes.
pub const SUPERBLOCK_BYTES: u64 = 4096;
/// The smallest region: a chunk of metadata, one of index and two for values, in bytes.
pub const REGION_BYTES_MIN: u64 = 4 * CHUNK_BYTES;
/// The largest region a block address reaches, in bytes.
pub const REGION_BYTES_MAX: u64 = 1 << 38;
/// The client ids of a region: 16 bits, 0 is no client.
pub const CLIENTS_MAX: u32 = 1024;

const MAGIC: [u8; 8] = *b"FARSIDE\n";

/// What is fixed when a region is formatted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    /// The whole region, in bytes, a multiple of [`CHUNK_BYTES`].
    pub region_bytes: u64,
    /// Random: tells this region from every other.
    pub region_id: [u8; 16],
    /// Random: the key of the hash that places keys.
    pub hash_key: [u8; 16],
    /// How long an unlinked block stays untouched, in milliseconds.
    pub grace_ms: u32,
    /// The longest key, in bytes.
    pub key_bytes_max: u32,
    /// The longest value, in bytes.
    pub value_bytes_max: u32,
}

/// The largest key and value a region may allow together, in bytes.
const PAYLOAD_BYTES_MAX: u64 = BLOCK_BYTES_MAX - BLOCK_HEADER_BYTES;
/// The last that a superblock may have: the next server's has to be half of a lease.
const INCARNATION_MAX: u64 = u32::MAX as u64 - 1;
/// The shortest and longest GRACE, in milliseconds.
const GRACE_MS: std::ops::RangeInclusive<u32> = 1..=60_000;

impl Format {
    /// Whether a region can be like this; the error names the field and its bounds.
    pub fn check(&self) -> Result<(), LayoutError> {
        bound("region_bytes", self.region_bytes, REGION_BYTES_MIN, REGION_BYTES_MAX)?;
        if !self.region_bytes.is_multiple_of(CHUNK_BYTES) {
            return Err(LayoutError::Field { field: "region_bytes", value: self.region_bytes });
        }
        let (least, most) = (u64::from(*GRACE_MS.start()), u64::from(*GRACE_MS.end()));
        bound("grace_ms", self.grace_ms.into(), least, most)?;
        bound("key_bytes_max", self.key_bytes_max.into(), 1, KEY_BYTES_LIMIT as u64)?;
        let room = PAYLOAD_BYTES_MAX - u64::from(self.key_bytes_max);
        bound("value_bytes_max", self.value_bytes_max.into(), 0, room)
    }

    /// Where everything stands in such a region.
    pub fn geometry(&self) -> Geometry {
        Geometry::new(self.region_bytes)
    }
}

fn bound(field: &'static str, value: u64, min: u64, max: u64) -> Result<(), LayoutError> {
    let outside = LayoutError::Bound { field, value, min, max };
    if (min..=max).contains(&value) { Ok(()) } else { Err(outside) }
}

/// Byte offsets of a region's parts, all derived from its length. The one place that computes
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

    /// The whole region, in bytes.
    pub fn region_bytes(&self) -> u64 {
        self.region_bytes
    }

    /// The entry of a client id in the client table; `None` for an id beyond it.
    pub fn client_entry(&self, client: u16) -> Option<u64> {
        (u32::from(client) < CLIENTS_MAX)
            .then(|| SUPERBLOCK_BYTES + u64::from(client) * size_of::<ClientEntry>() as u64)
    }

    /// The most bits of a hash a directory can go by.
    pub fn directory_depth_max(&self) -> u8 {
        self.directory_depth_max
    }

    fn directories_offset(&self) -> u64 {
        SUPERBLOCK_BYTES + u64::from(CLIENTS_MAX) * size_of::<ClientEntry>() as u64
    }

    /// The directory of this depth: each depth has a place of its own, so that a larger one is
    /// built beside the one in use. `None` beyond the deepest.
    pub fn directory_offset(&self, depth: u8) -> Option<u64> {
        let entry = size_of::<DirectoryEntry>() as u64;
        (depth <= self.directory_depth_max)
            .then(|| self.directories_offset() + (entry << depth) - entry)
    }

    fn chunk_table_offset(&self) -> u64 {
        let entry = size_of::<DirectoryEntry>() as u64;
        self.directories_offset() + (entry << (self.directory_depth_max + 1))
    }

    /// How many chunks the heap has.
    pub fn chunks(&self) -> u32 {
        ((self.region_bytes - self.heap_offset) / CHUNK_BYTES) as u32
    }

    /// The chunk table's entry of this chunk; `None` beyond the last.
    pub fn chunk_entry(&self, chunk: u32) -> Option<u64> {
        (chunk < self.chunks())
            .then(|| self.chunk_table_offset() + u64::from(chunk) * size_of::<ChunkEntry>() as u64)
    }

    /// Where a chunk starts; `None` beyond the last.
    pub fn chunk_offset(&self, chunk: u32) -> Option<u64> {
        (chunk < self.chunks()).then(|| self.heap_offset + u64::from(chunk) * CHUNK_BYTES)
    }

    /// Which chunk a byte offset lies in; `None` outside the heap.
    pub fn chunk_of(&self, offset: u64) -> Option<u32> {
        (self.heap_offset..self.region_bytes)
            .contains(&offset)
            .then(|| ((offset - self.heap_offset) / CHUNK_BYTES) as u32)
    }

    /// That a block lies wholly in the heap.
    ///
    /// # Errors
    /// [`LayoutError::BlockOutside`] with the block's offset.
    pub fn check_block(&self, block: BlockRef) -> Result<(), LayoutError> {
        let start = block.address.offset();
        if start >= self.heap_offset && start + block.class.block_bytes() <= self.region_bytes {
            Ok(())
        } else {
            Err(LayoutError::BlockOutside { offset: start, bytes: block.class.block_bytes() })
        }
    }

    /// That a subtable lies wholly in the heap, where subtables start.
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

/// Whether the server that used the region last said goodbye to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum RegionState {
    /// Stopped in order: no server uses the region.
    Clean = 1,
    /// A server has it, or died with it.
    InUse = 2,
}

/// The superblock as it stands in the region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Superblock {
    pub(super) magic: [u8; 8],
    pub(super) format_version: le::U32,
    /// Over the constant part with this field as 0.
    pub(super) crc32: le::U32,
    pub(super) region_id: [u8; 16],
    pub(super) hash_key: [u8; 16],
    pub(super) region_bytes: le::U64,
    pub(super) grace_ms: le::U32,
    pub(super) key_bytes_max: le::U32,
    pub(super) value_bytes_max: le::U32,
    pub(super) reserved: le::U32,
    /// Raised by one at each server start, before anything else happens to the region.
    pub(super) incarnation: le::U64,
    /// A [`RegionState`].
    pub(super) state: le::U32,
    /// How many bits of the hash the directory in use goes by: the word that switches directories.
    pub(super) directory_depth: le::U32,
}
const _: () = assert!(size_of::<Superblock>() as u64 <= SUPERBLOCK_BYTES);
const CONSTANT_BYTES: usize = std::mem::offset_of!(Superblock, incarnation);

/// Where the incarnation stands in a region, in bytes.
pub const INCARNATION_OFFSET: u64 = std::mem::offset_of!(Superblock, incarnation) as u64;
/// Where the word with state and directory depth stands in a region, in bytes.
pub const STATE_OFFSET: u64 = std::mem::offset_of!(Superblock, state) as u64;

impl Superblock {
    /// The superblock of a new region.
    ///
    /// # Errors
    /// [`LayoutError::Bound`] and [`LayoutError::Field`] as [`Format::check`] says.
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
        };
        superblock.crc32 = superblock.checksum().into();
        Ok(superblock)
    }

    /// Checks every field of the superblock at the start of these bytes.
    ///
    /// # Errors
    /// What is wrong with it, as a [`LayoutError`].
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
        bound("incarnation", superblock.incarnation(), 0, INCARNATION_MAX)?;
        superblock.state()?;
        superblock.directory_depth(&format.geometry())?;
        Ok((superblock, format))
    }

    fn checksum(&self) -> u32 {
        let unsigned = Self { crc32: 0.into(), ..*self };
        crc32fast::hash(&unsigned.as_bytes()[..CONSTANT_BYTES])
    }

    /// How many times a server started on this region.
    pub fn incarnation(&self) -> u64 {
        self.incarnation.get()
    }

    /// Whether the last server said goodbye.
    ///
    /// # Errors
    /// [`LayoutError::Field`] for a state that does not exist.
    pub fn state(&self) -> Result<RegionState, LayoutError> {
        match self.state.get() {
            1 => Ok(RegionState::Clean),
            2 => Ok(RegionState::InUse),
            other => Err(LayoutError::Field { field: "state", value: other.into() }),
        }
    }

    /// How many bits of the hash the directory in use goes by.
    ///
    /// # Errors
    /// [`LayoutError::Bound`] for a depth the region has no directory for.
    pub fn directory_depth(&self, geometry: &Geometry) -> Result<u8, LayoutError> {
        let depth = self.directory_depth.get();
        bound("directory_depth", depth.into(), 0, geometry.directory_depth_max().into())?;
        Ok(depth as u8)
    }

    /// The word that holds state and directory depth, for the server to store at
    /// [`STATE_OFFSET`].
    pub const fn state_word(state: RegionState, directory_depth: u8) -> u64 {
        state as u64 | (directory_depth as u64) << 32
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
    fn a_superblock_comes_back() {
        let superblock = Superblock::new(&format(), 5).unwrap();
        let (read, as_formatted) = Superblock::decode(superblock.as_bytes(), 64 << 20).unwrap();
        assert_eq!(as_formatted, format());
        assert_eq!(read.directory_depth(&format().geometry()).unwrap(), 5);
        assert_eq!(read.state().unwrap(), RegionState::Clean);
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
        for incarnation in [INCARNATION_MAX, INCARNATION_MAX + 1, u64::MAX] {
            let superblock = Superblock { incarnation: incarnation.into(), ..superblock };
            let decoded = Superblock::decode(superblock.as_bytes(), 64 << 20);
            assert_eq!(decoded.is_ok(), incarnation == INCARNATION_MAX, "{decoded:?}");
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
            let last_client = geometry.client_entry(CLIENTS_MAX as u16 - 1).unwrap();
            let mut end = last_client + size_of::<ClientEntry>() as u64;
            for depth in 0..=geometry.directory_depth_max() {
                assert_eq!(geometry.directory_offset(depth), Some(end));
                end += 8 << depth;
            }
            assert_eq!(geometry.directory_offset(geometry.directory_depth_max() + 1), None);
            assert!(geometry.chunk_entry(0).unwrap() >= end);
            let last = geometry.chunks() - 1;
            assert!(geometry.chunk_entry(last).unwrap() + 8 <= geometry.chunk_offset(0).unwrap());
            assert_eq!(geometry.chunk_offset(last).unwrap() + CHUNK_BYTES, region_bytes);
            assert_eq!(geometry.chunk_of(region_bytes - 1), Some(last));
            assert_eq!(geometry.chunk_of(region_bytes), None);
        }
    }

    #[test]
    fn limits_that_no_block_can_hold_are_refused() {
        let largest = (PAYLOAD_BYTES_MAX - 1024) as u32;
        assert!(Format { value_bytes_max: largest, ..format() }.check().is_ok());
        let too_large = Format { value_bytes_max: largest + 1, ..format() }.check();
        assert!(matches!(too_large, Err(LayoutError::Bound { field: "value_bytes_max", .. })));
        assert!(Format { key_bytes_max: 0, ..format() }.check().is_err());
        assert!(Format { region_bytes: (64 << 20) + 1, ..format() }.check().is_err());
        assert!(Format { grace_ms: 0, ..format() }.check().is_err());
    }
}
