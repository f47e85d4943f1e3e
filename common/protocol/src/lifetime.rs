//! How long stored values stay.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use farside_layout::EXPIRES_AT_MS_MAX;

use crate::OperationError;

/// When a value expires that had expired before it was stored, in milliseconds since 1970.
const EXPIRED_MS: u64 = 1;

/// How long a stored value stays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lifetime {
    expiry: Expiry,
    /// Whether the server never evicts the value.
    pub(crate) is_pinned: bool,
}

/// When a stored value expires.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Expiry {
    #[default]
    Never,
    /// This time after it is written.
    After(Duration),
    /// At this time, in milliseconds since 1970.
    At(u64),
    /// When the value that it replaces would have. Never if there was none.
    Kept,
}

impl Lifetime {
    /// Until a client replaces or removes it.
    pub const FOREVER: Self = Self::unpinned(Expiry::Never);
    /// As long as the value that it replaces, and pinned if that is. Forever if there was none.
    pub const KEPT: Self = Self::unpinned(Expiry::Kept);

    const fn unpinned(expiry: Expiry) -> Self {
        Self { expiry, is_pinned: false }
    }

    /// For this time after it is written.
    pub const fn lasting(ttl: Duration) -> Self {
        Self::unpinned(Expiry::After(ttl))
    }

    /// Until this time, in milliseconds since 1970.
    pub const fn until_ms(end: u64) -> Self {
        Self::unpinned(Expiry::At(end))
    }

    /// Until this time, rounded up to a full millisecond.
    pub fn until(end: SystemTime) -> Self {
        let since = end.duration_since(UNIX_EPOCH).unwrap_or_default();
        Self::until_ms(millisecond(since.as_nanos()))
    }

    /// As long as this one, and the server evicts the value only if `is_pinned` is false.
    pub const fn pinned(self, is_pinned: bool) -> Self {
        Self { is_pinned, ..self }
    }

    /// This one with the expiry of `other`.
    pub const fn expiring_as(self, other: Self) -> Self {
        Self { expiry: other.expiry, ..self }
    }

    /// Returns the TTL of [`Lifetime::lasting`].
    pub fn ttl(self) -> Option<Duration> {
        if let Expiry::After(ttl) = self.expiry { Some(ttl) } else { None }
    }

    /// Whether it is as long as that of the value that is replaced.
    pub fn is_kept(self) -> bool {
        self.expiry == Expiry::Kept
    }

    /// Whether the value never expires, unless it replaces one that does.
    #[inline]
    pub(crate) fn never_expires(self) -> bool {
        matches!(self.expiry, Expiry::Never | Expiry::Kept)
    }

    /// The lifetime of a value that replaces one with this expiry, in milliseconds since 1970; 0
    /// for never.
    pub(crate) fn after(self, expires_at_ms: u64) -> Self {
        let expiry = match self.expiry {
            Expiry::Kept if expires_at_ms != 0 => Expiry::At(expires_at_ms),
            Expiry::Kept => Expiry::Never,
            expiry => expiry,
        };
        Self { expiry, ..self }
    }

    /// Returns when a value written at `wall_ns` (nanoseconds since 1970) expires, as blocks store
    /// it: the first millisecond in which the value is absent, or 0 for never. Rounded down, so
    /// that no TTL that a client reads is longer than the one that was given. A TTL below a
    /// millisecond lasts until the next one begins.
    ///
    /// A value that has expired already expires in 1970. Otherwise an operation that began before
    /// the given time could find the value, although it was never there (invariant I19).
    pub fn expires_at_ms(self, wall_ns: u64) -> u64 {
        let expires_at_ms = match self.expiry {
            Expiry::Never | Expiry::Kept => return 0,
            Expiry::After(Duration::ZERO) => return EXPIRED_MS,
            Expiry::After(ttl) => {
                let end = (u128::from(wall_ns) + ttl.as_nanos()) / 1_000_000;
                u64::try_from(end).unwrap_or(u64::MAX).max(wall_ns / 1_000_000 + 1)
            }
            Expiry::At(millisecond) => millisecond,
        };
        if expires_at_ms <= wall_ns / 1_000_000 { EXPIRED_MS } else { expires_at_ms }
    }

    /// Checks that a block can store the expiry of a value written at `wall_ns`.
    ///
    /// # Errors
    /// [`OperationError::ExpiryTooLate`] if it cannot.
    pub fn check(self, wall_ns: u64) -> Result<(), OperationError> {
        if self.expires_at_ms(wall_ns) <= EXPIRES_AT_MS_MAX {
            Ok(())
        } else {
            Err(OperationError::ExpiryTooLate)
        }
    }
}

/// Rounds a time up to milliseconds. At least 1, because 0 means never.
fn millisecond(end_ns: u128) -> u64 {
    u64::try_from(end_ns.div_ceil(1_000_000)).unwrap_or(u64::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expiries_are_full_milliseconds_and_never_late() {
        let expiry = |ttl_us, wall_us: u64| {
            Lifetime::lasting(Duration::from_micros(ttl_us)).expires_at_ms(wall_us * 1000)
        };
        let expiries = [(0, 5000), (1, 5000), (1000, 5000), (1000, 5001)];
        assert_eq!(expiries.map(|(ttl_us, wall_us)| expiry(ttl_us, wall_us)), [1, 6, 6, 6]);
        assert_eq!(expiry(1_500_000, 1_700_000_000_123_000), 1_700_000_001_623);
        assert_eq!(Lifetime::FOREVER.expires_at_ms(5), 0);
        let check = |ttl| Lifetime::lasting(ttl).check(5_000_000);
        let longest = Duration::from_millis(EXPIRES_AT_MS_MAX - 5);
        assert_eq!(check(longest), Ok(()));
        let longer = longest + Duration::from_millis(1);
        assert_eq!(check(longer), Err(OperationError::ExpiryTooLate));
        assert!(Lifetime::lasting(Duration::MAX).check(u64::MAX).is_err());
        assert_eq!(Lifetime::lasting(Duration::ZERO).expires_at_ms(0), 1);
    }

    #[test]
    fn a_value_that_has_expired_expires_in_1970() {
        let expiry = |wall_ms: u64| Lifetime::until_ms(7).expires_at_ms(wall_ms * 1_000_000);
        assert_eq!([6, 7, 8].map(expiry), [7, 1, 1]);
    }
}
