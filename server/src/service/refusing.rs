//! Log lines about refused connections.

use farside_control::Refusal;
use farside_fabric::Nanos;

use crate::rate_limited_warning::RateLimitedWarning;

/// A warning that strangers can cause as often as they like: once in a while, with the number of
/// those left out.
#[derive(Debug, Default)]
pub(super) struct RareWarning {
    complaint: RateLimitedWarning,
    untold: u64,
}

impl RareWarning {
    /// How many were left out before this one; `None` if this one is, too.
    pub(super) fn due(&mut self, now: Nanos) -> Option<u64> {
        if !self.complaint.is_due(now) {
            self.untold += 1;
            return None;
        }
        Some(std::mem::take(&mut self.untold))
    }
}

/// Who was refused since the log last said so: who is refused tries again.
#[derive(Debug, Default)]
pub(super) struct Refusals(RareWarning);

impl Refusals {
    /// A connection was refused.
    pub(super) fn note(&mut self, refusal: Refusal, now: Nanos) {
        match self.due(refusal, now) {
            None => tracing::debug!("refused a client: {refusal}"),
            Some(0) => tracing::warn!("refused a client: {refusal}"),
            Some(others) => tracing::warn!(others, "refused a client: {refusal}"),
        }
    }

    /// How many others were refused meanwhile; `None` if it is not to be said yet, or never: a
    /// session without its client is one that connects anew.
    fn due(&mut self, refusal: Refusal, now: Nanos) -> Option<u64> {
        let is_routine = matches!(refusal, Refusal::UnknownClient { .. });
        if is_routine { None } else { self.0.due(now) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rate_limited_warning::COMPLAINT_NS;

    #[test]
    fn who_is_refused_again_and_again_fills_no_log() {
        let mut refusals = Refusals::default();
        let mut told = |at| refusals.due(Refusal::Credentials, at);
        assert_eq!([told(5), told(6), told(7)], [Some(0), None, None]);
        assert_eq!([told(5 + COMPLAINT_NS), told(6 + COMPLAINT_NS)], [Some(2), None]);
        let routine = Refusal::UnknownClient { client: 1 };
        assert_eq!(refusals.due(routine, 9 * COMPLAINT_NS), None);
    }
}
