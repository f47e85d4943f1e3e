//! The exit codes and error lines of the commands. Every error is one line. Also writing to stderr
//! although it may have no reader.

use std::borrow::Cow;
use std::error::Error;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::stdio::stderr;

/// The exit codes of kv-cli, kv-bench and kv-compare. kv-cli's `--help` and docs/operations.md list
/// them.
pub mod exit_code {
    use farside_control::attach::ConnectError;

    /// The key is absent, the condition of a change did not hold, or no client has the id. kv-cli
    /// only.
    pub const NO: u8 = 1;
    /// The command line or the config file is wrong.
    pub const USAGE: u8 = 2;
    /// No server answers, it stopped answering, or it refuses the client.
    pub const NO_SERVER: u8 = 3;
    /// The region is damaged.
    pub const DAMAGE: u8 = 4;
    /// Every other failure.
    pub const FAILED: u8 = 5;

    /// Returns the exit code of a command that could not connect.
    pub const fn of_connect(error: &ConnectError) -> u8 {
        match error {
            ConnectError::Unreachable { .. }
            | ConnectError::Refused { .. }
            | ConnectError::Untrusted { .. }
            | ConnectError::Forbidden { .. }
            | ConnectError::NoServer { .. }
            | ConnectError::Control(_)
            | ConnectError::Tls { .. } => NO_SERVER,
            ConnectError::Layout(_) => DAMAGE,
            _ => FAILED,
        }
    }
}

/// Whether a character would change a terminal or the text around it. These are control characters,
/// and those that break lines, change the direction of writing or are invisible.
pub fn is_unprintable(character: char) -> bool {
    character.is_control()
        || matches!(character, '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}')
        || matches!(character, '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}')
        || matches!(character, '\u{e0000}'..='\u{e007f}')
}

/// Formats an error and its causes in one line, without causes that the text contains already.
/// Unprintable characters become spaces: they may come from another user's file.
pub fn one_line(error: &(dyn Error + 'static)) -> String {
    let mut text = String::new();
    let mut next = Some(error);
    while let Some(cause) = next {
        let message = cause.to_string().replace(is_unprintable, " ");
        if text.is_empty() {
            text = message;
        } else if !text.contains(&message) {
            text = format!("{text}: {message}");
        }
        next = cause.source();
    }
    text
}

/// Formats clap's message about a wrong command line as one line. Leaves out the usage, which
/// `--help` shows.
pub fn usage_line(command: &str, text: &str) -> String {
    let text = text.strip_prefix("error: ").unwrap_or(text);
    let lines = text.lines().map(str::trim).take_while(|line| !line.starts_with("Usage:"));
    let lines = lines.filter(|line| !line.is_empty() && !line.starts_with("For more information"));
    let line = lines.collect::<Vec<_>>().join(" ").replace(" tip: ", "; ");
    let line = line.split(' ').map(cut).collect::<Vec<_>>().join(" ");
    format!("{line} ({command} --help tells more)")
}

/// The longest word of a command line that a message quotes in full, in characters.
const WORD_CHARS_MAX: usize = 300;

/// Cuts a word that is too long, and adds its length.
fn cut(word: &str) -> Cow<'_, str> {
    match word.char_indices().nth(WORD_CHARS_MAX) {
        Some((end, _)) => Cow::Owned(format!("{}... ({} bytes)", &word[..end], word.len())),
        None => Cow::Borrowed(word),
    }
}

/// What a pipe takes without a wait when it reports room: PIPE_BUF of Linux.
const PART_BYTES: usize = 4096;

/// Writes to stderr, but waits for room no longer than this at a time. The rest is lost then, and
/// after an error. Safe in a signal handler.
pub(crate) fn write_within(mut bytes: &[u8], wait_max: Option<&Timespec>) {
    let stderr = stderr();
    while !bytes.is_empty() {
        match poll(&mut [PollFd::new(&stderr, PollFlags::OUT)], wait_max) {
            Ok(1) => {}
            Err(Errno::INTR) => continue,
            _ => return,
        }
        match rustix::io::write(stderr, &bytes[..bytes.len().min(PART_BYTES)]) {
            Ok(written) => bytes = &bytes[written..],
            Err(Errno::INTR | Errno::AGAIN) => {}
            // It may be closed.
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{text}")]
    struct TestError {
        text: &'static str,
        source: Option<Box<TestError>>,
    }

    fn error(text: &'static str, source: Option<TestError>) -> TestError {
        TestError { text, source: source.map(Box::new) }
    }

    #[test]
    fn an_error_is_one_line_without_repetition() {
        let cause = error("it broke: the cause", Some(error("the cause", None)));
        assert_eq!(one_line(&error("so", Some(cause))), "so: it broke: the cause");
        assert_eq!(one_line(&error("two\nlines", None)), "two lines");
        assert_eq!(one_line(&error("\x1b[31mred\r\u{85}\u{202e}", None)), " [31mred   ");
    }

    #[test]
    fn a_wrong_command_line_is_reported_in_one_line() {
        let text = "error: unexpected argument '--jsn' found\n\n  tip: a similar argument exists: \
                    '--json'\n\nUsage: kv-cli stat --json\n\nFor more information, try '--help'.\n";
        let expected = "unexpected argument '--jsn' found; a similar argument exists: '--json' \
                        (kv-cli --help tells more)";
        assert_eq!(usage_line("kv-cli", text), expected);
        let huge = format!("error: unexpected argument '{}' found", "k".repeat(70_000));
        let line = usage_line("kv-cli", &huge);
        assert!(line.len() < 400 && line.contains("kkk... (70002 bytes) found"), "{line}");
        let text = "error: it lacks:\n  <KEY>\n  <VALUE>\n\nUsage: kv-cli put\n";
        let expected = "it lacks: <KEY> <VALUE> (kv-cli --help tells more)";
        assert_eq!(usage_line("kv-cli", text), expected);
    }
}
