//! Random changes of inputs, for the test `smoke`. libFuzzer makes its own changes.

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

/// Limit on the length of a changed input, in bytes. A longer one is truncated.
const BYTES_MAX: usize = 4096;
/// Limit on the changes of one input.
const CHANGES_MAX: u32 = 4;
/// Integers at the limits of types and of valid values.
const INTERESTING: [u64; 12] =
    [0, 1, 7, 0x20, 0x7f, 0x80, 0xff, 0x7fff, 0xffff, u32::MAX as u64, i64::MAX as u64, u64::MAX];

/// Changes inputs at random. The same seed makes the same changes.
pub struct Mutator {
    random: SmallRng,
}

impl Mutator {
    /// Starts with this seed.
    pub fn new(seed: u64) -> Self {
        Self { random: SmallRng::seed_from_u64(seed) }
    }

    /// Returns one of these inputs with up to `CHANGES_MAX` changes. A change may insert a piece of
    /// another input.
    ///
    /// # Panics
    /// If `inputs` is empty.
    pub fn next(&mut self, inputs: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = inputs[self.below(inputs.len())].clone();
        let other = &inputs[self.below(inputs.len())];
        for _ in 0..self.random.random_range(1..=CHANGES_MAX) {
            self.change(&mut bytes, other);
        }
        bytes.truncate(BYTES_MAX);
        bytes
    }

    /// Returns a random number below `end`, or 0 if `end` is 0.
    fn below(&mut self, end: usize) -> usize {
        self.random.random_range(0..end.max(1))
    }

    fn change(&mut self, bytes: &mut Vec<u8>, other: &[u8]) {
        let start = self.below(bytes.len());
        let end = (start + 1 + self.below(16)).min(bytes.len());
        match self.below(8) {
            0 | 1 if !bytes.is_empty() => bytes[start] ^= 1 << self.below(8),
            2 if !bytes.is_empty() => bytes[start] = self.random.random(),
            3 => self.overwrite(&mut bytes[start..]),
            4 => drop(bytes.drain(start.min(end)..end)),
            5 => {
                let piece = bytes[start.min(end)..end].to_vec();
                bytes.splice(start..start, piece);
            }
            6 => bytes.truncate(start),
            _ => {
                let from = self.below(other.len()).min(other.len());
                let to = (from + 1 + self.below(64)).min(other.len());
                let start = start.min(bytes.len());
                bytes.splice(start..start, other[from..to].iter().copied());
            }
        }
    }

    /// Overwrites the first 1, 2, 4 or 8 bytes with one of `INTERESTING`.
    fn overwrite(&mut self, bytes: &mut [u8]) {
        let integer = INTERESTING[self.below(INTERESTING.len())].to_le_bytes();
        let length = (1 << self.below(4)).min(bytes.len());
        bytes[..length].copy_from_slice(&integer[..length]);
    }
}
