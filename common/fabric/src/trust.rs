//! The time until which a client trusts a server.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::Nanos;

/// The value after the end for good.
const ENDED: Nanos = 0;

/// The time until which a client trusts a server, by the clock of [`boot_time_ns`]. Every fabric
/// has its deadlines by the same clock, except a simulated one. Clones share the time.
///
/// A client posts no chain to a server that it does not trust. When the trust ends while chains are
/// in flight, a fabric breaks the connection, so that these chains end. Over shared memory no chain
/// is in flight for long.
///
/// [`boot_time_ns`]: crate::boot_time_ns
#[derive(Clone, Debug)]
pub struct Trust(Arc<AtomicU64>);

// All accesses are relaxed: no other memory is read because of the value.
impl Trust {
    /// A trust that lasts until [`Trust::end`].
    pub fn forever() -> Self {
        Self::until(Nanos::MAX)
    }

    /// A trust that lasts until this time, unless it is extended.
    pub fn until(until: Nanos) -> Self {
        Self(Arc::new(AtomicU64::new(until)))
    }

    /// Extends the trust to this time. Has no effect if it lasts longer already, or has ended for
    /// good.
    pub fn extend(&self, until: Nanos) {
        let later = |held: Nanos| (held != ENDED && held < until).then_some(until);
        // An error means that the time stays.
        let _ = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, later);
    }

    /// Ends the trust for good.
    pub fn end(&self) {
        self.0.store(ENDED, Ordering::Relaxed);
    }

    /// Whether the client trusts the server at this time.
    #[inline]
    pub fn holds_at(&self, now: Nanos) -> bool {
        now < self.0.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trust_only_rises_until_it_ends_for_good() {
        let trust = Trust::until(5);
        let shared = trust.clone();
        assert!(trust.holds_at(4) && !trust.holds_at(5));
        shared.extend(9);
        trust.extend(7);
        assert!(trust.holds_at(8) && !trust.holds_at(9));
        trust.end();
        shared.extend(Nanos::MAX);
        assert!(!shared.holds_at(0));
        let trust = Trust::forever();
        trust.extend(1);
        assert!(trust.holds_at(Nanos::MAX - 1));
    }
}
