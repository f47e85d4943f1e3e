//! The limit on a lane's wait for the server.

use farside_fabric::wait_timer::WaitTimer;
use farside_fabric::{Nanos, interrupt};

use crate::failure::Failure;

/// How long a lane waits for an answer, for the end of a split, or for memory that the server
/// expects. Then the operation fails.
const TIMEOUT_NS: Nanos = 5_000_000_000;

/// Whether the wait has taken longer than [`TIMEOUT_NS`], or the caller has given up.
pub(crate) fn has_timed_out(waiting: &WaitTimer) -> bool {
    waiting.waited() > TIMEOUT_NS || interrupt::is_given_up()
}

/// Returns the failure of an operation whose wait has timed out.
pub(crate) fn no_answer(waiting: &WaitTimer) -> Failure {
    Failure::NoAnswer(waiting.waited())
}

#[cfg(test)]
mod tests {
    use farside_fabric::wait_timer::WAITED_NS_MAX;

    use super::*;

    #[test]
    fn the_time_in_which_a_process_was_stopped_is_not_counted() {
        let mut waiting = WaitTimer::since(7);
        for wake in 1..=50 {
            waiting.advance(wake * 1000 * WAITED_NS_MAX);
        }
        assert!(!has_timed_out(&waiting));
        waiting.advance(51_000 * WAITED_NS_MAX);
        assert!(has_timed_out(&waiting));
        let Failure::NoAnswer(waited) = no_answer(&waiting) else { panic!("it waited in vain") };
        assert_eq!(waited, 51 * WAITED_NS_MAX);
    }
}
