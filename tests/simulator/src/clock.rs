//! The times of an execution and those that the fabric promises, and the clocks of clients. A
//! client's clock runs slower or faster than the world's clock, and stands still while the client
//! is paused.

use farside_fabric::{Nanos, Timing};

/// The promises of the simulated fabric: the shortest round trip, and how late a chain can take
/// effect (L).
pub(crate) const TIMING: Timing =
    Timing { round_trip_min_ns: 20_000, lateness_max_ns: 8_000_000_000 };

/// The time at the start of an execution. The wall clock shows the same time.
pub(crate) const START_NS: Nanos = 1_000_000_000;
/// The expiries of touched values are later than this, in milliseconds: two years after the start.
/// So no touched value expires in an execution.
pub(crate) const EXPIRY_BASE_MS: u64 = 1 << 36;
/// When values with a time to live expire, in milliseconds: 50 ms after the start.
pub(crate) const EXPIRES_AT_MS: u64 = START_NS / 1_000_000 + TTL_NS / 1_000_000;
/// How long after the start of an execution values with a time to live expire.
pub const TTL_NS: Nanos = 50_000_000;

/// The pace of a clock that is as fast as the world's: it counts 16 sixteenths of a second in a
/// second.
pub(crate) const PACE: u8 = 16;

/// The clock of a client.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    pace: Nanos,
    /// The time at which the clock was right.
    origin: Nanos,
    /// How long the clock has stood still in ended pauses, and when the present pause began. Both
    /// by the world's clock.
    pub(crate) stood_still: Nanos,
    pub(crate) stopped_at: Option<Nanos>,
}

impl Clock {
    pub(crate) fn new(pace: u8, origin: Nanos) -> Self {
        Self { pace: pace.into(), origin, stood_still: 0, stopped_at: None }
    }

    /// Returns what the clock shows when the world's clock shows `now`.
    pub(crate) fn shows(&self, now: Nanos) -> Nanos {
        let ran = self.stopped_at.unwrap_or(now) - self.stood_still - self.origin;
        self.origin + ran * self.pace / Nanos::from(PACE)
    }

    /// Returns the world's time at which the clock will show `shown`, unless it is paused before.
    pub(crate) fn when(&self, shown: Nanos) -> Nanos {
        let Some(left) = shown.checked_sub(self.origin) else { return shown };
        let left = u128::from(left) * u128::from(PACE);
        let ran = left.div_ceil(self.pace.into()).try_into().unwrap_or(Nanos::MAX);
        self.origin.saturating_add(ran).saturating_add(self.stood_still)
    }
}
