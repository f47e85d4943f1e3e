//! `dump` and `load`: all entries of a store as files, or as lines of JSON.

use std::fmt;
use std::fs::{self, File};
use std::io::{BufReader, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use anyhow::Context;
use farside::OperationError::{Contended, KeyEmpty, KeyTooLong, Layout, OutOfSpace, ValueTooLong};
use farside::{Entry, Error, Scan};
use farside_cli::formats::{JsonLines, Pair, Record, brief, has_json_lines};
use farside_config::command_line::exit_code;
use indicatif::ProgressBar;

use crate::args::{self, Args};
use crate::connect;
use crate::files::{DumpFolder, Tree, check_free, write_whole};
use crate::keys::read_at_most;
use crate::output::{self, ExitStatus, Failures, Usage, count};
use crate::puts::{Put, PutSource, check_regions, is_of_one_shard, store_all};
use crate::stopping::{StopSignal, lock};

/// `dump`.
pub(crate) fn dump(args: &Args, options: &args::Dump) -> anyhow::Result<ExitStatus> {
    let name = options.to.display();
    let is_folder = !has_json_lines(&options.to) || options.to.is_dir();
    if !is_folder {
        check_free(&options.to, options.force)?;
    }
    let mut session = connect::reader(args)?.session()?;
    let folder = is_folder.then(|| DumpFolder::open(&options.to, options.force)).transpose()?;
    let progress = DumpProgress::new("dumping")?;
    if let Some(folder) = folder {
        let write = |entry: &Entry| folder.write(&entry.key, &entry.value);
        let written = progress.for_each_entry(session.scan()?, write);
        written.with_context(|| format!("{name} is incomplete"))?;
        return Ok(progress.conclude("file", &options.to));
    }
    let written = write_whole(&options.to, |file| {
        progress.for_each_entry(session.scan()?, |entry| {
            let line = Record::new(&entry.key, &entry.value).to_line();
            file.write_all(line.as_bytes()).map_err(|error| Fatal(error).into())
        })
    });
    written.with_context(|| format!("cannot write {name}"))?;
    Ok(progress.conclude("record", &options.to))
}

/// A failure that every further entry would have too, so it ends the command.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub(crate) struct Fatal(pub(crate) std::io::Error);

/// The progress of a dump or snapshot. Several threads may share it.
pub(crate) struct DumpProgress {
    pub(crate) bar: ProgressBar,
    pub(crate) stop: StopSignal,
    tally: Mutex<DumpTally>,
}

impl DumpProgress {
    /// From now on signals are recorded.
    pub(crate) fn new(doing: &'static str) -> anyhow::Result<Self> {
        let (bar, stop) = (output::progress(doing), StopSignal::listen()?);
        Ok(Self { bar, stop, tally: Mutex::default() })
    }

    /// Calls `write` with every entry, until a signal stops the scan. Prints and counts the failure
    /// of an entry, and continues with the next entry.
    pub(crate) fn for_each_entry(
        &self,
        entries: Scan<'_>,
        mut write: impl FnMut(&Entry) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        for entry in entries {
            self.stop.check()?;
            let (name, result) = match entry {
                Ok(entry) => {
                    let result = write(&entry).map(|()| entry.value.len() as u64);
                    (format!("the key `{}`", brief(&entry.key)), result)
                }
                Err(error @ Error::Operation(Layout(_))) => ("an entry".into(), Err(error.into())),
                Err(error) => return Err(error.into()),
            };
            let tally = &mut *lock(&self.tally);
            match result {
                Ok(bytes) => {
                    tally.bytes += bytes;
                    tally.written += 1;
                    self.bar.inc(1);
                }
                Err(error) if error.is::<Fatal>() || is_disk_full(&error) => return Err(error),
                Err(error) => {
                    tally.outcome = tally.outcome.or_failed(output::exit_code(&error));
                    let origin = format_args!("{name} is left out");
                    tally.failures.add(&self.bar, origin, &error);
                }
            }
        }
        Ok(())
    }

    /// Prints a summary. Returns how the command ended.
    pub(crate) fn conclude(&self, noun: &str, to: &Path) -> ExitStatus {
        self.bar.finish_and_clear();
        lock(&self.tally).conclude(noun, to)
    }
}

fn is_disk_full(error: &anyhow::Error) -> bool {
    let error = error.downcast_ref::<std::io::Error>();
    error.is_some_and(|error| error.kind() == std::io::ErrorKind::StorageFull)
}

/// Counts of the entries that were written, and of those that failed.
#[derive(Default)]
struct DumpTally {
    written: u64,
    bytes: u64,
    failures: Failures,
    outcome: ExitStatus,
}

impl DumpTally {
    /// Prints a summary. Returns how the command ended.
    fn conclude(&self, noun: &str, to: &Path) -> ExitStatus {
        self.failures.print_rest();
        let (written, bytes) = (count(self.written, noun), output::bytes(self.bytes));
        output::print_message(format_args!(
            "{written} written to {}, {bytes} of values",
            to.display()
        ));
        if self.failures.0 > 0 {
            output::print_message(format_args!("{} left out", count(self.failures.0, "key")));
        }
        self.outcome
    }
}

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
