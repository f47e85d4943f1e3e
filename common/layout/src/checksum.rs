//! Checksums that tell whole content from mixtures and damage, in blocks and in the entries of the
//! published protocols that `farside-bench-compare` drives.

use xxhash_rust::xxh3::xxh3_64;

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
    let mut sum = LongChecksum::new(seed);
    sum.add(content);
    sum.end()
}

/// The checksum of content of [`CRC_BYTES_MIN`] bytes or more, which comes in parts.
#[derive(Clone, Debug)]
pub(crate) struct LongChecksum(crc32fast::Hasher);

impl LongChecksum {
    #[inline]
    pub(crate) fn new(seed: u32) -> Self {
        Self(crc32fast::Hasher::new_with_initial(seed))
    }

    #[inline]
    pub(crate) fn add(&mut self, part: &[u8]) {
        self.0.update(part);
    }

    /// The CRC-32 so far.
    pub(crate) fn so_far(&self) -> u32 {
        self.0.clone().finalize()
    }

    /// Adds bytes, after which the CRC-32 is this one.
    pub(crate) fn set(&mut self, so_far: u32) {
        self.0 = crc32fast::Hasher::new_with_initial(so_far);
    }

    #[inline]
    pub(crate) fn end(self) -> u32 {
        self.0.finalize()
    }
}
