//! Self-describing values: each begins with its key, its writer and a count, which determine all
//! its bytes. So a test recognizes a value of another key, and a mixture of two values.
//!
//! Also long values that workers store until they are killed, and what the ledger of their PUTs
//! says. Each worker has keys of its own, and all workers store one further key. A value is a piece
//! of one random text, which begins at another place for each key and number. So two values differ
//! in every extent, and no process has to make a value before it can compare or store it.

use std::path::Path;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::counters::Ledger;

/// Returns a value of `bytes` bytes for a key, the `count`-th that `writer` makes. It has at least
/// [`HEADER_BYTES`] bytes.
pub fn value(key: u64, writer: u64, count: u64, bytes: usize) -> Vec<u8> {
    let mut value: Vec<u8> = [key, writer, count].into_iter().flat_map(u64::to_le_bytes).collect();
    let mut state = seed(key, writer, count);
    while value.len() < bytes {
        state = step(state);
        value.extend_from_slice(&(state ^ state >> 32).to_le_bytes());
    }
    value.truncate(bytes.max(HEADER_BYTES));
    value
}

/// The length of the key, writer and count at the start of a value.
pub const HEADER_BYTES: usize = 24;

/// Returns the count in a value that some writer made for this key; `None` if no writer did.
pub fn count_in(key: u64, bytes: &[u8]) -> Option<u64> {
    let count = bytes.get(16..HEADER_BYTES)?.try_into().ok()?;
    holds(key, bytes).then(|| u64::from_le_bytes(count))
}

/// Whether the bytes are exactly a value that some writer made for this key.
pub fn holds(key: u64, bytes: &[u8]) -> bool {
    let (numbers, _) = bytes.as_chunks::<8>();
    let [found_key, writer, count] =
        [0, 1, 2].map(|at| numbers.get(at).map(|n| u64::from_le_bytes(*n)));
    let (Some(found_key), Some(writer), Some(count)) = (found_key, writer, count) else {
        return false;
    };
    found_key == key && bytes == value(key, writer, count, bytes.len())
}

fn seed(key: u64, writer: u64, count: u64) -> u64 {
    [key, writer, count].into_iter().fold(1, |state, n| step(state ^ n))
}

fn step(state: u64) -> u64 {
    state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407)
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_holds_for_its_key_only_and_unchanged() {
        let good = value(7, 1, 2, 100);
        assert!(holds(7, &good));
        assert_eq!(
            (count_in(7, &good), count_in(8, &good), count_in(7, b"")),
            (Some(2), None, None)
        );
        assert!(!holds(8, &good));
        assert!(!holds(7, &good[..20]));
        for at in 0..good.len() {
            let mut torn = good.clone();
            torn[at] ^= 1;
            assert!(!holds(7, &torn), "byte {at}");
        }
    }
}
