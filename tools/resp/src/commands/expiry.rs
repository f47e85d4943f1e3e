//! Times of expiry as commands give them.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use farside_resp::parse_integer;

use super::error;

/// The latest time that a value of Farside can expire at, in milliseconds since 1970: 48 bits.
const EXPIRES_AT_MS_MAX: i64 = (1 << 48) - 1;

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
pub(crate) fn time_of(ms: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(ms)
}

/// Converts a time to milliseconds since 1970.
pub(crate) fn ms_of(time: SystemTime) -> i64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

/// Reads the time of a SET or GETEX, which has to lie in the future if it is relative.
pub(crate) fn of_store(
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
pub(crate) fn of_expire(
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
