//! Blocks: one key and one value, immutable once a slot points to them. Their checksums tell whole
//! content from mixtures and damage, here and in the entries of the published protocols that
//! `farside-bench-compare` drives.

use xxhash_rust::xxh3::xxh3_64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, little_endian as le};

use super::{BLOCK_BYTES_MAX, BlockAddress, BlockRef, LayoutError, SizeClass};

/// The longest key the format can hold, in bytes.
pub const KEY_BYTES_LIMIT: usize = u16::MAX as usize;
/// The latest expiry that a block can hold, in milliseconds since 1970: in the year 10889.
pub const EXPIRES_AT_MS_MAX: u64 = (1 << 48) - 1;
/// The bit of [`BlockHeader::written_at_ms`] that is set in a pinned block. The bits below it reach
/// until the year 6429.
const PINNED: u64 = 1 << 47;

/// Milliseconds since 1970, in 48 bits, or in 47 bits and a flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct U48 {
    low: le::U32,
    high: le::U16,
}

impl U48 {
    /// Stores the number, or the largest possible one if it does not fit.
    pub(super) fn new(number: u64) -> Self {
        let number = number.min(EXPIRES_AT_MS_MAX);
        Self { low: (number as u32).into(), high: ((number >> 32) as u16).into() }
    }

    pub(super) fn get(self) -> u64 {
        u64::from(self.high.get()) << 32 | u64::from(self.low.get())
    }
}

/// The first 32 bytes of a block. A late 4-byte mark must only ever hit `superseded`: so there is a
/// header at this address as long as any client may still write to it (invariants I9, I13).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct BlockHeader {
    /// A [`Mark`], set just before the block is unlinked (invariant I2). The only field that
    /// changes while the block is linked, and the only one that the checksum does not cover.
    pub(super) superseded: le::U32,
    /// Distinguishes all contents that were ever linked at this address (invariant I10). It starts
    /// at a random number of the region, and rises by one with each reuse. When a chunk changes its
    /// use, its next blocks start above [`ChunkEntry::age`](super::ChunkEntry::age).
    pub(super) generation: le::U32,
    /// Covers the fields that follow, key and value. Its seed is made of the block's address and
    /// generation, so that no block is mistaken for another.
    pub(super) checksum: le::U32,
    pub(super) key_bytes: le::U16,
    /// The id of the client that wrote the block. If that client dies, the server finds the PENDING
    /// words that it left by this field.
    pub(super) writer: le::U16,
    /// The length of the value in the low bits. Above [`VALUE_BITS`] the index of the class plus
    /// one if this is not the smallest class that fits: a cache may have had no block of that.
    pub(super) value_bytes: le::U32,
    /// When the writer filled this block, in milliseconds since 1970 by its clock. For people and
    /// for eviction; the protocol orders nothing by it. The highest bit says that the value is
    /// pinned. A server without this bit takes such a value for one written last.
    pub(super) written_at_ms: U48,
    /// When the value expires, in milliseconds since 1970; 0 for never.
    pub(super) expires_at_ms: U48,
}
const _: () = assert!(size_of::<BlockHeader>() == 32);

impl BlockHeader {
    /// A header without its checksum.
    #[inline]
    pub(crate) fn unsealed(key_bytes: u16, value_field: u32, stamp: BlockStamp) -> Self {
        Self {
            superseded: 0.into(),
            generation: stamp.generation.into(),
            checksum: 0.into(),
            key_bytes: key_bytes.into(),
            writer: stamp.writer.into(),
            value_bytes: value_field.into(),
            written_at_ms: U48::new(
                stamp.written_at_ms.min(PINNED - 1) | u64::from(stamp.is_pinned) << 47,
            ),
            expires_at_ms: U48::new(stamp.expires_at_ms),
        }
    }

    /// The first aligned word.
    #[inline]
    pub(crate) fn word(&self) -> HeaderWord {
        HeaderWord { mark: Mark(self.superseded.get()), generation: self.generation.get() }
    }

    /// The key's length, in bytes, without a check of the block.
    pub fn key_bytes(&self) -> usize {
        self.key_bytes.get().into()
    }

    /// The length of header, key and value, in bytes, without a check of the block.
    pub fn block_bytes(&self) -> u64 {
        block_bytes(self.key_bytes(), self.value_bytes() as usize)
    }

    /// The block's generation, without a check of the block.
    pub fn generation(&self) -> u32 {
        self.generation.get()
    }

    /// The id of the client that wrote the block, without a check of the block.
    pub fn writer(&self) -> u16 {
        self.writer.get()
    }

    /// The value's length, in bytes, without a check of the block.
    #[inline]
    pub fn value_bytes(&self) -> u32 {
        self.value_bytes.get() & VALUE_MASK
    }

    /// Whether a block with this header can be one of the class, by its lengths: the smallest class
    /// that fits, or the one that the header names because it is larger.
    #[inline]
    pub fn is_of_class(&self, class: SizeClass) -> bool {
        class.fits(self.key_bytes(), self.value_bytes() as usize) || self.names_class(class)
    }

    #[cold]
    fn names_class(&self, class: SizeClass) -> bool {
        let fits =
            self.block_bytes() <= class.block_bytes() && class <= SizeClass::LARGEST_OF_VALUES;
        fits && self.value_bytes.get() >> VALUE_BITS == u32::from(class.index()) + 1
    }

    /// When the writer filled the block, in milliseconds since 1970, without a check of the block.
    pub fn written_at_ms(&self) -> u64 {
        self.written_at_ms.get() & !PINNED
    }

    /// Whether the value is pinned, without a check of the block: the server never evicts it.
    pub fn is_pinned(&self) -> bool {
        self.written_at_ms.get() & PINNED != 0
    }

    /// Whether this is the header of a block of this class with a key of this length.
    pub fn fits(&self, class: SizeClass, key_bytes: usize) -> bool {
        self.key_bytes() == key_bytes && self.is_of_class(class)
    }

    /// When the value expires, in milliseconds since 1970, without a check of the block; 0 for
    /// never.
    pub fn expires_at_ms(&self) -> u64 {
        self.expires_at_ms.get()
    }

    /// Whether the block has a mark: it was unlinked, or is about to be.
    pub fn is_marked(&self) -> bool {
        Mark(self.superseded.get()).is_set()
    }
}

/// The number of bits that hold the length of a value in a header.
const VALUE_BITS: u32 = 24;
const VALUE_MASK: u32 = (1 << VALUE_BITS) - 1;
const _: () = assert!(BLOCK_BYTES_MAX <= VALUE_MASK as u64);

impl SizeClass {
    /// Whether this is the smallest class for a key and this many bytes of a value; for classes of
    /// heads, of a table of extents. The class of extents never is.
    #[inline]
    pub const fn fits(self, key_bytes: usize, value_bytes: usize) -> bool {
        self.is_smallest_for(block_bytes(key_bytes, value_bytes))
    }

    /// The field of a header for a value of this length in a block of this class, for [`seal`]: the
    /// length alone if this is the smallest class that fits.
    #[inline]
    pub fn value_field(self, key_bytes: usize, value_bytes: usize) -> u32 {
        match self.fits(key_bytes, value_bytes) {
            true => value_bytes as u32,
            false => value_bytes as u32 | (u32::from(self.index()) + 1) << VALUE_BITS,
        }
    }
}

/// The size of a block's header, in bytes.
pub const BLOCK_HEADER_BYTES: u64 = size_of::<BlockHeader>() as u64;
/// The offset of the first byte that the checksum covers, from the start of a block.
pub(crate) const COVERED_OFFSET: usize = std::mem::offset_of!(BlockHeader, key_bytes);

/// The first four bytes of a block. A WRITE sets them just before the block is unlinked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark(u32);

impl Mark {
    /// The mark of a block whose unlink was not announced.
    pub const CLEAR: Self = Self(0);
    /// The mark of a block that is unlinked without a successor. 1 is no block's address: the
    /// superblock is there.
    pub const SUPERSEDED: Self = Self(1);

    /// The mark of a block that `block` is about to replace. Only a guess: the compare-and-swap
    /// after the mark may have failed, and other writers may have replaced the value since.
    pub const fn superseded_by(block: BlockAddress) -> Self {
        Self(block.0)
    }

    /// The bits, as stored in the region.
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// Whether an unlink of the block was announced.
    pub const fn is_set(self) -> bool {
        self.0 != 0
    }

    /// The block that was about to replace the marked one, if the mark names a block.
    pub const fn successor(self) -> Option<BlockAddress> {
        if self.0 > Self::SUPERSEDED.0 { Some(BlockAddress(self.0)) } else { None }
    }
}

/// The first aligned word of a block. Its two fields decide whether a cached GET may use the
/// block that it read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeaderWord {
    /// Whether an unlink of the block was announced, and which block is the successor.
    pub mark: Mark,
    /// The block's generation.
    pub generation: u32,
}

impl HeaderWord {
    /// The bits, as stored in the region.
    pub const fn bits(self) -> u64 {
        self.mark.0 as u64 | (self.generation as u64) << 32
    }

    /// The header word in these eight bytes, read as a little-endian integer.
    pub const fn from_bits(bits: u64) -> Self {
        Self { mark: Mark(bits as u32), generation: (bits >> 32) as u32 }
    }
}

/// A block that no slot links, and the generation of its next content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FreeBlock {
    /// The block's address.
    pub address: BlockAddress,
    /// The generation that its next writer stores in the header.
    pub generation: u32,
}

/// The length of a block, in bytes, with a key and a value of these lengths.
pub const fn block_bytes(key_bytes: usize, value_bytes: usize) -> u64 {
    BLOCK_HEADER_BYTES + key_bytes as u64 + value_bytes as u64
}

/// The fields of a new block's header, except for the lengths and the checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockStamp {
    /// The address of the new block.
    pub address: BlockAddress,
    /// The generation of the new content.
    pub generation: u32,
    /// The client id of the writer.
    pub writer: u16,
    /// The writer's wall clock, milliseconds since 1970. A time after the year 6429 becomes the
    /// latest that a block can store.
    pub written_at_ms: u64,
    /// When the value expires, in milliseconds since 1970; 0 for never. A later time than
    /// [`EXPIRES_AT_MS_MAX`] becomes [`EXPIRES_AT_MS_MAX`].
    pub expires_at_ms: u64,
    /// Whether the server never evicts the value.
    pub is_pinned: bool,
}

/// Writes the header of a block whose key and value are in `image` already: the key at
/// [`BLOCK_HEADER_BYTES`], and the value directly after it. `value_field` is the length of the
/// value, or [`SizeClass::value_field`].
///
/// # Errors
/// [`LayoutError::Truncated`] if the image is shorter than header, key and value.
pub fn seal(
    image: &mut [u8],
    key_bytes: u16,
    value_field: u32,
    stamp: BlockStamp,
) -> Result<(), LayoutError> {
    let total = block_bytes(key_bytes.into(), (value_field & VALUE_MASK) as usize) as usize;
    let short = LayoutError::Truncated { what: "block image", bytes: image.len() as u64 };
    let Some(image) = image.get_mut(..total) else { return Err(short) };
    let (header, _) = BlockHeader::mut_from_prefix(image).map_err(|_| short.clone())?;
    *header = BlockHeader::unsealed(key_bytes, value_field, stamp);
    write_checksum(image, checksum_seed(stamp.address, stamp.generation)).ok_or(short)
}

/// Writes the checksum of a block whose header, key and value are in `image` already. Bytes after
/// its value are ignored.
///
/// # Errors
/// [`LayoutError::Truncated`] if the block is longer than the image, by its header.
pub fn seal_again(image: &mut [u8], address: BlockAddress) -> Result<(), LayoutError> {
    let short = LayoutError::Truncated { what: "block image", bytes: image.len() as u64 };
    let Ok((header, _)) = BlockHeader::ref_from_prefix(image) else { return Err(short) };
    let (total, generation) = (header.block_bytes() as usize, header.generation());
    let Some(image) = image.get_mut(..total) else { return Err(short) };
    write_checksum(image, checksum_seed(address, generation)).ok_or(short)
}

/// Writes the checksum of a whole block with this seed. `None` if the block has no header.
#[inline]
fn write_checksum(image: &mut [u8], seed: u32) -> Option<()> {
    let checksum = checksum(image.get(COVERED_OFFSET..)?, seed);
    let (header, _) = BlockHeader::mut_from_prefix(image).ok()?;
    header.checksum = checksum.into();
    Some(())
}

/// Returns the seed of a block's checksum: an odd number times the address, plus the generation.
/// Two generations of one block have different seeds; so have two blocks of one generation.
#[inline]
pub(crate) const fn checksum_seed(address: BlockAddress, generation: u32) -> u32 {
    address.0.wrapping_mul(0x9e37_79b1).wrapping_add(generation)
}

/// A block whose lengths and checksum were checked.
#[derive(Clone, Copy, Debug)]
pub struct Block<'a> {
    header: &'a BlockHeader,
    payload: &'a [u8],
}

impl<'a> Block<'a> {
    /// Checks the bytes of a block that was read at `address`. Bytes after its value are ignored.
    ///
    /// # Errors
    /// [`LayoutError::Truncated`] if the block is longer than these bytes, by its header.
    /// [`LayoutError::Checksum`] if the content is damaged, or was read while it was rewritten.
    #[inline]
    pub fn decode(bytes: &'a [u8], address: BlockAddress) -> Result<Self, LayoutError> {
        let short = LayoutError::Truncated { what: "block", bytes: bytes.len() as u64 };
        let Ok((header, rest)) = BlockHeader::ref_from_prefix(bytes) else { return Err(short) };
        let length = header.key_bytes() + header.value_bytes() as usize;
        let Some(payload) = rest.get(..length) else { return Err(short) };
        let covered = &bytes[COVERED_OFFSET..BLOCK_HEADER_BYTES as usize + length];
        let seed = checksum_seed(address, header.generation.get());
        if checksum(covered, seed) != header.checksum.get() {
            return Err(LayoutError::Checksum { what: "block", offset: address.claimed_offset() });
        }
        Ok(Self { header, payload })
    }

    /// Checks, all at once, that the bytes of a READ have the whole block of this key: its lengths,
    /// its checksum, its key, and that it is the block to which `block` refers. `None` if any check
    /// fails; then [`Block::decode`] finds out why.
    #[inline(always)]
    pub fn of_key(bytes: &'a [u8], block: BlockRef, key: &[u8]) -> Option<Self> {
        let (header, payload) = BlockHeader::ref_from_prefix(bytes).ok()?;
        let value_bytes = header.value_bytes() as usize;
        let payload = payload.get(..key.len() + value_bytes)?;
        let covered = bytes.get(COVERED_OFFSET..BLOCK_HEADER_BYTES as usize + payload.len())?;
        let generation = header.generation.get();
        let is_of_key = usize::from(header.key_bytes.get()) == key.len()
            && block.has_generation(generation)
            // The word, which has the class, has no checksum. With a wrong class the block would
            // later be reused as a larger one than it is.
            && header.is_of_class(block.class)
            && has_bytes(&payload[..key.len()], key)
            && checksum(covered, checksum_seed(block.address, generation)) == header.checksum.get();
        is_of_key.then_some(Self { header, payload })
    }

    /// The word that decides whether a cached GET may use this block.
    #[inline]
    pub fn header_word(&self) -> HeaderWord {
        self.header.word()
    }

    /// The header.
    pub fn header(&self) -> &'a BlockHeader {
        self.header
    }

    /// Whether it can be a block of this class: see [`BlockHeader::is_of_class`].
    pub fn is_of_class(&self, class: SizeClass) -> bool {
        self.header.is_of_class(class)
    }

    /// The key.
    #[inline]
    pub fn key(&self) -> &'a [u8] {
        &self.payload[..usize::from(self.header.key_bytes.get())]
    }

    /// The value.
    #[inline]
    pub fn value(&self) -> &'a [u8] {
        &self.payload[usize::from(self.header.key_bytes.get())..]
    }

    /// When the value expires, in milliseconds since 1970; 0 for never.
    #[inline]
    pub fn expires_at_ms(&self) -> u64 {
        self.header.expires_at_ms()
    }

    /// The client id of the writer.
    pub fn writer(&self) -> u16 {
        self.header.writer.get()
    }

    /// The writer's wall clock when it filled the block, in milliseconds since 1970.
    pub fn written_at_ms(&self) -> u64 {
        self.header.written_at_ms()
    }

    /// Whether the value is pinned: the server never evicts it.
    pub fn is_pinned(&self) -> bool {
        self.header.is_pinned()
    }
}

/// Whether the two have the same bytes. Both have the same length. Most keys are short, so a call
/// of the C library would take longer than the comparison.
#[inline]
fn has_bytes(bytes: &[u8], expected: &[u8]) -> bool {
    let (words, rest) = bytes.as_chunks::<8>();
    let (expected_words, expected_rest) = expected.as_chunks::<8>();
    let is_word = |(word, expected): (&[u8; 8], &[u8; 8])| {
        u64::from_ne_bytes(*word) == u64::from_ne_bytes(*expected)
    };
    words.iter().zip(expected_words).all(is_word)
        && rest.iter().zip(expected_rest).all(|(byte, expected)| byte == expected)
}

/// The class of a block with a key and a value of these lengths; `None` if it fits no class.
#[inline]
pub const fn class_for(key_bytes: usize, value_bytes: usize) -> Option<SizeClass> {
    SizeClass::for_bytes(block_bytes(key_bytes, value_bytes))
}

/// The shortest content whose checksum is a CRC-32. That of shorter content is the low half of its
/// XXH3-64. Each kind is the faster one for its lengths (docs/decisions/0008).
pub(crate) const CRC_BYTES_MIN: usize = 1024;

/// Returns the checksum of the content with this seed. The same content has different checksums
/// with different seeds.
// Without `always` the compiler makes a call of it, in every GET.
#[inline(always)]
pub fn checksum(content: &[u8], seed: u32) -> u32 {
    if content.len() < CRC_BYTES_MIN {
        return xxh3_64(content) as u32 ^ seed;
    }
    crc_after(seed, content)
}

/// The CRC-32 of bytes that have the CRC-32 `before`, followed by these. From the seed on it is the
/// checksum of content of [`CRC_BYTES_MIN`] bytes or more, which may come in parts.
#[inline]
pub(crate) fn crc_after(before: u32, bytes: &[u8]) -> u32 {
    let mut sum = crc32fast::Hasher::new_with_initial(before);
    sum.update(bytes);
    sum.finalize()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::block::CRC_BYTES_MIN;

    pub(crate) fn stamp(units: u32, generation: u32) -> BlockStamp {
        BlockStamp {
            address: BlockAddress(units),
            generation,
            writer: 7,
            written_at_ms: 1,
            expires_at_ms: 0,
            is_pinned: false,
        }
    }

    pub(crate) fn sealed(key: &[u8], value: &[u8], stamp: BlockStamp) -> Vec<u8> {
        let mut image = vec![0; 2048];
        let start = BLOCK_HEADER_BYTES as usize;
        image[start..start + key.len()].copy_from_slice(key);
        image[start + key.len()..start + key.len() + value.len()].copy_from_slice(value);
        seal(&mut image, key.len() as u16, value.len() as u32, stamp).unwrap();
        image
    }

    #[test]
    fn a_sealed_block_decodes_to_what_was_sealed() {
        let image = sealed(b"key", b"value", stamp(3, 9));
        let block = Block::decode(&image, BlockAddress(3)).unwrap();
        assert_eq!((block.key(), block.value()), (&b"key"[..], &b"value"[..]));
        assert_eq!(block.header_word(), HeaderWord { mark: Mark::CLEAR, generation: 9 });
        assert_eq!((block.writer(), block.written_at_ms()), (7, 1));
    }

    #[test]
    fn times_round_trip_and_later_ones_become_the_largest() {
        let times = [0, 1, 1_700_000_000_123, EXPIRES_AT_MS_MAX - 1, EXPIRES_AT_MS_MAX];
        for time in times.into_iter().chain((0..48).map(|bit| 1 << bit)) {
            assert_eq!(U48::new(time).get(), time);
            let stamp = BlockStamp { written_at_ms: time, expires_at_ms: !time, ..stamp(3, 9) };
            let image = sealed(b"key", b"value", stamp);
            let block = Block::decode(&image, BlockAddress(3)).unwrap();
            let found = (block.written_at_ms(), block.expires_at_ms());
            let latest = (time.min(PINNED - 1), EXPIRES_AT_MS_MAX);
            assert_eq!(found, latest, "a later time becomes the latest");
            assert_eq!((block.writer(), block.value()), (7, &b"value"[..]));
            let pinned = sealed(b"key", b"value", BlockStamp { is_pinned: true, ..stamp });
            let pinned = Block::decode(&pinned, BlockAddress(3)).unwrap();
            assert_eq!(pinned.written_at_ms(), block.written_at_ms());
            assert_eq!([block, pinned].map(|block| block.is_pinned()), [false, true]);
        }
        assert_eq!(U48::new(u64::MAX).get(), EXPIRES_AT_MS_MAX);
        // The offsets in docs/memory-layout.md.
        let image = sealed(b"", b"", BlockStamp { expires_at_ms: 0x0605_0403_0201, ..stamp(3, 9) });
        assert_eq!(image[20..32], [1, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6]);
        let image = sealed(b"", b"", BlockStamp { is_pinned: true, ..stamp(3, 9) });
        assert_eq!(image[20..26], [1, 0, 0, 0, 0, 0x80]);
    }

    #[test]
    fn a_block_that_is_sealed_again_is_the_same() {
        for value_bytes in [5, CRC_BYTES_MIN] {
            let image = sealed(b"key", &vec![7; value_bytes], stamp(3, 9));
            let mut again = image.clone();
            again[8..12].fill(0xff);
            assert!(Block::decode(&again, BlockAddress(3)).is_err());
            seal_again(&mut again, BlockAddress(3)).unwrap();
            assert_eq!(again, image);
            let bytes = block_bytes(3, value_bytes) as usize;
            assert!(seal_again(&mut again[..bytes - 1], BlockAddress(3)).is_err());
        }
    }

    #[test]
    fn a_block_is_refused_at_another_address() {
        let image = sealed(b"key", b"value", stamp(3, 9));
        let elsewhere = Block::decode(&image, BlockAddress(4));
        assert!(matches!(elsewhere, Err(LayoutError::Checksum { offset: 256, .. })));
    }

    #[test]
    fn every_flipped_bit_outside_the_mark_is_noticed() {
        let image = sealed(b"key", b"value", stamp(3, 9));
        flip_every_bit(&image, 8);
    }

    #[test]
    fn every_flipped_bit_is_noticed_by_either_kind_of_checksum() {
        for value_bytes in [CRC_BYTES_MIN - 24, CRC_BYTES_MIN - 23] {
            let value: Vec<u8> = (0..value_bytes).map(|at| at as u8).collect();
            flip_every_bit(&sealed(b"key", &value, stamp(3, 9)), 3 + value_bytes);
        }
    }

    fn flip_every_bit(image: &[u8], key_and_value_bytes: usize) {
        for bit in 0..(BLOCK_HEADER_BYTES as usize + key_and_value_bytes) * 8 {
            let mut torn = image.to_vec();
            torn[bit / 8] ^= 1 << (bit % 8);
            let decoded = Block::decode(&torn, BlockAddress(3));
            if bit < 32 {
                assert!(decoded.unwrap().header_word().mark.is_set());
            } else {
                assert!(decoded.is_err(), "bit {bit}");
            }
        }
    }

    /// Regions outlive programs, so a new version of a crate must not change any checksum.
    #[test]
    fn checksums_are_frozen() {
        let checksum_of_length = |bytes: usize| {
            let covered: Vec<u8> = (0..bytes).map(|at| (at * 31) as u8).collect();
            checksum(&covered, checksum_seed(BlockAddress(3), 9))
        };
        let checksums = [20, 104, 200, 1023, 1024, 4096].map(checksum_of_length);
        let frozen = [
            3_706_971_016,
            631_792_775,
            2_907_110_375,
            2_497_789_712,
            1_071_839_848,
            3_456_584_609,
        ];
        assert_eq!(checksums, frozen);
    }

    #[test]
    fn lengths_beyond_the_bytes_are_refused() {
        let image = sealed(b"key", b"value", stamp(3, 9));
        for bytes in 0..block_bytes(3, 5) as usize {
            assert!(Block::decode(&image[..bytes], BlockAddress(3)).is_err());
        }
    }
}
