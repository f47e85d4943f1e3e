//! T_word: how long a proof of a word may be relied on. `docs/protocol.md` ("Time") derives it.

use crate::WORD_GENERATIONS;

/// Nanoseconds.
type Nanos = u64;

/// How old a proof of a word may be when a compare-and-swap relies on it (invariant I4): T_word.
///
/// 256 x GRACE after a word was proved it may stand there for another key, by the clocks of the
/// clients that reuse its block. An eighth of that is left, because clocks drift. The client's own clock may
/// have stood still for [`clock_lag_max_ns`], and the chain may take effect as late as
/// `lateness_max_ns` after its post.
pub fn proof_age_max_ns(grace_ns: Nanos, lateness_max_ns: Nanos) -> Nanos {
    let counted = WORD_GENERATIONS * grace_ns / 8 * 7 - clock_lag_max_ns(grace_ns);
    counted.saturating_sub(lateness_max_ns)
}

/// By how much a client's clock can fall behind the server's, a sixteenth of the time aside, before
/// the server has fenced the client. More means fewer fenced by mistake, and a shorter T_word.
pub const fn clock_lag_max_ns(grace_ns: Nanos) -> Nanos {
    WORD_GENERATIONS * grace_ns / 4
}

/// The shortest GRACE with which [`proof_age_max_ns`] is not 0, in milliseconds.
pub fn grace_ms_min(lateness_max_ns: Nanos) -> u64 {
    const MS: Nanos = 1_000_000;
    lateness_max_ns / proof_age_max_ns(MS, 0) + 2
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRACES_MS: [Nanos; 4] = [52, 100, 250, 10_000];
    const LATENESSES: [Nanos; 3] = [50_000_000, 504_000_000, 8_000_000_000];

    /// The clock of the client that relies on a proof is a sixteenth slow and stands still for as
    /// long as it can; those of all that reuse the block are a sixteenth fast.
    #[test]
    fn no_word_recurs_while_a_proof_of_it_counts() {
        for grace in GRACES_MS.map(|ms| ms * 1_000_000) {
            for lateness in LATENESSES {
                let age = proof_age_max_ns(grace, lateness);
                let takes_effect = (age + lateness + clock_lag_max_ns(grace)) * 16 / 15;
                let recurs = WORD_GENERATIONS * grace * 16 / 17;
                assert!(age == 0 || takes_effect < recurs, "{grace} {lateness}");
            }
        }
    }

    #[test]
    fn the_shortest_grace_leaves_something() {
        for lateness in LATENESSES {
            let min = grace_ms_min(lateness);
            assert!(proof_age_max_ns(min * 1_000_000, lateness) > 0);
            assert_eq!(proof_age_max_ns((min - 2) * 1_000_000, lateness), 0);
        }
    }
}
