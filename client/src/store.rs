//! Conditions under which values are stored, when they expire, and what an exchange returns.

use std::time::{Duration, SystemTime};

use farside_protocol::{Action, Expected, Lifetime, Value, Version};

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
}

impl<'e> Store<'e> {
    fn on(condition: Precondition<'e>) -> Self {
        Self { condition, lifetime: Lifetime::Forever }
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

    pub(crate) fn action(self) -> Action<'e> {
        match self.condition {
            Precondition::None => Action::Put(self.lifetime),
            Precondition::Absent => Action::Insert(self.lifetime),
            Precondition::Present => Action::Update(self.lifetime),
            Precondition::Expected(expected) => Action::Exchange(expected, self.lifetime),
        }
    }
}

/// The result of [`Session::compare_exchange`](crate::Session::compare_exchange).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Exchange {
    /// The key had the expected value (or was absent, as expected) and now has the new one.
    Exchanged,
    /// The key had this value instead; `None` if the key was absent. Nothing was changed.
    Mismatch(Option<Value>),
}
