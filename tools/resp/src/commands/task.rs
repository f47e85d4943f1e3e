//! What a command does with the outcome of its operation. Some read a value and store a new one if
//! its version is unchanged; otherwise they start over. Each takes effect at its store.

use farside::{Outcome, ValueRef};
use farside_resp::ReplyWriter;

use super::operation::{Condition, Expiry, Operation, Unit, now_ms};
use super::{Arguments, error};

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
    let ms = if is_absolute { at_ms } else { (at_ms - now_ms()).max(0) };
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

/// Limit on the attempts of one command. More than this fail only if other clients change the key
/// all the time.
const ATTEMPTS_MAX: u32 = 1000;

/// The expiry that GETEX gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NewExpiry {
    Never,
    /// In milliseconds since 1970.
    At(i64),
}

/// The conditions of EXPIRE and its like, on the present expiry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Conditions {
    nx: bool,
    xx: bool,
    gt: bool,
    lt: bool,
}

impl Conditions {
    /// Reads the conditions from this argument on.
    pub(crate) fn read(arguments: &impl Arguments, from: usize) -> Result<Self, String> {
        let mut conditions = Self::default();
        for at in from..arguments.count() {
            let Self { nx, xx, gt, lt } = &mut conditions;
            let words = [("NX", nx), ("XX", xx), ("GT", gt), ("LT", lt)];
            let Some((_, flag)) = words.into_iter().find(|(word, _)| arguments.is(at, word)) else {
                let option = String::from_utf8_lossy(arguments.get(at));
                return Err(format!("ERR Unsupported option {option}"));
            };
            *flag = true;
        }
        let Self { nx, xx, gt, lt } = conditions;
        if nx && (xx || gt || lt) {
            let text = "ERR NX and XX, GT or LT options at the same time are not compatible";
            return Err(text.to_owned());
        }
        if gt && lt {
            return Err("ERR GT and LT options at the same time are not compatible".to_owned());
        }
        Ok(conditions)
    }

    /// Whether they hold if the value expires at `present`, or never.
    fn hold(self, present: Option<i64>, new: i64) -> bool {
        let Self { nx, xx, gt, lt } = self;
        !(nx && present.is_some()
            || xx && present.is_none()
            || gt && present.is_none_or(|present| new <= present)
            || lt && present.is_some_and(|present| new >= present))
    }
}

/// A change that depends on the present value.
#[derive(Debug)]
pub(crate) enum Modification {
    GetEx(NewExpiry),
    Expire {
        at_ms: i64,
        conditions: Conditions,
    },
    Persist,
    /// Nothing: the command is wrong, which redis notices only if the key is present.
    Refuse(String),
    Exchange {
        expected: Vec<u8>,
        new: Vec<u8>,
        expiry: Expiry,
        returns: bool,
    },
}

/// A modification under way.
#[derive(Debug)]
pub(crate) struct Modify {
    modification: Modification,
    /// Whether the change is in flight; otherwise the read.
    is_changing: bool,
    /// The present value, which the change stores again, or the command returns.
    present: Vec<u8>,
    attempts: u32,
}

impl Modify {
    pub(crate) fn new(modification: Modification) -> Self {
        Self { modification, is_changing: false, present: Vec::new(), attempts: 0 }
    }

    /// The length of the longest value that it compares or stores, as far as that is known.
    pub(crate) fn bytes(&self) -> usize {
        match &self.modification {
            Modification::Exchange { expected, new, .. } => expected.len().max(new.len()),
            _ => 0,
        }
    }

    /// Forgets what it has read. Returns the operation that reads again.
    pub(crate) fn start_over(&mut self) -> Operation {
        self.is_changing = false;
        Operation::Get
    }

    /// The value that the next operation stores.
    pub(crate) fn value(&self) -> &[u8] {
        match &self.modification {
            Modification::Exchange { new, .. } => new,
            _ => &self.present,
        }
    }

    /// Takes the outcome of the last operation. Replies, or returns the next operation.
    pub(crate) fn advance(
        &mut self,
        outcome: &Outcome<ValueRef<'_>>,
        expires_at_ms: Option<i64>,
        reply: &mut ReplyWriter<'_>,
    ) -> Option<Operation> {
        if !self.is_changing {
            let operation = self.examine(outcome, expires_at_ms, reply);
            self.is_changing = operation.is_some();
            return operation;
        }
        if outcome.applied {
            match &self.modification {
                Modification::GetEx(_) => reply.bulk(&self.present),
                Modification::Exchange { returns: true, expected, .. } => reply.bulk(expected),
                Modification::Exchange { .. } => reply.ok(),
                Modification::Expire { .. } | Modification::Persist => reply.integer(1),
                Modification::Refuse(text) => reply.error(text),
            }
            return None;
        }
        self.attempts += 1;
        if self.attempts == ATTEMPTS_MAX {
            reply.error(error::CONTENDED);
            return None;
        }
        self.is_changing = false;
        Some(Operation::Get)
    }

    /// Takes the present value.
    fn examine(
        &mut self,
        outcome: &Outcome<ValueRef<'_>>,
        expires_at_ms: Option<i64>,
        reply: &mut ReplyWriter<'_>,
    ) -> Option<Operation> {
        let Some(ValueRef { data, version }) = outcome.value else {
            match &self.modification {
                Modification::GetEx(_)
                | Modification::Exchange { .. }
                | Modification::Refuse(_) => reply.null(),
                Modification::Expire { .. } | Modification::Persist => reply.integer(0),
            }
            return None;
        };
        let store = |expiry| {
            let condition = Condition::Version(version);
            Some(Operation::Store { condition, expiry, returns: false })
        };
        let store_until = |at_ms: i64| match u64::try_from(at_ms) {
            Ok(at_ms) if at_ms as i64 > now_ms() => store(Expiry::At(at_ms)),
            _ => Some(Operation::DeleteIf(version)),
        };
        let keep = |present: &mut Vec<u8>| {
            present.clear();
            present.extend_from_slice(data);
        };
        match &self.modification {
            Modification::GetEx(NewExpiry::Never) if expires_at_ms.is_none() => {
                reply.bulk(data);
                None
            }
            Modification::GetEx(NewExpiry::Never) => {
                keep(&mut self.present);
                store(Expiry::Never)
            }
            Modification::GetEx(NewExpiry::At(at_ms)) => {
                keep(&mut self.present);
                store_until(*at_ms)
            }
            Modification::Expire { at_ms, conditions } => {
                if !conditions.hold(expires_at_ms, *at_ms) {
                    reply.integer(0);
                    return None;
                }
                keep(&mut self.present);
                store_until(*at_ms)
            }
            Modification::Refuse(text) => {
                reply.error(text);
                None
            }
            Modification::Persist if expires_at_ms.is_none() => {
                reply.integer(0);
                None
            }
            Modification::Persist => {
                keep(&mut self.present);
                store(Expiry::Never)
            }
            Modification::Exchange { expected, expiry, returns, .. } => {
                if data == expected {
                    return store(*expiry);
                }
                if *returns {
                    reply.bulk(data)
                } else {
                    reply.null()
                }
                None
            }
        }
    }
}
