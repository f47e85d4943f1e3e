//! Commands on all keys. They run on a helper thread, because they take long.

use std::hash::{BuildHasher, RandomState};

use farside::{KeyEntry, Result, ScanPosition, Session};
use farside_resp::{ReplyWriter, matches, parse_integer};

use super::table::Command;
use super::{Arguments, error, key_of_client};

/// How many keys SCAN returns at least without COUNT, if there are as many. As in redis.
const COUNT_DEFAULT: i64 = 10;

/// Runs the command.
///
/// # Errors
/// Those of a scan.
pub(crate) fn run(
    command: Command,
    arguments: &impl Arguments,
    session: &mut Session,
    reply: &mut ReplyWriter<'_>,
) -> Result<()> {
    match command {
        Command::DbSize => reply.integer(session.count_keys()? as i64),
        Command::Keys => {
            let pattern = arguments.get(1);
            let mut keys = Vec::new();
            for entry in session.scan_keys("")? {
                keys.extend(Some(key_of(entry)?).filter(|key| matches(pattern, key)));
            }
            reply.array(keys.len());
            keys.iter().for_each(|key| reply.bulk(key));
        }
        Command::RandomKey => match random_key(session)? {
            Some(key) => reply.bulk(key),
            None => reply.null(),
        },
        Command::Scan => scan(arguments, session, reply)?,
        _ if arguments.count() > 2
            || arguments.count() == 2 && !arguments.is(1, "ASYNC") && !arguments.is(1, "SYNC") =>
        {
            reply.error(error::SYNTAX);
        }
        _ => match session.delete_prefix("") {
            Ok(_) => reply.ok(),
            Err(failure) => {
                let text = error::of_operation(&failure);
                reply.error(format!("{text}; a part of the keys may be removed"));
            }
        },
    }
    Ok(())
}

/// The key of an entry, as clients know it. An error, also one that concerns this entry only, is
/// the command's: otherwise a key that is present would be missing from the answer.
fn key_of(entry: Result<KeyEntry>) -> Result<Vec<u8>> {
    entry.map(|entry| key_of_client(entry.key))
}

/// A key of the part of the index at a random place, or of the first one behind it with any.
fn random_key(session: &mut Session) -> Result<Option<Vec<u8>>> {
    let mut random = Random::new();
    for place in [random.below(1 << 32), 0] {
        let mut scan = session.scan_keys_from(ScanPosition::from_u64(place))?;
        let (mut chosen, mut seen) = (None, 0);
        while let Some(entry) = scan.next() {
            let key = key_of(entry)?;
            seen += 1;
            if random.below(seen) == 0 {
                chosen = Some(key);
            }
            if scan.position().is_some() {
                break;
            }
        }
        if chosen.is_some() {
            return Ok(chosen);
        }
    }
    Ok(None)
}

/// Random numbers.
struct Random(RandomState, u64);

impl Random {
    fn new() -> Self {
        Self(RandomState::new(), 0)
    }

    /// A number below a limit.
    fn below(&mut self, limit: u64) -> u64 {
        self.1 += 1;
        self.0.hash_one(self.1) % limit
    }
}

/// What SCAN asks for.
struct ScanRequest<'a> {
    position: ScanPosition,
    pattern: Option<&'a [u8]>,
    count: i64,
    /// Whether keys of the only type, string, are asked for.
    is_of_type: bool,
}

impl<'a> ScanRequest<'a> {
    fn read(arguments: &'a impl Arguments) -> std::result::Result<Self, &'static str> {
        let text = str::from_utf8(arguments.get(1)).unwrap_or_default();
        let digits = text.bytes().all(|byte| byte.is_ascii_digit());
        let is_empty = arguments.get(1).is_empty();
        let number = if is_empty { Some(0) } else { text.parse().ok() };
        let number = number.filter(|_| digits).ok_or("ERR invalid cursor")?;
        let position = ScanPosition::from_u64(number);
        let mut request = Self { position, pattern: None, count: COUNT_DEFAULT, is_of_type: true };
        let mut at = 2;
        while at < arguments.count() {
            if at + 1 == arguments.count() {
                return Err(error::SYNTAX);
            }
            let value = arguments.get(at + 1);
            if arguments.is(at, "COUNT") {
                request.count = parse_integer(value).ok_or(error::NOT_AN_INTEGER)?;
                if request.count < 1 {
                    return Err(error::SYNTAX);
                }
            } else if arguments.is(at, "MATCH") {
                request.pattern = Some(value);
            } else if arguments.is(at, "TYPE") {
                request.is_of_type = value.eq_ignore_ascii_case(b"string");
            } else {
                return Err(error::SYNTAX);
            }
            at += 2;
        }
        Ok(request)
    }
}

fn scan(
    arguments: &impl Arguments,
    session: &mut Session,
    reply: &mut ReplyWriter<'_>,
) -> Result<()> {
    let request = match ScanRequest::read(arguments) {
        Ok(request) => request,
        Err(text) => {
            reply.error(text);
            return Ok(());
        }
    };
    let (mut keys, mut read) = (Vec::new(), 0);
    let mut scan = session.scan_keys_from(request.position)?;
    let next = loop {
        let Some(entry) = scan.next() else { break 0 };
        read += 1;
        let key = key_of(entry)?;
        if request.is_of_type && request.pattern.is_none_or(|pattern| matches(pattern, &key)) {
            keys.push(key);
        }
        if read >= request.count
            && let Some(position) = scan.position()
        {
            break position.as_u64();
        }
    };
    reply.array(2);
    reply.bulk(next.to_string());
    reply.array(keys.len());
    keys.iter().for_each(|key| reply.bulk(key));
    Ok(())
}
