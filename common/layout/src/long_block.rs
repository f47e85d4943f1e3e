//! Long blocks, whose value is copied and summed in one pass, part by part.
//!
//! The checksum covers the header's last fields, the key and the value, in this order. So the first
//! bytes of a block, its **head**, come first: header, key, and as much of the value as is with
//! them. The rest of the value follows in parts. All lengths have the checksum of long content.

use zerocopy::FromBytes;

use crate::block::{CRC_BYTES_MIN, crc_after};
use crate::{
    BLOCK_HEADER_BYTES, BlockHeader, BlockRef, BlockStamp, COVERED_OFFSET, HeaderWord, LayoutError,
    block_bytes, checksum_seed,
};

/// The length of the shortest value whose block can arrive and depart in parts, in bytes.
pub const LONG_VALUE_BYTES_MIN: usize = CRC_BYTES_MIN;

/// A long block of a key that is READ. Its checksum is compared at the end.
#[derive(Clone, Debug)]
pub struct ArrivingBlock {
    header: BlockHeader,
    /// The CRC-32 of what has arrived.
    sum: u32,
    /// How many bytes of the value have not arrived yet.
    missing: usize,
}

impl ArrivingBlock {
    /// Checks the head of a block as [`Block::of_key`](crate::Block::of_key) does, except for the
    /// checksum. `None` if a check fails, if the value is short, or if `head` does not reach the
    /// value or has all of it.
    pub fn of_key(head: &[u8], block: BlockRef, key: &[u8]) -> Option<Self> {
        let (header, payload) = BlockHeader::ref_from_prefix(head).ok()?;
        let value_bytes = header.value_bytes() as usize;
        let generation = header.generation.get();
        let bytes = block_bytes(key.len(), value_bytes) as usize;
        let is_of_key = usize::from(header.key_bytes.get()) == key.len()
            && block.has_generation(generation)
            && header.is_of_class(block.class)
            && payload.get(..key.len())? == key;
        if !is_of_key || head.len() >= bytes || value_bytes < LONG_VALUE_BYTES_MIN {
            return None;
        }
        let seed = checksum_seed(block.address, generation);
        let sum = crc_after(seed, &head[COVERED_OFFSET..]);
        Some(Self { header: *header, sum, missing: bytes - head.len() })
    }

    /// How many bytes of the value have not arrived yet.
    pub fn missing_bytes(&self) -> usize {
        self.missing
    }

    /// The length of the whole value, in bytes.
    pub fn value_bytes(&self) -> usize {
        self.header.value_bytes() as usize
    }

    /// When the value expires, in milliseconds since 1970; 0 for never.
    pub fn expires_at_ms(&self) -> u64 {
        self.header.expires_at_ms()
    }

    /// The CRC-32 of what has arrived.
    pub fn sum(&self) -> u32 {
        self.sum
    }

    /// Adds the next bytes of the value, so many, after which the CRC-32 is this one.
    pub fn add_summed(&mut self, sum: u32, bytes: usize) {
        self.sum = sum;
        self.missing = self.missing.saturating_sub(bytes);
    }

    /// Returns the word that decides whether a cached GET may use this block. `None` if bytes are
    /// missing, or if the checksum is wrong.
    pub fn end(&self) -> Option<HeaderWord> {
        let is_whole = self.missing == 0 && self.sum == self.header.checksum.get();
        is_whole.then(|| self.header.word())
    }
}

/// A long block that is WRITten. Its header is complete at the end.
#[derive(Clone, Debug)]
pub struct DepartingBlock {
    /// The CRC-32 of what was added.
    sum: u32,
}

impl DepartingBlock {
    /// Writes the header without its checksum. `head` has the key and the first bytes of the value
    /// already: the key at [`BLOCK_HEADER_BYTES`], and the value directly after it. `value_field`
    /// is as in [`seal`](crate::seal).
    ///
    /// # Errors
    /// [`LayoutError::Truncated`] if `head` does not reach the value.
    /// [`LayoutError::Field`] if the value is short.
    pub fn begin(
        head: &mut [u8],
        key_bytes: u16,
        value_field: u32,
        stamp: BlockStamp,
    ) -> Result<Self, LayoutError> {
        let unsealed = BlockHeader::unsealed(key_bytes, value_field, stamp);
        let value_bytes = unsealed.value_bytes();
        if (value_bytes as usize) < LONG_VALUE_BYTES_MIN {
            return Err(LayoutError::Field { field: "value_bytes", value: value_bytes.into() });
        }
        let short = LayoutError::Truncated { what: "head of a block", bytes: head.len() as u64 };
        if (head.len() as u64) < BLOCK_HEADER_BYTES + u64::from(key_bytes) {
            return Err(short);
        }
        let (header, _) = BlockHeader::mut_from_prefix(head).map_err(|_| short)?;
        *header = unsealed;
        let seed = checksum_seed(stamp.address, stamp.generation);
        Ok(Self { sum: crc_after(seed, &head[COVERED_OFFSET..]) })
    }

    /// The CRC-32 of what was added.
    pub fn sum(&self) -> u32 {
        self.sum
    }

    /// Adds the next bytes of the value, after which the CRC-32 is this one.
    pub fn add_summed(&mut self, sum: u32) {
        self.sum = sum;
    }

    /// Writes the checksum into the header, after all bytes of the value have been added.
    pub fn end(&self, head: &mut [u8]) {
        if let Ok((header, _)) = BlockHeader::mut_from_prefix(head) {
            header.checksum = self.sum.into();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::tests::{sealed, stamp};
    use crate::{Block, BlockAddress, NamedBlock, class_for};

    const VALUE_BYTES: usize = 1500;
    const BYTES: usize = BLOCK_HEADER_BYTES as usize + 3 + VALUE_BYTES;

    fn value() -> Vec<u8> {
        (0..VALUE_BYTES).map(|at| (at * 7) as u8).collect()
    }

    fn reference() -> BlockRef {
        let class = class_for(3, VALUE_BYTES).unwrap();
        BlockRef(NamedBlock { address: BlockAddress(3), class, generation_low: 9 })
    }

    fn arrive(image: &[u8], head_bytes: usize, part_bytes: usize) -> Option<HeaderWord> {
        let (head, rest) = image.split_at(head_bytes);
        let mut arriving = ArrivingBlock::of_key(head, reference(), b"key")?;
        let missing = arriving.missing_bytes();
        for part in rest[..missing].chunks(part_bytes) {
            arriving.add_summed(crc_after(arriving.sum(), part), part.len());
        }
        arriving.end()
    }

    #[test]
    fn a_block_that_arrives_in_parts_is_whole_only_with_each_bit() {
        let image = sealed(b"key", &value(), stamp(3, 9));
        for head_bytes in [35, 64, 1000, BYTES - 1] {
            for part_bytes in [1, 100, 2000] {
                let header = arrive(&image, head_bytes, part_bytes).unwrap();
                assert_eq!((header.generation, header.mark.is_set()), (9, false));
            }
        }
        // Without the key's last byte, and with nothing to come.
        assert_eq!(arrive(&image, 34, 100), None);
        assert_eq!(arrive(&image, BYTES, 100), None);
        for bit in 32..BYTES * 8 {
            let mut torn = image.clone();
            torn[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(arrive(&torn, 64, 700), None, "bit {bit}");
        }
        let head = &image[..64];
        let mut arriving = ArrivingBlock::of_key(head, reference(), b"key").unwrap();
        arriving.add_summed(crc_after(arriving.sum(), &image[64..BYTES - 1]), BYTES - 65);
        assert_eq!(arriving.end(), None, "a byte is missing");
    }

    #[test]
    fn a_block_that_arrives_is_refused_for_another_key_or_word() {
        let image = sealed(b"key", &value(), stamp(3, 9));
        let is_taken =
            |block, key: &[u8]| ArrivingBlock::of_key(&image[..64], block, key).is_some();
        let block = reference();
        assert!(is_taken(block, b"key"));
        assert!(!is_taken(block, b"kex") && !is_taken(block, b"ke"));
        assert!(!is_taken(BlockRef(NamedBlock { generation_low: 8, ..*block }), b"key"));
        let class = class_for(3, 2 * VALUE_BYTES).unwrap();
        assert!(!is_taken(BlockRef(NamedBlock { class, ..*block }), b"key"));
        let elsewhere = BlockRef(NamedBlock { address: BlockAddress(4), ..*block });
        let mut arriving = ArrivingBlock::of_key(&image[..64], elsewhere, b"key").unwrap();
        arriving.add_summed(crc_after(arriving.sum(), &image[64..BYTES]), BYTES - 64);
        assert_eq!(arriving.end(), None, "the checksum has the address");
    }

    #[test]
    fn a_block_that_departs_in_parts_is_the_one_that_is_sealed_at_once() {
        let stamp = BlockStamp { expires_at_ms: 77, is_pinned: true, ..stamp(3, 9) };
        let image = sealed(b"key", &value(), stamp);
        for (head_bytes, part_bytes) in [(35, 1), (64, 100), (1000, 2000), (BYTES, 1)] {
            let mut departing = image.clone();
            departing[..BLOCK_HEADER_BYTES as usize].fill(0xff);
            let (head, rest) = departing[..BYTES].split_at_mut(head_bytes);
            let mut sum = DepartingBlock::begin(head, 3, VALUE_BYTES as u32, stamp).unwrap();
            for part in rest.chunks(part_bytes) {
                sum.add_summed(crc_after(sum.sum(), part));
            }
            assert!(Block::decode(&[&*head, &*rest].concat(), stamp.address).is_err());
            sum.end(head);
            assert_eq!(departing, image, "{head_bytes} {part_bytes}");
        }
    }

    #[test]
    fn a_head_without_its_key_and_a_short_value_are_refused() {
        let mut head = [0; 64];
        let mut begin = |key_bytes, value_bytes| {
            DepartingBlock::begin(&mut head, key_bytes, value_bytes, stamp(3, 9)).is_ok()
        };
        assert!(begin(32, VALUE_BYTES as u32));
        assert!(!begin(33, VALUE_BYTES as u32));
        assert!(!begin(3, LONG_VALUE_BYTES_MIN as u32 - 1));
        assert!(DepartingBlock::begin(&mut [0; 20], 0, 5000, stamp(3, 9)).is_err());
    }
}
