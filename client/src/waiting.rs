//! How long a lane has waited for the server.

use farside_common::fabric::Nanos;

use crate::failure::Failure;

/// How long it waits: for an answer, for a split to end, for memory that is about to come free.
const TIMEOUT_NS: Nanos = 5_000_000_000;
/// What counts at most as waited between two looks: longer, and it was this process that had been
/// stopped, and the connection may be lost.
const WAITED_NS_MAX: Nanos = 100_000_000;

pub(crate) struct Waiting {
    looked_at: Nanos,
    waited: Nanos,
}

impl Waiting {
    pub(crate) fn since(now: Nanos) -> Self {
        Self { looked_at: now, waited: 0 }
    }

    /// There is nothing yet by now.
    pub(crate) fn look(&mut self, now: Nanos) {
        self.waited += now.saturating_sub(self.looked_at).min(WAITED_NS_MAX);
        self.looked_at = now;
    }

    pub(crate) fn waited(&self) -> Nanos {
        self.waited
    }

    pub(crate) fn is_over(&self) -> bool {
        self.waited > TIMEOUT_NS
    }

    /// What ends the operation then.
    pub(crate) fn failure(&self) -> Failure {
        Failure::NoAnswer(self.waited)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_was_stopped_has_not_waited() {
        let mut waiting = Waiting::since(7);
        for look in 1..=50 {
            waiting.look(look * 1000 * WAITED_NS_MAX);
        }
        assert!(!waiting.is_over());
        waiting.look(51_000 * WAITED_NS_MAX);
        assert!(waiting.is_over());
        let Failure::NoAnswer(waited) = waiting.failure() else { panic!("it waited in vain") };
        assert_eq!(waited, 51 * WAITED_NS_MAX);
    }
}
