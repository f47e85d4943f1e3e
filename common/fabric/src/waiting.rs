//! How long a caller has waited, without the time for which its process was stopped.

use crate::Nanos;

/// What counts at most as waited between two looks: longer, and it was this process that had been
/// stopped.
pub const WAITED_NS_MAX: Nanos = 100_000_000;

/// One wait. Everything by a clock of the caller's.
pub struct WaitTimer {
    looked_at: Nanos,
    waited: Nanos,
}

impl WaitTimer {
    /// Begins it.
    pub fn since(now: Nanos) -> Self {
        Self { looked_at: now, waited: 0 }
    }

    /// There is nothing yet by now.
    pub fn advance(&mut self, now: Nanos) {
        self.waited += now.saturating_sub(self.looked_at).min(WAITED_NS_MAX);
        self.looked_at = now;
    }

    /// In nanoseconds, up to the last look.
    pub fn waited(&self) -> Nanos {
        self.waited
    }

    /// When to look again, in a wait of at most so long in all: before more time passes than
    /// counts.
    pub fn next_look_at(&self, most: Nanos) -> Nanos {
        let left = most.saturating_sub(self.waited);
        self.looked_at.saturating_add(left.min(WAITED_NS_MAX))
    }
}
