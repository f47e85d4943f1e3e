//! Conditions and ends of what is stored.

use std::time::{Duration, SystemTime};

use farside_protocol::{Action, Expected, Lifetime, Version};

/// What has to be there for a store to happen.
#[derive(Clone, Copy, Debug, Default)]
enum Condition<'e> {
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
    condition: Condition<'e>,
    lifetime: Lifetime,
}

impl<'e> Store<'e> {
    fn when(condition: Condition<'e>) -> Self {
        Self { condition, lifetime: Lifetime::Forever }
    }

    /// Whatever is there, as a PUT.
    pub fn always() -> Self {
        Self::default()
    }

    /// Only if the key is absent, as an INSERT.
    pub fn if_absent() -> Self {
        Self::when(Condition::Absent)
    }

    /// Only if the key is there, as an UPDATE.
    pub fn if_present() -> Self {
        Self::when(Condition::Present)
    }

    /// Only if the key has this value.
    pub fn if_value(value: &'e [u8]) -> Self {
        Self::when(Condition::Is(Expected::Value(value)))
    }

    /// Only if the key's value still comes from this write.
    pub fn if_version(version: Version) -> Self {
        Self::when(Condition::Is(Expected::Version(version)))
    }

    /// The value ends this long after it is written, rounded up to a full millisecond of the wall
    /// clock. From that millisecond on the key is absent. An end after the year 10889 is refused,
    /// as [`Error::EndTooLate`](crate::Error::EndTooLate). Without this it stays, and so it does
    /// when a value that would have ended is replaced by one without it.
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
            Condition::None => Action::Put(self.lifetime),
            Condition::Absent => Action::Insert(self.lifetime),
            Condition::Present => Action::Update(self.lifetime),
            Condition::Is(expected) => Action::Exchange(expected, self.lifetime),
        }
    }
}
