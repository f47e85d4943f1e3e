//! When a lane has waited for the server for too long.

use farside_fabric::Nanos;
use farside_fabric::waiting::Waiting;

use crate::failure::Failure;

/// How long it waits: for an answer, for a split to end, for memory that is about to come free.
const TIMEOUT_NS: Nanos = 5_000_000_000;

pub(crate) fn is_over(waiting: &Waiting) -> bool {
    waiting.waited() > TIMEOUT_NS
}

/// What ends the operation then.
pub(crate) fn no_answer(waiting: &Waiting) -> Failure {
    Failure::NoAnswer(waiting.waited())
}

#[cfg(test)]
mod tests {
    use farside_fabric::waiting::WAITED_NS_MAX;

    use super::*;

    #[test]
    fn who_was_stopped_has_not_waited() {
        let mut waiting = Waiting::since(7);
        for look in 1..=50 {
            waiting.look(look * 1000 * WAITED_NS_MAX);
        }
        assert!(!is_over(&waiting));
        waiting.look(51_000 * WAITED_NS_MAX);
        assert!(is_over(&waiting));
        let Failure::NoAnswer(waited) = no_answer(&waiting) else { panic!("it waited in vain") };
        assert_eq!(waited, 51 * WAITED_NS_MAX);
    }
}
