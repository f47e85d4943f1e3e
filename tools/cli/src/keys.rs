//! The commands on keys: on one, on some, and on all of them.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ffi::OsStr;
use std::fs::{File, Metadata};
use std::io::{ErrorKind, IsTerminal, Read, Write};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail};
use farside::{Entry, Session, Store, Ttl};
use farside_cli::formats::{Encoding, Record, brief};
use farside_config::command_line::one_line;
use indicatif::ProgressBar;

use crate::args::{self, Args, BigKeys, Cas, Delete, Hot, Increment, Key, KeyValue, Keys};
use crate::connect;
use crate::output::{self, ExitStatus, Usage, stdin_was_open};

/// `get`: prints the value, and nothing else, on stdout.
pub(crate) fn get(args: &Args, options: &Key) -> anyhow::Result<ExitStatus> {
    let key = connect::key(args, &options.key)?;
    let mut session = connect::reader(args)?.session()?;
    let printed = match args.value_encoding {
        Encoding::Raw => print_pieces(&mut session, &key)?,
        _ => match session.get(&key)? {
            Some(value) => Some(print_value(args, &value.data)?),
            None => None,
        },
    };
    printed.map_or_else(|| report_no("is absent", &key), Ok)
}

/// `put`: stores a value, piece by piece if it comes from a file or stdin.
pub(crate) fn put(args: &Args, options: &KeyValue) -> anyhow::Result<ExitStatus> {
    let ValueSource::Input(input) = ValueSource::of(args, options)? else {
        return store(args, options, Store::always(), "");
    };
    let key = connect::key(args, &options.key)?;
    let mut session = connect::writer(args)?.session()?;
    let bytes_max = session.limits().value_bytes_max;
    let (from, name, total) = input.open()?;
    let is_stored = store_pieces(&mut session, &key, (from, &name, total), options)?;
    if is_stored { Ok(ExitStatus::Done) } else { Err(too_long(&name, bytes_max)) }
}

/// `insert` and `update`: stores a value under the condition of `store`. If the condition does not
/// hold, prints `refusal`.
pub(crate) fn store(
    args: &Args,
    options: &KeyValue,
    store: Store<'_>,
    refusal: &str,
) -> anyhow::Result<ExitStatus> {
    let key = connect::key(args, &options.key)?;
    let source = ValueSource::of(args, options)?;
    // Connects before it reads stdin: a wrong address must not cost people the value that they
    // typed.
    let mut session = connect::writer(args)?.session()?;
    let value = source.read(session.limits().value_bytes_max)?;
    let store = options.ttl.map_or(store, |ttl| store.ttl(ttl));
    let store = if options.pinned { store.pinned() } else { store };
    if session.store(&key, &value, store)?.applied {
        Ok(ExitStatus::Done)
    } else {
        report_no(refusal, &key)
    }
}

/// `mget`: prints each key that is present with its value, in the format of `scan`.
pub(crate) fn get_many(args: &Args, options: &Keys) -> anyhow::Result<ExitStatus> {
    let keys = options.keys.iter().map(|key| connect::key(args, key));
    let keys = keys.collect::<anyhow::Result<Vec<_>>>()?;
    let values = connect::reader(args)?.session()?.get_many(&keys)?;
    let mut stdout = output::stdout();
    let mut all_present = ExitStatus::Done;
    for (key, value) in keys.iter().zip(values) {
        let Some(value) = value else {
            all_present = report_no("is absent", key)?;
            continue;
        };
        stdout.write_all(entry_line(args, key, &value).as_bytes())?;
    }
    output::finish(stdout)?;
    Ok(all_present)
}

/// `exists`.
pub(crate) fn exists(args: &Args, options: &Key) -> anyhow::Result<ExitStatus> {
    let key = connect::key(args, &options.key)?;
    let exists = connect::reader(args)?.session()?.exists(&key)?;
    if exists { Ok(ExitStatus::Done) } else { report_no("is absent", &key) }
}

/// `incr`: prints the sum.
pub(crate) fn increment(args: &Args, options: &Increment) -> anyhow::Result<ExitStatus> {
    let key = connect::key(args, &options.key)?;
    let sum = connect::writer(args)?.session()?.increment(&key, options.by)?;
    print_line(sum)
}

/// `ttl`: prints seconds, or `never`.
pub(crate) fn ttl(args: &Args, options: &Key) -> anyhow::Result<ExitStatus> {
    let key = connect::key(args, &options.key)?;
    match connect::reader(args)?.session()?.ttl(&key)? {
        None => report_no("is absent", &key),
        Some(Ttl::Forever) => print_line("never"),
        Some(Ttl::For(ttl)) => print_line(format_args!("{:.3}", ttl.as_secs_f64())),
        Some(other) => anyhow::bail!("this kv-cli does not know the TTL {other:?}"),
    }
}

fn print_line(text: impl std::fmt::Display) -> anyhow::Result<ExitStatus> {
    let mut stdout = output::stdout();
    writeln!(stdout, "{text}")?;
    output::finish(stdout)
}

/// `delete`.
pub(crate) fn delete(args: &Args, options: &Delete) -> anyhow::Result<ExitStatus> {
    if let Some(prefix) = &options.prefix {
        let prefix = connect::decode(args.key_encoding, "prefix", prefix)?;
        if prefix.is_empty() {
            return Err(Usage::error(
                "the prefix is empty, and all keys start with that: to remove all keys, start the \
                 server anew, or give the prefixes one by one",
            ));
        }
        return print_line(connect::writer(args)?.session()?.delete_prefix(prefix)?);
    }
    let Some(key) = &options.key else { return Err(Usage::error("give a key, or --prefix")) };
    let key = connect::key(args, key)?;
    let deleted = connect::writer(args)?.session()?.delete(&key)?;
    if deleted { Ok(ExitStatus::Done) } else { report_no("is absent", &key) }
}

/// `cas`: on a mismatch the current value goes to stdout.
pub(crate) fn compare_and_swap(args: &Args, options: &Cas) -> anyhow::Result<ExitStatus> {
    let key = connect::key(args, &options.key)?;
    let decode = |text: &OsStr| connect::decode(args.value_encoding, "expected value", text);
    let expected = options.expect.as_deref().map(decode).transpose()?;
    let mut session = connect::writer(args)?.session()?;
    let new =
        ValueSource::of_argument(args, &options.new)?.read(session.limits().value_bytes_max)?;
    let outcome = session.compare_exchange(&key, expected.as_deref(), &new)?;
    match outcome.value {
        _ if outcome.applied => Ok(ExitStatus::Done),
        None => report_no("is absent; nothing was changed", &key),
        Some(current) => {
            print_value(args, &current)?;
            report_no("has another value, which went to stdout; nothing was changed", &key)
        }
    }
}

fn print_value(args: &Args, value: &[u8]) -> anyhow::Result<ExitStatus> {
    let mut stdout = output::stdout();
    stdout.write_all(&args.value_encoding.encode_whole(value))?;
    output::finish(stdout)
}

/// Prints why the exit code is 1.
fn report_no(why: &str, key: &[u8]) -> anyhow::Result<ExitStatus> {
    output::print_message(format_args!("the key `{}` {why}", brief(key)));
    Ok(ExitStatus::No)
}

/// The source of a value.
enum ValueSource<'a> {
    Argument(Vec<u8>),
    Input(Input<'a>),
}

/// Content that is read piece by piece.
enum Input<'a> {
    File(&'a Path),
    Stdin,
}

impl<'a> ValueSource<'a> {
    fn of(args: &Args, options: &'a KeyValue) -> anyhow::Result<Self> {
        match (&options.file, &options.value) {
            (Some(path), _) => Ok(Self::Input(Input::File(path))),
            (None, Some(text)) => Self::of_argument(args, text),
            (None, None) => Err(Usage::error("give a value, --file FILE, or - for stdin")),
        }
    }

    fn of_argument(args: &Args, text: &OsStr) -> anyhow::Result<Self> {
        if text == "-" {
            return Ok(Self::Input(Input::Stdin));
        }
        Ok(Self::Argument(connect::decode(args.value_encoding, "value", text)?))
    }

    /// Returns the value. Stops reading once the content is longer than a value may be.
    fn read(self, bytes_max: usize) -> anyhow::Result<Vec<u8>> {
        let (from, name, _) = match self {
            Self::Argument(value) => return Ok(value),
            Self::Input(input) => input.open()?,
        };
        let value = read_at_most(from, bytes_max).with_context(|| name.clone())?;
        value.ok_or_else(|| too_long(&name, bytes_max))
    }
}

impl<'a> Input<'a> {
    /// Returns the content, its name, and its length if that is known.
    fn open(self) -> anyhow::Result<(Box<dyn Read + 'a>, String, Option<u64>)> {
        match self {
            Self::File(path) => {
                let name = path.display().to_string();
                let file = File::open(path).with_context(|| format!("cannot open {name}"))?;
                let total = file.metadata().ok().filter(Metadata::is_file).map(|file| file.len());
                Ok((Box::new(file), name, total))
            }
            Self::Stdin if stdin_was_open() => {
                Ok((Box::new(std::io::stdin().lock()), "stdin".into(), None))
            }
            Self::Stdin => bail!("stdin is closed: there is no value to read"),
        }
    }
}

fn too_long(name: &str, bytes_max: usize) -> anyhow::Error {
    Usage::error(format!(
        "{name} has more than the {bytes_max} bytes that a value in this region may have"
    ))
}

/// Reads to the end. Returns `None` if the content has more than `bytes_max` bytes.
pub(crate) fn read_at_most(from: impl Read, bytes_max: usize) -> std::io::Result<Option<Vec<u8>>> {
    let mut content = Vec::new();
    from.take(bytes_max as u64 + 1).read_to_end(&mut content)?;
    Ok((content.len() <= bytes_max).then_some(content))
}

/// The length of a piece that is read from a file or stdin, in bytes.
const INPUT_BYTES: usize = 1 << 20;
/// The length of a piece that is read from the store, in bytes.
const OUTPUT_BYTES: usize = 8 << 20;

/// Stores what `from` has, up to its end. Returns false if that is more than a value may have; then
/// nothing is stored. `total` is its length, if it is known.
fn store_pieces(
    session: &mut Session,
    key: &[u8],
    (mut from, name, total): (impl Read, &str, Option<u64>),
    options: &KeyValue,
) -> anyhow::Result<bool> {
    let bytes_max = session.limits().value_bytes_max;
    let mut writer = session.writer(key);
    if let Some(ttl) = options.ttl {
        writer = writer.ttl(ttl);
    }
    if options.pinned {
        writer = writer.pinned();
    }
    let bar = output::byte_progress("storing", total);
    let mut piece = vec![0; INPUT_BYTES];
    loop {
        let bytes = match from.read(&mut piece) {
            Ok(0) => break,
            Ok(bytes) => bytes,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => return Err(error).context(name.to_owned()),
        };
        if writer.bytes() + bytes > bytes_max {
            return Ok(false);
        }
        writer.add(&piece[..bytes])?;
        bar.inc(bytes as u64);
    }
    writer.finish()?;
    bar.finish_and_clear();
    Ok(true)
}

/// Prints the value of a key. `None` if the key is absent.
fn print_pieces(session: &mut Session, key: &[u8]) -> anyhow::Result<Option<ExitStatus>> {
    let mut piece = vec![0; OUTPUT_BYTES.min(session.limits().value_bytes_max)];
    let Some(first) = session.get_range(key, 0, &mut piece)? else { return Ok(None) };
    let mut stdout = output::stdout();
    stdout.write_all(&piece[..first.bytes])?;
    let mut printed = first.bytes;
    if printed < first.value_bytes {
        let bar = match std::io::stdout().is_terminal() {
            true => ProgressBar::hidden(),
            false => output::byte_progress("reading", Some(first.value_bytes as u64)),
        };
        bar.set_position(printed as u64);
        while printed < first.value_bytes {
            let next = session.get_range(key, printed, &mut piece)?;
            let Some(next) = next.filter(|next| next.version == first.version) else {
                bail!("the value was replaced while it was read: stdout has the start of it");
            };
            stdout.write_all(&piece[..next.bytes])?;
            printed += next.bytes;
            bar.set_position(printed as u64);
        }
        bar.finish_and_clear();
    }
    output::finish(stdout).map(Some)
}

/// `scan`: prints one line for each entry.
pub(crate) fn scan(args: &Args, options: &args::Scan) -> anyhow::Result<ExitStatus> {
    let prefix = options.prefix.as_deref();
    let prefix =
        prefix.map(|text| connect::decode(args.key_encoding, "prefix", text)).transpose()?;
    let prefix = prefix.unwrap_or_default();
    let mut session = connect::reader(args)?.session()?;
    let mut stdout = output::stdout();
    let mut remaining = options.limit.unwrap_or(u64::MAX);
    let mut outcome = ExitStatus::Done;
    let mut lines = lines(args, options, &mut session, &prefix)?;
    while remaining > 0
        && let Some(line) = lines.next()
    {
        match line {
            Ok(line) => {
                stdout.write_all(line.as_bytes())?;
                remaining -= 1;
            }
            Err(error) => {
                // The scan continues with the other entries.
                output::print_message(one_line(&error));
                outcome = outcome.or_failed(error.exit_code());
            }
        }
    }
    output::finish(stdout)?;
    Ok(outcome)
}

/// The lines of all entries. Values are read only if they are printed.
fn lines<'s>(
    args: &'s Args,
    options: &args::Scan,
    session: &'s mut Session,
    prefix: &[u8],
) -> farside::Result<Box<dyn Iterator<Item = farside::Result<String>> + 's>> {
    if options.keys_only {
        let line = |key: Vec<u8>| format!("{}\n", args.key_encoding.encode_line(&key));
        return Ok(Box::new(session.scan_keys(prefix)?.map(move |entry| Ok(line(entry?.key)))));
    }
    let is_json = options.json;
    let line = move |Entry { key, value, .. }: Entry| match is_json {
        true => Record::new(&key, &value).to_line(),
        false => entry_line(args, &key, &value),
    };
    Ok(Box::new(session.scan_prefix(prefix)?.map(move |entry| Ok(line(entry?)))))
}

/// The line of a key and its value.
fn entry_line(args: &Args, key: &[u8], value: &[u8]) -> String {
    let (key, value) = (args.key_encoding.encode_line(key), args.value_encoding.encode_line(value));
    format!("{key}\t{value}\n")
}

/// `bigkeys`: reads all keys with the lengths of their values, and prints a line for each of the
/// longest.
pub(crate) fn bigkeys(args: &Args, options: &BigKeys) -> anyhow::Result<ExitStatus> {
    let mut session = connect::reader(args)?.session()?;
    let mut outcome = ExitStatus::Done;
    // The shortest of the values kept is on top. Equal lengths are in the order of the keys.
    let mut longest = BinaryHeap::new();
    let bar = output::progress("reading the keys");
    for entry in session.scan_keys("")? {
        match entry {
            Ok(entry) => {
                bar.inc(1);
                longest.push((Reverse(entry.value_bytes), entry.key));
                if longest.len() > options.count.get() {
                    longest.pop();
                }
            }
            Err(error) => {
                bar.suspend(|| output::print_message(one_line(&error)));
                outcome = outcome.or_failed(error.exit_code());
            }
        }
    }
    bar.finish_and_clear();
    let mut stdout = output::stdout();
    for (Reverse(bytes), key) in longest.into_sorted_vec() {
        writeln!(stdout, "{bytes}\t{}", args.key_encoding.encode_line(&key))?;
    }
    output::finish(stdout)?;
    Ok(outcome)
}

/// `hot`: has the servers sample reads for a while, and prints a line for each of the hottest keys.
pub(crate) fn hot(args: &Args, options: &Hot) -> anyhow::Result<ExitStatus> {
    let client = connect::reader(args)?;
    let time = Duration::from_secs(options.seconds.into());
    let hot = client.admin().hot_keys(time, options.count.get())?;
    if hot.samples == 0 {
        output::print_message("clients reported no reads");
    }
    let mut stdout = output::stdout();
    for key in hot.keys {
        let percent = key.reads as f64 * 100.0 / hot.samples.max(1) as f64;
        let line = args.key_encoding.encode_line(&key.key);
        writeln!(stdout, "{percent:.2} %\t{}\t{line}", key.reads)?;
    }
    output::finish(stdout)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn input_beyond_the_limit_is_not_read_to_its_end() {
        assert_eq!(read_at_most(&b"abc"[..], 3).unwrap(), Some(b"abc".to_vec()));
        assert_eq!(read_at_most(&b"abcd"[..], 3).unwrap(), None);
        assert_eq!(read_at_most(std::io::repeat(7), 100).unwrap(), None);
        let missing =
            ValueSource::Input(Input::File(Path::new("/nonexistent/value"))).read(1).unwrap_err();
        assert!(missing.to_string().contains("/nonexistent/value"));
    }
}
