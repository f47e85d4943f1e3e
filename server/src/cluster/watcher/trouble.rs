//! A trouble that lasts: logged when it begins and ends, and rarely meanwhile.

use std::time::{Duration, Instant};

/// The shortest time between two log lines of one trouble.
const INTERVAL: Duration = Duration::from_secs(60);

/// A trouble with the records.
#[derive(Debug, Default)]
pub(super) struct Trouble {
    is_present: bool,
    /// When it was logged last.
    logged_at: Option<Instant>,
    /// Whether its end is worth a line, because its begin had one.
    is_logged: bool,
}

impl Trouble {
    /// Notes that the trouble is there.
    pub(super) fn report(&mut self, why: &str) {
        if self.is_due(Instant::now()) {
            tracing::warn!("FS-042 {why}; the server goes on with what it knows, and tries again");
        } else {
            tracing::debug!("{why}");
        }
    }

    fn is_due(&mut self, now: Instant) -> bool {
        self.is_present = true;
        let is_due = self.logged_at.is_none_or(|at| now.duration_since(at) >= INTERVAL);
        if is_due {
            (self.logged_at, self.is_logged) = (Some(now), true);
        }
        is_due
    }

    /// Notes that the trouble has ended.
    pub(super) fn end(&mut self, what: &str) {
        if std::mem::take(&mut self.is_logged) {
            tracing::info!("FS-043 {what}");
        }
        self.is_present = false;
    }

    /// Whether the trouble is there.
    pub(super) fn is_present(&self) -> bool {
        self.is_present
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trouble_that_comes_and_goes_fills_no_log() {
        let (mut trouble, start) = (Trouble::default(), Instant::now());
        let mut is_due = |seconds| trouble.is_due(start + Duration::from_secs(seconds));
        assert_eq!([0, 1, 59, 60, 61].map(&mut is_due), [true, false, false, true, false]);
        assert!(trouble.is_present() && trouble.is_logged);
        trouble.end("over");
        assert!(!trouble.is_present());
        assert!(!trouble.is_due(start + Duration::from_secs(62)) && !trouble.is_logged);
    }
}
