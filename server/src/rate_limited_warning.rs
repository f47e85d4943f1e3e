//! Limits how often a line is logged, so that a repeated cause does not fill the log.

use farside_fabric::Nanos;

/// The shortest time between two log lines of one kind, in the long run.
const INTERVAL_NS: Nanos = 1_000_000_000;
/// How many lines of an ordinary event may come at once after a quiet time.
const BURST: u64 = 20;

/// The rate limit of one kind of line, and how many it has suppressed since the last one.
#[derive(Debug, Default)]
pub(crate) struct RateLimitedWarning {
    /// When the next line would be due without a burst.
    due_at: Nanos,
    /// How much earlier it may come.
    burst_ns: Nanos,
    suppressed: u64,
}

impl RateLimitedWarning {
    /// The limit of an ordinary event, such as a client that connects: some lines at once, and one
    /// a second in the long run.
    pub(crate) fn of_ordinary_event() -> Self {
        Self { burst_ns: (BURST - 1) * INTERVAL_NS, ..Self::default() }
    }

    /// Returns `None` if this line is suppressed. Otherwise the caller logs it, with the returned
    /// number of lines that were suppressed before it.
    pub(crate) fn due(&mut self, now: Nanos) -> Option<u64> {
        if now.saturating_add(self.burst_ns) < self.due_at {
            self.suppressed += 1;
            return None;
        }
        self.due_at = self.due_at.max(now).saturating_add(INTERVAL_NS);
        Some(std::mem::take(&mut self.suppressed))
    }
}

/// Logs a message with this severity if one is due, else for debugging only.
macro_rules! log_rarely {
    ($level:ident, $limit:expr, $($message:tt)+) => {
        match $limit.due(::farside_fabric::boot_time_ns()) {
            None => tracing::debug!($($message)+),
            Some(0) => tracing::$level!($($message)+),
            Some(others) => tracing::$level!(others, $($message)+),
        }
    };
}
pub(crate) use log_rarely;

/// Logs a message as a warning if one is due, else for debugging only.
macro_rules! warn_rarely {
    ($($all:tt)+) => {
        $crate::rate_limited_warning::log_rarely!(warn, $($all)+)
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

    #[test]
    fn an_ordinary_event_is_logged_some_times_at_once_and_once_a_second_in_the_long_run() {
        let mut limit = RateLimitedWarning::of_ordinary_event();
        let at_once = (0..1000).filter(|at| limit.due(*at).is_some()).count() as u64;
        let logged = (1..=60_000).filter(|ms| limit.due(ms * 1_000_000).is_some()).count();
        assert_eq!((at_once, logged), (BURST, 60));
        let after_an_hour = 3600 * INTERVAL_NS;
        let lines = (0..100).filter(|at| limit.due(after_an_hour + at).is_some()).count();
        assert_eq!(lines as u64, BURST);
    }
}
