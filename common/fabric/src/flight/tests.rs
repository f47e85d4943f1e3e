//! The budget on simulated links, in virtual time: deterministic, and without sleeps.
//!
//! Guards against two former bugs. Bytes in flight had no bound, so on a slow link chains queued
//! for seconds. READs came too late to be believed, and a change took effect after its bound. And
//! each completion restarted the age of a change.

use std::collections::VecDeque;

use super::*;

const SECOND: Nanos = 1_000_000_000;
const MS: Nanos = 1_000_000;
/// 7/8 of the default GRACE.
const PATIENCE: Nanos = 87_500_000;
/// The rate of a slow link, in bytes a second.
const SLOW: u64 = 25_000_000;
/// The length of a large value, in bytes.
const VALUE: u64 = 512 << 10;
/// The time from the end of a chain's transfer to its completion.
const ROUND_TRIP: Nanos = 100_000;

/// A link that transfers one chain after another, and lanes that post a chain when one has
/// completed.
struct Link {
    flight: Flight,
    now: Nanos,
    bytes_per_s: u64,
    free_at: Nanos,
    /// The chains in flight: lane, bytes, when the chain left, and when it completes.
    carried: VecDeque<(LaneId, u64, Nanos, Nanos)>,
}

/// The observations of the lanes.
#[derive(Debug, Default)]
struct Seen {
    bytes: u64,
    took_max: Nanos,
    chains_max: usize,
}

impl Link {
    fn new(bytes_per_s: u64) -> Self {
        let mut flight = Flight::new(1024);
        flight.set_patience(PATIENCE);
        Self { flight, now: SECOND, bytes_per_s, free_at: 0, carried: VecDeque::new() }
    }

    /// Runs the lanes, each of which always has a chain of this length to post.
    fn run(&mut self, depth: u16, bytes: u64, until: Nanos) -> Seen {
        let mut seen = Seen::default();
        let busy: Vec<_> = self.carried.iter().map(|(lane, ..)| *lane).collect();
        let mut ready: VecDeque<_> =
            (0..depth).map(LaneId).filter(|lane| !busy.contains(lane)).collect();
        while self.now < until {
            while self.flight.admits(0)
                && let Some(lane) = ready.pop_front()
            {
                self.flight.leave(lane, bytes, false, || self.now);
                let takes = u128::from(bytes) * u128::from(SECOND) / u128::from(self.bytes_per_s);
                self.free_at = self.free_at.max(self.now) + takes as Nanos;
                self.carried.push_back((lane, bytes, self.now, self.free_at + ROUND_TRIP));
            }
            seen.chains_max = seen.chains_max.max(self.carried.len());
            let (lane, bytes, left_at, at) = self.carried.pop_front().unwrap();
            self.now = self.now.max(at);
            self.flight.arrive(lane, bytes, false, || self.now);
            seen.bytes += bytes;
            seen.took_max = seen.took_max.max(self.now - left_at);
            ready.push_back(lane);
        }
        seen
    }
}

#[test]
fn a_slow_link_is_busy_and_no_chain_queues_for_long() {
    for depth in [1, 4, 16, 64, 256, 1024] {
        let mut link = Link::new(SLOW);
        let begun = link.now;
        let first = link.run(depth, VALUE, begun + SECOND);
        // This includes the chains that leave before the link's rate is known.
        assert!(first.took_max < PATIENCE, "{depth} lanes at first: {first:?}");
        let (begun, seen) = (link.now, link.run(depth, VALUE, begun + 20 * SECOND));
        let capacity = SLOW * (link.now - begun) / SECOND;
        assert!(seen.bytes >= capacity * 85 / 100, "{depth} lanes: {seen:?} of {capacity}");
        // The next value queues while one is transferred.
        assert!(depth == 1 || seen.chains_max == 2, "{depth} lanes: {seen:?}");
        // The bytes in flight when a chain leaves take no longer than a third of patience.
        let transfer = VALUE * SECOND / SLOW;
        assert!(seen.took_max <= PATIENCE / 3 + 2 * transfer, "{depth} lanes: {seen:?}");
    }
}

#[test]
fn small_chains_on_a_fast_link_are_never_held_back() {
    for (bytes_per_s, bytes) in [(12_500_000_000, 64), (12_500_000_000, 512), (1_000_000_000, 64)] {
        let mut link = Link::new(bytes_per_s);
        let seen = link.run(1024, bytes, 2 * SECOND);
        assert_eq!(seen.chains_max, 1024, "{bytes} bytes at {bytes_per_s}");
    }
}

#[test]
fn a_fast_link_is_busy_after_some_round_trips() {
    let mut link = Link::new(12_500_000_000);
    link.run(1024, VALUE, SECOND + 10 * MS);
    let (begun, seen) = (link.now, link.run(1024, VALUE, 2 * SECOND));
    assert!(seen.bytes >= 12 * (link.now - begun), "{seen:?}");
}

#[test]
fn the_budget_follows_a_link_that_becomes_slow_and_fast_again() {
    let mut link = Link::new(12_500_000_000);
    link.run(256, VALUE, 2 * SECOND);
    link.bytes_per_s = SLOW;
    // Leaves out the chains that leave before the budget has followed the link's rate.
    link.run(256, VALUE, 5 * SECOND);
    let seen = link.run(256, VALUE, 10 * SECOND);
    assert!(seen.took_max < PATIENCE, "{seen:?}");
    link.bytes_per_s = 12_500_000_000;
    link.run(256, VALUE, 11 * SECOND);
    let (begun, seen) = (link.now, link.run(256, VALUE, 12 * SECOND));
    assert!(seen.bytes >= 12 * (link.now - begun), "{seen:?}");
}

/// The budget stays within its bounds for any measured time, also by a wrong clock.
#[test]
fn one_chain_may_always_leave() {
    let mut flight = Flight::new(2);
    flight.set_patience(0);
    for took in [0, 1, SECOND, u64::MAX / 2] {
        for _ in 0..100 {
            assert!(flight.admits(0));
            flight.leave(LaneId(0), u64::from(u32::MAX), false, || 0);
            assert!(!flight.admits(0));
            flight.arrive(LaneId(0), u64::from(u32::MAX), false, || took);
        }
        assert!((BYTES_MIN..=BYTES_MAX).contains(&flight.budget_bytes));
    }
}

#[test]
fn a_completion_does_not_restart_the_age_of_a_change() {
    let mut flight = Flight::new(8);
    let age_max = 7 * SECOND;
    flight.leave(LaneId(0), 64, false, || 0);
    flight.leave(LaneId(1), 64, true, || SECOND);
    flight.leave(LaneId(2), 64, false, || SECOND);
    flight.leave(LaneId(3), 64, true, || 3 * SECOND);
    flight.arrive(LaneId(0), 64, false, || 7 * SECOND);
    assert!(!flight.has_change_older_than(age_max, 8 * SECOND));
    assert!(flight.has_change_older_than(age_max, 8 * SECOND + 1), "a READ completed meanwhile");
    flight.arrive(LaneId(1), 64, true, || 9 * SECOND);
    flight.arrive(LaneId(2), 64, false, || 9 * SECOND);
    assert!(!flight.has_change_older_than(age_max, 10 * SECOND), "the next one left later");
    assert!(flight.has_change_older_than(age_max, 10 * SECOND + 1));
    flight.arrive(LaneId(3), 64, true, || 11 * SECOND);
    flight.leave(LaneId(0), 64, false, || 0);
    assert!(!flight.has_change_older_than(age_max, 99 * SECOND), "a READ has no bound");
    flight.leave(LaneId(4), 64, true, || 0);
    flight.clear();
    assert!(!flight.has_change_older_than(age_max, 99 * SECOND));
}
