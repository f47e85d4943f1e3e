//! The demand of one class for blocks, by the requests of clients. It decides how many free blocks
//! the server keeps ready.

use farside_fabric::Nanos;

use crate::depot::CACHE_SHARE_DIVISOR;

/// The demand is counted over periods of at least this length.
const PERIOD_NS: Nanos = 100_000_000;
/// After a period with less demand, the demand of the earlier ones still counts, less this share.
/// So most of it is forgotten after 5 s.
const DECAY_DIVISOR: u64 = 32;
/// After this many periods without requests nothing is left of the demand before.
const PERIODS_MAX: u64 = 400;
/// The estimate of the demand is at most this many times as high as what was measured.
const RAISE_MAX: u64 = 8;
/// There are too few blocks if a request gets less than this share.
const SHORTAGE_DIVISOR: u64 = 4;
/// For how long the free blocks should last, beside the time for which blocks rest.
const LEAD_NS: Nanos = 20_000_000;
/// At most this share of a class's blocks should be free or rest: an eighth. These hold no key.
const SHARE_DIVISOR: u64 = 8;
/// A class of few blocks may have up to this many, or half of its blocks.
const SHARE_MIN: u64 = 4;
const SECOND_NS: u64 = 1_000_000_000;

/// The recent requests for blocks of one class.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ClassDemand {
    /// The number of blocks that were given in this period.
    given: u64,
    period_began_at: Nanos,
    /// The number of blocks that clients took each second of the last period.
    measured: u64,
    /// The number of blocks that clients would take each second, as an estimate.
    per_second: u64,
    /// The latest request.
    requested: u64,
    requested_at: Nanos,
    /// When the demand was last raised because a request found too few blocks.
    raised_at: Nanos,
}

impl ClassDemand {
    /// Notes a request for `requested` blocks, which got `given`.
    pub(super) fn note(&mut self, requested: u64, given: u64, grace: Nanos, now: Nanos) {
        self.roll(now);
        self.given += given;
        // A period that is not over yet shows a lower bound of the rate. So the estimate rises soon
        // after clients begin.
        self.per_second = self.per_second.max(self.given * (SECOND_NS / PERIOD_NS));
        (self.requested, self.requested_at) = (requested, now);
        // What clients would have taken is unknown. So the estimate doubles until it suffices.
        if given * SHORTAGE_DIVISOR < requested && now.saturating_sub(self.raised_at) >= grace / 2 {
            let wanted = requested * SECOND_NS / grace.max(1);
            let limit = (self.measured + wanted) * RAISE_MAX;
            self.per_second = self.per_second.max(wanted.max(self.per_second * 2).min(limit));
            self.raised_at = now;
        }
    }

    /// Ends the present period if it is long enough.
    fn roll(&mut self, now: Nanos) {
        let elapsed = now.saturating_sub(self.period_began_at);
        if elapsed < PERIOD_NS {
            return;
        }
        let measured =
            (u128::from(self.given) * u128::from(SECOND_NS) / u128::from(elapsed)) as u64;
        let mut before = self.per_second;
        for _ in 0..(elapsed / PERIOD_NS).min(PERIODS_MAX) {
            before -= before.div_ceil(DECAY_DIVISOR);
        }
        self.per_second = measured.max(before);
        (self.measured, self.given, self.period_began_at) = (measured, 0, now);
    }

    /// Returns how many blocks should be free or rest, of `blocks` in the class.
    pub(super) fn target(&self, blocks: u64, grace: Nanos) -> u64 {
        self.wanted(grace).min(free_max(blocks))
    }

    /// Whether a class with this number of blocks can keep as many free as clients want now.
    pub(super) fn is_met_by(&self, blocks: u64, grace: Nanos, now: Nanos) -> bool {
        !self.is_recent(now) || self.wanted(grace) <= free_max(blocks)
    }

    /// Whether there was a request in the last second.
    fn is_recent(&self, now: Nanos) -> bool {
        now.saturating_sub(self.requested_at) <= SECOND_NS
    }

    /// Returns what clients take while blocks rest and a little longer, and what has to be
    /// available so that a request gets all that it asks for.
    fn wanted(&self, grace: Nanos) -> u64 {
        let lead = u128::from(grace + LEAD_NS);
        let used = (u128::from(self.per_second) * lead / u128::from(SECOND_NS)) as u64;
        used + self.requested * CACHE_SHARE_DIVISOR
    }

    /// Returns how many blocks clients take within this time, if they go on; 0 if there was no
    /// request in the last second.
    pub(super) fn within(&self, time: Nanos, now: Nanos) -> u64 {
        if !self.is_recent(now) {
            return 0;
        }
        (u128::from(self.per_second) * u128::from(time) / u128::from(SECOND_NS)) as u64
    }
}

/// Returns how many blocks should be free or rest at most, of `blocks` in the class.
fn free_max(blocks: u64) -> u64 {
    (blocks / SHARE_DIVISOR).max(SHARE_MIN.min(blocks.div_ceil(2)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRACE: Nanos = 100_000_000;
    const MANY: u64 = 1 << 40;

    #[test]
    fn free_blocks_last_for_grace_and_the_lead() {
        let mut demand = ClassDemand::default();
        // 10 requests for 100 blocks in each 100 ms.
        for at in 100..200 {
            demand.note(100, 100, GRACE, at * 10_000_000);
        }
        let target = demand.target(MANY, GRACE);
        assert!((1200..1500).contains(&target), "{target}");
        assert_eq!(demand.target(1000, GRACE), 125);
        assert_eq!(demand.target(1, GRACE), 1);
        assert!((900..1100).contains(&demand.within(GRACE, 2_000_000_000)));
        assert_eq!(demand.within(GRACE, 9_000_000_000), 0);
    }

    #[test]
    fn demand_rises_while_requests_find_too_little_and_is_forgotten() {
        let mut demand = ClassDemand::default();
        let mut targets = (0..5).map(|round| {
            demand.note(64, round % 2, GRACE, SECOND_NS + round * GRACE / 2);
            demand.target(MANY, GRACE)
        });
        let first = targets.next().unwrap();
        assert!(targets.last().unwrap() > 3 * first);
        demand.note(1, 1, GRACE, 60 * SECOND_NS);
        assert!(demand.target(MANY, GRACE) < 10);
    }
}
