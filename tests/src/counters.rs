//! Observations of shared counters by clients, and a check that some order of the operations
//! explains them. A file that workers map to count increments, so that the counts survive a killed
//! worker.

use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::path::Path;

use farside_fabric::memory::Region;

/// One completed operation on a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Observation {
    /// The number of the counter.
    pub counter: u64,
    /// The value of the counter after the increment, or the value that was read.
    pub value: u64,
    /// Whether the operation was an increment, which made this value.
    pub is_increment: bool,
    /// The time when the call began, by the clock of the observers' host, in nanoseconds.
    pub invoked_ns: u64,
    /// The time when the call returned, by the same clock, in nanoseconds.
    pub returned_ns: u64,
}

impl Observation {
    /// Returns the position in the only possible order: each increment, then the reads of its
    /// value.
    fn position(&self) -> u64 {
        self.value * 2 + u64::from(!self.is_increment)
    }
}

/// Checks that the observations of one host are linearizable. Every increment makes a different
/// value, so the values give the order. That order must agree with the clock.
///
/// # Errors
/// Two operations that contradict each other, or two increments that made the same value.
pub fn check(seen: &[Observation]) -> Result<(), String> {
    check_unique(seen.iter().filter(|seen| seen.is_increment).map(|s| (s.counter, s.value)))?;
    let counters: BTreeSet<u64> = seen.iter().map(|seen| seen.counter).collect();
    for counter in counters {
        let of_counter = || seen.iter().filter(|seen| seen.counter == counter);
        let (mut by_call, mut by_return): (Vec<&Observation>, Vec<&Observation>) =
            (of_counter().collect(), of_counter().collect());
        by_call.sort_by_key(|seen| seen.invoked_ns);
        by_return.sort_by_key(|seen| seen.returned_ns);
        let mut ended = by_return.into_iter().peekable();
        let mut highest: Option<&Observation> = None;
        for later in by_call {
            while let Some(earlier) = ended.next_if(|seen| seen.returned_ns < later.invoked_ns) {
                highest = highest.into_iter().chain([earlier]).max_by_key(|seen| seen.position());
            }
            if let Some(earlier) = highest
                && earlier.position() > later.position()
            {
                return Err(format!("{earlier:?} ended before {later:?} began"));
            }
        }
    }
    Ok(())
}

/// Checks that no two increments, of any hosts, made the same value of the same counter.
///
/// # Errors
/// The counter and the value that two increments made.
pub fn check_unique(increments: impl IntoIterator<Item = (u64, u64)>) -> Result<(), String> {
    let mut made = BTreeSet::new();
    for (counter, value) in increments {
        if !made.insert((counter, value)) {
            return Err(format!("two increments made counter {counter} be {value}"));
        }
    }
    Ok(())
}

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

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(value: u64, is_increment: bool, invoked_ns: u64, returned_ns: u64) -> Observation {
        Observation { counter: 1, value, is_increment, invoked_ns, returned_ns }
    }

    #[test]
    fn possible_histories_are_accepted() {
        let overlapping = [
            seen(1, true, 0, 50),
            seen(0, false, 10, 20),
            seen(1, false, 21, 30),
            seen(2, true, 5, 60),
            seen(2, false, 31, 40),
            Observation { counter: 2, ..seen(1, true, 100, 110) },
        ];
        assert_eq!(check(&overlapping), Ok(()));
    }

    #[test]
    fn impossible_histories_are_refused() {
        let lost_update = [seen(1, true, 0, 10), seen(1, true, 5, 20)];
        let stale_read = [seen(1, true, 0, 10), seen(0, false, 11, 20)];
        let going_back = [seen(3, false, 0, 10), seen(2, false, 11, 20)];
        let from_the_future = [seen(1, false, 0, 10), seen(1, true, 11, 20)];
        let late_increment = [seen(2, true, 0, 10), seen(1, true, 11, 20)];
        for history in [lost_update, stale_read, going_back, from_the_future, late_increment] {
            assert!(check(&history).is_err(), "{history:?}");
        }
    }
}
