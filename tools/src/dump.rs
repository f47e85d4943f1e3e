//! `dump`: everything in a region as files, or as lines of JSON.

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
use crate::stopping::Stop;

/// `dump`.
pub(crate) fn dump(args: &Args, what: &args::Dump) -> anyhow::Result<ExitStatus> {
    if has_json_lines(&what.to) && !what.to.is_dir() {
        return dump_lines(args, what);
    }
    dump_folder(args, what)
}

fn dump_folder(args: &Args, what: &args::Dump) -> anyhow::Result<ExitStatus> {
    let mut session = connect::reader(args)?.session()?;
    let target = DumpFolder::open(&what.to, what.force)?;
    let (bar, stop) = (output::progress("dumping"), Stop::listen()?);
    let tally =
        for_each_entry(&mut session, (&bar, &stop), |entry| target.write(&entry.key, &entry.value));
    let tally = tally.with_context(|| format!("{} has only a part", what.to.display()))?;
    Ok(tally.conclude("file", &what.to))
}

fn dump_lines(args: &Args, what: &args::Dump) -> anyhow::Result<ExitStatus> {
    let name = what.to.display();
    check_free(&what.to, what.force)?;
    let mut session = connect::reader(args)?.session()?;
    let (bar, stop) = (output::progress("dumping"), Stop::listen()?);
    let tally = write_whole(&what.to, |file| {
        for_each_entry(&mut session, (&bar, &stop), |entry| {
            let line = Record::new(&entry.key, &entry.value).to_line();
            file.write_all(line.as_bytes()).map_err(|error| Fatal(error).into())
        })
    });
    Ok(tally.with_context(|| format!("cannot write {name}"))?.conclude("record", &what.to))
}

/// A failure that all entries would meet.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub(crate) struct Fatal(pub(crate) std::io::Error);

/// Calls `write` with every entry until a signal says stop; what fails for one entry is told and
/// counted.
pub(crate) fn for_each_entry(
    session: &mut Session,
    (bar, stop): (&ProgressBar, &Stop),
    mut write: impl FnMut(&Entry) -> anyhow::Result<()>,
) -> anyhow::Result<Tally> {
    let mut tally =
        Tally { written: 0, bytes: 0, failures: Failures::default(), outcome: ExitStatus::Done };
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

/// What became of the entries.
#[derive(Debug)]
pub(crate) struct Tally {
    written: u64,
    bytes: u64,
    failures: Failures,
    outcome: ExitStatus,
}

impl Tally {
    pub(crate) fn conclude(&self, noun: &str, to: &Path) -> ExitStatus {
        self.failures.tell_rest();
        let (written, bytes) = (count(self.written, noun), output::bytes(self.bytes));
        output::tell(format_args!("{written} written to {}, {bytes} of values", to.display()));
        if self.failures.0 > 0 {
            output::tell(format_args!("{} left out", count(self.failures.0, "key")));
        }
        self.outcome
    }
}
