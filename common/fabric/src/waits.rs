use super::{Completion, LaneId, Nanos};

/// Lanes that wait for a time; what every fabric with a clock of its own does the same.
pub(super) struct SleepingLanes(Vec<(Nanos, LaneId)>);

impl SleepingLanes {
    /// None, with room for this many.
    pub(super) fn with_capacity(lanes: usize) -> Self {
        Self(Vec::with_capacity(lanes))
    }

    /// The lane waits until then.
    pub(super) fn add(&mut self, lane: LaneId, until: Nanos) {
        self.0.push((until, lane));
    }

    /// Until when the first waits.
    pub(super) fn first(&self) -> Option<Nanos> {
        self.0.iter().map(|(until, _)| *until).min()
    }

    /// A lane whose time has come. Asks for the time only if any waits.
    #[inline]
    pub(super) fn due(&mut self, now: impl FnOnce() -> Nanos) -> Option<Completion> {
        if self.0.is_empty() {
            return None;
        }
        let now = now();
        let due = self.0.iter().position(|(until, _)| *until <= now)?;
        let (_, lane) = self.0.swap_remove(due);
        Some(Completion { lane, result: Ok(0) })
    }
}
