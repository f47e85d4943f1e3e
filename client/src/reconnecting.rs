//! One connection for all sessions of a client, which one of them makes anew when it is lost; and
//! how long a call goes on reconnecting.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::client::ClientInner;
use crate::{Contact, Error, Result};

/// The present connection, and whether a session is making another.
pub(crate) struct Reconnecting<C> {
    state: Mutex<State<C>>,
    /// An attempt has ended.
    attempted: Condvar,
}

struct State<C> {
    connection: Arc<C>,
    /// A session is reconnecting, for all of them.
    is_connecting: bool,
    /// When reconnecting failed last, and why, as far as that can be told twice.
    failed: Option<(Instant, Option<Error>)>,
}

impl<C> Reconnecting<C> {
    pub(crate) fn new(connection: C) -> Self {
        let connection = Arc::new(connection);
        let state = State { connection, is_connecting: false, failed: None };
        Self { state: Mutex::new(state), attempted: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State<C>> {
        // A panic elsewhere leaves the state as it was.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The connection; a new one if the last is lost. The first session that needs it connects; the
    /// others wait, and fail with it.
    ///
    /// The attempt does not hold the lock. A session that failed and asks again would mostly get
    /// the lock before those that wait, and they would wait for one attempt after the other.
    pub(crate) fn get(
        &self,
        is_lost: impl Fn(&C) -> bool,
        establish: impl FnOnce() -> Result<C>,
        gave_up: impl FnOnce(Duration) -> Error,
    ) -> Result<Arc<C>> {
        let asked_at = Instant::now();
        let mut state = self.lock();
        loop {
            if !is_lost(&state.connection) {
                return Ok(state.connection.clone());
            }
            if let Some((at, why)) = &state.failed
                && *at > asked_at
            {
                let tried = asked_at.elapsed();
                let why = why.as_ref().and_then(|why| why.for_another(tried));
                return Err(why.unwrap_or_else(|| gave_up(tried)));
            }
            if !state.is_connecting {
                break;
            }
            state = self.attempted.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.is_connecting = true;
        drop(state);
        // Declared first, so it ends last, when what came of it is in the state.
        let _attempt = Attempt(self);
        let established = establish();
        let mut state = self.lock();
        match established {
            Ok(connection) => {
                state.connection = Arc::new(connection);
                Ok(state.connection.clone())
            }
            Err(error) => {
                let error = match error {
                    Error::Connect(error) => error.after_an_answer().into(),
                    error => error,
                };
                state.failed = Some((Instant::now(), error.for_another(asked_at.elapsed())));
                Err(error)
            }
        }
    }
}

/// An attempt to reconnect. Should it panic, others must not wait for it for ever.
struct Attempt<'a, C>(&'a Reconnecting<C>);

impl<C> Drop for Attempt<'_, C> {
    fn drop(&mut self) {
        self.0.lock().is_connecting = false;
        self.0.attempted.notify_all();
    }
}

/// How often one call reconnects at least; it goes on until the timeout for connecting is over.
const RECONNECTS_MIN: u32 = 3;
/// Backoff before reconnect attempt n is n times this. The first attempt does not wait.
const RECONNECT_PAUSE: Duration = Duration::from_millis(10);
const RECONNECT_PAUSE_MAX: Duration = Duration::from_millis(250);

/// How often a call lost its connection.
#[derive(Default)]
pub(crate) struct ReconnectBudget {
    first_at: Option<Instant>,
    count: u32,
}

impl ReconnectBudget {
    /// For how long there was no connection that lasted.
    pub(crate) fn lasted(&self) -> Duration {
        self.first_at.map_or(Duration::ZERO, |first| first.elapsed())
    }

    /// One more; the error if that is enough.
    pub(crate) fn add(&mut self, shared: &ClientInner) -> Result<()> {
        self.first_at.get_or_insert_with(Instant::now);
        self.count += 1;
        if self.count >= RECONNECTS_MIN && self.lasted() >= shared.connect_timeout() {
            return Err(shared.unreachable(Contact::Lost, self.lasted()));
        }
        std::thread::sleep((RECONNECT_PAUSE * (self.count - 1)).min(RECONNECT_PAUSE_MAX));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    #[test]
    fn an_attempt_that_panics_leaves_no_session_waiting() {
        let connections = Reconnecting::new(1);
        let get = |establish: fn() -> Result<u32>| {
            connections.get(|number| *number == 1, establish, |_| unreachable!())
        };
        let attempt = || get(|| panic!("as it should"));
        assert!(catch_unwind(AssertUnwindSafe(attempt)).is_err());
        assert!(!connections.lock().is_connecting);
        assert_eq!(*get(|| Ok(2)).unwrap(), 2);
    }
}
