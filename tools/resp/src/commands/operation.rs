//! The operations of the library that commands are made of, and times as they need them.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use farside::{Pipeline, PipelineFull, Store, Ticket, Version};

/// The condition of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Condition {
    Always,
    Absent,
    Present,
    Version(Version),
}

/// An operation of the library.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Operation {
    Get,
    Version,
    Put,
    Store { condition: Condition, expiry: Expiry, returns: bool },
    Delete,
    DeleteIf(Version),
    Take,
    Increment(i64),
    Append,
    Touch(Duration),
}

impl Operation {
    /// Whether it READs the key's value.
    pub(crate) fn reads_value(self) -> bool {
        match self {
            Self::Get | Self::Take | Self::Increment(_) | Self::Append | Self::Touch(_) => true,
            Self::Store { returns, expiry, .. } => returns || expiry == Expiry::Kept,
            Self::Version | Self::Put | Self::Delete | Self::DeleteIf(_) => false,
        }
    }

    /// Whether it derives its value from the present one alone, so that it can start again without
    /// the request.
    pub(crate) fn can_repeat(self) -> bool {
        matches!(self, Self::Take | Self::Increment(_) | Self::Touch(_))
    }

    /// Whether it stores what it derives from the present value, or stores only over that one.
    #[inline]
    pub(crate) fn derives_value(self) -> bool {
        match self {
            Self::Take | Self::Increment(_) | Self::Append | Self::Touch(_) => true,
            Self::Store { condition, expiry, returns } => {
                returns || expiry == Expiry::Kept || condition != Condition::Always
            }
            Self::Get | Self::Version | Self::Put | Self::Delete | Self::DeleteIf(_) => false,
        }
    }

    /// Starts the operation.
    #[inline]
    pub(crate) fn start(
        self,
        pipeline: &mut Pipeline<'_>,
        key: &[u8],
        value: &[u8],
    ) -> Result<Ticket, PipelineFull> {
        match self {
            Self::Get => pipeline.get(key),
            Self::Put => pipeline.put(key, value),
            Self::Version => pipeline.version(key),
            Self::Store { condition, expiry, returns } => {
                let store = match condition {
                    Condition::Always => Store::always(),
                    Condition::Absent => Store::if_absent(),
                    Condition::Present => Store::if_present(),
                    Condition::Version(version) => Store::if_version(version),
                };
                let store = match expiry {
                    Expiry::Never => store,
                    Expiry::At(ms) => store.until(time_of(ms)),
                    Expiry::Kept => store.keep_ttl(),
                };
                pipeline.store(key, value, if returns { store.returning() } else { store })
            }
            Self::Delete => pipeline.delete(key),
            Self::DeleteIf(version) => pipeline.delete_if_version(key, version),
            Self::Take => pipeline.take(key),
            Self::Increment(delta) => pipeline.increment(key, delta),
            Self::Append => pipeline.append(key, value),
            Self::Touch(ttl) => pipeline.touch(key, ttl),
        }
    }
}

/// What becomes of a value's expiry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Expiry {
    /// It never expires.
    Never,
    /// It expires at this time, in milliseconds since 1970.
    At(u64),
    /// It expires when the value before it would have.
    Kept,
}

/// The unit of a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    Seconds,
    Milliseconds,
}

/// Returns this moment, in milliseconds since 1970.
pub(crate) fn now_ms() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

/// Converts milliseconds since 1970.
fn time_of(ms: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(ms)
}

/// Converts a time to milliseconds since 1970.
pub(crate) fn ms_of(time: SystemTime) -> i64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}
