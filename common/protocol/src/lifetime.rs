//! How long what is stored stays.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use farside_layout::EXPIRES_AT_MS_MAX;

use crate::OperationError;

/// How long a stored value stays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Lifetime {
    /// Until a client replaces or removes it.
    #[default]
    Forever,
    /// This long from when it is written.
    For(Duration),
    /// Until this millisecond, since 1970.
    Until(u64),
}

impl Lifetime {
    /// Until this time, rounded up to a full millisecond.
    pub fn until(end: SystemTime) -> Self {
        let since = end.duration_since(UNIX_EPOCH).unwrap_or_default();
        Self::Until(millisecond(since.as_nanos()))
    }

    /// When a value written at `wall_ns`, nanoseconds since 1970, ends, as it stands in a block:
    /// the first millisecond in which it is gone, 0 for never. It gets the whole of its time, so
    /// that is rounded up.
    pub fn expires_at_ms(self, wall_ns: u64) -> u64 {
        match self {
            Self::Forever => 0,
            Self::For(ttl) => millisecond(u128::from(wall_ns) + ttl.as_nanos()),
            Self::Until(millisecond) => millisecond,
        }
    }

    /// That a value written at `wall_ns` can end when this says.
    ///
    /// # Errors
    /// [`OperationError::EndTooLate`].
    pub fn check(self, wall_ns: u64) -> Result<(), OperationError> {
        if self.expires_at_ms(wall_ns) <= EXPIRES_AT_MS_MAX {
            Ok(())
        } else {
            Err(OperationError::EndTooLate)
        }
    }
}

/// The first full millisecond that is not before this moment, in nanoseconds since 1970.
fn millisecond(end_ns: u128) -> u64 {
    u64::try_from(end_ns.div_ceil(1_000_000)).unwrap_or(u64::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_full_milliseconds_and_never_early() {
        let end = |ttl_us, wall_us: u64| {
            Lifetime::For(Duration::from_micros(ttl_us)).expires_at_ms(wall_us * 1000)
        };
        assert_eq!([end(0, 5000), end(1, 5000), end(1000, 5000), end(1000, 5001)], [5, 6, 6, 7]);
        assert_eq!(end(1_500_000, 1_700_000_000_123_000), 1_700_000_001_623);
        assert_eq!(Lifetime::Forever.expires_at_ms(5), 0);
        let check = |ttl| Lifetime::For(ttl).check(5_000_000);
        let most = Duration::from_millis(EXPIRES_AT_MS_MAX - 5);
        assert!(
            check(most).is_ok()
                && check(most + Duration::from_nanos(1)) == Err(OperationError::EndTooLate)
        );
        assert!(Lifetime::For(Duration::MAX).check(u64::MAX).is_err());
        assert_eq!(Lifetime::For(Duration::ZERO).expires_at_ms(0), 1);
    }
}
