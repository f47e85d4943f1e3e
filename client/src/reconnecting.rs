//! One connection for all sessions of a client. When it is lost, one session reconnects for all.
//! Also the budget of each call, which limits how often and for how long the call reconnects.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use farside_fabric::interrupt;

use crate::ConnectError;

/// The present connection, and whether a session is replacing it.
pub(crate) struct Reconnecting<C> {
    state: Mutex<State<C>>,
    /// Notified when an attempt to reconnect has ended.
    attempted: Condvar,
}

struct State<C> {
    /// `None` before the first one.
    connection: Option<Arc<C>>,
    /// Whether a session is reconnecting, for all sessions.
    is_connecting: bool,
    /// When the last failed attempt ended, and its error for the sessions that waited for it.
    last_failure: Option<(Instant, ConnectError)>,
}

impl<C> Reconnecting<C> {
    pub(crate) fn new(connection: Option<C>) -> Self {
        let connection = connection.map(Arc::new);
        let state = State { connection, is_connecting: false, last_failure: None };
        Self { state: Mutex::new(state), attempted: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State<C>> {
        // Poisoning is ignored: no critical section can leave the state half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the last connection, which may be lost.
    pub(crate) fn last(&self) -> Option<Arc<C>> {
        self.lock().connection.clone()
    }

    /// Returns the connection, unless it is lost.
    pub(crate) fn present(&self, is_lost: impl Fn(&C) -> bool) -> Option<Arc<C>> {
        self.last().filter(|connection| !is_lost(connection))
    }

    /// Returns the connection, after reconnecting if it is lost. The first session that needs a new
    /// one reconnects; the others wait, and share its result.
    ///
    /// The attempt does not hold the lock. Otherwise a session that failed and tries again would
    /// usually get the lock before the waiting sessions, which would wait for attempt after
    /// attempt.
    pub(crate) fn get(
        &self,
        is_lost: impl Fn(&C) -> bool,
        establish: impl FnOnce() -> Result<C, ConnectError>,
    ) -> Result<Arc<C>, ConnectError> {
        let asked_at = Instant::now();
        let mut state = self.lock();
        loop {
            if let Some(connection) = state.connection.as_ref().filter(|it| !is_lost(it)) {
                return Ok(connection.clone());
            }
            if let Some((failed_at, error)) = &state.last_failure
                && *failed_at > asked_at
            {
                return Err(error.clone().tried_for(asked_at.elapsed()));
            }
            if !state.is_connecting {
                break;
            }
            let waited = self.attempted.wait_timeout(state, interrupt::step(Duration::MAX));
            // The question needs Python's lock, whose holder may wait for this one.
            drop(waited);
            if interrupt::gives_up() {
                let source = Arc::new(io::ErrorKind::Interrupted.into());
                return Err(ConnectError::System { doing: "waiting for a connection", source });
            }
            state = self.lock();
        }
        state.is_connecting = true;
        drop(state);
        // Declared before the guard of the lock, so dropped after it: the result is in the state by
        // then, and `Attempt::drop` can lock.
        let _attempt = Attempt(self);
        let established = establish();
        let mut state = self.lock();
        match established {
            Ok(connection) => {
                let connection = Arc::new(connection);
                state.connection = Some(connection.clone());
                Ok(connection)
            }
            Err(error) => {
                let error = error.after_an_answer();
                // After an attempt that its caller has ended, a session that waits makes its own.
                if !interrupt::is_given_up() {
                    state.last_failure = Some((Instant::now(), error.clone()));
                }
                Err(error)
            }
        }
    }
}

/// An attempt to reconnect. Its drop wakes the waiting sessions, even if the attempt panics.
struct Attempt<'a, C>(&'a Reconnecting<C>);

impl<C> Drop for Attempt<'_, C> {
    fn drop(&mut self) {
        self.0.lock().is_connecting = false;
        self.0.attempted.notify_all();
    }
}

/// A call fails only after at least this many losses, and once the timeout for connecting is over.
const LOSSES_MIN: u32 = 3;
/// The pause before attempt n to reconnect is n - 1 times this, and at most
/// [`RECONNECT_PAUSE_MAX`]. So the first attempt does not wait.
const RECONNECT_PAUSE: Duration = Duration::from_millis(10);
const RECONNECT_PAUSE_MAX: Duration = Duration::from_millis(250);

/// The losses of the connection during one call, and the time of the first loss. Both decide
/// whether the call tries again.
#[derive(Default)]
pub(crate) struct ReconnectBudget {
    first_loss_at: Option<Instant>,
    losses: u32,
}

impl ReconnectBudget {
    /// Returns the time since the first loss; zero if there was none.
    pub(crate) fn since_first_loss(&self) -> Duration {
        self.first_loss_at.map_or(Duration::ZERO, |at| at.elapsed())
    }

    /// Counts a loss. Returns when the first one was; `None` once the budget is used up.
    pub(crate) fn count(&mut self, connect_timeout: Duration) -> Option<Instant> {
        let first = *self.first_loss_at.get_or_insert_with(Instant::now);
        self.losses += 1;
        let is_used_up = self.losses >= LOSSES_MIN && first.elapsed() >= connect_timeout;
        (!is_used_up).then_some(first)
    }

    /// Counts a loss, and sleeps before the next attempt. Returns false, without a pause, once the
    /// budget is used up.
    pub(crate) fn count_loss(&mut self, connect_timeout: Duration) -> bool {
        if self.count(connect_timeout).is_none() || interrupt::gives_up() {
            return false;
        }
        interrupt::sleep((RECONNECT_PAUSE * (self.losses - 1)).min(RECONNECT_PAUSE_MAX));
        true
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    #[test]
    fn an_attempt_that_panics_leaves_no_session_waiting() {
        let connections = Reconnecting::new(Some(1));
        let get = |establish: fn() -> Result<u32, ConnectError>| {
            connections.get(|number| *number == 1, establish)
        };
        let attempt = || get(|| panic!("as it should"));
        assert!(catch_unwind(AssertUnwindSafe(attempt)).is_err());
        assert!(!connections.lock().is_connecting);
        assert_eq!(*get(|| Ok(2)).unwrap(), 2);
    }
}
