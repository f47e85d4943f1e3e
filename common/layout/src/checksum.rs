//! What tells whole content from mixtures and damage: of blocks, and of what the drivers of
//! `farside-bench` keep.

use xxhash_rust::xxh3::xxh3_64;

/// Content of so many bytes or more has a CRC-32, shorter the low half of its XXH3-64.
pub(crate) const CRC_BYTES_MIN: usize = 1024;

/// The checksum from this start; from two starts the same content has two checksums. Each kind
/// where it is the faster one (docs/decisions/0008).
#[inline]
pub fn checksum(content: &[u8], start: u32) -> u32 {
    if content.len() < CRC_BYTES_MIN {
        return xxh3_64(content) as u32 ^ start;
    }
    let mut hasher = crc32fast::Hasher::new_with_initial(start);
    hasher.update(content);
    hasher.finalize()
}
