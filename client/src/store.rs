//! Conditions under which values are stored, and when they expire.

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
    pub fn always() -> Self {
        Self::default()
    }

    /// Only if the key is absent, as an INSERT.
    pub fn if_absent() -> Self {
        Self::on(Precondition::Absent)
    }

    /// Only if the key is present, as an UPDATE.
    pub fn if_present() -> Self {
        Self::on(Precondition::Present)
    }

    /// Only if the key has this value.
    pub fn if_value(value: &'e [u8]) -> Self {
        Self::on(Precondition::Expected(Expected::Value(value)))
    }

    /// Only if the key's value is still the one that this write stored.
    pub fn if_version(version: Version) -> Self {
        Self::on(Precondition::Expected(Expected::Version(version)))
    }

    /// The value expires this long after it is written, rounded up to a full millisecond of the
    /// wall clock. From that millisecond on the key is absent. A time after the year 10889 is
    /// refused, as [`OperationError::ExpiryTooLate`](crate::OperationError::ExpiryTooLate). Without
    /// a TTL the value stays, even if the value that it replaces had one.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.lifetime = Lifetime::For(ttl);
        self
    }

    /// The value expires at this time, rounded up to a full millisecond; otherwise as
    /// [`Store::ttl`].
    pub fn until(mut self, expires_at: SystemTime) -> Self {
        self.lifetime = Lifetime::until(expires_at);
        self
    }

    /// The value expires when the one that it replaces would have. Costs the round trips of a GET
    /// and one more, unless the key is absent.
    pub fn keep_ttl(mut self) -> Self {
        self.lifetime = Lifetime::Kept;
        self
    }

    /// The outcome has the value before this store: the one that it replaced, or the one that made
    /// its condition fail. Costs the round trips of a GET and one more, unless the key is absent.
    pub fn returning(mut self) -> Self {
        self.returns = true;
        self
    }

    pub(crate) fn action(self) -> Action<'e> {
        let Self { condition, lifetime, returns } = self;
        let modify = |change, creates| Action::modify(change, creates, lifetime, returns);
        let is_plain = !returns && lifetime != Lifetime::Kept;
        match condition {
            Precondition::None if is_plain => Action::Put(lifetime),
            Precondition::None => modify(Change::Store(None), true),
            Precondition::Absent if !returns => Action::Insert(lifetime),
            Precondition::Absent => modify(Change::Leave, true),
            Precondition::Present if is_plain => Action::Update(lifetime),
            Precondition::Present => modify(Change::Store(None), false),
            Precondition::Expected(expected) => modify(Change::Store(Some(expected)), false),
        }
    }
}
