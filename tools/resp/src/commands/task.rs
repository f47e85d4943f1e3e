//! What a command does with the outcome of its operation.

use farside::{Outcome, ValueRef};
use farside_resp::ReplyWriter;

use super::expiry::{self, Unit};
use super::modify::Modify;
use super::operation::Operation;

/// How the outcome becomes a reply.
#[derive(Debug)]
pub(crate) enum Task {
    /// The value, or nothing.
    Value,
    /// The value's length.
    Length,
    /// The bytes of the value between these two, counted from the end if negative.
    Range(i64, i64),
    /// `OK`.
    Ok,
    /// `OK`, or nothing if the condition did not hold.
    OkIfApplied,
    /// 1 if the operation applied, otherwise 0.
    Applied,
    /// 1 if the key is present, otherwise 0.
    Exists,
    /// The type of the value.
    Type,
    /// The number that was stored.
    Number,
    /// The length after this many bytes were appended.
    Appended(usize),
    /// When the value expires.
    Ttl { unit: Unit, is_absolute: bool },
    /// An estimate of the key's memory, for a key of so many bytes.
    Memory(usize),
    /// More than one operation.
    Modify(Box<Modify>),
}

/// The bytes of a block's header, and about those of its slot in the index.
const BYTES_PER_KEY: usize = 64;

impl Task {
    /// What the outcome adds to the sum of a command on several keys.
    pub(crate) fn count(&self, outcome: &Outcome<ValueRef<'_>>) -> i64 {
        match self {
            Self::Exists => outcome.version.is_some().into(),
            _ => outcome.applied.into(),
        }
    }

    /// Takes the outcome. Replies, or returns the next operation, whose value is
    /// [`Task::next_value`].
    #[inline]
    pub(crate) fn advance(
        &mut self,
        outcome: &Outcome<ValueRef<'_>>,
        expires_at_ms: Option<i64>,
        reply: &mut ReplyWriter<'_>,
    ) -> Option<Operation> {
        let length = || outcome.value.map_or(0, |value| value.len());
        match self {
            Self::Value => match outcome.value {
                Some(value) => reply.bulk(value.data),
                None => reply.null(),
            },
            Self::Ok => reply.ok(),
            Self::Length => reply.integer(length() as i64),
            Self::Range(start, end) => {
                let value = outcome.value.map_or(&[][..], |value| value.data);
                reply.bulk(slice(value, *start, *end));
            }
            Self::OkIfApplied if outcome.applied => reply.ok(),
            Self::OkIfApplied => reply.null(),
            Self::Applied | Self::Exists => reply.integer(self.count(outcome)),
            Self::Type => {
                reply.simple(if outcome.version.is_some() { "string" } else { "none" });
            }
            Self::Number => reply.integer(outcome.number),
            Self::Appended(bytes) => reply.integer((length() + *bytes) as i64),
            Self::Ttl { unit, is_absolute } => {
                let is_present = outcome.value.is_some();
                reply.integer(ttl(is_present, expires_at_ms, *unit, *is_absolute));
            }
            Self::Memory(key_bytes) => match outcome.value {
                Some(value) => reply.integer((BYTES_PER_KEY + *key_bytes + value.len()) as i64),
                None => reply.null(),
            },
            Self::Modify(modify) => return modify.advance(outcome, expires_at_ms, reply),
        }
        None
    }

    /// The value of the operation that [`Task::advance`] returned.
    pub(crate) fn next_value(&self) -> &[u8] {
        match self {
            Self::Modify(modify) => modify.value(),
            _ => &[],
        }
    }
}

fn ttl(is_present: bool, expires_at_ms: Option<i64>, unit: Unit, is_absolute: bool) -> i64 {
    if !is_present {
        return -2;
    }
    let Some(at_ms) = expires_at_ms else { return -1 };
    let ms = if is_absolute { at_ms } else { (at_ms - expiry::now_ms()).max(0) };
    match unit {
        Unit::Seconds => (ms + 500) / 1000,
        Unit::Milliseconds => ms,
    }
}

/// The bytes from `start` to `end`, both included.
fn slice(value: &[u8], start: i64, end: i64) -> &[u8] {
    let bytes = value.len() as i64;
    if start < 0 && end < 0 && start > end {
        return &[];
    }
    let from_start =
        |place: i64| if place < 0 { place.saturating_add(bytes).max(0) } else { place };
    let (start, end) = (from_start(start), from_start(end).min(bytes - 1));
    if start > end || bytes == 0 {
        return &[];
    }
    &value[start as usize..=end as usize]
}
