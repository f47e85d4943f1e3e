//! Output: data on stdout, messages on stderr, and the exit code.

use std::fmt;
use std::io::{self, BufWriter, Write};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

use farside::SetupError;
use farside_cli::check::CheckError;
use farside_cli::formats::printable;
use farside_config::ConfigError;
use farside_config::command_line::{exit_code, one_line};
use farside_config::size::ByteSize;
use farside_control::address::AddressError;
use farside_control::attach::ConnectError;
use indicatif::{ProgressBar, ProgressStyle};
use rustix::io::fcntl_getfd;
use rustix::stdio;

use crate::stopping::Stopped;

/// How a command ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum ExitStatus {
    /// Everything was done.
    #[default]
    Done,
    /// The key was absent, the condition of the change did not hold, or no client has the id.
    No,
    /// The command failed, with this exit code. It has reported the error or the damage.
    Failed(u8),
}

impl ExitStatus {
    /// Returns the exit status after one more failure with this exit code. Damage takes precedence.
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

/// An error in the command line or the config file: nothing was done.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Usage(String);

impl Usage {
    pub(crate) fn error(message: impl Into<String>) -> anyhow::Error {
        Self(message.into()).into()
    }
}

/// Returns the exit code for an error.
pub(crate) fn exit_code(error: &anyhow::Error) -> u8 {
    let code = |cause: &(dyn std::error::Error + 'static)| {
        if let Some(stopped) = cause.downcast_ref::<Stopped>() {
            return Some(stopped.exit_code());
        }
        if let Some(error) = cause.downcast_ref::<farside::Error>() {
            return Some(error.exit_code());
        }
        if let Some(error) = cause.downcast_ref::<SetupError>() {
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

/// The reader of stdout is gone: not an error, but a reason to stop.
#[derive(Debug, thiserror::Error)]
#[error("stdout is closed")]
struct StdoutClosed;

/// Marks a broken pipe of stdout, so that it is not mistaken for a broken socket of the server.
pub(crate) struct Stdout(io::Stdout);

impl Write for Stdout {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if !stdout_was_open() {
            return Err(io::Error::new(io::ErrorKind::NotConnected, "stdout is closed"));
        }
        self.0.write(bytes).map_err(mark_stdout_error)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush().map_err(mark_stdout_error)
    }
}

fn mark_stdout_error(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::BrokenPipe => io::Error::other(StdoutClosed),
        kind => io::Error::new(kind, format!("cannot write to stdout: {error}")),
    }
}

/// Returns a buffered stdout; call [`finish`] at the end.
pub(crate) fn stdout() -> BufWriter<Stdout> {
    BufWriter::with_capacity(64 << 10, Stdout(io::stdout()))
}

/// Flushes stdout.
pub(crate) fn finish(mut stdout: BufWriter<Stdout>) -> anyhow::Result<ExitStatus> {
    stdout.flush()?;
    Ok(ExitStatus::Done)
}

/// Whether the command ended because the reader of stdout is gone.
pub(crate) fn is_stdout_closed(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        let cause = cause.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        cause.is_some_and(|inner| inner.is::<StdoutClosed>())
    })
}

/// Prints a message to stderr. Escapes it, because names and keys in it may have any characters.
pub(crate) fn print_message(message: impl fmt::Display) {
    let message = printable(&message.to_string());
    // If this fails, there is no other way to report it.
    let _ = writeln!(io::stderr(), "kv-cli: {message}");
}

/// Limit on failures that are printed one by one. The others are only counted.
const FAILURES_PRINTED_MAX: u64 = 20;

/// The number of failures for single keys. They do not end a command.
#[derive(Debug, Default)]
pub(crate) struct Failures(pub(crate) u64);

impl Failures {
    /// Counts a failure, and prints it unless [`FAILURES_PRINTED_MAX`] were printed already.
    pub(crate) fn add(
        &mut self,
        bar: &ProgressBar,
        origin: impl fmt::Display,
        error: &anyhow::Error,
    ) {
        self.0 += 1;
        if self.0 <= FAILURES_PRINTED_MAX {
            bar.suspend(|| print_message(format_args!("{origin}: {}", one_line(error.as_ref()))));
        }
    }

    /// Prints how many failures were only counted.
    pub(crate) fn print_rest(&self) {
        let unprinted = self.0.saturating_sub(FAILURES_PRINTED_MAX);
        if unprinted > 0 {
            print_message(format_args!("... and {unprinted} more"));
        }
    }
}

/// Returns a counter of the progress, on stderr. It is shown only if stderr is a terminal.
pub(crate) fn progress(doing: &'static str) -> ProgressBar {
    let bar = ProgressBar::no_length().with_message(doing);
    bar.set_style(style("{msg} {pos} {spinner}"));
    bar
}

/// Makes a progress bar of the counter, once the total is known.
pub(crate) fn set_total(bar: &ProgressBar, total: u64) {
    bar.set_length(total);
    bar.set_style(style("{msg} {wide_bar} {pos}/{len} {eta}"));
}

/// Returns a progress bar of so many bytes, or a counter if their number is not known.
pub(crate) fn byte_progress(doing: &'static str, total: Option<u64>) -> ProgressBar {
    let bar = ProgressBar::no_length().with_message(doing);
    let Some(total) = total else {
        bar.set_style(style("{msg} {binary_bytes} {binary_bytes_per_sec} {spinner}"));
        return bar;
    };
    bar.set_length(total);
    let total = "{msg} {wide_bar} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}";
    bar.set_style(style(total));
    bar
}

fn style(template: &str) -> ProgressStyle {
    // The templates here are valid. If one were not, the bar would only look different.
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

/// Formats a number with its noun: `1 file`, `2 files`.
pub(crate) fn count(number: u64, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// Formats a number of bytes for people: `17 B`, `4.2 MiB`.
pub(crate) fn bytes(number: u64) -> String {
    ByteSize(number).rounded()
}

/// Names a block size by what its blocks hold, as `SizeClass::content` names it, and their length.
pub(crate) fn block_name(content: &str, block_bytes: u64) -> String {
    let length = bytes(block_bytes);
    if content == "value" { length } else { format!("{content} {length}") }
}

/// Formats a time in milliseconds for people, by its two largest units: `7s`, `3m12s`, `2d04h`.
pub(crate) fn duration(ms: u64) -> String {
    let seconds = ms / 1000;
    let (minutes, hours) = (seconds / 60, seconds / 3600);
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{minutes}m{:02}s", seconds % 60),
        3600..86_400 => format!("{hours}h{:02}m", minutes % 60),
        _ => format!("{}d{:02}h", hours / 24, hours % 24),
    }
}

/// Returns rows as lines of text. Cells are at their left, and two spaces are between columns.
pub(crate) fn aligned<const COLUMNS: usize>(rows: &[[String; COLUMNS]]) -> String {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let widths: [_; COLUMNS] = std::array::from_fn(|column| width(column).unwrap_or(0));
    let line = |row: &[String; COLUMNS]| {
        let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}  "));
        cells.collect::<String>().trim_end().to_owned() + "\n"
    };
    rows.iter().map(line).collect()
}

/// Returns what was read of a shard. If it is one of several and cannot be reached, says why and
/// returns `None`, so that the command continues with the others and fails at its end.
pub(crate) fn available<T>(
    read: anyhow::Result<T>,
    (shard, shards): (usize, usize),
    status: &mut ExitStatus,
) -> anyhow::Result<Option<T>> {
    match read {
        Err(error) if shards > 1 => {
            let why = one_line(error.as_ref());
            print_message(format_args!("shard {shard} is not available: {why}"));
            *status = status.or_failed(exit_code::NO_SERVER);
            Ok(None)
        }
        read => read.map(Some),
    }
}

/// Whether stdin and stdout were closed when this process started. The standard library replaces a
/// closed one by /dev/null, so `main` cannot see it. Then a value would be read as empty, or a
/// printed one would be lost, without an error.
static STDIN_CLOSED: AtomicBool = AtomicBool::new(false);
static STDOUT_CLOSED: AtomicBool = AtomicBool::new(false);

/// Runs before the standard library is set up, so it must not call anything that needs this.
extern "C" fn record_closed() {
    STDIN_CLOSED.store(fcntl_getfd(stdio::stdin()).is_err(), Ordering::Relaxed);
    STDOUT_CLOSED.store(fcntl_getfd(stdio::stdout()).is_err(), Ordering::Relaxed);
}

/// The C library calls the functions in this section, in order, before `main`.
// SAFETY: the section has pointers to functions of this type. `record_closed` only makes two system
// calls and two stores, for which the standard library need not be set up.
#[allow(unsafe_code, reason = "nothing else runs before the standard library")]
#[used]
#[unsafe(link_section = ".init_array")]
static RECORD_CLOSED: extern "C" fn() = record_closed;

pub(crate) fn stdin_was_open() -> bool {
    !STDIN_CLOSED.load(Ordering::Relaxed)
}

pub(crate) fn stdout_was_open() -> bool {
    !STDOUT_CLOSED.load(Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_of_one_is_singular() {
        assert_eq!((count(1, "key"), count(0, "key")), ("1 key".into(), "0 keys".into()));
    }

    #[test]
    fn a_duration_has_its_two_largest_units() {
        let ms = [0, 59_999, 60_000, 3_599_000, 3_600_000, 86_399_000, 86_400_000, 8_650_000_000];
        let texts = ["0s", "59s", "1m00s", "59m59s", "1h00m", "23h59m", "1d00h", "100d02h"];
        assert_eq!(ms.map(duration), texts);
    }

    #[test]
    fn a_closed_stdout_is_distinguished_from_a_broken_socket() {
        let broken = || io::Error::from(io::ErrorKind::BrokenPipe);
        assert!(is_stdout_closed(&anyhow::Error::from(mark_stdout_error(broken()))));
        assert!(!is_stdout_closed(&anyhow::Error::from(broken())));
    }
}
