//! The figures of each class: its demand for blocks, by the requests of clients, and how old its
//! keys are when they are evicted.
//!
//! The demand decides how many free blocks the server keeps ready. If keys are evicted young, the
//! cache is too small for what clients store in it, and the log says so.

use farside_fabric::Nanos;
use farside_layout::SizeClass;

use crate::chores::depot::CACHE_SHARE_DIVISOR;

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

/// The mean age is that of about so many evictions, the latest ones.
const WINDOW: u64 = 4096;
/// A key that is evicted sooner than this after its write is young, in milliseconds.
const YOUNG_MS: f64 = 60_000.0;
/// So many evictions of a class have to show that its keys are young, or one for each of its blocks
/// if these are fewer.
const EVICTIONS_MIN: u64 = 1024;
/// The pause between two warnings.
const WARNING_PAUSE_NS: Nanos = 60_000_000_000;

/// The evictions of one class since the server started.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ClassEvictions {
    /// The number of keys that were evicted.
    pub(crate) keys: u64,
    /// The mean time from the write of a key to its eviction, in milliseconds, of the latest
    /// evictions.
    age_ms: f64,
}

impl ClassEvictions {
    /// The mean age of the keys that were evicted lately, in milliseconds.
    pub(crate) fn age_ms(&self) -> u64 {
        self.age_ms as u64
    }
}

/// The evictions of all classes.
pub(super) struct EvictionAges {
    classes: [ClassEvictions; SizeClass::COUNT],
    warned_at: Option<Nanos>,
}

impl EvictionAges {
    pub(super) fn new() -> Self {
        Self { classes: [ClassEvictions::default(); _], warned_at: None }
    }

    pub(super) fn of(&self, class: SizeClass) -> ClassEvictions {
        self.classes[usize::from(class.index())]
    }

    /// Notes that a key was evicted so long after its write.
    pub(super) fn note(&mut self, class: SizeClass, age_ms: u64) {
        let evictions = &mut self.classes[usize::from(class.index())];
        evictions.keys += 1;
        let weight = 1.0 / evictions.keys.min(WINDOW) as f64;
        evictions.age_ms += (age_ms as f64 - evictions.age_ms) * weight;
    }

    /// Logs that keys of this class, which has so many blocks, are evicted young. At most one line
    /// a minute.
    pub(super) fn warn_if_young(&mut self, class: SizeClass, blocks: u64, now: Nanos) {
        if self.begins_warning(class, blocks, now) {
            tracing::warn!(
                "FS-015 the cache is too small for what clients store: keys with blocks of {} \
                 bytes are evicted {:.1} s after they were written; start the server with more \
                 --memory, store fewer or smaller values, or give a TTL to those that are soon of \
                 no use",
                class.block_bytes(),
                self.of(class).age_ms / 1000.0
            );
        }
    }

    /// Whether to warn now. Then no warning follows for a minute.
    fn begins_warning(&mut self, class: SizeClass, blocks: u64, now: Nanos) -> bool {
        let ClassEvictions { keys, age_ms } = self.of(class);
        let is_young = keys >= blocks.clamp(1, EVICTIONS_MIN) && age_ms < YOUNG_MS;
        let is_due = self.warned_at.is_none_or(|at| now.saturating_sub(at) >= WARNING_PAUSE_NS);
        let begins = is_young && is_due;
        if begins {
            self.warned_at = Some(now);
        }
        begins
    }
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

    fn class() -> SizeClass {
        SizeClass::for_bytes(1024).unwrap()
    }

    #[test]
    fn the_age_is_the_mean_of_the_latest_evictions_of_the_class() {
        let mut ages = EvictionAges::new();
        [100, 200, 600].into_iter().for_each(|age_ms| ages.note(class(), age_ms));
        assert_eq!((ages.of(class()).keys, ages.of(class()).age_ms()), (3, 300));
        (0..10 * WINDOW).for_each(|_| ages.note(class(), 5000));
        assert!((4999..=5000).contains(&ages.of(class()).age_ms()));
        assert_eq!(ages.of(SizeClass::for_bytes(64).unwrap()).keys, 0);
    }

    #[test]
    fn one_warning_a_minute_says_that_keys_are_evicted_young() {
        let mut ages = EvictionAges::new();
        let note = |ages: &mut EvictionAges, count, age_ms| {
            (0..count).for_each(|_| ages.note(class(), age_ms));
        };
        note(&mut ages, EVICTIONS_MIN - 1, 59_999);
        assert!(!ages.begins_warning(class(), u64::MAX, 7));
        note(&mut ages, 1, 59_999);
        assert!(ages.begins_warning(class(), u64::MAX, 7));
        assert!(!ages.begins_warning(class(), u64::MAX, 6 + WARNING_PAUSE_NS));
        assert!(ages.begins_warning(class(), u64::MAX, 7 + WARNING_PAUSE_NS));
        note(&mut ages, 10 * WINDOW, 60_100);
        assert!(!ages.begins_warning(class(), u64::MAX, 9 * WARNING_PAUSE_NS));
    }

    #[test]
    fn a_class_of_few_blocks_needs_few_evictions_for_a_warning() {
        let mut ages = EvictionAges::new();
        assert!(!ages.begins_warning(class(), 0, 7), "nothing was evicted");
        (0..9).for_each(|_| ages.note(class(), 1));
        assert!(!ages.begins_warning(class(), 10, 7));
        assert!(ages.begins_warning(class(), 9, 7));
    }
}
