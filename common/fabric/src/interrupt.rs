//! Calls that their caller can end while they wait, as Python does at Ctrl-C.
//!
//! A call waits at many places: for a chain, a connection, memory, or another thread. Each of them
//! waits in steps of at most 50 ms, and asks in between whether the caller gives up. From then
//! on all timeouts of the call count as over. So it fails as if the server had not answered, and
//! its error says whether it may have had an effect.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// The longest time between two questions.
const STEP: Duration = Duration::from_millis(50);

/// A call that its caller can end.
#[derive(Clone, Copy)]
struct Call {
    gives_up: fn() -> bool,
    /// `None` before the first wait.
    asked_at: Option<Instant>,
    is_given_up: bool,
}

thread_local! {
    /// The thread's present call.
    static CALL: Cell<Option<Call>> = const { Cell::new(None) };
}

/// Ends a call, also if it panics.
struct End(Option<Call>);

impl Drop for End {
    fn drop(&mut self) {
        CALL.set(self.0);
    }
}

/// Runs a call of the library, which ends early if `gives_up` returns true. It is asked about 20
/// times a second, while the call waits.
///
/// The call then fails with the error of a server that does not answer. A write may be on its way
/// to the server: if its error is indeterminate, it takes effect within a second or never.
///
/// A call inside of `gives_up` fails at once if it would have to wait, because it could wait for
/// the outer call.
pub fn interruptible<T>(gives_up: fn() -> bool, call: impl FnOnce() -> T) -> T {
    let outer = CALL.get();
    let inner = Call { gives_up, asked_at: None, is_given_up: outer.is_some() };
    let _end = End(CALL.replace(Some(inner)));
    call()
}

/// Whether the caller has given up.
#[inline]
pub fn is_given_up() -> bool {
    CALL.get().is_some_and(|call| call.is_given_up)
}

/// Asks whether the caller gives up, unless it was asked a moment ago. Call it at each step of a
/// wait, and without a lock that `gives_up` could need.
#[inline]
pub fn gives_up() -> bool {
    CALL.get().is_some_and(ask)
}

#[cold]
fn ask(mut call: Call) -> bool {
    let now = Instant::now();
    let asked_at = *call.asked_at.get_or_insert(now);
    let asks = !call.is_given_up && now - asked_at >= STEP;
    if asks {
        call.asked_at = Some(now);
    }
    CALL.set(Some(call));
    if asks && (call.gives_up)() {
        call.is_given_up = true;
        CALL.set(Some(call));
    }
    call.is_given_up
}

/// Returns for how long to wait until the next question, of the time that is left.
#[inline]
pub fn step(left: Duration) -> Duration {
    match CALL.get() {
        None => left,
        Some(call) if call.is_given_up => Duration::ZERO,
        Some(_) => left.min(STEP),
    }
}

/// Sleeps for this time, or until the caller gives up.
pub fn sleep(time: Duration) {
    let started = Instant::now();
    loop {
        let left = time.saturating_sub(started.elapsed());
        if left.is_zero() || gives_up() {
            return;
        }
        std::thread::sleep(step(left));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    thread_local! {
        static ASKED: Cell<u32> = const { Cell::new(0) };
    }

    fn gives_up_the_third_time() -> bool {
        ASKED.set(ASKED.get() + 1);
        ASKED.get() == 3
    }

    #[test]
    fn a_call_ends_when_its_caller_gives_up() {
        let slept = interruptible(gives_up_the_third_time, || {
            // Without the question this test would not end.
            sleep(Duration::from_secs(1_000_000));
            assert!(is_given_up() && gives_up());
            step(Duration::from_secs(1))
        });
        // Once the caller has given up, nothing waits, and it is not asked again.
        assert_eq!((slept, ASKED.get()), (Duration::ZERO, 3));
        assert!(!is_given_up());
        assert_eq!(step(Duration::from_secs(1)), Duration::from_secs(1));
    }

    #[test]
    fn a_call_while_the_caller_is_asked_does_not_wait() {
        let calls = || interruptible(|| false, || (is_given_up(), step(STEP)));
        let inner = interruptible(|| false, calls);
        assert_eq!(inner, (true, Duration::ZERO));
        assert_eq!(calls(), (false, STEP));
    }

    #[test]
    fn a_call_that_panics_has_ended() {
        let panics = || interruptible(|| true, || panic!("as it should"));
        assert!(std::panic::catch_unwind(panics).is_err());
        assert!(CALL.get().is_none());
    }
}
