//! T_word: how old a proof of a word may be when a compare-and-swap relies on it. The derivation is
//! in `docs/protocol.md` ("Time").

use crate::WORD_GENERATIONS;

/// Nanoseconds.
type Nanos = u64;

/// T_word: the maximum age of a proof on which a compare-and-swap may rely (invariant I4).
///
/// 256 x GRACE after its proof, the same word may belong to another key. Three amounts are
/// subtracted from this interval. An eighth is for clocks that drift. The client's own clock may
/// have stood still for [`clock_lag_max_ns`]. The chain may take effect `lateness_max_ns` after its
/// post.
pub fn proof_age_max_ns(grace_ns: Nanos, lateness_max_ns: Nanos) -> Nanos {
    let age_and_lateness_max = WORD_GENERATIONS * grace_ns / 8 * 7 - clock_lag_max_ns(grace_ns);
    age_and_lateness_max.saturating_sub(lateness_max_ns)
}

/// The maximum lag of a client's clock behind the server's: beyond it, the server has fenced the
/// client. Drift of up to a sixteenth of the time does not count as lag.
///
/// A larger value means fewer clients that are fenced by mistake, and a shorter T_word.
pub const fn clock_lag_max_ns(grace_ns: Nanos) -> Nanos {
    WORD_GENERATIONS * grace_ns / 4
}

/// The shortest GRACE, in milliseconds, with which [`proof_age_max_ns`] is above 160 ms. A shorter
/// one leaves operations no time for a compare-and-swap.
pub fn grace_ms_min(lateness_max_ns: Nanos) -> u64 {
    const MS: Nanos = 1_000_000;
    // Each millisecond of GRACE adds 160 ms to the age and the lateness together.
    let age_and_lateness_per_ms = proof_age_max_ns(MS, 0);
    // One more because the division rounds down, and one more to leave a proof its 160 ms.
    lateness_max_ns / age_and_lateness_per_ms + 2
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRACES_MS: [Nanos; 4] = [52, 100, 250, 10_000];
    const LATENESSES_NS: [Nanos; 3] = [50_000_000, 504_000_000, 8_000_000_000];

    /// The worst case: the clock of the client with the proof is a sixteenth slow, and stands still
    /// for as long as it can. The clocks of all clients that reuse the block are a sixteenth fast.
    #[test]
    fn no_word_recurs_while_a_proof_of_it_counts() {
        for grace in GRACES_MS.map(|ms| ms * 1_000_000) {
            for lateness in LATENESSES_NS {
                let age = proof_age_max_ns(grace, lateness);
                let takes_effect = (age + lateness + clock_lag_max_ns(grace)) * 16 / 15;
                let recurs = WORD_GENERATIONS * grace * 16 / 17;
                assert!(age == 0 || takes_effect < recurs, "{grace} {lateness}");
            }
        }
    }

    #[test]
    fn the_shortest_grace_lets_a_proof_count_for_160_ms() {
        for lateness in LATENESSES_NS {
            let min = grace_ms_min(lateness);
            assert!(proof_age_max_ns(min * 1_000_000, lateness) > 160_000_000);
            assert!(proof_age_max_ns((min - 1) * 1_000_000, lateness) <= 160_000_000);
        }
    }
}
