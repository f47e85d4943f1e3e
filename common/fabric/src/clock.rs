//! The clock of the fabrics: the time since boot, including the time spent suspended, read in a few
//! nanoseconds.
//!
//! Over shared memory an operation takes 200 ns and reads the clock twice, and the system's clock
//! takes 28 ns each time. If the kernel's own time source is the processor's time stamp counter,
//! this clock reads the counter, and asks the system once a millisecond. If a suspension resets the
//! counter, or the counter steps back, its difference to the last anchor exceeds a millisecond.
//! Then this clock asks the system.

use std::cell::Cell;

use super::Nanos;

/// How long the counter is used before the system is asked again.
const ANCHOR_NS: Nanos = 1_000_000;
/// The longest time between the readings of both clocks. Above it the process lost the processor
/// between the readings, and an anchor would be wrong by this time.
const PAIR_NS_MAX: Nanos = 1_000;

/// The time since boot by the system's clock, including the time spent suspended.
#[inline]
pub fn boot_time_ns() -> Nanos {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    time.tv_sec as Nanos * 1_000_000_000 + time.tv_nsec as Nanos
}

/// One moment, by both clocks.
#[derive(Clone, Copy, PartialEq)]
struct Anchor {
    ticks: u64,
    boot_ns: Nanos,
}

const NO_ANCHOR: Anchor = Anchor { ticks: 0, boot_ns: 0 };

/// The time since boot, which never steps back.
#[derive(Clone)]
pub(crate) struct Clock {
    /// Whether the kernel's time source is the counter.
    counter_is_time: bool,
    anchor: Cell<Anchor>,
    /// Nanoseconds a tick times 2^32; 0 while it is unknown.
    rate: Cell<u64>,
    /// The number of ticks after the anchor for which the rate is used.
    ticks_max: Cell<u64>,
    /// The last reading. The time by a new anchor may be a little before the time by the old one.
    last: Cell<Nanos>,
}

impl Clock {
    pub(crate) fn new() -> Self {
        let path = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
        let source = std::fs::read_to_string(path).unwrap_or_default();
        Self {
            counter_is_time: cfg!(target_arch = "x86_64") && source.trim() == "tsc",
            anchor: Cell::new(NO_ANCHOR),
            rate: Cell::new(0),
            ticks_max: Cell::new(0),
            last: Cell::new(0),
        }
    }

    #[inline]
    pub(crate) fn now(&self) -> Nanos {
        order_loads();
        let now = self.since_anchor(ticks()).max(self.last.get());
        self.last.set(now);
        now
    }

    /// The time, accurate to about a microsecond: the processor may read the counter before or
    /// after the accesses around this call, and around other readings.
    #[inline]
    pub(crate) fn roughly(&self) -> Nanos {
        self.since_anchor(ticks())
    }

    #[inline]
    fn since_anchor(&self, ticks: u64) -> Nanos {
        let anchor = self.anchor.get();
        let passed = ticks.wrapping_sub(anchor.ticks);
        if passed < self.ticks_max.get() {
            // No overflow: fewer than 2^28 ticks times a rate below 2^34.
            return anchor.boot_ns + ((passed * self.rate.get()) >> 32);
        }
        self.ask()
    }

    /// Asks the system for the time, and computes the rate from the time since the last anchor.
    #[cold]
    fn ask(&self) -> Nanos {
        let before_ns = boot_time_ns();
        if !self.counter_is_time {
            return before_ns;
        }
        order_loads();
        let ticks = ticks();
        let boot_ns = boot_time_ns();
        let (anchor, now) = (self.anchor.get(), Anchor { ticks, boot_ns });
        let passed_ns = boot_ns.saturating_sub(anchor.boot_ns);
        let passed_ticks = ticks.wrapping_sub(anchor.ticks);
        if boot_ns - before_ns > PAIR_NS_MAX {
            // The process lost the processor between the readings.
            self.ticks_max.set(0);
        } else if anchor == NO_ANCHOR {
            self.anchor.set(now);
        } else if passed_ns >= ANCHOR_NS {
            let rate = (u128::from(passed_ns) << 32) / u128::from(passed_ticks.max(1));
            // A counter runs at 250 MHz or faster, and below 256 GHz.
            let known = (1 << 24..1 << 34).contains(&rate);
            self.anchor.set(now);
            self.rate.set(if known { rate as u64 } else { 0 });
            let ticks_max = ((ANCHOR_NS << 32) / self.rate.get().max(1)).min(1 << 28);
            self.ticks_max.set(if known { ticks_max } else { 0 });
        }
        boot_ns
    }
}

/// Later instructions wait until all earlier loads have completed.
#[cfg(target_arch = "x86_64")]
#[inline]
#[allow(unsafe_code, reason = "this fence is an intrinsic")]
fn order_loads() {
    // SAFETY: every x86-64 processor has SSE2 and with it this instruction.
    unsafe { std::arch::x86_64::_mm_lfence() };
}

#[cfg(not(target_arch = "x86_64"))]
fn order_loads() {}

/// The processor's time stamp counter.
#[cfg(target_arch = "x86_64")]
#[inline]
#[allow(unsafe_code, reason = "reading the counter is an intrinsic")]
fn ticks() -> u64 {
    // SAFETY: every x86-64 processor has this instruction.
    unsafe { std::arch::x86_64::_rdtsc() }
}

#[cfg(not(target_arch = "x86_64"))]
fn ticks() -> u64 {
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_agrees_with_the_systems_clock() {
        let clock = Clock::new();
        let started = boot_time_ns();
        while boot_time_ns() - started < 50_000_000 {
            let before = boot_time_ns();
            let now = clock.now();
            let after = boot_time_ns();
            // The rate comes from a millisecond and two readings within a microsecond.
            let slack = 5_000;
            assert!(before <= now + slack && now <= after + slack, "{before} {now} {after}");
        }
    }

    #[test]
    fn the_clock_ignores_a_counter_that_jumped() {
        let clock = Clock::new();
        while clock.ticks_max.get() == 0 && clock.counter_is_time {
            clock.now();
        }
        let Anchor { ticks, boot_ns } = clock.anchor.get();
        for ticks in [ticks.wrapping_sub(1 << 40), ticks.wrapping_add(1 << 40)] {
            clock.anchor.set(Anchor { ticks, boot_ns });
            let before = boot_time_ns();
            assert!((before..=boot_time_ns() + 1_000_000).contains(&clock.now()));
        }
    }
}
