//! `dump`: writes all entries of a region as files, or as lines of JSON.

use std::io::Write;
use std::path::Path;

use anyhow::Context;
use farside::OperationError::Layout;
use farside::{Entry, Error, Session};
use farside_tools::encoding::brief;
use farside_tools::records::{Record, has_json_lines};
use indicatif::ProgressBar;

use crate::args::{self, Args};
use crate::connect;
use crate::files::{DumpFolder, check_free, write_whole};
use crate::output::{self, ExitStatus, Failures, count};
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
    let (bar, stop) = (output::progress("dumping"), StopSignal::listen()?);
    if let Some(folder) = folder {
        let write = |entry: &Entry| folder.write(&entry.key, &entry.value);
        let tally = for_each_entry(&mut session, (&bar, &stop), write);
        let tally = tally.with_context(|| format!("{name} is incomplete"))?;
        return Ok(tally.conclude("file", &options.to));
    }
    let tally = write_whole(&options.to, |file| {
        for_each_entry(&mut session, (&bar, &stop), |entry| {
            let line = Record::new(&entry.key, &entry.value).to_line();
            file.write_all(line.as_bytes()).map_err(|error| Fatal(error).into())
        })
    });
    Ok(tally.with_context(|| format!("cannot write {name}"))?.conclude("record", &options.to))
}

/// A failure that every further entry would have too, so it ends the command.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub(crate) struct Fatal(pub(crate) std::io::Error);

/// Calls `write` with every entry, until a signal stops the scan. Prints and counts the failure of
/// an entry, and continues with the next entry.
pub(crate) fn for_each_entry(
    session: &mut Session,
    (bar, stop): (&ProgressBar, &StopSignal),
    mut write: impl FnMut(&Entry) -> anyhow::Result<()>,
) -> anyhow::Result<DumpTally> {
    let mut tally = DumpTally::default();
    for entry in session.scan()? {
        stop.check()?;
        let (name, result) = match entry {
            Ok(entry) => {
                let result = write(&entry);
                tally.bytes += if result.is_ok() { entry.value.len() as u64 } else { 0 };
                (format!("the key `{}`", brief(&entry.key)), result)
            }
            Err(error @ Error::Operation(Layout(_))) => ("an entry".into(), Err(error.into())),
            Err(error) => return Err(error.into()),
        };
        match result {
            Ok(()) => {
                tally.written += 1;
                bar.inc(1);
            }
            Err(error) if error.is::<Fatal>() || is_disk_full(&error) => return Err(error),
            Err(error) => {
                tally.outcome = tally.outcome.or_failed(output::exit_code(&error));
                tally.failures.add(bar, format_args!("{name} is left out"), &error);
            }
        }
    }
    bar.finish_and_clear();
    Ok(tally)
}

fn is_disk_full(error: &anyhow::Error) -> bool {
    let error = error.downcast_ref::<std::io::Error>();
    error.is_some_and(|error| error.kind() == std::io::ErrorKind::StorageFull)
}

/// Counts of the entries that were written, and of those that failed.
#[derive(Debug, Default)]
pub(crate) struct DumpTally {
    written: u64,
    bytes: u64,
    failures: Failures,
    outcome: ExitStatus,
}

impl DumpTally {
    /// Prints a summary. Returns how the command ended.
    pub(crate) fn conclude(&self, noun: &str, to: &Path) -> ExitStatus {
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
