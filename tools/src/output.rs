//! stdout for data, stderr for talk, and the exit codes.

use std::fmt;
use std::io::{self, BufWriter, Write};
use std::process::ExitCode;

use farside_config::ConfigError;
use farside_config::command_line::{exit_code, one_line};
use farside_config::size::ByteSize;
use farside_control::address::AddressError;
use farside_control::attach::ConnectError;
use farside_tools::check::CheckError;
use farside_tools::encoding::printable;
use indicatif::{ProgressBar, ProgressStyle};

use crate::standard_streams::StandardStreams;
use crate::stopping::Stopped;

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExitStatus {
    /// As wished.
    Done,
    /// The key was absent, or the change was not made.
    No,
    /// With this exit code: an error or damage, already told.
    Failed(u8),
}

impl ExitStatus {
    /// After one more failure with this exit code. Damage counts more than what else there was.
    pub(crate) fn or_failed(self, code: u8) -> Self {
        match self {
            Self::Failed(exit_code::DAMAGE) => self,
            _ => Self::Failed(code),
        }
    }
}

impl From<ExitStatus> for ExitCode {
    fn from(outcome: ExitStatus) -> Self {
        match outcome {
            ExitStatus::Done => Self::SUCCESS,
            ExitStatus::No => exit_code::NO.into(),
            ExitStatus::Failed(code) => code.into(),
        }
    }
}

/// A mistake in what was asked for: another command line or config file mends it.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Usage(String);

impl Usage {
    pub(crate) fn error(what: impl Into<String>) -> anyhow::Error {
        Self(what.into()).into()
    }
}

/// What the process ends with after an error.
pub(crate) fn exit_code(error: &anyhow::Error) -> u8 {
    let code = |cause: &(dyn std::error::Error + 'static)| {
        if let Some(stopped) = cause.downcast_ref::<Stopped>() {
            return Some(stopped.exit_code());
        }
        if let Some(error) = cause.downcast_ref::<farside::Error>() {
            return Some(error.exit_code());
        }
        if let Some(error) = cause.downcast_ref::<ConnectError>() {
            return Some(exit_code::of_connect(error));
        }
        if cause.is::<Usage>() || cause.is::<ConfigError>() || cause.is::<AddressError>() {
            return Some(exit_code::USAGE);
        }
        let is_damage = matches!(cause.downcast_ref(), Some(CheckError::Superblock(_)));
        is_damage.then_some(exit_code::DAMAGE)
    };
    error.chain().find_map(code).unwrap_or(exit_code::FAILED)
}

/// stdout has no reader any more: no error, but a reason to stop.
#[derive(Debug)]
struct Closed;

impl fmt::Display for Closed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("stdout is closed")
    }
}

impl std::error::Error for Closed {}

/// Marks a broken pipe of stdout, so that it is not taken for one of the server's socket.
pub(crate) struct Stdout(io::Stdout);

impl Write for Stdout {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if !StandardStreams::at_start().stdout {
            return Err(io::Error::new(io::ErrorKind::NotConnected, "stdout is closed"));
        }
        self.0.write(bytes).map_err(mark)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush().map_err(mark)
    }
}

fn mark(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::BrokenPipe => io::Error::other(Closed),
        kind => io::Error::new(kind, format!("cannot write to stdout: {error}")),
    }
}

/// stdout, buffered; call [`finish`] at the end.
pub(crate) fn stdout() -> BufWriter<Stdout> {
    BufWriter::with_capacity(64 << 10, Stdout(io::stdout()))
}

/// Writes out what is still buffered.
pub(crate) fn finish(mut stdout: BufWriter<Stdout>) -> anyhow::Result<ExitStatus> {
    stdout.flush()?;
    Ok(ExitStatus::Done)
}

/// Whether the command ended because stdout has no reader.
pub(crate) fn is_closed(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        let cause = cause.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        cause.is_some_and(|inner| inner.is::<Closed>())
    })
}

/// Says something to the person at the terminal, whose name for it may hold any characters.
pub(crate) fn tell(message: impl fmt::Display) {
    let message = printable(&message.to_string());
    // Without stderr there is no way to tell.
    let _ = writeln!(io::stderr(), "kv-cli: {message}");
}

/// How many failures are told one by one; the rest is only counted.
const FAILURES_TOLD_MAX: u64 = 20;

/// Failures for single keys, which do not end a command.
#[derive(Debug, Default)]
pub(crate) struct Failures(pub(crate) u64);

impl Failures {
    /// Counts a failure, and tells it unless there were too many.
    pub(crate) fn add(&mut self, bar: &ProgressBar, of: impl fmt::Display, error: &anyhow::Error) {
        self.0 += 1;
        if self.0 <= FAILURES_TOLD_MAX {
            bar.suspend(|| tell(format_args!("{of}: {}", one_line(error.as_ref()))));
        }
    }

    /// Says how many failures were not told.
    pub(crate) fn tell_rest(&self) {
        let untold = self.0.saturating_sub(FAILURES_TOLD_MAX);
        if untold > 0 {
            tell(format_args!("... and {untold} more"));
        }
    }
}

/// Says what went wrong, in one line.
pub(crate) fn tell_error(error: &anyhow::Error) {
    tell(one_line(error.as_ref()));
}

/// A count on stderr of what is done, which shows nothing unless stderr is a terminal.
pub(crate) fn progress(doing: &'static str) -> ProgressBar {
    let bar = ProgressBar::no_length().with_message(doing);
    bar.set_style(style("{msg} {pos} {spinner}"));
    bar
}

/// Makes a progress bar of the count, now that it is known how much there is to do.
pub(crate) fn set_total(bar: &ProgressBar, total: u64) {
    bar.set_length(total);
    bar.set_style(style("{msg} {wide_bar} {pos}/{len} {eta}"));
}

fn style(template: &str) -> ProgressStyle {
    // The templates here are right, and without one the bar only looks different.
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

/// `1 file`, `2 files`.
pub(crate) fn count(number: u64, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// A number of bytes for people: `17 B`, `4.2 MiB`.
pub(crate) fn bytes(number: u64) -> String {
    ByteSize(number).rounded()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_not_plural() {
        assert_eq!((count(1, "key"), count(0, "key")), ("1 key".into(), "0 keys".into()));
    }

    #[test]
    fn a_closed_stdout_is_told_from_a_broken_socket() {
        let broken = || io::Error::from(io::ErrorKind::BrokenPipe);
        assert!(is_closed(&anyhow::Error::from(mark(broken()))));
        assert!(!is_closed(&anyhow::Error::from(broken())));
    }
}
