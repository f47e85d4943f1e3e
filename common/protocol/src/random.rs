//! Random numbers, where it does no harm if they can be guessed.

use std::cell::Cell;

/// A generator of random numbers, xorshift64. They keep sessions from acting in step, and choose
/// samples.
#[derive(Debug)]
pub struct Random(pub(crate) Cell<u64>);

impl Random {
    /// A generator that begins with this seed.
    pub fn new(seed: u64) -> Self {
        Self(Cell::new(seed | 1))
    }

    /// Returns a number below `bound`; 0 if that is 0.
    pub fn below(&self, bound: u64) -> u64 {
        let mut state = self.0.get();
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        self.0.set(state);
        state % bound.max(1)
    }
}
