//! Cache-aside in one call. The client fetches a value that is absent once, however many of its
//! sessions ask for it.

mod under_way;

use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use farside_protocol::OperationKind;

pub(crate) use self::under_way::Fetches;
use self::under_way::Start;
use crate::{Error, Session, Store};

impl Session {
    /// Returns the key's value. If the key is absent, fetches the value from elsewhere, stores it
    /// with this TTL, and returns it. If it cannot be stored, because the server has no room or
    /// does not answer, the call returns it all the same.
    ///
    /// Of all sessions of the client only one fetches a key at a time. The others wait for its end,
    /// and share its value, or its failure as [`Error::Fetch`]. Other clients may fetch the same
    /// key meanwhile; then the last value stays.
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
    /// The error of `fetch`; those of [`Session::get`]; `Denied` if the key is absent and the
    /// client a reader.
    pub fn get_or_fetch<V: AsRef<[u8]>, E: From<Error> + Display>(
        &mut self,
        key: impl AsRef<[u8]>,
        ttl: Duration,
        fetch: impl FnOnce() -> Result<V, E>,
    ) -> Result<Vec<u8>, E> {
        let shared = self.shared.clone();
        let key = key.as_ref();
        if let Some(value) = self.get(key)? {
            return Ok(value.into_vec());
        }
        self.check_role(OperationKind::Put)?;
        let under_way = match shared.fetches.begin(key) {
            Start::Fetch(under_way) => under_way,
            Start::Wait(outcome) => {
                let failed = |reason: Arc<str>| Error::Fetch { reason };
                return Ok(outcome.wait().clone().map_err(failed)?);
            }
        };
        let value = fetch().inspect_err(|error| under_way.end(Err(error)))?;
        let value = value.as_ref();
        if let Err(error) = self.store(key, value, Store::always().ttl(ttl)) {
            tracing::debug!(%error, "a fetched value was not stored");
        }
        under_way.end(Ok(value));
        Ok(value.to_vec())
    }
}
