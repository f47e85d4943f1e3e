//! Conditions and ends of what is stored.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::protocol::{Action, Expected};
use crate::{Error, Result, Version};

/// How long a stored value stays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Lifetime {
    /// Until somebody replaces or removes it.
    #[default]
    Forever,
    /// This long from when it is written.
    For(Duration),
    /// Until this second, since 1970.
    Until(u64),
}

/// The last second in which a value can end, as long as it has one: in 2106.
const END_S_MAX: u64 = u32::MAX as u64;

impl Lifetime {
    /// When a value written at `wall_ns`, nanoseconds since 1970, ends, as it stands in a block:
    /// the first second in which it is gone, 0 for never. It gets the whole of its time, so that
    /// is rounded up. [`Lifetime::check`] has refused what a block cannot say.
    pub(crate) fn expires_at_s(self, wall_ns: u64) -> u32 {
        self.end_s(wall_ns).min(END_S_MAX) as u32
    }

    /// Whether a value written at `wall_ns` can end when this says.
    pub(crate) fn check(self, wall_ns: u64) -> Result<()> {
        if self.end_s(wall_ns) <= END_S_MAX { Ok(()) } else { Err(Error::EndTooLate) }
    }

    fn end_s(self, wall_ns: u64) -> u64 {
        match self {
            Self::Forever => 0,
            Self::For(ttl) => second(u128::from(wall_ns) + ttl.as_nanos()),
            Self::Until(second) => second,
        }
    }
}

/// The first full second that is not before this moment, in nanoseconds since 1970.
fn second(end_ns: u128) -> u64 {
    u64::try_from(end_ns.div_ceil(1_000_000_000)).unwrap_or(u64::MAX).max(1)
}

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

    /// The value ends this long after it is written, rounded up to a full second of the wall clock.
    /// An end after 2106 is refused, as [`Error::EndTooLate`]. From that second on the key is
    /// absent. Without this it stays, and so it does when a value that would have ended is replaced
    /// by one without it.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.lifetime = Lifetime::For(ttl);
        self
    }

    /// The value ends at this time, rounded up to a full second, and else as with [`Store::ttl`].
    pub fn until(mut self, end: SystemTime) -> Self {
        let since = end.duration_since(UNIX_EPOCH).unwrap_or_default();
        self.lifetime = Lifetime::Until(second(since.as_nanos()));
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

#[cfg(test)]
mod tests {
    use farside_config::ServerConfig;
    use farside_config::size::ByteSize;

    use super::*;
    use crate::test_server::TestServer;
    use crate::{BatchOutcome, Client, Outcome};

    #[test]
    fn ends_are_full_seconds_and_never_early() {
        let end = |ttl_ms, wall_ms: u64| {
            Lifetime::For(Duration::from_millis(ttl_ms)).expires_at_s(wall_ms * 1_000_000)
        };
        assert_eq!([end(0, 5000), end(1, 5000), end(1000, 5000), end(1000, 5001)], [5, 6, 6, 7]);
        assert_eq!(Lifetime::Forever.expires_at_s(5), 0);
        let check = |ttl| Lifetime::For(ttl).check(5_000_000_000);
        let most = Duration::from_secs(END_S_MAX - 5);
        assert!(
            check(most).is_ok()
                && matches!(check(most + Duration::from_nanos(1)), Err(Error::EndTooLate))
        );
        assert!(Lifetime::For(Duration::MAX).check(u64::MAX).is_err());
        assert_eq!(Lifetime::For(Duration::ZERO).expires_at_s(0), 1);
    }

    #[test]
    fn what_is_expected_need_only_outlive_the_operation() {
        let config = ServerConfig { memory: Some(ByteSize::mib(8)), ..Default::default() };
        let server = TestServer::start(config);
        let client = Client::builder().server(&server.address).connect().unwrap();
        let mut session = client.session().unwrap();
        session.put(b"key", b"one").unwrap();
        let (one, two) = (b"one".to_vec(), b"two".to_vec());
        let mut batch = session.batch();
        batch.store(b"key", &two, Store::if_value(&one));
        assert!(matches!(batch.run().unwrap()[..], [Ok(BatchOutcome::Applied(true))]));
        let mut pipeline = session.pipeline().unwrap();
        for (expected, holds) in [(&one, false), (&two, true)] {
            pipeline.store(b"key", b"three", Store::if_value(expected)).unwrap();
            let result = pipeline.wait().unwrap().result.unwrap();
            assert_eq!(result, Outcome::Applied(holds));
        }
        drop(pipeline);
        assert_eq!(*session.get(b"key").unwrap().unwrap(), *b"three");
    }
}
