//! When a lane has waited for the server for too long.

use farside_fabric::Nanos;
use farside_fabric::waiting::WaitTimer;

use crate::failure::Failure;

/// How long it waits: for an answer, for a split to end, for memory that is about to come free.
const TIMEOUT_NS: Nanos = 5_000_000_000;

pub(crate) fn is_over(waiting: &WaitTimer) -> bool {
    waiting.waited() > TIMEOUT_NS
}

/// What ends the operation then.
pub(crate) fn no_answer(waiting: &WaitTimer) -> Failure {
    Failure::NoAnswer(waiting.waited())
}

#[cfg(test)]
mod tests {
    use farside_fabric::waiting::WAITED_NS_MAX;

    use super::*;

    #[test]
    fn who_was_stopped_has_not_waited() {
        let mut waiting = WaitTimer::since(7);
        for look in 1..=50 {
            waiting.advance(look * 1000 * WAITED_NS_MAX);
        }
        assert!(!is_over(&waiting));
        waiting.advance(51_000 * WAITED_NS_MAX);
        assert!(is_over(&waiting));
        let Failure::NoAnswer(waited) = no_answer(&waiting) else { panic!("it waited in vain") };
        assert_eq!(waited, 51 * WAITED_NS_MAX);
    }
}
