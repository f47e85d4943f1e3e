//! Conditions under which values are stored, when they expire, and whether they can be evicted.

use std::time::{Duration, SystemTime};

use farside_protocol::{Action, Change, Expected, Lifetime, Version};

/// The condition under which a store takes effect.
#[derive(Clone, Copy, Debug, Default)]
enum Precondition<'e> {
    #[default]
    None,
    Absent,
    Present,
    Expected(Expected<'e>),
}

/// The condition of a store, and the lifetime of its value. An argument of
/// [`Session::store`](crate::Session::store), [`Pipeline::store`](crate::Pipeline::store) and
/// [`Batch::store`](crate::Batch::store).
///
/// ```
/// use std::time::Duration;
/// use farside::Store;
///
/// let lock = Store::if_absent().ttl(Duration::from_secs(10));
/// # let _ = lock;
/// ```
#[derive(Clone, Copy, Debug, Default)]
#[must_use = "a `Store` only says how to store a value: pass it to `store`"]
pub struct Store<'e> {
    condition: Precondition<'e>,
    lifetime: Lifetime,
    returns: bool,
}

impl<'e> Store<'e> {
    fn on(condition: Precondition<'e>) -> Self {
        Self { condition, ..Self::default() }
    }

    /// Without a condition, as a PUT.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// use farside::Store;
    ///
    /// session.put("greeting", "hello")?;
    /// let outcome = session.store("greeting", "hi", Store::always().returning())?;
    /// assert_eq!(outcome.value.expect("it was just put"), "hello");
    /// # Ok(()) }
    /// ```
    pub fn always() -> Self {
        Self::default()
    }

    /// Only if the key is absent, as an INSERT.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// use std::time::Duration;
    /// use farside::Store;
    ///
    /// let lock = Store::if_absent().ttl(Duration::from_secs(10));
    /// assert!(session.store("lock", "first", lock)?.applied);
    /// assert!(!session.store("lock", "second", lock)?.applied);
    /// # Ok(()) }
    /// ```
    pub fn if_absent() -> Self {
        Self::on(Precondition::Absent)
    }

    /// Only if the key is present, as an UPDATE.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// use farside::Store;
    ///
    /// assert!(!session.store("greeting", "hello", Store::if_present())?.applied);
    /// # Ok(()) }
    /// ```
    pub fn if_present() -> Self {
        Self::on(Precondition::Present)
    }

    /// Only if the key has this value.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// use farside::Store;
    ///
    /// session.put("state", "new")?;
    /// assert!(session.store("state", "open", Store::if_value(b"new"))?.applied);
    /// assert!(!session.store("state", "open", Store::if_value(b"new"))?.applied);
    /// # Ok(()) }
    /// ```
    pub fn if_value(value: &'e [u8]) -> Self {
        Self::on(Precondition::Expected(Expected::Value(value)))
    }

    /// Only if the key's value is still the one that this write stored.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// use farside::Store;
    ///
    /// let version = session.get_or_insert("state", "new")?.version;
    /// assert!(session.store("state", "open", Store::if_version(version))?.applied);
    /// assert!(!session.store("state", "closed", Store::if_version(version))?.applied);
    /// # Ok(()) }
    /// ```
    pub fn if_version(version: Version) -> Self {
        Self::on(Precondition::Expected(Expected::Version(version)))
    }

    /// The value expires this long after it is written, rounded down to a full millisecond of the
    /// wall clock. From that millisecond on the key is absent. A time after the year 10889 is
    /// refused, as [`OperationError::ExpiryTooLate`](crate::OperationError::ExpiryTooLate). Without
    /// a TTL the value stays, even if the value that it replaces had one.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// use std::time::Duration;
    /// use farside::Store;
    ///
    /// session.put("session:42", "alice")?;
    /// let renewed = Store::if_present().ttl(Duration::from_secs(15 * 60));
    /// assert!(session.store("session:42", "alice", renewed)?.applied);
    /// # Ok(()) }
    /// ```
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.lifetime = self.lifetime.expiring_as(Lifetime::lasting(ttl));
        self
    }

    /// The value expires at this time, rounded up to a full millisecond; otherwise as
    /// [`Store::ttl`].
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// use std::time::{Duration, SystemTime};
    /// use farside::Store;
    ///
    /// let midnight = SystemTime::now() + Duration::from_secs(3600);
    /// session.store("offer", "half price", Store::always().until(midnight))?;
    /// assert!(session.ttl("offer")?.is_some());
    /// # Ok(()) }
    /// ```
    pub fn until(mut self, expires_at: SystemTime) -> Self {
        self.lifetime = self.lifetime.expiring_as(Lifetime::until(expires_at));
        self
    }

    /// The value expires when the one that it replaces would have, and is pinned if that one is.
    /// Costs the round trips of a GET and one more, unless the key is absent.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// use std::time::Duration;
    /// use farside::{Store, Ttl};
    ///
    /// session.put_with_ttl("session:42", "alice", Duration::from_secs(60))?;
    /// session.store("session:42", "bob", Store::always().keep_ttl())?;
    /// assert!(matches!(session.ttl("session:42")?, Some(Ttl::For(_))));
    /// # Ok(()) }
    /// ```
    pub fn keep_ttl(mut self) -> Self {
        self.lifetime = self.lifetime.expiring_as(Lifetime::KEPT);
        self
    }

    /// The server never evicts the value to make room for others (`kv-server --evict`). It stays
    /// until it expires, or until a client replaces or removes it. A later PUT replaces the pin
    /// with the value; [`Session::increment`](crate::Session::increment) and all other calls that
    /// keep the TTL keep the pin, and so does [`Session::touch`](crate::Session::touch).
    ///
    /// A server that is full of pinned values refuses others, as
    /// [`Exhausted::Pinned`](crate::Exhausted::Pinned).
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// use farside::Store;
    ///
    /// session.store("config", "blue", Store::always().pinned())?;
    /// session.put("config", "green")?; // not pinned any more
    /// # Ok(()) }
    /// ```
    pub fn pinned(mut self) -> Self {
        self.lifetime = self.lifetime.pinned(true);
        self
    }

    /// The outcome has the value before this store: the one that it replaced, or the one that made
    /// its condition fail. Costs the round trips of a GET and one more, unless the key is absent.
    ///
    /// ```
    /// # fn example(session: &mut farside::Session) -> farside::Result<()> {
    /// use farside::Store;
    ///
    /// session.put("greeting", "hello")?;
    /// let outcome = session.store("greeting", "hi", Store::if_present().returning())?;
    /// assert_eq!(outcome.value.expect("it was just put"), "hello");
    /// # Ok(()) }
    /// ```
    pub fn returning(mut self) -> Self {
        self.returns = true;
        self
    }

    /// The action without the value that the store expects, and that value.
    pub(crate) fn detached(self) -> (Action<'static>, Option<&'e [u8]>) {
        let Self { condition, lifetime, returns } = self;
        let (condition, expected) = match condition {
            Precondition::None => (Precondition::None, None),
            Precondition::Absent => (Precondition::Absent, None),
            Precondition::Present => (Precondition::Present, None),
            Precondition::Expected(Expected::Version(version)) => {
                (Precondition::Expected(Expected::Version(version)), None)
            }
            Precondition::Expected(Expected::Value(value)) => {
                (Precondition::Expected(Expected::Value(&[])), Some(value))
            }
        };
        (Store { condition, lifetime, returns }.action(), expected)
    }

    pub(crate) fn action(self) -> Action<'e> {
        let Self { condition, lifetime, returns } = self;
        let modify = |change, creates| Action::modify(change, creates, lifetime, returns);
        let is_plain = !returns && !lifetime.is_kept();
        match condition {
            Precondition::None if is_plain => Action::Put(lifetime),
            Precondition::None => modify(Change::Store(None), true),
            Precondition::Absent if !returns => Action::Insert(lifetime),
            Precondition::Absent => modify(Change::Refuse, true),
            Precondition::Present if is_plain => Action::Update(lifetime),
            Precondition::Present => modify(Change::Store(None), false),
            Precondition::Expected(expected) => modify(Change::Store(Some(expected)), false),
        }
    }
}
