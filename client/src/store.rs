//! Conditions and ends of what is stored, and what an exchange came to.

use std::time::{Duration, SystemTime};

use farside_protocol::{Action, Expected, Lifetime, Value, Version};

/// What has to be there for a store to happen.
#[derive(Clone, Copy, Debug, Default)]
enum Precondition<'e> {
    #[default]
    None,
    Absent,
    Present,
    Is(Expected<'e>),
}

/// When a value is stored, and for how long: for [`Session::store`](crate::Session::store),
/// [`Pipeline::store`](crate::Pipeline::store) and [`Batch::store`](crate::Batch::store).
///
/// ```
/// use std::time::Duration;
/// use farside::Store;
///
/// let lock = Store::if_absent().ttl(Duration::from_secs(10));
/// # let _ = lock;
/// ```
#[derive(Clone, Copy, Debug, Default)]
#[must_use = "it says how to store, and stores nothing"]
pub struct Store<'e> {
    condition: Precondition<'e>,
    lifetime: Lifetime,
}

impl<'e> Store<'e> {
    fn when(condition: Precondition<'e>) -> Self {
        Self { condition, lifetime: Lifetime::Forever }
    }

    /// Whatever is there, as a PUT.
    pub fn always() -> Self {
        Self::default()
    }

    /// Only if the key is absent, as an INSERT.
    pub fn if_absent() -> Self {
        Self::when(Precondition::Absent)
    }

    /// Only if the key is there, as an UPDATE.
    pub fn if_present() -> Self {
        Self::when(Precondition::Present)
    }

    /// Only if the key has this value.
    pub fn if_value(value: &'e [u8]) -> Self {
        Self::when(Precondition::Is(Expected::Value(value)))
    }

    /// Only if the key's value still comes from this write.
    pub fn if_version(version: Version) -> Self {
        Self::when(Precondition::Is(Expected::Version(version)))
    }

    /// The value ends this long after it is written, rounded up to a full millisecond of the wall
    /// clock. From that millisecond on the key is absent. An end after the year 10889 is refused,
    /// as [`OperationError::EndTooLate`](crate::OperationError::EndTooLate). Without this it stays,
    /// and so it does when a value that would have ended is replaced by one without it.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.lifetime = Lifetime::For(ttl);
        self
    }

    /// The value ends at this time, rounded up to a full millisecond, and else as with
    /// [`Store::ttl`].
    pub fn until(mut self, end: SystemTime) -> Self {
        self.lifetime = Lifetime::until(end);
        self
    }

    pub(crate) fn action(self) -> Action<'e> {
        match self.condition {
            Precondition::None => Action::Put(self.lifetime),
            Precondition::Absent => Action::Insert(self.lifetime),
            Precondition::Present => Action::Update(self.lifetime),
            Precondition::Is(expected) => Action::Exchange(expected, self.lifetime),
        }
    }
}

/// The outcome of [`Session::compare_exchange`](crate::Session::compare_exchange).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Exchange {
    /// The key had the expected value (or was absent, as expected) and now has the new one.
    Exchanged,
    /// It had this instead; `None` when it was absent. Nothing was changed.
    Mismatch(Option<Value>),
}
