//! Cache-aside in one call. The client fetches a value that is absent once, however many of its
//! sessions ask for it.

use std::collections::HashSet;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::{Error, Session, Store};

/// The fetches under way of a client's sessions.
#[derive(Default)]
pub(crate) struct Fetches {
    /// Their keys.
    under_way: Mutex<HashSet<Vec<u8>>>,
    /// Notified when a fetch has ended.
    ended: Condvar,
}

/// A fetch under way. Its drop ends it, even if the fetch panics.
struct Fetch<'f> {
    fetches: &'f Fetches,
    key: &'f [u8],
}

impl Fetches {
    fn lock(&self) -> MutexGuard<'_, HashSet<Vec<u8>>> {
        // Poisoning is ignored: no critical section can leave the set half changed.
        self.under_way.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to fetch this key. If another session already does, waits for its end and returns
    /// `None`.
    fn begin<'f>(&'f self, key: &'f [u8]) -> Option<Fetch<'f>> {
        let mut under_way = self.lock();
        if under_way.insert(key.to_vec()) {
            return Some(Fetch { fetches: self, key });
        }
        while under_way.contains(key) {
            under_way = self.ended.wait(under_way).unwrap_or_else(PoisonError::into_inner);
        }
        None
    }
}

impl Drop for Fetch<'_> {
    fn drop(&mut self) {
        self.fetches.lock().remove(self.key);
        self.fetches.ended.notify_all();
    }
}

impl Session {
    /// Returns the key's value. If the key is absent, fetches the value from elsewhere, stores it
    /// with this TTL, and returns it.
    ///
    /// Of all sessions of the client only one fetches a key at a time. The others wait for its end,
    /// and then find the value, or fetch it themselves if that fetch has failed. Other clients may
    /// fetch the same key meanwhile; then the last value stays.
    ///
    /// The round trips of [`Session::get`]; if the key is absent, also those of [`Session::put`].
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// use std::time::Duration;
    ///
    /// let fetch = || Ok::<_, farside::Error>("Ada"); // from a database
    /// let name = session.get_or_fetch("user:7", Duration::from_secs(60), fetch)?;
    /// assert_eq!(name, b"Ada");
    /// assert_eq!(session.get("user:7")?.expect("it was just fetched"), "Ada");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// The error of `fetch`; those of [`Session::get`] and [`Session::put`].
    pub fn get_or_fetch<V: AsRef<[u8]>, E: From<Error>>(
        &mut self,
        key: impl AsRef<[u8]>,
        ttl: Duration,
        fetch: impl FnOnce() -> Result<V, E>,
    ) -> Result<Vec<u8>, E> {
        let shared = self.shared.clone();
        let key = key.as_ref();
        loop {
            if let Some(value) = self.get(key)? {
                return Ok(value.into_vec());
            }
            let Some(_under_way) = shared.fetches.begin(key) else { continue };
            let value = fetch()?;
            self.store(key, &value, Store::always().ttl(ttl))?;
            return Ok(value.as_ref().to_vec());
        }
    }
}
