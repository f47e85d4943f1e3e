//! A file that workers map to keep book of increments, so that what they did outlives them.

use std::fs::OpenOptions;
use std::path::Path;

use farside::Session;
use farside_fabric::shm::Region;

/// How many counters there are.
pub const COUNTERS: u64 = 8;
/// How many processes write keys of their own in the restart test.
pub const WRITERS: u64 = 4;
/// How many keys each of them has.
pub const KEYS_PER_WRITER: u64 = 200;
const ENTRIES: u64 = COUNTERS + WRITERS * KEYS_PER_WRITER;

/// Which entry, behind those of the counters, belongs to a writer's key; it also names the key.
pub fn entry_of(writer: u64, key: u64) -> u64 {
    COUNTERS + writer * KEYS_PER_WRITER + key
}

/// Whether this step of a key removes it; the others store a value with the step's number.
pub fn is_removal(number: u64) -> bool {
    number > 0 && number.is_multiple_of(7)
}

/// For each counter how many increments were attempted and how many acknowledged. A worker that is
/// killed in between leaves an attempt that may or may not have happened.
pub struct Ledger {
    words: Region,
}

impl Ledger {
    /// Makes the file.
    pub fn create(path: &Path) {
        std::fs::write(path, vec![0; ENTRIES as usize * 16]).unwrap();
    }

    /// Maps it.
    pub fn open(path: &Path) -> Self {
        let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
        Self { words: Region::map(&file).unwrap() }
    }

    /// Whether every counter was used.
    pub fn is_used(&self) -> bool {
        (0..COUNTERS).all(|counter| self.bounds(counter).0 > 0)
    }

    /// That no increment of a shared counter was lost, and none happened twice.
    pub fn check_counters(&self, session: &mut Session) {
        for counter in 0..COUNTERS {
            let (acknowledged, attempted) = self.bounds(counter);
            let value = session.get(format!("counter {counter}").as_bytes()).unwrap();
            let number =
                value.map_or(0, |value| u64::from_le_bytes(value.data.try_into().unwrap()));
            assert!(acknowledged > 0, "counter {counter} was not used");
            assert!(
                (acknowledged..=attempted).contains(&number),
                "counter {counter} is {number}, possible is {acknowledged} to {attempted}"
            );
        }
    }

    /// An increment, or the next step of a key, is about to be tried; how many were before.
    pub fn attempt(&self, counter: u64) -> u64 {
        self.add(counter * 16, 1)
    }

    /// It did not happen.
    pub fn retract(&self, counter: u64) {
        self.add(counter * 16, u64::MAX);
    }

    /// It happened.
    pub fn acknowledge(&self, counter: u64) {
        self.add(counter * 16 + 8, 1);
    }

    /// Adds to a word, wrapping; returns the word found.
    fn add(&self, offset: u64, addend: u64) -> u64 {
        let mut expected = self.words.load(offset).unwrap();
        loop {
            let desired = expected.wrapping_add(addend);
            let found = self.words.compare_swap(offset, expected, desired).unwrap();
            if found == expected {
                return found;
            }
            expected = found;
        }
    }

    /// The step with this number happened to a key.
    pub fn acknowledge_as(&self, entry: u64, number: u64) {
        self.words.store(entry * 16 + 8, number).unwrap();
    }

    /// The least and the most increments that can have happened.
    pub fn bounds(&self, counter: u64) -> (u64, u64) {
        let at = |offset| self.words.load(counter * 16 + offset).unwrap();
        (at(8), at(0))
    }
}
