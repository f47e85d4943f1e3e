//! Values that go from a file to the store, or from the store to stdout, piece by piece.

use std::io::{ErrorKind, IsTerminal, Read, Write};

use anyhow::{Context, bail};
use farside::Session;
use indicatif::ProgressBar;

use crate::args::KeyValue;
use crate::output::{self, ExitStatus};

/// The length of a piece that is read from a file or stdin, in bytes.
const INPUT_BYTES: usize = 1 << 20;
/// The length of a piece that is read from the store, in bytes.
const OUTPUT_BYTES: usize = 8 << 20;

/// Stores what `from` has, up to its end. Returns false if that is more than a value may have; then
/// nothing is stored. `total` is its length, if it is known.
pub(crate) fn store(
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
pub(crate) fn print(session: &mut Session, key: &[u8]) -> anyhow::Result<Option<ExitStatus>> {
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
