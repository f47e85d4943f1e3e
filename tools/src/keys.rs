//! The commands on one key.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;

use anyhow::{Context, bail};
use farside::{Exchange, Store};
use farside_tools::encoding::brief;

use crate::args::{Args, Cas, Key, KeyValue};
use crate::connect;
use crate::output::{self, ExitStatus, Usage};
use crate::standard_streams::StandardStreams;

/// `get`: the bytes, and nothing else, on stdout.
pub(crate) fn get(args: &Args, what: &Key) -> anyhow::Result<ExitStatus> {
    let key = connect::key(args, &what.key)?;
    match connect::reader(args)?.session()?.get(&key)? {
        Some(value) => print_value(args, &value.data),
        None => no("is absent", &key),
    }
}

/// `put`, `insert` and `update`: stores on this condition; `why` it was not met.
pub(crate) fn store(
    args: &Args,
    what: &KeyValue,
    store: Store<'_>,
    why: &str,
) -> anyhow::Result<ExitStatus> {
    let key = connect::key(args, &what.key)?;
    let source = match (&what.file, &what.value) {
        (Some(path), _) => Source::File(path),
        (None, Some(text)) => Source::of_argument(args, text)?,
        (None, None) => return Err(Usage::error("give a value, --file FILE, or - for stdin")),
    };
    // Connect first: a wrong address should not cost a person the input they typed.
    let mut session = connect::writer(args)?.session()?;
    let value = source.read(session.limits().value_bytes_max)?;
    let store = what.ttl.map_or(store, |ttl| store.ttl(ttl));
    if session.store(&key, &value, store)? { Ok(ExitStatus::Done) } else { no(why, &key) }
}

/// `delete`.
pub(crate) fn delete(args: &Args, what: &Key) -> anyhow::Result<ExitStatus> {
    let key = connect::key(args, &what.key)?;
    let deleted = connect::writer(args)?.session()?.delete(&key)?;
    if deleted { Ok(ExitStatus::Done) } else { no("is absent", &key) }
}

/// `cas`: on a mismatch the current value goes to stdout.
pub(crate) fn compare_and_swap(args: &Args, what: &Cas) -> anyhow::Result<ExitStatus> {
    let key = connect::key(args, &what.key)?;
    let decode = |text: &OsStr| connect::decode(args.value_encoding, "expected value", text);
    let expected = what.expect.as_deref().map(decode).transpose()?;
    let mut session = connect::writer(args)?.session()?;
    let new = Source::of_argument(args, &what.new)?.read(session.limits().value_bytes_max)?;
    match session.compare_exchange(&key, expected.as_deref(), &new)? {
        Exchange::Exchanged => Ok(ExitStatus::Done),
        Exchange::Mismatch(None) => no("is absent; nothing was changed", &key),
        Exchange::Mismatch(Some(current)) => {
            print_value(args, &current.data)?;
            no("has another value, which went to stdout; nothing was changed", &key)
        }
    }
}

fn print_value(args: &Args, value: &[u8]) -> anyhow::Result<ExitStatus> {
    let mut stdout = output::stdout();
    stdout.write_all(&args.value_encoding.encode_whole(value))?;
    output::finish(stdout)
}

fn no(why: &str, key: &[u8]) -> anyhow::Result<ExitStatus> {
    output::tell(format_args!("the key `{}` {why}", brief(key)));
    Ok(ExitStatus::No)
}

/// Where a value comes from.
enum Source<'a> {
    Argument(Vec<u8>),
    File(&'a Path),
    Stdin,
}

impl Source<'_> {
    fn of_argument(args: &Args, text: &OsStr) -> anyhow::Result<Self> {
        if text == "-" {
            return Ok(Self::Stdin);
        }
        Ok(Self::Argument(connect::decode(args.value_encoding, "value", text)?))
    }

    /// The value; stops reading once it is longer than a value may be.
    fn read(self, bytes_max: usize) -> anyhow::Result<Vec<u8>> {
        let too_long = |name: &str| {
            format!("{name} has more than the {bytes_max} bytes that this region allows a value")
        };
        match self {
            Self::Argument(value) => Ok(value),
            Self::File(path) => {
                let name = path.display().to_string();
                let file = File::open(path).with_context(|| format!("cannot open {name}"))?;
                let value = read_at_most(file, bytes_max).with_context(|| name.clone())?;
                value.ok_or_else(|| Usage::error(too_long(&name)))
            }
            Self::Stdin => {
                if !StandardStreams::at_start().stdin {
                    bail!("stdin is closed: there is no value to read");
                }
                let value = read_at_most(std::io::stdin().lock(), bytes_max).context("stdin")?;
                value.ok_or_else(|| Usage::error(too_long("stdin")))
            }
        }
    }
}

/// Everything there is to read; `None` if it is more than `bytes_max`.
pub(crate) fn read_at_most(from: impl Read, bytes_max: usize) -> std::io::Result<Option<Vec<u8>>> {
    let mut content = Vec::new();
    from.take(bytes_max as u64 + 1).read_to_end(&mut content)?;
    Ok((content.len() <= bytes_max).then_some(content))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn input_beyond_the_limit_is_not_read_to_its_end() {
        assert_eq!(read_at_most(&b"abc"[..], 3).unwrap(), Some(b"abc".to_vec()));
        assert_eq!(read_at_most(&b"abcd"[..], 3).unwrap(), None);
        assert_eq!(read_at_most(std::io::repeat(7), 100).unwrap(), None);
        let missing = Source::File(Path::new("/nonexistent/value")).read(1).unwrap_err();
        assert!(missing.to_string().contains("/nonexistent/value"));
    }
}
