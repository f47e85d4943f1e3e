//! The clock of all latencies.

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds of a monotonic clock, as a plain number: differences cost one subtraction.
#[inline]
pub fn now_ns() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
