//! Operations of a session that depend on a key's present value, or tell about it.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use farside_protocol::{Action, Expected, Lifetime, OperationKind, Version};

use crate::{Outcome, Result, Session, Store, Value};

/// When a present value expires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Ttl {
    /// Never.
    Forever,
    /// After this time, by the clock of this machine.
    For(Duration),
}

impl Session {
    /// Stores `new` only if the key's value is `expected`; with `None`, only if the key is absent.
    /// If it is not, [`Outcome::value`] is the present value.
    ///
    /// The round trips of a GET, and one more. With `None` those of [`Session::insert`], and those
    /// of a GET if the key was present. Compares whole values: for large ones
    /// [`Session::compare_exchange_version`] is cheaper.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// assert!(session.compare_exchange("state", None, "new")?.applied);
    /// assert!(session.compare_exchange("state", Some(b"new"), "open")?.applied);
    /// let outcome = session.compare_exchange("state", Some(b"new"), "closed")?;
    /// assert_eq!(outcome.value.expect("the key is present"), "open");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Session::put`].
    pub fn compare_exchange(
        &mut self,
        key: impl AsRef<[u8]>,
        expected: Option<&[u8]>,
        new: impl AsRef<[u8]>,
    ) -> Result<Outcome> {
        let action = match expected {
            Some(value) => Action::Exchange(Expected::Value(value), Lifetime::FOREVER),
            None => Store::if_absent().returning().action(),
        };
        let answer = self.change(action, key.as_ref(), new.as_ref())?;
        Ok(self.outcome(answer))
    }

    /// Stores `new` only if the key's value is still the one that the write `expected` stored. If
    /// it is not, [`Outcome::value`] is the present value.
    ///
    /// The round trips of a GET, and one more.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// session.put("state", "new")?;
    /// let read = session.get("state")?.expect("it was just put");
    /// assert!(session.compare_exchange_version("state", read.version, "open")?.applied);
    /// assert!(!session.compare_exchange_version("state", read.version, "closed")?.applied);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Session::put`].
    pub fn compare_exchange_version(
        &mut self,
        key: impl AsRef<[u8]>,
        expected: Version,
        new: impl AsRef<[u8]>,
    ) -> Result<Outcome> {
        let action = Action::Exchange(Expected::Version(expected), Lifetime::FOREVER);
        let answer = self.change(action, key.as_ref(), new.as_ref())?;
        Ok(self.outcome(answer))
    }

    /// Adds `delta` to the decimal number in the key's value, and returns the sum. An absent key
    /// counts as 0. The TTL stays.
    ///
    /// The number is an integer of 64 bits with a sign, in the form that this call writes: no plus
    /// sign, no leading zeros. Two round trips if the location is cached, three if not, four at
    /// most for an absent key.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// assert_eq!(session.increment("visits", 1)?, 1);
    /// assert_eq!(session.increment("visits", -3)?, -2);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Session::put`]; and `NotANumber`, `NumberOverflow`.
    pub fn increment(&mut self, key: impl AsRef<[u8]>, delta: i64) -> Result<i64> {
        Ok(self.change(Action::increment(delta), key.as_ref(), &[])?.number)
    }

    /// Appends bytes to the key's value, and returns the new length in bytes. An absent key counts
    /// as empty. The TTL stays.
    ///
    /// Round trips as for [`Session::increment`].
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// assert_eq!(session.append("log", "one,")?, 4);
    /// assert_eq!(session.append("log", "two,")?, 8);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Session::put`].
    pub fn append(&mut self, key: impl AsRef<[u8]>, bytes: impl AsRef<[u8]>) -> Result<usize> {
        let appended = self.change(Action::append(), key.as_ref(), bytes.as_ref())?;
        let before = appended.found.map_or(0, |found| found.value_bytes as usize);
        Ok(before + bytes.as_ref().len())
    }

    /// Removes a key and returns its value; `None` if the key was absent.
    ///
    /// Two round trips if the location is cached, three if not, one if the key was absent.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// session.put("job", "build")?;
    /// assert_eq!(session.take("job")?.expect("it was just put"), "build");
    /// assert!(session.take("job")?.is_none());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Session::delete`].
    pub fn take(&mut self, key: impl AsRef<[u8]>) -> Result<Option<Value>> {
        let taken = self.change(Action::take(), key.as_ref(), &[])?;
        Ok(self.outcome(taken).value)
    }

    /// Removes a key only if its value is still the one that the write `expected` stored. Returns
    /// false if it is not, or if the key is absent.
    ///
    /// Round trips as for [`Session::take`]: the value is READ, because only its block shows the
    /// whole version. One round trip less if the value is another one.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// session.put("job", "build")?;
    /// let read = session.get("job")?.expect("it was just put");
    /// session.put("job", "test")?; // usually another client does this
    /// assert!(!session.delete_if_version("job", read.version)?);
    /// let read = session.get("job")?.expect("it was just put");
    /// assert!(session.delete_if_version("job", read.version)?);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Session::delete`].
    pub fn delete_if_version(&mut self, key: impl AsRef<[u8]>, expected: Version) -> Result<bool> {
        Ok(self.change(Action::delete_if_version(expected), key.as_ref(), &[])?.applied)
    }

    /// Returns the key's value; if the key is absent, stores `value` first.
    ///
    /// The round trips of a GET, and those of [`Session::insert`] if the key is absent.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// assert_eq!(session.get_or_insert("region", "north")?, "north");
    /// assert_eq!(session.get_or_insert("region", "south")?, "north");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Session::put`].
    pub fn get_or_insert(
        &mut self,
        key: impl AsRef<[u8]>,
        value: impl AsRef<[u8]>,
    ) -> Result<Value> {
        let answer = self.change(Action::get_or_insert(), key.as_ref(), value.as_ref())?;
        let outcome = self.outcome(answer);
        let version = outcome.version.unwrap_or(Version::from_u64(0));
        Ok(outcome.value.unwrap_or_else(|| Value { data: value.as_ref().to_vec(), version }))
    }

    /// Whether the key is present. Round trips and verbs as for [`Session::version`].
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// assert!(!session.exists("greeting")?);
    /// session.put("greeting", "hello")?;
    /// assert!(session.exists("greeting")?);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Session::get`].
    pub fn exists(&mut self, key: impl AsRef<[u8]>) -> Result<bool> {
        Ok(self.version(key)?.is_some())
    }

    /// Returns the version of the key's value; `None` if the key is absent.
    ///
    /// One READ of 8 bytes and one round trip if the location is cached, the value has not changed
    /// since, and it does not expire. Otherwise the round trips of [`Session::get`], and one more
    /// if the value has changed.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// session.put("config", "1")?;
    /// let version = session.version("config")?;
    /// session.put("config", "1")?;
    /// assert_ne!(session.version("config")?, version); // also if the bytes are the same
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Session::get`].
    pub fn version(&mut self, key: impl AsRef<[u8]>) -> Result<Option<Version>> {
        let answer = self.run(OperationKind::Version, key.as_ref(), |handle, key| {
            handle.perform(Action::Version, key, &[])
        })?;
        Ok(answer.version)
    }

    /// Makes the key's value expire after `ttl`, instead of when it would have. Returns false if
    /// the key is absent.
    ///
    /// Round trips as for [`Session::take`]: the value is copied to a new block.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// use std::time::Duration;
    ///
    /// session.put("session:42", "alice")?;
    /// assert!(session.touch("session:42", Duration::from_secs(60))?);
    /// assert!(!session.touch("session:43", Duration::from_secs(60))?);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Session::put`].
    pub fn touch(&mut self, key: impl AsRef<[u8]>, ttl: Duration) -> Result<bool> {
        Ok(self.change(Action::touch(Lifetime::lasting(ttl)), key.as_ref(), &[])?.applied)
    }

    /// Makes the key's value stay until a client replaces or removes it. Returns false if the key
    /// is absent. Otherwise as [`Session::touch`].
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// session.put_with_ttl("draft", "text", std::time::Duration::from_secs(60))?;
    /// assert!(session.persist("draft")?);
    /// assert_eq!(session.ttl("draft")?, Some(farside::Ttl::Forever));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Session::put`].
    pub fn persist(&mut self, key: impl AsRef<[u8]>) -> Result<bool> {
        Ok(self.change(Action::touch(Lifetime::FOREVER), key.as_ref(), &[])?.applied)
    }

    /// Returns when the key's value expires; `None` if the key is absent. Takes as many round trips
    /// as [`Session::get`].
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// use std::time::Duration;
    /// use farside::Ttl;
    ///
    /// session.put_with_ttl("session:42", "alice", Duration::from_secs(60))?;
    /// let Some(Ttl::For(left)) = session.ttl("session:42")? else { panic!("it has a TTL") };
    /// assert!(left <= Duration::from_secs(61));
    /// assert_eq!(session.ttl("absent")?, None);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Session::get`].
    pub fn ttl(&mut self, key: impl AsRef<[u8]>) -> Result<Option<Ttl>> {
        let found = self.run(OperationKind::Get, key.as_ref(), |handle, key| handle.get(key))?;
        Ok(found.map(|found| match found.expires_at_ms() {
            0 => Ttl::Forever,
            expires_at_ms => {
                let expires_at = UNIX_EPOCH + Duration::from_millis(expires_at_ms);
                Ttl::For(expires_at.duration_since(SystemTime::now()).unwrap_or_default())
            }
        }))
    }
}
