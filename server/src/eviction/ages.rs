//! How old keys are when they are evicted, by class. If they are young, the cache is too small for
//! what clients store in it, and the log says so.

use farside_fabric::Nanos;
use farside_layout::SizeClass;

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
