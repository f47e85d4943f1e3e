//! Wakes a session's thread from its sleep when another thread has work for it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

/// A signal to one thread, which sleeps by it: alone ([`Wakeup::sleep`]), or inside a fabric
/// together with other descriptors ([`Fabric::set_wakeup`](crate::Fabric::set_wakeup)).
///
/// No signal is lost. The sleeper announces its sleep before it looks for a signal. The signal is
/// set before its sender looks for a sleeper. So one of the two sees the other, because the four
/// accesses have one order.
pub struct Wakeup {
    event: OwnedFd,
    is_signaled: AtomicBool,
    is_asleep: AtomicBool,
}

impl Wakeup {
    /// A wakeup without a signal.
    ///
    /// # Errors
    /// The system's error, if it refuses an eventfd.
    pub fn new() -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let [is_signaled, is_asleep] = [false, false].map(AtomicBool::new);
        Ok(Self { event, is_signaled, is_asleep })
    }

    /// Sets the signal, and wakes the thread if it sleeps. Costs a system call only then.
    ///
    /// Pass the work on under a lock first. The sleeper calls [`Wakeup::clear`] and then takes the
    /// work under the same lock.
    #[inline]
    pub fn signal(&self) {
        if self.is_signaled.load(Ordering::Relaxed) {
            // The sleeper has not cleared it yet, so it has yet to take the work.
            return;
        }
        self.is_signaled.store(true, Ordering::SeqCst);
        if self.is_asleep.load(Ordering::SeqCst) {
            // It fails only if the counter is full: then the thread is woken anyway.
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }

    /// Whether there is a signal.
    #[inline]
    pub fn is_signaled(&self) -> bool {
        self.is_signaled.load(Ordering::Relaxed)
    }

    /// Clears the signal. The sleeper calls this before it takes the work.
    #[inline]
    pub fn clear(&self) {
        if self.is_signaled() {
            self.is_signaled.store(false, Ordering::SeqCst);
        }
    }

    /// Announces a sleep. Returns false if there is a signal: then the thread must not sleep. If it
    /// returns true, poll the descriptor and call [`Wakeup::end_sleep`].
    pub fn begin_sleep(&self) -> bool {
        self.is_asleep.store(true, Ordering::SeqCst);
        let may_sleep = !self.is_signaled.load(Ordering::SeqCst);
        if !may_sleep {
            self.is_asleep.store(false, Ordering::SeqCst);
        }
        may_sleep
    }

    /// Ends an announced sleep.
    pub fn end_sleep(&self) {
        self.is_asleep.store(false, Ordering::SeqCst);
        // It fails if nothing was written.
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
    }

    /// Sleeps until there is a signal, at most for this time.
    pub fn sleep(&self, time_max: Option<Duration>) {
        if self.begin_sleep() {
            let timeout = time_max.and_then(|time| Timespec::try_from(time).ok());
            // An interrupted sleep is a short one.
            let _ = poll(&mut [PollFd::new(self, PollFlags::IN)], timeout.as_ref());
            self.end_sleep();
        }
    }
}

impl AsFd for Wakeup {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicU64;

    use super::*;

    /// A lost signal would make the sleeper sleep without end.
    #[test]
    fn no_signal_is_lost() {
        const SIGNALS: u64 = 20_000;
        let wakeup = Arc::new(Wakeup::new().unwrap());
        let [sent, seen] = [0, 0].map(AtomicU64::new);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for number in 1..=SIGNALS {
                    sent.store(number, Ordering::SeqCst);
                    wakeup.signal();
                    while seen.load(Ordering::SeqCst) < number {
                        std::thread::yield_now();
                    }
                }
            });
            while seen.load(Ordering::SeqCst) < SIGNALS {
                wakeup.sleep(None);
                wakeup.clear();
                seen.store(sent.load(Ordering::SeqCst), Ordering::SeqCst);
            }
        });
    }

    #[test]
    fn a_sleep_ends_at_its_time() {
        Wakeup::new().unwrap().sleep(Some(Duration::from_millis(1)));
    }
}
