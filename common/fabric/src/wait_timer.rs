//! A timer that does not count the time for which its own process was stopped.

use crate::Nanos;

/// The longest time between two looks that counts as waiting. A longer one means that this process
/// was stopped.
pub const WAITED_NS_MAX: Nanos = 100_000_000;

/// Measures one wait, by the caller's clock.
pub struct WaitTimer {
    looked_at: Nanos,
    waited: Nanos,
}

impl WaitTimer {
    /// Starts the timer.
    pub fn since(now: Nanos) -> Self {
        Self { looked_at: now, waited: 0 }
    }

    /// Counts the time since the last look. Call it when what is awaited has not happened yet.
    pub fn advance(&mut self, now: Nanos) {
        self.waited += now.saturating_sub(self.looked_at).min(WAITED_NS_MAX);
        self.looked_at = now;
    }

    /// The time waited up to the last look, in nanoseconds.
    pub fn waited(&self) -> Nanos {
        self.waited
    }

    /// When to look next, if the wait takes at most `wait_max` in all. This is at most
    /// [`WAITED_NS_MAX`] after the last look, so that all time in between counts.
    pub fn next_look_at(&self, wait_max: Nanos) -> Nanos {
        let left = wait_max.saturating_sub(self.waited);
        self.looked_at.saturating_add(left.min(WAITED_NS_MAX))
    }
}
