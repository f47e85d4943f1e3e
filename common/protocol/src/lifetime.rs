//! How long what is stored stays.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::OperationError;

/// How long a stored value stays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Lifetime {
    /// Until somebody replaces or removes it.
    #[default]
    Forever,
    /// This long from when it is written.
    For(Duration),
    /// Until this second, since 1970.
    Until(u64),
}

/// The last second in which a value can end, as long as it has one: in 2106.
const END_S_MAX: u64 = u32::MAX as u64;

impl Lifetime {
    /// Until this time, rounded up to what a block can say.
    pub fn until(end: SystemTime) -> Self {
        let since = end.duration_since(UNIX_EPOCH).unwrap_or_default();
        Self::Until(second(since.as_nanos()))
    }

    /// When a value written at `wall_ns`, nanoseconds since 1970, ends, as it stands in a block:
    /// the first second in which it is gone, 0 for never. It gets the whole of its time, so that
    /// is rounded up. [`Lifetime::check`] has refused what a block cannot say.
    pub fn expires_at_s(self, wall_ns: u64) -> u32 {
        self.end_s(wall_ns).min(END_S_MAX) as u32
    }

    /// Whether a value written at `wall_ns` can end when this says.
    pub fn check(self, wall_ns: u64) -> Result<(), OperationError> {
        if self.end_s(wall_ns) <= END_S_MAX { Ok(()) } else { Err(OperationError::EndTooLate) }
    }

    fn end_s(self, wall_ns: u64) -> u64 {
        match self {
            Self::Forever => 0,
            Self::For(ttl) => second(u128::from(wall_ns) + ttl.as_nanos()),
            Self::Until(second) => second,
        }
    }
}

/// The first full second that is not before this moment, in nanoseconds since 1970.
pub(crate) fn second(end_ns: u128) -> u64 {
    u64::try_from(end_ns.div_ceil(1_000_000_000)).unwrap_or(u64::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_full_seconds_and_never_early() {
        let end = |ttl_ms, wall_ms: u64| {
            Lifetime::For(Duration::from_millis(ttl_ms)).expires_at_s(wall_ms * 1_000_000)
        };
        assert_eq!([end(0, 5000), end(1, 5000), end(1000, 5000), end(1000, 5001)], [5, 6, 6, 7]);
        assert_eq!(Lifetime::Forever.expires_at_s(5), 0);
        let check = |ttl| Lifetime::For(ttl).check(5_000_000_000);
        let most = Duration::from_secs(END_S_MAX - 5);
        assert!(
            check(most).is_ok()
                && matches!(check(most + Duration::from_nanos(1)), Err(OperationError::EndTooLate))
        );
        assert!(Lifetime::For(Duration::MAX).check(u64::MAX).is_err());
        assert_eq!(Lifetime::For(Duration::ZERO).expires_at_s(0), 1);
    }
}
