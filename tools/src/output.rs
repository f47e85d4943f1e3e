//! stdout for data, stderr for talk, and the exit codes.

use std::fmt;
use std::io::{self, BufWriter, Write};
use std::process::ExitCode;

use indicatif::{ProgressBar, ProgressStyle};

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// As wished.
    Done,
    /// The key was absent, or the change was not made.
    No,
    /// An error or damage, already told.
    Failed,
}

impl From<Outcome> for ExitCode {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Done => Self::SUCCESS,
            Outcome::No => Self::from(1),
            Outcome::Failed => Self::from(2),
        }
    }
}

/// Nobody reads stdout any more: no error, but a reason to stop.
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
        self.0.write(bytes).map_err(mark_closed)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush().map_err(mark_closed)
    }
}

fn mark_closed(error: io::Error) -> io::Error {
    if error.kind() == io::ErrorKind::BrokenPipe { io::Error::other(Closed) } else { error }
}

/// stdout, buffered; call [`finish`] at the end.
pub(crate) fn stdout() -> BufWriter<Stdout> {
    BufWriter::with_capacity(64 << 10, Stdout(io::stdout()))
}

/// Writes out what is still buffered.
pub(crate) fn finish(mut stdout: BufWriter<Stdout>) -> anyhow::Result<Outcome> {
    stdout.flush()?;
    Ok(Outcome::Done)
}

/// Whether the command ended because nobody reads stdout.
pub(crate) fn is_closed(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        let cause = cause.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        cause.is_some_and(|inner| inner.is::<Closed>())
    })
}

/// Says something to the person at the terminal.
pub(crate) fn tell(message: impl fmt::Display) {
    // Without stderr there is nobody to tell.
    let _ = writeln!(io::stderr(), "kv-cli: {message}");
}

/// Says what went wrong, in one line.
pub(crate) fn tell_error(error: &anyhow::Error) {
    tell(one_line(error));
}

/// An error and its causes, without those that it already names.
pub(crate) fn one_line(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(|cause| cause.to_string().replace('\n', " ")) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// What clap says about a wrong command line, in one line: without its usage, which --help shows.
pub(crate) fn usage_line(text: &str) -> String {
    let text = text.strip_prefix("error: ").unwrap_or(text);
    let lines = text.lines().map(str::trim).take_while(|line| !line.starts_with("Usage:"));
    let lines = lines.filter(|line| !line.is_empty() && !line.starts_with("For more information"));
    let line = lines.collect::<Vec<_>>().join(" ").replace(" tip: ", "; ");
    format!("{line} (kv-cli --help tells more)")
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
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut scaled = number as f64;
    let mut unit = 0;
    while scaled >= 1024.0 && unit + 1 < units.len() {
        scaled /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{number} B") } else { format!("{scaled:.1} {}", units[unit]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_for_people() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1 << 20), "1.0 MiB");
        assert_eq!(bytes(u64::MAX), "16777216.0 TiB");
        assert_eq!((count(1, "key"), count(0, "key")), ("1 key".into(), "0 keys".into()));
    }

    #[test]
    fn an_error_is_one_line_and_says_nothing_twice() {
        let error = anyhow::anyhow!("the cause").context("it broke: the cause").context("so");
        assert_eq!(one_line(&error), "so: it broke: the cause");
        assert_eq!(one_line(&anyhow::anyhow!("two\nlines")), "two lines");
    }

    #[test]
    fn a_wrong_command_line_is_told_in_one_line() {
        let text = "error: unexpected argument '--jsn' found\n\n  tip: a similar argument exists: \
                    '--json'\n\nUsage: kv-cli stat --json\n\nFor more information, try '--help'.\n";
        let expected = "unexpected argument '--jsn' found; a similar argument exists: '--json' \
                        (kv-cli --help tells more)";
        assert_eq!(usage_line(text), expected);
        let text = "error: it lacks:\n  <KEY>\n  <VALUE>\n\nUsage: kv-cli put\n";
        assert_eq!(usage_line(text), "it lacks: <KEY> <VALUE> (kv-cli --help tells more)");
    }

    #[test]
    fn a_closed_stdout_is_told_from_a_broken_socket() {
        let broken = || io::Error::from(io::ErrorKind::BrokenPipe);
        assert!(is_closed(&anyhow::Error::from(mark_closed(broken()))));
        assert!(!is_closed(&anyhow::Error::from(broken())));
    }
}
