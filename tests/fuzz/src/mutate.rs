//! Random changes of bytes, for the test `smoke`. libFuzzer has its own.

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

/// Inputs get no longer than this, in bytes.
const BYTES_MAX: usize = 4096;
/// The most changes of one input.
const CHANGES_MAX: u32 = 4;
/// Integers at which something tends to change.
const INTERESTING: [u64; 12] =
    [0, 1, 7, 0x20, 0x7f, 0x80, 0xff, 0x7fff, 0xffff, u32::MAX as u64, i64::MAX as u64, u64::MAX];

/// Changes bytes at random. A seed decides everything.
pub struct Mutator {
    random: SmallRng,
}

impl Mutator {
    /// The mutator of this seed.
    pub fn new(seed: u64) -> Self {
        Self { random: SmallRng::seed_from_u64(seed) }
    }

    /// One of these inputs, changed once or a few times, maybe with a piece of another.
    ///
    /// # Panics
    /// Without any inputs.
    pub fn next(&mut self, inputs: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = inputs[self.below(inputs.len())].clone();
        let other = &inputs[self.below(inputs.len())];
        for _ in 0..self.random.random_range(1..=CHANGES_MAX) {
            self.change(&mut bytes, other);
        }
        bytes.truncate(BYTES_MAX);
        bytes
    }

    /// A number below `end`; 0 if there is none.
    fn below(&mut self, end: usize) -> usize {
        self.random.random_range(0..end.max(1))
    }

    fn change(&mut self, bytes: &mut Vec<u8>, other: &[u8]) {
        let at = self.below(bytes.len());
        let behind = (at + 1 + self.below(16)).min(bytes.len());
        match self.below(8) {
            0 | 1 if !bytes.is_empty() => bytes[at] ^= 1 << self.below(8),
            2 if !bytes.is_empty() => bytes[at] = self.random.random(),
            3 => self.overwrite(&mut bytes[at..]),
            4 => drop(bytes.drain(at.min(behind)..behind)),
            5 => {
                let piece = bytes[at.min(behind)..behind].to_vec();
                bytes.splice(at..at, piece);
            }
            6 => bytes.truncate(at),
            _ => {
                let from = self.below(other.len()).min(other.len());
                let to = (from + 1 + self.below(64)).min(other.len());
                let at = at.min(bytes.len());
                bytes.splice(at..at, other[from..to].iter().copied());
            }
        }
    }

    /// An interesting integer of 1, 2, 4 or 8 bytes.
    fn overwrite(&mut self, bytes: &mut [u8]) {
        let integer = INTERESTING[self.below(INTERESTING.len())].to_le_bytes();
        let length = (1 << self.below(4)).min(bytes.len());
        bytes[..length].copy_from_slice(&integer[..length]);
    }
}
