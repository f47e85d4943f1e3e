//! Warnings that clients can cause as often as they like, and that must not fill the log.

use farside_fabric::Nanos;

/// Pause between two warnings.
const PAUSE_NS: Nanos = 1_000_000_000;

/// A warning that is logged once in a while, with the number of those left out.
#[derive(Debug, Default)]
pub(crate) struct RateLimitedWarning {
    again_at: Nanos,
    left_out: u64,
}

impl RateLimitedWarning {
    /// How many warnings were left out before this one; `None` if this one is, too.
    pub(crate) fn due(&mut self, now: Nanos) -> Option<u64> {
        if now < self.again_at {
            self.left_out += 1;
            return None;
        }
        self.again_at = now.saturating_add(PAUSE_NS);
        Some(std::mem::take(&mut self.left_out))
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
        assert_eq!([5, 6].map(|at| warning.due(at + PAUSE_NS)), [Some(2), None]);
    }
}
