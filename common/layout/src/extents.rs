//! Values that are too long for a block: a head, which a slot leads to, and extents.
//!
//! The head is a block whose value is an [`ExtentTable`]. Each extent is a block of
//! [`SizeClass::EXTENT`] with the same key and a part of the value. No slot leads to it: it is
//! linked as long as its head is, and rests as long (invariant I26).
//!
//! ```text
//! slot -> head:   header | key | length of the value | address, generation, checksum of each part
//!         extent: header | key | padding to a multiple of 64 | a part of the value
//! ```

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, little_endian as le};

use super::{
    BLOCK_HEADER_BYTES, BLOCK_UNIT, Block, BlockAddress, BlockHeader, BlockStamp, FreeBlock,
    LayoutError, NamedBlock, SizeClass, block_bytes, class_for, seal,
};
use crate::block::checksum_seed;

/// The longest value, in bytes.
pub const VALUE_BYTES_LIMIT: u64 = 256 << 20;

/// The length of a value with extents, at the start of its table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct TableHeader {
    value_bytes: le::U64,
}

/// An extent, as the table of its head names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Extent {
    pub(super) address: le::U32,
    pub(super) generation: le::U32,
    /// Covers the part of the value, filled with zeros to a multiple of 8: its CRC-32, and the seed
    /// of a block's checksum.
    pub(super) checksum: le::U32,
}

impl Extent {
    /// The extent in this block, whose part of the value has this CRC-32.
    pub fn new(block: FreeBlock, sum: u32) -> Self {
        let checksum = sum ^ checksum_seed(block.address, block.generation);
        let (address, generation) = (block.address.0.into(), block.generation.into());
        Self { address, generation, checksum: checksum.into() }
    }

    /// The address of its block.
    pub fn address(&self) -> BlockAddress {
        BlockAddress(self.address.get())
    }

    /// Its block, which the table names: unchecked.
    pub fn block(&self) -> NamedBlock {
        let generation_low = self.generation.get() as u8;
        NamedBlock { address: self.address(), class: SizeClass::EXTENT, generation_low }
    }

    /// The generation of its block.
    pub fn generation(&self) -> u32 {
        self.generation.get()
    }

    /// Its block after it was unlinked: the next content has the next generation.
    pub fn unlinked(&self) -> FreeBlock {
        let generation = self.generation.get().wrapping_add(1);
        FreeBlock { address: self.address(), generation }
    }

    /// The CRC-32 of its part of the value.
    pub fn sum(&self) -> u32 {
        self.checksum.get() ^ checksum_seed(self.address(), self.generation.get())
    }

    /// Whether a part of a value with this CRC-32 is the extent's.
    pub fn has_sum(&self, sum: u32) -> bool {
        sum == self.sum()
    }

    /// Whether this is the extent's part of a value, filled with zeros to a multiple of 8.
    pub fn has_part(&self, part: &[u8]) -> bool {
        self.has_sum(crc32fast::hash(part))
    }
}

/// The CRC-32 of bytes with this CRC-32 and of the next ones behind them.
pub fn extend_sum(sum: u32, next: &[u8]) -> u32 {
    let mut both = crc32fast::Hasher::new_with_initial(sum);
    both.update(next);
    both.finalize()
}

/// Where the part of the value starts in an extent of a key of this length, in bytes.
pub const fn extent_data_offset(key_bytes: usize) -> u64 {
    block_bytes(key_bytes, 0).next_multiple_of(BLOCK_UNIT)
}

/// How values are divided into extents. All regions have the same division; the simulator has one
/// with shorter parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExtentShape {
    /// The largest class of values without extents.
    pub class_max: SizeClass,
    /// Limit on a part, in bytes, beside the length of an extent: a multiple of 8.
    pub part_bytes_max: u64,
}

impl ExtentShape {
    /// The division in regions.
    pub const OF_REGIONS: Self =
        Self { class_max: SizeClass::LARGEST_OF_VALUES, part_bytes_max: u64::MAX };

    /// The longest part of a value in an extent of a key of this length, in bytes.
    pub const fn part_bytes(self, key_bytes: usize) -> u64 {
        let room = SizeClass::EXTENT.block_bytes() - extent_data_offset(key_bytes);
        if room < self.part_bytes_max { room } else { self.part_bytes_max }
    }

    /// The number of extents of a value.
    pub const fn count(self, key_bytes: usize, value_bytes: u64) -> usize {
        value_bytes.div_ceil(self.part_bytes(key_bytes)) as usize
    }

    /// The class of the block to which a slot leads: that of key and value, or of the head. `None`
    /// if the value is too long.
    pub const fn class_in_slot(self, key_bytes: usize, value_bytes: usize) -> Option<SizeClass> {
        match class_for(key_bytes, value_bytes) {
            Some(class) if class.index() <= self.class_max.index() => Some(class),
            _ if value_bytes as u64 > VALUE_BYTES_LIMIT => None,
            _ => {
                let extents = self.count(key_bytes, value_bytes as u64);
                SizeClass::for_head(block_bytes(key_bytes, extent_table_bytes(extents)))
            }
        }
    }
}

/// The length of the table of this many extents, in bytes.
pub const fn extent_table_bytes(extents: usize) -> usize {
    size_of::<TableHeader>() + extents * size_of::<Extent>()
}

/// Writes the length of a value into its table, which [`set_extent`] completes.
///
/// # Errors
/// [`LayoutError::Truncated`] if `table` is shorter.
pub fn set_value_bytes(table: &mut [u8], value_bytes: u64) -> Result<(), LayoutError> {
    set(table, 0, TableHeader { value_bytes: value_bytes.into() }.as_bytes())
}

/// Writes the extent with this number into a table.
///
/// # Errors
/// [`LayoutError::Truncated`] if `table` is shorter.
pub fn set_extent(table: &mut [u8], number: usize, extent: Extent) -> Result<(), LayoutError> {
    set(table, extent_table_bytes(number), extent.as_bytes())
}

fn set(table: &mut [u8], at: usize, bytes: &[u8]) -> Result<(), LayoutError> {
    let short = LayoutError::Truncated { what: "extent table", bytes: table.len() as u64 };
    table.get_mut(at..at + bytes.len()).ok_or(short)?.copy_from_slice(bytes);
    Ok(())
}

/// The table of a value's extents.
#[derive(Clone, Copy, Debug)]
pub struct ExtentTable<'t> {
    /// The length of the value, in bytes.
    pub value_bytes: u64,
    /// The extents, in the order of their parts.
    pub extents: &'t [Extent],
    /// The longest part of each, in bytes.
    part_bytes: u64,
}

impl<'t> ExtentTable<'t> {
    /// The table in the head of a key.
    ///
    /// # Errors
    /// [`LayoutError::Field`] if the head has not as many extents as its length takes.
    pub fn of(head: &Block<'t>, shape: ExtentShape) -> Result<Self, LayoutError> {
        Self::decode(head.key().len(), head.value(), shape)
    }

    /// The table in these bytes, which are the value of a head with a key of this length.
    ///
    /// # Errors
    /// As [`ExtentTable::of`].
    pub fn decode(
        key_bytes: usize,
        table: &'t [u8],
        shape: ExtentShape,
    ) -> Result<Self, LayoutError> {
        let wrong = |value| LayoutError::Field { field: "extent table", value };
        let (header, rest) =
            TableHeader::ref_from_prefix(table).map_err(|_| wrong(table.len() as u64))?;
        let value_bytes = header.value_bytes.get();
        let extents = <[Extent]>::ref_from_bytes(rest).map_err(|_| wrong(table.len() as u64))?;
        if value_bytes > VALUE_BYTES_LIMIT || extents.len() != shape.count(key_bytes, value_bytes) {
            return Err(wrong(value_bytes));
        }
        Ok(Self { value_bytes, extents, part_bytes: shape.part_bytes(key_bytes) })
    }

    /// The length of the part of the value that this extent has, in bytes.
    pub fn part_bytes(&self, number: usize) -> u64 {
        self.value_bytes.saturating_sub(number as u64 * self.part_bytes).min(self.part_bytes)
    }

    /// Where this extent's part starts in the value, in bytes.
    pub fn part_start(&self, number: usize) -> u64 {
        number as u64 * self.part_bytes
    }
}

/// Writes the header of an extent whose key is in `image` already. The part of the value is not in
/// the image, and the header's checksum does not cover it.
///
/// # Errors
/// [`LayoutError::Truncated`] if the image is shorter than header and key.
pub fn seal_extent(
    image: &mut [u8],
    key_bytes: u16,
    part_bytes: u32,
    stamp: BlockStamp,
) -> Result<(), LayoutError> {
    seal(image, key_bytes, 0, stamp)?;
    let short = LayoutError::Truncated { what: "extent", bytes: image.len() as u64 };
    let (header, _) = BlockHeader::mut_from_prefix(image).map_err(|_| short)?;
    header.value_bytes = part_bytes.into();
    Ok(())
}

impl BlockHeader {
    /// Whether this is the header of this extent, of a key of this length. The caller compares the
    /// key.
    pub fn is_of_extent(&self, extent: &Extent, key_bytes: usize) -> bool {
        self.fits_extent()
            && self.key_bytes() == key_bytes
            && self.generation() == extent.generation()
    }

    /// Whether this is the header of an extent.
    pub fn fits_extent(&self) -> bool {
        let part_bytes = u64::from(self.value_bytes());
        let key_bytes = self.key_bytes();
        BLOCK_HEADER_BYTES + key_bytes as u64 <= SizeClass::EXTENT.block_bytes()
            && 0 < part_bytes
            && part_bytes <= ExtentShape::OF_REGIONS.part_bytes(key_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::tests::stamp;
    use crate::{BlockRef, KEY_BYTES_LIMIT};

    const SHAPE: ExtentShape = ExtentShape::OF_REGIONS;

    fn extents(count: usize) -> Vec<Extent> {
        let block = |n: usize| FreeBlock { address: BlockAddress(n as u32 + 9), generation: 7 };
        (0..count).map(|n| Extent::new(block(n), n as u32)).collect()
    }

    fn write_table(table: &mut [u8], value_bytes: u64, extents: &[Extent]) {
        set_value_bytes(table, value_bytes).unwrap();
        for (number, extent) in extents.iter().enumerate() {
            set_extent(table, number, *extent).unwrap();
        }
    }

    fn head(key: &[u8], value_bytes: u64, extents: &[Extent]) -> Vec<u8> {
        let start = block_bytes(key.len(), 0) as usize;
        let table_bytes = extent_table_bytes(extents.len());
        let mut image = vec![0; start + table_bytes];
        image[BLOCK_HEADER_BYTES as usize..start].copy_from_slice(key);
        write_table(&mut image[start..], value_bytes, extents);
        seal(&mut image, key.len() as u16, table_bytes as u32, stamp(3, 1)).unwrap();
        image
    }

    #[test]
    fn every_length_up_to_the_limit_has_a_head() {
        for key_bytes in [1, 16, 1000, 4000, KEY_BYTES_LIMIT] {
            for value_bytes in [4 << 20, 64 << 20, VALUE_BYTES_LIMIT] {
                let class = SHAPE.class_in_slot(key_bytes, value_bytes as usize).unwrap();
                let table_bytes = extent_table_bytes(SHAPE.count(key_bytes, value_bytes));
                assert!(class.is_head() && class.fits(key_bytes, table_bytes));
                let fitting = SizeClass::of_heads().filter(|it| it.fits(key_bytes, table_bytes));
                assert_eq!(fitting.collect::<Vec<_>>(), [class]);
                assert!(block_bytes(key_bytes, table_bytes) <= class.block_bytes());
            }
        }
        assert_eq!(
            SHAPE.class_in_slot(16, VALUE_BYTES_LIMIT as usize).unwrap().block_bytes(),
            4096
        );
        assert_eq!(SHAPE.class_in_slot(16, VALUE_BYTES_LIMIT as usize + 1), None);
        // A head is no block of a value, though it may be as long as one.
        assert!(!SizeClass::FIRST_HEAD.fits(16, 5000) && !SizeClass::EXTENT.fits(16, 1 << 20));
        assert!(!SizeClass::for_bytes(4096).unwrap().is_head());
    }

    #[test]
    fn a_table_has_the_parts_of_the_value_in_order() {
        let value_bytes = (2 << 20) + 5;
        let count = SHAPE.count(3, value_bytes);
        let written = extents(count);
        let image = head(b"key", value_bytes, &written);
        let class = SizeClass::FIRST_HEAD;
        let block = BlockRef(NamedBlock { address: BlockAddress(3), class, generation_low: 1 });
        let found = Block::of_key(&image, block, b"key").unwrap();
        let table = ExtentTable::of(&found, SHAPE).unwrap();
        assert_eq!((table.value_bytes, table.extents), (value_bytes, &*written));
        let parts = (0..count).map(|n| (table.part_start(n), table.part_bytes(n)));
        let end = parts.fold(0, |end, (start, bytes)| {
            assert!(start == end && 0 < bytes && bytes <= SHAPE.part_bytes(3));
            end + bytes
        });
        assert_eq!(end, value_bytes);
        assert!(table.extents[1].has_sum(1) && !table.extents[1].has_sum(2));
        let rewritten = Extent::new(table.extents[1].unlinked(), 1);
        assert_ne!(rewritten.checksum, table.extents[1].checksum);
        assert_eq!(table.extents[1].unlinked().generation, 8);
    }

    #[test]
    fn a_table_of_another_length_is_refused() {
        let value_bytes = 5 << 20;
        let count = SHAPE.count(3, value_bytes);
        let mut table = vec![0; extent_table_bytes(count)];
        write_table(&mut table, value_bytes, &extents(count));
        assert!(ExtentTable::decode(3, &table, SHAPE).is_ok());
        assert!(ExtentTable::decode(3, &table[..table.len() - 12], SHAPE).is_err());
        assert!(ExtentTable::decode(3, &table[..table.len() - 1], SHAPE).is_err());
        assert!(ExtentTable::decode(3, &[], SHAPE).is_err());
        write_table(&mut table, u64::MAX, &extents(count));
        assert!(ExtentTable::decode(3, &table, SHAPE).is_err());
        assert!(set_extent(&mut table[..9], 0, extents(1)[0]).is_err());
        assert!(set_value_bytes(&mut table[..7], 1).is_err());
    }

    #[test]
    fn an_extent_has_the_header_of_no_other_block() {
        let mut image = vec![0; 64];
        image[32..35].copy_from_slice(b"key");
        seal_extent(&mut image, 3, 1 << 19, stamp(3, 1)).unwrap();
        let (header, _) = BlockHeader::ref_from_prefix(&image).unwrap();
        assert!(header.fits_extent() && !header.fits(SizeClass::EXTENT, 3));
        assert!(!SizeClass::EXTENT.is_head());
        seal_extent(&mut image, 3, 2 << 20, stamp(3, 1)).unwrap();
        let (header, _) = BlockHeader::ref_from_prefix(&image).unwrap();
        assert!(!header.fits_extent());
    }
}
