//! The schedule of a run with a target rate: when each operation is due.
//!
//! A latency counts from when the operation was due, so it includes the wait for slow operations
//! before it. This avoids coordinated omission.

use std::time::Duration;

use clap::ValueEnum;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use crate::accounting::now_ns;

/// The process by which operations become due.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Arrivals {
    /// At fixed intervals
    Fixed,
    /// Independently: a Poisson process, with exponential intervals
    Poisson,
}

impl Arrivals {
    /// The name in results.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fixed => "fixed",
            Self::Poisson => "poisson",
        }
    }
}

/// The times at which one thread's operations are due.
#[derive(Clone, Debug)]
pub struct Schedule {
    arrivals: Arrivals,
    interval_ns: f64,
    /// The time from the start to the first operation. It differs between threads, so they take
    /// turns.
    offset_ns: f64,
    random: SmallRng,
    started_ns: u64,
    /// When the next operation is due, from the start.
    next_ns: f64,
}

/// A thread with a longer wait than this sleeps, in nanoseconds. It asks to be woken half of this
/// time before the operation is due, because the system wakes it late.
const SLEEP_NS_MIN: u64 = 200_000;
/// Limit on one sleep, in nanoseconds, so that the thread notices the end of the phase.
const SLEEP_NS_MAX: u64 = 5_000_000;

impl Schedule {
    /// The schedule of one of `threads` threads, which together start `target_ops_s` operations a
    /// second.
    pub fn new(
        arrivals: Arrivals,
        target_ops_s: f64,
        (thread, threads): (u64, u64),
        seed: u64,
    ) -> Self {
        let interval_ns = 1e9 / target_ops_s * threads as f64;
        let offset_ns = interval_ns * thread as f64 / threads as f64;
        let random = SmallRng::seed_from_u64(!seed);
        Self { arrivals, interval_ns, offset_ns, random, started_ns: 0, next_ns: 0.0 }
    }

    /// Starts the schedule.
    pub fn start(&mut self, now_ns: u64) {
        self.started_ns = now_ns;
        self.next_ns = self.offset_ns;
        if self.arrivals == Arrivals::Poisson {
            self.next_ns = 0.0;
            self.advance();
        }
    }

    /// When the next operation is due.
    #[inline]
    pub fn due_ns(&self) -> u64 {
        self.started_ns + self.next_ns as u64
    }

    /// Makes the following operation the next one.
    #[inline]
    pub fn advance(&mut self) {
        let intervals = match self.arrivals {
            Arrivals::Fixed => 1.0,
            Arrivals::Poisson => {
                let u: f64 = self.random.random();
                // u is at least 0 and below 1, so the logarithm is finite.
                -(1.0 - u).ln()
            }
        };
        self.next_ns += self.interval_ns * intervals;
    }

    /// Waits until the next operation is due, and returns the time after the wait; `None` if the
    /// phase ends before that.
    pub fn wait(&self, go_on: impl Fn() -> bool) -> Option<u64> {
        let due = self.due_ns();
        loop {
            let now = now_ns();
            if !go_on() {
                return None;
            }
            let left = due.saturating_sub(now);
            match left {
                0 => return Some(now),
                SLEEP_NS_MIN.. => {
                    let nap = (left - SLEEP_NS_MIN / 2).min(SLEEP_NS_MAX);
                    std::thread::sleep(Duration::from_nanos(nap));
                }
                _ => std::hint::spin_loop(),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The times within one second at which operations are due, from its start.
    fn second(arrivals: Arrivals, target_ops_s: f64, threads: u64) -> Vec<u64> {
        let mut all = Vec::new();
        for thread in 0..threads {
            let mut schedule = Schedule::new(arrivals, target_ops_s, (thread, threads), thread);
            schedule.start(1000);
            while schedule.due_ns() < 1_000_001_000 {
                all.push(schedule.due_ns() - 1000);
                schedule.advance();
            }
        }
        all.sort_unstable();
        all
    }

    #[test]
    fn threads_take_turns_at_fixed_intervals() {
        let all = second(Arrivals::Fixed, 1000.0, 4);
        assert_eq!(all.len(), 1000);
        assert!(all.windows(2).all(|pair| pair[1] - pair[0] == 1_000_000), "{all:?}");
    }

    #[test]
    fn poisson_arrivals_have_the_rate_and_exponential_intervals() {
        let all = second(Arrivals::Poisson, 100_000.0, 4);
        // Three standard deviations.
        assert!((all.len() as f64 - 100_000.0).abs() < 950.0, "{}", all.len());
        let intervals: Vec<f64> = all.windows(2).map(|pair| (pair[1] - pair[0]) as f64).collect();
        for multiple in [0.1, 1.0, 3.0] {
            let longer = intervals.iter().filter(|interval| **interval > multiple * 10_000.0);
            let share = longer.count() as f64 / intervals.len() as f64;
            assert!((share - (-multiple).exp()).abs() < 0.01, "{multiple}: {share}");
        }
    }

    #[test]
    fn a_wait_ends_when_the_operation_is_due_or_the_phase_ends() {
        let mut schedule = Schedule::new(Arrivals::Fixed, 1000.0, (0, 1), 1);
        schedule.start(now_ns());
        schedule.advance();
        assert!(schedule.wait(|| true).unwrap() >= schedule.due_ns());
        assert_eq!(schedule.wait(|| false), None);
    }
}
