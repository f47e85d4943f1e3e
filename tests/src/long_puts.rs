//! Long values that workers store until they are killed, and what the ledger of their PUTs says.
//!
//! Each worker has keys of its own, and all workers store one further key. A value is a piece of
//! one random text, which begins at another place for each key and number. So two values differ in
//! every extent, and no process has to make a value before it can compare or store it.

use std::path::Path;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::ledger::Ledger;

/// The number of workers that store values at the same time.
pub const WORKERS: u64 = 2;
/// The lengths of a worker's values, in the order of its counters. Values of [`SHARED`] have the
/// last one.
const LENGTHS: [usize; 3] = [(8 << 20) + 1, (11 << 20) + 777, 16 << 20];
/// The number of counters of a worker: one for each of its own keys, and one for its PUTs of
/// [`SHARED`].
pub const COUNTERS_EACH: u64 = LENGTHS.len() as u64;
/// The key that all workers store.
pub const SHARED: &str = "shared";
/// The number of places at which values begin.
const PLACES: usize = 1 << 14;
const SEED: u64 = 7;

/// The text whose pieces are the values.
pub struct LongValues(Vec<u8>);

impl LongValues {
    /// Makes the text, and writes it to a file for the workers.
    pub fn create(path: &Path) -> Self {
        let mut text = vec![0; LENGTHS[LENGTHS.len() - 1] + 8 * PLACES];
        SmallRng::seed_from_u64(SEED).fill_bytes(&mut text);
        std::fs::write(path, &text).unwrap();
        Self(text)
    }

    /// Reads the text.
    pub fn open(path: &Path) -> Self {
        Self(std::fs::read(path).unwrap())
    }

    /// Returns the value with this number that a worker stores for one of its counters.
    pub fn value(&self, counter: u64, number: u64) -> &[u8] {
        let place = (number * WORKERS * COUNTERS_EACH + counter) as usize % PLACES;
        &self.0[8 * place..][..LENGTHS[(counter % COUNTERS_EACH) as usize]]
    }
}

/// Returns the counters of a worker.
pub fn counters_of(worker: u64) -> std::ops::Range<u64> {
    worker * COUNTERS_EACH..(worker + 1) * COUNTERS_EACH
}

/// Returns the key that the PUTs of a counter store.
pub fn key_of(counter: u64) -> String {
    let is_shared = counter % COUNTERS_EACH == COUNTERS_EACH - 1;
    if is_shared { SHARED.to_owned() } else { format!("key {counter}") }
}

/// Returns whether a PUT of this counter has begun and not ended.
pub fn is_in_flight(ledger: &Ledger, counter: u64) -> bool {
    let (done, begun) = ledger.bounds(counter);
    done != begun
}
