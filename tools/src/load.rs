//! `load`: stores files or lines of JSON, with many PUTs in flight.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::fs::{self, File};
use std::io::BufReader;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use farside::OperationError::{Contended, KeyEmpty, KeyTooLong, OutOfSpace, ValueTooLong};
use farside::{Error, Pipeline, PipelineFull, Ticket};
use farside_config::command_line::exit_code;
use farside_tools::records::{has_json_lines, read_json_lines};
use indicatif::ProgressBar;

use crate::args::{self, Args};
use crate::connect;
use crate::files::Tree;
use crate::keys::read_at_most;
use crate::output::{self, ExitStatus, Failures, Usage, count};

/// `load`.
pub(crate) fn load(args: &Args, options: &args::Load) -> anyhow::Result<ExitStatus> {
    let name = options.from.display();
    let metadata = fs::metadata(&options.from).with_context(|| format!("cannot load {name}"))?;
    if !metadata.is_dir() && !has_json_lines(&options.from) {
        return Err(Usage::error(format!("{name} is neither a folder nor a .jsonl file")));
    }
    let mut session = connect::writer(args)?.session()?;
    let value_bytes_max = session.limits().value_bytes_max;
    let bar = output::progress("loading");
    let mut loader = Loader {
        pipeline: session.pipeline()?,
        bar: &bar,
        in_flight: HashMap::new(),
        keys: HashSet::new(),
        skip_too_large: options.skip_too_large,
        tally: LoadTally { value_bytes_max, ..Default::default() },
    };
    if metadata.is_dir() {
        load_folder(&options.from, &mut loader, value_bytes_max)?;
        loader.finish()?;
    } else {
        let file = File::open(&options.from).with_context(|| format!("cannot open {name}"))?;
        let read = read_json_lines(BufReader::new(file), |record| {
            loader.put_or_fail(Origin::Line(record.line), record.pair)
        });
        loader.finish()?;
        read.with_context(|| format!("{name}"))?;
    }
    bar.finish_and_clear();
    Ok(loader.tally.conclude())
}

fn load_folder(root: &Path, loader: &mut Loader<'_>, bytes_max: usize) -> anyhow::Result<()> {
    let mut tree = Tree::list(root).with_context(|| format!("cannot read {}", root.display()))?;
    loader.tally.links = tree.links;
    loader.tally.others = tree.others;
    for (folder, error) in std::mem::take(&mut tree.failures) {
        loader.count_failure(&Origin::File(root.join(folder)), &error.into());
    }
    output::set_total(loader.bar, tree.files.len() as u64);
    for file in &tree.files {
        let key = file.as_os_str().as_bytes().to_vec();
        let value = tree.open(file).map_err(Into::into);
        let pair = value.and_then(|file| Ok((key, read_file(file, bytes_max)?)));
        loader.put_or_fail(Origin::File(root.join(file)), pair)?;
    }
    Ok(())
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

/// A PUT in flight.
struct PutInFlight {
    origin: Origin,
    key: Vec<u8>,
    value_bytes: u64,
}

struct Loader<'a> {
    pipeline: Pipeline<'a>,
    bar: &'a ProgressBar,
    in_flight: HashMap<Ticket, PutInFlight>,
    /// The keys of the PUTs in flight. A second PUT of one of them must wait, because two PUTs in
    /// flight take effect in any order.
    keys: HashSet<Vec<u8>>,
    /// Values over the region's limit do not count as failures.
    skip_too_large: bool,
    tally: LoadTally,
}

impl Loader<'_> {
    /// Starts a PUT of the pair. If `pair` is an error, counts it.
    fn put_or_fail(
        &mut self,
        origin: Origin,
        pair: anyhow::Result<(Vec<u8>, Vec<u8>)>,
    ) -> anyhow::Result<()> {
        let (key, value) = match pair {
            Ok(pair) => pair,
            Err(error) => {
                self.count_failure(&origin, &error);
                return Ok(());
            }
        };
        while self.keys.contains(&key) {
            self.take_one()?;
        }
        loop {
            match self.pipeline.put(&key, &value) {
                Ok(ticket) => {
                    self.keys.insert(key.clone());
                    let value_bytes = value.len() as u64;
                    self.in_flight.insert(ticket, PutInFlight { origin, key, value_bytes });
                    return Ok(());
                }
                Err(PipelineFull) => self.take_one()?,
            }
        }
    }

    /// Waits for one PUT. Returns its error if the next PUTs would fail in the same way; otherwise
    /// prints and counts it.
    fn take_one(&mut self) -> anyhow::Result<()> {
        let completed = self.pipeline.wait().context("the pipeline lost an operation")?;
        let (ticket, result) = (completed.ticket, completed.result.map(|_| ()));
        let put =
            self.in_flight.remove(&ticket).context("the pipeline returned an unknown operation")?;
        self.keys.remove(&put.key);
        match result {
            Ok(()) => {
                self.bar.inc(1);
                self.tally.stored += 1;
                self.tally.stored_bytes += put.value_bytes;
                Ok(())
            }
            Err(error) if concerns_one_key(&error) => {
                self.count_failure(&put.origin, &error.into());
                Ok(())
            }
            Err(error) => {
                let stored = count(self.tally.stored, "key");
                let origin = put.origin;
                Err(anyhow::Error::from(error).context(format!("{origin} (after {stored})")))
            }
        }
    }

    fn count_failure(&mut self, origin: &Origin, error: &anyhow::Error) {
        self.bar.inc(1);
        if self.skip_too_large && is_too_large(error) {
            self.tally.too_large += 1;
            return;
        }
        self.tally.failures.add(self.bar, origin, error);
    }

    fn finish(&mut self) -> anyhow::Result<()> {
        while !self.in_flight.is_empty() {
            self.take_one()?;
        }
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

/// Counts of what was loaded, skipped, and failed.
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
