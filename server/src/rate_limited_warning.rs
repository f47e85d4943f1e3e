//! Limits how often a warning is logged, so that a repeated cause does not fill the log.

use farside_fabric::Nanos;

/// The shortest time between two log lines of one warning.
const INTERVAL_NS: Nanos = 1_000_000_000;

/// The rate limit of one warning, and how many warnings it has suppressed since the last log line.
#[derive(Debug, Default)]
pub(crate) struct RateLimitedWarning {
    due_at: Nanos,
    suppressed: u64,
}

impl RateLimitedWarning {
    /// Returns `None` if this warning is suppressed. Otherwise the caller logs it, with the
    /// returned number of warnings that were suppressed before it.
    pub(crate) fn due(&mut self, now: Nanos) -> Option<u64> {
        if now < self.due_at {
            self.suppressed += 1;
            return None;
        }
        self.due_at = now.saturating_add(INTERVAL_NS);
        Some(std::mem::take(&mut self.suppressed))
    }
}

/// Logs a message as a warning if one is due, else for debugging only.
macro_rules! warn_rarely {
    ($warning:expr, $($message:tt)+) => {
        match $warning.due(::farside_fabric::boot_time_ns()) {
            None => tracing::debug!($($message)+),
            Some(0) => tracing::warn!($($message)+),
            Some(others) => tracing::warn!(others, $($message)+),
        }
    };
}
pub(crate) use warn_rarely;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_warning_that_is_caused_again_and_again_fills_no_log() {
        let mut warning = RateLimitedWarning::default();
        assert_eq!([5, 6, 7].map(|at| warning.due(at)), [Some(0), None, None]);
        assert_eq!([5, 6].map(|at| warning.due(at + INTERVAL_NS)), [Some(2), None]);
    }
}
