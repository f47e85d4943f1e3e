//! `load`: stores files or lines of JSON, with many PUTs in flight.

use std::fmt;
use std::fs::{self, File};
use std::io::BufReader;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use farside::Error;
use farside::OperationError::{Contended, KeyEmpty, KeyTooLong, OutOfSpace, ValueTooLong};
use farside_cli::records::{JsonLines, Pair, has_json_lines};
use farside_config::command_line::exit_code;
use indicatif::ProgressBar;

use crate::args::{self, Args};
use crate::connect;
use crate::files::Tree;
use crate::keys::read_at_most;
use crate::output::{self, ExitStatus, Failures, Usage, count};
use crate::puts::{Put, PutSource, check_regions, is_of_one_shard, store_all};

/// `load`.
pub(crate) fn load(args: &Args, options: &args::Load) -> anyhow::Result<ExitStatus> {
    let name = options.from.display();
    let metadata = fs::metadata(&options.from).with_context(|| format!("cannot load {name}"))?;
    if !metadata.is_dir() && !has_json_lines(&options.from) {
        return Err(Usage::error(format!("{name} is neither a folder nor a .jsonl file")));
    }
    let client = connect::writer(args)?;
    let mut session = client.session()?;
    let value_bytes_max = session.limits().value_bytes_max;
    let bar = output::progress("loading");
    let (skip_too_large, is_pinned) = (options.skip_too_large, options.pinned);
    let mut tally = LoadTally { value_bytes_max, ..Default::default() };
    let tree = match metadata.is_dir() {
        true => Some(list(&options.from, &bar, &mut tally)?),
        false => None,
    };
    let input: Box<dyn Iterator<Item = anyhow::Result<Item>>> = match &tree {
        Some(tree) => Box::new(tree.files.iter().map(|file| {
            let pair = read_file_of(tree, file, value_bytes_max);
            Ok((Origin::File(options.from.join(file)), pair))
        })),
        None => {
            let file = File::open(&options.from).with_context(|| format!("cannot open {name}"))?;
            Box::new(JsonLines::new(BufReader::new(file)).map(|record| {
                let record = record.with_context(|| format!("{name}"))?;
                Ok((Origin::Line(record.line), record.pair))
            }))
        }
    };
    let mut loader = Loader { input, bar: &bar, skip_too_large, is_pinned, tally };
    let stored = store_all(&mut session, &mut loader, options.retries.retry_for);
    let tally = loader.tally;
    stored.with_context(|| format!("after {}", count(tally.stored, "key")))?;
    bar.finish_and_clear();
    let status = tally.conclude();
    check_regions(&client)?;
    Ok(status)
}

fn list(root: &Path, bar: &ProgressBar, tally: &mut LoadTally) -> anyhow::Result<Tree> {
    let mut tree = Tree::list(root).with_context(|| format!("cannot read {}", root.display()))?;
    (tally.links, tally.others) = (tree.links, tree.others);
    for (folder, error) in std::mem::take(&mut tree.failures) {
        tally.failures.add(bar, Origin::File(root.join(folder)), &error.into());
    }
    output::set_total(bar, tree.files.len() as u64);
    Ok(tree)
}

fn read_file_of(tree: &Tree, file: &Path, bytes_max: usize) -> anyhow::Result<Pair> {
    let key = file.as_os_str().as_bytes().to_vec();
    Ok((key, read_file(tree.open(file)?, bytes_max)?))
}

/// A file is longer than a value of this region may be.
#[derive(Debug, thiserror::Error)]
#[error(
    "it is {bytes} bytes long, but a value in this region has at most {max}; --skip-too-large \
     loads the others"
)]
struct TooLarge {
    bytes: u64,
    max: usize,
}

fn read_file(file: File, max: usize) -> anyhow::Result<Vec<u8>> {
    let bytes = file.metadata()?.len();
    if bytes > max as u64 {
        return Err(TooLarge { bytes, max }.into());
    }
    // The file may have grown since its length was read.
    let content = read_at_most(file, max)?;
    Ok(content.ok_or(TooLarge { bytes: max as u64 + 1, max })?)
}

/// Where a key came from.
#[derive(Clone, Debug)]
enum Origin {
    File(PathBuf),
    Line(u64),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Line(line) => write!(f, "line {line}"),
        }
    }
}

/// A key and its value, or why it has none.
type Item = (Origin, anyhow::Result<Pair>);

struct Loader<'a> {
    input: Box<dyn Iterator<Item = anyhow::Result<Item>> + 'a>,
    bar: &'a ProgressBar,
    /// Values over the region's limit do not count as failures.
    skip_too_large: bool,
    is_pinned: bool,
    tally: LoadTally,
}

impl Loader<'_> {
    fn count_failure(&mut self, origin: &Origin, error: &anyhow::Error) {
        self.bar.inc(1);
        if self.skip_too_large && is_too_large(error) {
            self.tally.too_large += 1;
            return;
        }
        self.tally.failures.add(self.bar, origin, error);
    }
}

impl PutSource for Loader<'_> {
    type Origin = Origin;

    fn next(&mut self) -> anyhow::Result<Option<Put<Origin>>> {
        while let Some((origin, pair)) = self.input.next().transpose()? {
            match pair {
                Ok((key, value)) => {
                    let is_pinned = self.is_pinned;
                    return Ok(Some(Put { origin, key, value, expires_at: None, is_pinned }));
                }
                Err(error) => self.count_failure(&origin, &error),
            }
        }
        Ok(None)
    }

    fn stored(&mut self, put: &Put<Origin>) {
        self.bar.inc(1);
        self.tally.stored += 1;
        self.tally.stored_bytes += put.value.len() as u64;
    }

    /// Returns the error if the next PUTs would fail in the same way; otherwise prints and counts
    /// it.
    fn failed(&mut self, put: &Put<Origin>, error: Error) -> anyhow::Result<()> {
        if !concerns_one_key(&error) && !is_of_one_shard(&error) {
            return Err(anyhow::Error::from(error).context(put.origin.to_string()));
        }
        self.count_failure(&put.origin, &error.into());
        Ok(())
    }
}

fn is_too_large(error: &anyhow::Error) -> bool {
    error.is::<TooLarge>()
        || matches!(error.downcast_ref(), Some(Error::Operation(ValueTooLong { .. })))
}

fn concerns_one_key(error: &Error) -> bool {
    matches!(
        error,
        Error::Operation(
            KeyEmpty
                | KeyTooLong { .. }
                | ValueTooLong { .. }
                | OutOfSpace { .. }
                | Contended { .. }
        )
    )
}

/// Counts of the records that were loaded, skipped, and failed.
#[derive(Debug, Default)]
struct LoadTally {
    stored: u64,
    stored_bytes: u64,
    failures: Failures,
    too_large: u64,
    /// The longest value that the region allows, in bytes.
    value_bytes_max: usize,
    links: u64,
    others: u64,
}

impl LoadTally {
    /// Prints a summary. Returns how the command ended.
    fn conclude(&self) -> ExitStatus {
        self.failures.print_rest();
        output::print_message(self.summary());
        if self.failures.0 == 0 { ExitStatus::Done } else { ExitStatus::Failed(exit_code::FAILED) }
    }

    fn summary(&self) -> String {
        let bytes = output::bytes(self.stored_bytes);
        let mut summary = format!("{} loaded, {bytes} of values", count(self.stored, "key"));
        for (number, noun) in [(self.links, "symbolic link"), (self.others, "special file")] {
            if number > 0 {
                summary += &format!(", {} skipped", count(number, noun));
            }
        }
        if self.too_large > 0 {
            let (values, max) = (count(self.too_large, "value"), self.value_bytes_max);
            summary += &format!(", {values} over {max} bytes skipped");
        }
        if self.failures.0 > 0 {
            summary += &format!("; {} failed", self.failures.0);
        }
        summary
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_for_a_file_over_the_limit_names_its_length_and_the_limit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("large");
        fs::write(&path, [7; 11]).unwrap();
        let open = || File::open(&path).unwrap();
        let error = read_file(open(), 10).unwrap_err().to_string();
        assert!(error.contains("11 bytes") && error.contains("at most 10"), "{error}");
        assert_eq!(read_file(open(), 11).unwrap(), [7; 11]);
    }

    #[test]
    fn the_summary_counts_skipped_and_failed_files() {
        let tally = LoadTally {
            stored: 1,
            stored_bytes: 3,
            failures: Failures(2),
            links: 1,
            ..LoadTally::default()
        };
        let expected = "1 key loaded, 3 B of values, 1 symbolic link skipped; 2 failed";
        assert_eq!(tally.summary(), expected);
        let tally = LoadTally { stored: 2, ..LoadTally::default() };
        assert_eq!(tally.summary(), "2 keys loaded, 0 B of values");
        let tally = LoadTally { too_large: 1, value_bytes_max: 10, ..LoadTally::default() };
        assert_eq!(tally.summary(), "0 keys loaded, 0 B of values, 1 value over 10 bytes skipped");
    }
}
