//! The fetches under way, which the sessions of a client share.

use std::collections::HashMap;
use std::fmt::Display;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// The fetches under way of a client's sessions, by their keys.
#[derive(Default)]
pub(crate) struct Fetches(Mutex<HashMap<Vec<u8>, Arc<Outcome>>>);

/// What a fetch ended with, for the sessions that wait for it: the value, or the error's text.
pub(super) type Outcome = OnceLock<Result<Vec<u8>, Arc<str>>>;

/// How a session gets the value of an absent key.
pub(super) enum Start<'f> {
    Fetch(Fetch<'f>),
    /// Another session fetches the value.
    Wait(Arc<Outcome>),
}

/// A fetch under way. Its drop ends it, also if the fetch panics.
pub(super) struct Fetch<'f> {
    fetches: &'f Fetches,
    key: &'f [u8],
    outcome: Arc<Outcome>,
}

impl Fetches {
    fn lock(&self) -> MutexGuard<'_, HashMap<Vec<u8>, Arc<Outcome>>> {
        // Poisoning is ignored: no critical section can leave the map half changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to fetch this key, unless another session does.
    pub(super) fn begin<'f>(&'f self, key: &'f [u8]) -> Start<'f> {
        let mut under_way = self.lock();
        if let Some(outcome) = under_way.get(key) {
            return Start::Wait(outcome.clone());
        }
        let outcome = Arc::<Outcome>::default();
        under_way.insert(key.to_vec(), outcome.clone());
        Start::Fetch(Fetch { fetches: self, key, outcome })
    }
}

impl Fetch<'_> {
    /// Passes the result to the sessions that wait.
    pub(super) fn end(&self, result: Result<&[u8], &dyn Display>) {
        let text = |error: &dyn Display| error.to_string().into();
        // It was not set before: only the session that fetches sets it.
        let _ = self.outcome.set(result.map(<[u8]>::to_vec).map_err(text));
    }
}

impl Drop for Fetch<'_> {
    fn drop(&mut self) {
        self.fetches.lock().remove(self.key);
        // Of a fetch that has panicked.
        self.outcome.get_or_init(|| Err("it panicked".into()));
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    /// Fetches a key with this end, while nine others wait. Returns what they get.
    fn shared(end: impl FnOnce(&Fetch<'_>)) -> Vec<Result<Vec<u8>, Arc<str>>> {
        let fetches = Fetches::default();
        let Start::Fetch(fetch) = fetches.begin(b"key") else {
            panic!("another fetch is under way")
        };
        let wait = || match fetches.begin(b"key") {
            Start::Fetch(_) => panic!("a second fetch"),
            Start::Wait(outcome) => outcome.wait().clone(),
        };
        std::thread::scope(|scope| {
            let waiting: Vec<_> = (0..9).map(|_| scope.spawn(wait)).collect();
            // The map, the fetch, and those that wait.
            while Arc::strong_count(&fetch.outcome) < 11 {
                std::thread::yield_now();
            }
            let ended = catch_unwind(AssertUnwindSafe(|| end(&fetch)));
            drop(fetch);
            drop(ended);
            assert!(matches!(fetches.begin(b"key"), Start::Fetch(_)), "the fetch has ended");
            waiting.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn those_that_wait_share_the_value_or_the_failure() {
        let value = shared(|fetch| fetch.end(Ok(b"value")));
        assert_eq!(value, vec![Ok(b"value".to_vec()); 9]);
        let failed = shared(|fetch| fetch.end(Err(&"the database is down")));
        assert_eq!(failed, vec![Err("the database is down".into()); 9]);
        let panicked = shared(|_| panic!("as it should"));
        assert_eq!(panicked, vec![Err("it panicked".into()); 9]);
    }
}
