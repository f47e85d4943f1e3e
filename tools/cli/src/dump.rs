//! `dump`: writes all entries of a region as files, or as lines of JSON.

use std::io::Write;
use std::path::Path;
use std::sync::Mutex;

use anyhow::Context;
use farside::OperationError::Layout;
use farside::{Entry, Error, Scan};
use farside_cli::encoding::brief;
use farside_cli::records::{Record, has_json_lines};
use indicatif::ProgressBar;

use crate::args::{self, Args};
use crate::connect;
use crate::files::{DumpFolder, check_free, write_whole};
use crate::output::{self, ExitStatus, Failures, count};
use crate::parallel::lock;
use crate::stopping::StopSignal;

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
