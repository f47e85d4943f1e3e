//! Lanes that wait for a time: [`Fabric::wait`](crate::Fabric::wait) of both fabrics.

use super::{Completion, LaneId, Nanos, interrupt};

/// The lanes that wait, each with the time until which it waits.
pub(super) struct SleepingLanes(Vec<(Nanos, LaneId)>);

impl SleepingLanes {
    /// An empty set, with room for `lanes` lanes.
    pub(super) fn with_capacity(lanes: usize) -> Self {
        Self(Vec::with_capacity(lanes))
    }

    pub(super) fn add(&mut self, lane: LaneId, until: Nanos) {
        self.0.push((until, lane));
    }

    /// The earliest time for which a lane waits.
    pub(super) fn first(&self) -> Option<Nanos> {
        self.0.iter().map(|(until, _)| *until).min()
    }

    /// The completion of a lane whose time has come, or of any if the caller has given up. Reads
    /// the clock only if a lane waits.
    #[inline]
    pub(super) fn due(&mut self, now: impl FnOnce() -> Nanos) -> Option<Completion> {
        if self.0.is_empty() {
            return None;
        }
        let now = if interrupt::is_given_up() { Nanos::MAX } else { now() };
        let due = self.0.iter().position(|(until, _)| *until <= now)?;
        let (_, lane) = self.0.swap_remove(due);
        Some(Completion { lane, result: Ok(0) })
    }
}
