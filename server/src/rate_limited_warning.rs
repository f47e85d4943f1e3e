//! What may happen again and again, and is not to fill the log.

use farside_fabric::Nanos;

/// How often it is said at most.
pub(crate) const COMPLAINT_NS: Nanos = 1_000_000_000;

/// When to say it again.
#[derive(Debug, Default)]
pub(crate) struct RateLimitedWarning {
    again_at: Nanos,
}

impl RateLimitedWarning {
    /// Whether it is to be said now; then not again for a while.
    pub(crate) fn is_due(&mut self, now: Nanos) -> bool {
        let is_due = self.again_at <= now;
        if is_due {
            self.again_at = now.saturating_add(COMPLAINT_NS);
        }
        is_due
    }
}
