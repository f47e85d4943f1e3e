//! What a queue pair has in flight, and how much that may be.
//!
//! A device takes any number of chains at once and carries them one after the other, so a chain's
//! round trip includes the bytes queued before it. On a slow link, deep pipelines of large values
//! queue for longer than operations believe what they READ (invariant I3). Each READ comes too late
//! and is posted again. So bytes in flight have a budget, and what exceeds it waits with the
//! session, where it does not age.
//!
//! The budget follows the link. Now and then one chain is timed from its doorbell to its
//! completion. If the bytes in flight then took less than the queue may take, the budget grows by
//! that ratio, else it shrinks. One step at most doubles or halves it. A link that carries
//! little makes it small, and sessions that share a link make each other's small.
//!
//! Chains of a queue pair complete in the order of their doorbells, so the oldest one that changes
//! the region is the first in a queue. Its age is what bounds how late such a chain takes effect
//! ("Time" in `docs/protocol.md`).

use std::collections::VecDeque;

use super::{LaneId, Nanos};

/// The budget of a new connection. On a slow link of 25 MB/s it takes 42 ms.
const BYTES_AT_FIRST: u64 = 1 << 20;
/// The least budget: a thousand chains of 64 bytes. Less than this in flight is never timed, which
/// takes two looks at the clock.
const BYTES_MIN: u64 = 64 << 10;
/// The largest budget, which keeps a link of 400 Gb/s busy for 0.3 ms. A larger one would bring
/// nothing, and would have to drain first when a link becomes slow.
const BYTES_MAX: u64 = 16 << 20;
/// How long the queue may take, for a session without patience of its own.
const QUEUE_NS: Nanos = 10_000_000;
/// Which part of its patience an operation may spend in the queue. A third lets a second value of
/// 512 KiB queue behind the first at 25 MB/s, so that the link does not idle while one is copied.
const PATIENCE_PARTS: Nanos = 3;

/// The chains with a device, of one queue pair.
pub struct Flight {
    /// Their bytes.
    bytes: u64,
    budget_bytes: u64,
    /// How long the queue may take.
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
    /// In flight when it left, its own included.
    bytes: u64,
}

impl Flight {
    /// Nothing in flight, with room for the chains of this many lanes.
    pub fn new(lanes: u16) -> Self {
        Self {
            bytes: 0,
            budget_bytes: BYTES_AT_FIRST,
            queue_ns: QUEUE_NS,
            timed: None,
            changes: VecDeque::with_capacity(lanes.into()),
        }
    }

    /// What operations READ is believed for this long.
    pub fn set_patience(&mut self, patience: Nanos) {
        self.queue_ns = (patience / PATIENCE_PARTS).max(1);
    }

    /// Whether the next chain may leave while so many bytes are on their way besides. One chain
    /// always may, however long.
    #[inline]
    pub fn admits(&self, besides: u64) -> bool {
        self.bytes + besides < self.budget_bytes
    }

    /// Whether the next chain may leave if this is all that is in flight.
    #[inline]
    pub fn admits_all(&self, bytes: u64) -> bool {
        bytes < self.budget_bytes
    }

    /// A lane's chain leaves now.
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

    /// The chain of a lane completed now, with or without an error.
    #[inline]
    pub fn arrive(&mut self, lane: LaneId, bytes: u64, changes: bool, now: impl FnOnce() -> Nanos) {
        self.bytes = self.bytes.saturating_sub(bytes);
        if changes && let Some(at) = self.changes.iter().position(|(of, _)| *of == lane) {
            // The first one, unless the connection is broken.
            self.changes.remove(at);
        }
        if let Some(timed) = self.timed.filter(|timed| timed.lane == lane) {
            self.timed = None;
            self.adapt(timed.bytes, now().saturating_sub(timed.left_at));
        }
    }

    /// Nothing is in flight any more.
    pub fn clear(&mut self) {
        self.bytes = 0;
        self.timed = None;
        self.changes.clear();
    }

    /// Whether a chain that changes the region left so long ago and has not completed.
    #[inline]
    pub fn has_change_older_than(&self, most: Nanos, now: Nanos) -> bool {
        self.changes.front().is_some_and(|(_, left_at)| now.saturating_sub(*left_at) > most)
    }

    /// So many bytes took so long.
    fn adapt(&mut self, bytes: u64, took: Nanos) {
        let fitting = u128::from(bytes) * u128::from(self.queue_ns) / u128::from(took.max(1));
        let fitting = u64::try_from(fitting).unwrap_or(u64::MAX);
        let (least, most) = (self.budget_bytes / 2, self.budget_bytes * 2);
        self.budget_bytes = fitting.clamp(least, most).clamp(BYTES_MIN, BYTES_MAX);
    }
}

#[cfg(test)]
mod tests;
