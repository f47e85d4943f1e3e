//! What a client knows of its server's clock.
//!
//! A chain's deadline is a time of the client's clock, and the server compares it with its own. So
//! the client converts it, and must never err to the later side. Each answer of the server has the
//! time of its clock, `server_ns`. When the answer arrives, at `at_ns` of the client's clock, the
//! server's clock reads at least that. From then on it may run up to a sixteenth slower than the
//! client's (`docs/protocol.md`, "Time").

use super::LATENESS_MAX_NS;
use crate::Nanos;

/// A clock may run slow or fast by a sixteenth of the time that has passed.
const DRIFT_DIVISOR: Nanos = 16;
/// How long a bound is used. Its possible error is then a quarter of the time that a chain has.
const AGE_NS_MAX: Nanos = LATENESS_MAX_NS / 4 * DRIFT_DIVISOR;

/// A lower bound of the server's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ClockBound {
    server_ns: Nanos,
    at_ns: Nanos,
}

impl ClockBound {
    /// The bound by an answer with the time `server_ns` that arrived at `now`.
    pub(super) fn new(server_ns: Nanos, now: Nanos) -> Self {
        Self { server_ns, at_ns: now }
    }

    /// The least that the server's clock reads when the client's clock reads `time`.
    #[inline]
    pub(super) fn at(&self, time: Nanos) -> Nanos {
        let passed = time.saturating_sub(self.at_ns);
        self.server_ns.saturating_add(passed - passed / DRIFT_DIVISOR)
    }

    /// Takes over the bound of another answer, if it is the better one. An answer that this session
    /// read late gives a bad one.
    #[inline]
    pub(super) fn improve(&mut self, server_ns: Nanos, now: Nanos) {
        if server_ns >= self.at(now) {
            *self = Self::new(server_ns, now);
        }
    }

    /// Whether the bound is too old for another deadline.
    #[inline]
    pub(super) fn is_old(&self, now: Nanos) -> bool {
        now.saturating_sub(self.at_ns) > AGE_NS_MAX
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Whatever the clocks' rates, the delay of the answer and the time since: a deadline is
        /// never converted to a time of the server that comes after it.
        #[test]
        fn a_deadline_is_never_converted_to_a_later_time(
            offset in 0u64..1 << 50,
            delay in 0u64..2_000_000_000,
            passed in 0u64..100_000_000_000,
            rate in 15u64..=17,
        ) {
            let received = 5_000_000_000;
            // The server's clock when the answer arrives, and at the deadline.
            let at_arrival = (1u64 << 40) + offset;
            let bound = ClockBound::new(at_arrival - delay, received);
            let at_deadline = at_arrival + passed * rate / 16;
            prop_assert!(bound.at(received + passed) <= at_deadline + 1);
        }

        /// `improve` keeps whichever bound is higher.
        #[test]
        fn the_better_bound_stays(server_ns in 0u64..1 << 40, later in 0u64..1 << 40) {
            let mut bound = ClockBound::new(server_ns, 1000);
            let before = bound.at(2000);
            bound.improve(later, 2000);
            prop_assert_eq!(bound.at(2000), before.max(later));
        }
    }

    #[test]
    fn a_bound_ages() {
        let bound = ClockBound::new(0, 0);
        assert!(!bound.is_old(AGE_NS_MAX) && bound.is_old(AGE_NS_MAX + 1));
        // The error of the oldest bound, and what is left to a chain.
        let deadline = AGE_NS_MAX + LATENESS_MAX_NS;
        assert!(bound.at(deadline) >= AGE_NS_MAX + LATENESS_MAX_NS / 16 * 10);
    }
}
