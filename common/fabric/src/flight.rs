//! Flow control: the chains that a queue pair has in flight, and the budget of their bytes.
//!
//! A device accepts any number of chains at once and transfers them one after the other, so a
//! chain's round trip includes the bytes queued before it. On a slow link, deep pipelines of large
//! values queue for longer than operations believe what they READ (invariant I3). Each READ comes
//! too late and is posted again. So the bytes in flight have a budget. Chains above it wait in the
//! session. A chain's age counts from when it leaves.
//!
//! The budget follows the link's rate. One chain at a time is timed, from its
//! doorbell to its completion. If the bytes in flight took less time than the queue may take, the
//! budget grows by this ratio, otherwise it shrinks. One step at most doubles or halves it. A slow
//! link makes the budget small. Sessions that share a link make each other's budgets small.
//!
//! Chains of a queue pair complete in the order of their doorbells, so the oldest one that changes
//! the region is the first in a queue. Its age bounds how late such a chain takes effect ("Time" in
//! `docs/protocol.md`).

use std::collections::VecDeque;

use super::{LaneId, Nanos};

/// The budget of a new connection. On a slow link of 25 MB/s it takes 42 ms.
const BYTES_AT_FIRST: u64 = 1 << 20;
/// The smallest budget: a thousand chains of 64 bytes. With fewer bytes in flight no chain is
/// timed, which saves two readings of the clock.
const BYTES_MIN: u64 = 64 << 10;
/// The largest budget, which occupies a link of 400 Gb/s for 0.3 ms. A larger one gains nothing,
/// and its queue takes longer to drain when a link becomes slow.
const BYTES_MAX: u64 = 16 << 20;
/// The time that the queue may take in a session without patience of its own.
const QUEUE_NS: Nanos = 10_000_000;
/// The queue may take an operation's patience divided by this. With 3, a second value of 512
/// KiB can queue behind the first at 25 MB/s, so that the link is not idle while one is copied.
const PATIENCE_PARTS: Nanos = 3;

/// The chains of one queue pair that the device has.
pub struct Flight {
    /// The chains' bytes.
    bytes: u64,
    budget_bytes: u64,
    /// The time that the queue may take.
    queue_ns: Nanos,
    timed: Option<Timed>,
    /// The lanes whose chains change the region, and when they left; the oldest first.
    changes: VecDeque<(LaneId, Nanos)>,
}

/// A chain that is timed.
#[derive(Clone, Copy)]
struct Timed {
    lane: LaneId,
    left_at: Nanos,
    /// The bytes in flight when the chain left, including its own.
    bytes: u64,
}

impl Flight {
    /// A queue pair without chains in flight, and with room for the chains of `lanes` lanes.
    pub fn new(lanes: u16) -> Self {
        Self {
            bytes: 0,
            budget_bytes: BYTES_AT_FIRST,
            queue_ns: QUEUE_NS,
            timed: None,
            changes: VecDeque::with_capacity(lanes.into()),
        }
    }

    /// Sets for how long operations believe what they READ.
    pub fn set_patience(&mut self, patience: Nanos) {
        self.queue_ns = (patience / PATIENCE_PARTS).max(1);
    }

    /// Whether the next chain may leave if `more_bytes` more bytes are in flight. A single chain
    /// always may, of any length.
    #[inline]
    pub fn admits(&self, more_bytes: u64) -> bool {
        self.bytes + more_bytes < self.budget_bytes
    }

    /// Whether the next chain may leave if only `bytes` bytes are in flight.
    #[inline]
    pub fn admits_all(&self, bytes: u64) -> bool {
        bytes < self.budget_bytes
    }

    /// Adds the chain of a lane, which leaves now.
    #[inline]
    pub fn leave(
        &mut self,
        lane: LaneId,
        bytes: u64,
        changes: bool,
        mut now: impl FnMut() -> Nanos,
    ) {
        self.bytes += bytes;
        if changes {
            self.changes.push_back((lane, now()));
        }
        if self.bytes >= BYTES_MIN && self.timed.is_none() {
            self.timed = Some(Timed { lane, left_at: now(), bytes: self.bytes });
        }
    }

    /// Removes the chain of a lane, which completed now, with or without an error.
    #[inline]
    pub fn arrive(&mut self, lane: LaneId, bytes: u64, changes: bool, now: impl FnOnce() -> Nanos) {
        self.bytes = self.bytes.saturating_sub(bytes);
        if changes && let Some(at) = self.changes.iter().position(|(owner, _)| *owner == lane) {
            // The chain is the first one, unless the connection is broken.
            self.changes.remove(at);
        }
        if let Some(timed) = self.timed.filter(|timed| timed.lane == lane) {
            self.timed = None;
            self.adapt(timed.bytes, now().saturating_sub(timed.left_at));
        }
    }

    /// Removes all chains.
    pub fn clear(&mut self) {
        self.bytes = 0;
        self.timed = None;
        self.changes.clear();
    }

    /// Whether a chain that changes the region has been in flight for longer than `age_max`.
    #[inline]
    pub fn has_change_older_than(&self, age_max: Nanos, now: Nanos) -> bool {
        self.changes.front().is_some_and(|(_, left_at)| now.saturating_sub(*left_at) > age_max)
    }

    /// Adapts the budget to a link that took the time `took` for `bytes` bytes.
    fn adapt(&mut self, bytes: u64, took: Nanos) {
        let fitting = u128::from(bytes) * u128::from(self.queue_ns) / u128::from(took.max(1));
        let fitting = u64::try_from(fitting).unwrap_or(u64::MAX);
        let (half, double) = (self.budget_bytes / 2, self.budget_bytes * 2);
        self.budget_bytes = fitting.clamp(half, double).clamp(BYTES_MIN, BYTES_MAX);
    }
}

#[cfg(test)]
mod tests;
