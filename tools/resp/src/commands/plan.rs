//! What a command on one key asks of the store.

use std::time::Duration;

use farside_resp::parse_integer;

use super::operation::{Condition, Expiry, Operation, Unit, now_ms};
use super::table::Command;
use super::task::{Conditions, Modification, Modify, NewExpiry, Task};
use super::{Arguments, error};

/// The first operation of a command, and what to do with its outcome.
pub(crate) struct Plan<'a> {
    pub(crate) operation: Operation,
    pub(crate) value: &'a [u8],
    pub(crate) task: Task,
}

impl<'a> Plan<'a> {
    pub(crate) fn new(operation: Operation, value: &'a [u8], task: Task) -> Self {
        Self { operation, value, task }
    }

    fn modify(modification: Modification) -> Self {
        let task = Task::Modify(Box::new(Modify::new(modification)));
        Self::new(Operation::Get, &[], task)
    }
}

/// Plans a command on one key. The error is the reply.
#[inline]
pub(crate) fn plan<'a, A: Arguments>(
    command: Command,
    name: &str,
    arguments: &'a A,
) -> Result<Plan<'a>, String> {
    let integer =
        |at| parse_integer(arguments.get(at)).ok_or_else(|| error::NOT_AN_INTEGER.to_owned());
    let read = |task| Ok(Plan::new(Operation::Get, &[], task));
    let expire = |unit, is_absolute| plan_expire(name, arguments, unit, is_absolute);
    let set_until = |unit| {
        let expiry = expiry_of_store(arguments.get(2), unit, false, name)?;
        let operation = Operation::Store { condition: Condition::Always, expiry, returns: false };
        Ok(Plan::new(operation, arguments.get(3), Task::Ok))
    };
    let add = |delta| Ok(Plan::new(Operation::Increment(delta), &[], Task::Number));
    match command {
        Command::Get => read(Task::Value),
        Command::Set if arguments.count() == 3 => {
            Ok(Plan::new(Operation::Put, arguments.get(2), Task::Ok))
        }
        Command::Set => plan_set(name, arguments),
        Command::SetNx => {
            let (condition, expiry) = (Condition::Absent, Expiry::Never);
            let operation = Operation::Store { condition, expiry, returns: false };
            Ok(Plan::new(operation, arguments.get(2), Task::Applied))
        }
        Command::SetEx => set_until(Unit::Seconds),
        Command::PSetEx => set_until(Unit::Milliseconds),
        Command::GetSet => {
            let (condition, expiry) = (Condition::Always, Expiry::Never);
            let operation = Operation::Store { condition, expiry, returns: true };
            Ok(Plan::new(operation, arguments.get(2), Task::Value))
        }
        Command::GetDel => Ok(Plan::new(Operation::Take, &[], Task::Value)),
        Command::GetEx => plan_getex(name, arguments),
        Command::GetRange => {
            let (start, end) = (integer(2)?, integer(3)?);
            read(Task::Range(start, end))
        }
        Command::StrLen => read(Task::Length),
        Command::Append => {
            let more = arguments.get(2);
            Ok(Plan::new(Operation::Append, more, Task::Appended(more.len())))
        }
        Command::Incr => add(1),
        Command::Decr => add(-1),
        Command::IncrBy => add(integer(2)?),
        Command::DecrBy => {
            let overflow = || "ERR decrement would overflow".to_owned();
            add(integer(2)?.checked_neg().ok_or_else(overflow)?)
        }
        Command::Type => Ok(Plan::new(Operation::Version, &[], Task::Type)),
        Command::Ttl => read(Task::Ttl { unit: Unit::Seconds, is_absolute: false }),
        Command::PTtl => read(Task::Ttl { unit: Unit::Milliseconds, is_absolute: false }),
        Command::ExpireTime => read(Task::Ttl { unit: Unit::Seconds, is_absolute: true }),
        Command::PExpireTime => read(Task::Ttl { unit: Unit::Milliseconds, is_absolute: true }),
        Command::Expire => expire(Unit::Seconds, false),
        Command::PExpire => expire(Unit::Milliseconds, false),
        Command::ExpireAt => expire(Unit::Seconds, true),
        Command::PExpireAt => expire(Unit::Milliseconds, true),
        Command::Persist => Ok(Plan::modify(Modification::Persist)),
        _ => Err(error::SYNTAX.to_owned()),
    }
}

/// Plans one part of a command on several keys: the key at this argument.
#[inline]
pub(crate) fn plan_part<'a>(
    command: Command,
    arguments: &'a impl Arguments,
    at: usize,
) -> Plan<'a> {
    match command {
        Command::MGet => Plan::new(Operation::Get, &[], Task::Value),
        Command::MSet => Plan::new(Operation::Put, arguments.get(at + 1), Task::Ok),
        Command::Del | Command::Unlink => Plan::new(Operation::Delete, &[], Task::Applied),
        _ => Plan::new(Operation::Version, &[], Task::Exists),
    }
}

/// The options of SET and GETEX so far.
#[derive(Default)]
struct Options<'a> {
    expiry: Option<Expiry>,
    persists: bool,
    condition: Option<Condition>,
    expected: Option<&'a [u8]>,
    returns: bool,
    /// Why the time of a GETEX is wrong.
    wrong: Option<String>,
}

impl<'a> Options<'a> {
    /// Reads the options from this argument on.
    fn read<A: Arguments>(
        name: &str,
        arguments: &'a A,
        from: usize,
        is_set: bool,
    ) -> Result<Self, String> {
        let mut options = Self::default();
        // Times are read when all options are known, because redis complains of syntax first.
        let mut time = None;
        let mut at = from;
        while at < arguments.count() {
            let has_next = at + 1 < arguments.count();
            // An option may be repeated, and of two times in the same unit the last one counts.
            let keeps = options.expiry.is_some() || options.persists;
            let is_other = |condition| {
                options.expected.is_some() || options.condition.is_some_and(|set| set != condition)
            };
            let unit_of = |word: &str| match word {
                "EX" => (Unit::Seconds, false),
                "PX" => (Unit::Milliseconds, false),
                "EXAT" => (Unit::Seconds, true),
                _ => (Unit::Milliseconds, true),
            };
            let is_time = |word: &&str| {
                arguments.is(at, word) && time.is_none_or(|(_, set)| set == unit_of(word))
            };
            if is_set && !is_other(Condition::Absent) && arguments.is(at, "NX") {
                options.condition = Some(Condition::Absent);
            } else if is_set && !is_other(Condition::Present) && arguments.is(at, "XX") {
                options.condition = Some(Condition::Present);
            } else if is_set
                && options.condition.is_none()
                && options.expected.is_none()
                && has_next
                && arguments.is(at, "IFEQ")
            {
                options.expected = Some(arguments.get(at + 1));
                at += 1;
            } else if is_set && arguments.is(at, "GET") {
                options.returns = true;
            } else if is_set && time.is_none() && arguments.is(at, "KEEPTTL") {
                options.expiry = Some(Expiry::Kept);
            } else if !is_set && time.is_none() && arguments.is(at, "PERSIST") {
                options.persists = true;
            } else if !keeps
                && has_next
                && let Some(word) = ["EX", "PX", "EXAT", "PXAT"].iter().find(|word| is_time(word))
            {
                time = Some((at + 1, unit_of(word)));
                at += 1;
            } else {
                return Err(error::SYNTAX.to_owned());
            }
            at += 1;
        }
        if let Some((at, (unit, is_absolute))) = time {
            match expiry_of_store(arguments.get(at), unit, is_absolute, name) {
                Ok(expiry) => options.expiry = Some(expiry),
                Err(text) if is_set => return Err(text),
                Err(text) => options.wrong = Some(text),
            }
        }
        Ok(options)
    }
}

fn plan_set<'a, A: Arguments>(name: &str, arguments: &'a A) -> Result<Plan<'a>, String> {
    let Options { expiry, condition, expected, returns, .. } =
        Options::read(name, arguments, 3, true)?;
    let (expiry, value) = (expiry.unwrap_or(Expiry::Never), arguments.get(2));
    if let Some(expected) = expected {
        let (expected, new) = (expected.to_vec(), value.to_vec());
        return Ok(Plan::modify(Modification::Exchange { expected, new, expiry, returns }));
    }
    let condition = condition.unwrap_or(Condition::Always);
    // There is no TTL to keep if the key is absent.
    let is_new = condition == Condition::Absent && expiry == Expiry::Kept;
    let expiry = if is_new { Expiry::Never } else { expiry };
    let task = match condition {
        _ if returns => Task::Value,
        Condition::Always => Task::Ok,
        _ => Task::OkIfApplied,
    };
    Ok(Plan::new(Operation::Store { condition, expiry, returns }, value, task))
}

fn plan_getex<'a, A: Arguments>(name: &str, arguments: &'a A) -> Result<Plan<'a>, String> {
    let options = Options::read(name, arguments, 2, false)?;
    if let Some(text) = options.wrong {
        return Ok(Plan::modify(Modification::Refuse(text)));
    }
    let new = match options.expiry {
        Some(Expiry::At(ms)) => NewExpiry::At(ms as i64),
        _ if options.persists => NewExpiry::Never,
        _ => return Ok(Plan::new(Operation::Get, &[], Task::Value)),
    };
    Ok(Plan::modify(Modification::GetEx(new)))
}

fn plan_expire<'a, A: Arguments>(
    name: &str,
    arguments: &'a A,
    unit: Unit,
    is_absolute: bool,
) -> Result<Plan<'a>, String> {
    let conditions = Conditions::read(arguments, 3)?;
    let at_ms = time_of_expire(arguments.get(2), unit, is_absolute, name)?;
    let left_ms = at_ms.saturating_sub(now_ms());
    Ok(match (conditions == Conditions::default(), left_ms) {
        (true, ..=0) => Plan::new(Operation::Delete, &[], Task::Applied),
        (true, left_ms) if !is_absolute => {
            let ttl = Duration::from_millis(left_ms.unsigned_abs());
            Plan::new(Operation::Touch(ttl), &[], Task::Applied)
        }
        _ => Plan::modify(Modification::Expire { at_ms, conditions }),
    })
}

/// The latest time that a value of Farside can expire at, in milliseconds since 1970: 48 bits.
const EXPIRES_AT_MS_MAX: i64 = (1 << 48) - 1;

/// Reads the time of a SET or GETEX, which has to lie in the future if it is relative.
fn expiry_of_store(
    text: &[u8],
    unit: Unit,
    is_absolute: bool,
    command: &str,
) -> Result<Expiry, String> {
    let invalid = || error::invalid_expire(command);
    let number = parse_integer(text).ok_or_else(|| error::NOT_AN_INTEGER.to_owned())?;
    if number <= 0 {
        return Err(invalid());
    }
    let ms = match unit {
        Unit::Seconds => number.checked_mul(1000).ok_or_else(invalid)?,
        Unit::Milliseconds => number,
    };
    let at = if is_absolute { Some(ms) } else { ms.checked_add(now_ms()) };
    let at = at.filter(|at| *at <= EXPIRES_AT_MS_MAX).ok_or_else(invalid)?;
    Ok(Expiry::At(at as u64))
}

/// Reads the time of an EXPIRE and its like, which may lie in the past. Returns it in milliseconds
/// since 1970.
fn time_of_expire(
    text: &[u8],
    unit: Unit,
    is_absolute: bool,
    command: &str,
) -> Result<i64, String> {
    let invalid = || error::invalid_expire(command);
    let number = parse_integer(text).ok_or_else(|| error::NOT_AN_INTEGER.to_owned())?;
    let ms = match unit {
        Unit::Seconds => number.checked_mul(1000).ok_or_else(invalid)?,
        Unit::Milliseconds => number,
    };
    let base = if is_absolute { 0 } else { now_ms() };
    ms.checked_add(base).filter(|at| *at <= EXPIRES_AT_MS_MAX).ok_or_else(invalid)
}
