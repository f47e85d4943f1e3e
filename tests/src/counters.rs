//! What clients saw of shared counters, and whether some order of it explains all of it.

use std::collections::BTreeSet;

/// One operation on a counter that came to an end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// Which counter.
    pub counter: u64,
    /// What the counter was: after an increment, or when it was read.
    pub value: u64,
    /// Whether this made it so.
    pub is_increment: bool,
    /// When the call began, by the clock of the observers' host. Nanoseconds.
    pub invoked_ns: u64,
    /// When it returned.
    pub returned_ns: u64,
}

impl Seen {
    /// Where it stands in the only order there can be: an increment, then the reads of its value.
    fn position(&self) -> u64 {
        self.value * 2 + u64::from(!self.is_increment)
    }
}

/// Why what was seen on one host is not linearizable. As every increment makes a value of its own,
/// the values give the order, and it only has to agree with the clock.
///
/// # Errors
/// The first two operations that contradict each other.
pub fn check(seen: &[Seen]) -> Result<(), String> {
    check_unique(seen.iter().filter(|seen| seen.is_increment).map(|s| (s.counter, s.value)))?;
    let counters: BTreeSet<u64> = seen.iter().map(|seen| seen.counter).collect();
    for counter in counters {
        let of = || seen.iter().filter(|seen| seen.counter == counter);
        let (mut by_call, mut by_return): (Vec<&Seen>, Vec<&Seen>) =
            (of().collect(), of().collect());
        by_call.sort_by_key(|seen| seen.invoked_ns);
        by_return.sort_by_key(|seen| seen.returned_ns);
        let mut ended = by_return.into_iter().peekable();
        let mut last: Option<&Seen> = None;
        for later in by_call {
            while let Some(earlier) = ended.next_if(|seen| seen.returned_ns < later.invoked_ns) {
                last = last.into_iter().chain([earlier]).max_by_key(|seen| seen.position());
            }
            if let Some(earlier) = last
                && earlier.position() > later.position()
            {
                return Err(format!("{earlier:?} ended before {later:?} began"));
            }
        }
    }
    Ok(())
}

/// That no two increments, of whatever hosts, made the same value of the same counter.
///
/// # Errors
/// The counter and the value.
pub fn check_unique(increments: impl IntoIterator<Item = (u64, u64)>) -> Result<(), String> {
    let mut made = BTreeSet::new();
    for (counter, value) in increments {
        if !made.insert((counter, value)) {
            return Err(format!("two increments made counter {counter} be {value}"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(value: u64, is_increment: bool, invoked_ns: u64, returned_ns: u64) -> Seen {
        Seen { counter: 1, value, is_increment, invoked_ns, returned_ns }
    }

    #[test]
    fn what_can_be_is_accepted() {
        let overlapping = [
            seen(1, true, 0, 50),
            seen(0, false, 10, 20),
            seen(1, false, 21, 30),
            seen(2, true, 5, 60),
            seen(2, false, 31, 40),
            Seen { counter: 2, ..seen(1, true, 100, 110) },
        ];
        assert_eq!(check(&overlapping), Ok(()));
    }

    #[test]
    fn what_cannot_be_is_refused() {
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
