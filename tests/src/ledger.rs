//! A file that workers map to count increments, so that the counts survive a killed worker.

use std::fs::OpenOptions;
use std::path::Path;

use farside_fabric::memory::Region;

/// The number of counters.
pub const COUNTERS: u64 = 8;

/// For each counter the number of increments attempted and the number acknowledged. A worker killed
/// between the two leaves an attempt that may or may not have happened.
pub struct Ledger {
    words: Region,
}

impl Ledger {
    /// Creates the file.
    pub fn create(path: &Path) {
        std::fs::write(path, vec![0; COUNTERS as usize * 16]).unwrap();
    }

    /// Maps the file.
    pub fn open(path: &Path) -> Self {
        let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
        Self { words: Region::map(&file).unwrap() }
    }

    /// Counts an attempt, before the increment.
    pub fn attempt(&self, counter: u64) {
        self.add(counter * 16, 1);
    }

    /// Takes back an attempt that certainly failed.
    pub fn retract(&self, counter: u64) {
        self.add(counter * 16, u64::MAX);
    }

    /// Counts an attempt that certainly succeeded.
    pub fn acknowledge(&self, counter: u64) {
        self.add(counter * 16 + 8, 1);
    }

    /// Adds to a word, wrapping.
    fn add(&self, offset: u64, addend: u64) {
        let mut expected = self.words.load(offset).unwrap();
        loop {
            let desired = expected.wrapping_add(addend);
            let found = self.words.compare_swap(offset, expected, desired).unwrap();
            if found == expected {
                return;
            }
            expected = found;
        }
    }

    /// Returns the minimum and the maximum number of increments that can have happened.
    pub fn bounds(&self, counter: u64) -> (u64, u64) {
        let word = |offset| self.words.load(counter * 16 + offset).unwrap();
        (word(8), word(0))
    }
}
