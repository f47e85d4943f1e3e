//! A file that workers map to keep book of increments, so that what they did outlives them.

use std::fs::OpenOptions;
use std::path::Path;

use farside_fabric::shm::Region;

/// How many counters there are.
pub const COUNTERS: u64 = 8;

/// For each counter how many increments were attempted and how many acknowledged. A worker that is
/// killed in between leaves an attempt that may or may not have happened.
pub struct Ledger {
    words: Region,
}

impl Ledger {
    /// Makes the file.
    pub fn create(path: &Path) {
        std::fs::write(path, vec![0; COUNTERS as usize * 16]).unwrap();
    }

    /// Maps it.
    pub fn open(path: &Path) -> Self {
        let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
        Self { words: Region::map(&file).unwrap() }
    }

    /// An increment is about to be tried.
    pub fn attempt(&self, counter: u64) {
        self.add(counter * 16, 1);
    }

    /// It did not happen.
    pub fn retract(&self, counter: u64) {
        self.add(counter * 16, u64::MAX);
    }

    /// It happened.
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

    /// The least and the most increments that can have happened.
    pub fn bounds(&self, counter: u64) -> (u64, u64) {
        let at = |offset| self.words.load(counter * 16 + offset).unwrap();
        (at(8), at(0))
    }
}
