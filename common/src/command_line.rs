//! What the commands say to people: every mistake and every error is one line.

use std::error::Error;

/// An error and its causes, without those that it already names. Control characters, which may
/// come from a file that somebody else wrote, are spaces: they would do something to a terminal.
pub fn one_line(error: &(dyn Error + 'static)) -> String {
    let mut text = String::new();
    let mut next = Some(error);
    while let Some(cause) = next {
        let said = cause.to_string().replace(char::is_control, " ");
        if text.is_empty() {
            text = said;
        } else if !text.contains(&said) {
            text = format!("{text}: {said}");
        }
        next = cause.source();
    }
    text
}

/// What clap says about a wrong command line, without its usage, which `--help` shows.
pub fn usage_line(command: &str, text: &str) -> String {
    let text = text.strip_prefix("error: ").unwrap_or(text);
    let lines = text.lines().map(str::trim).take_while(|line| !line.starts_with("Usage:"));
    let lines = lines.filter(|line| !line.is_empty() && !line.starts_with("For more information"));
    let line = lines.collect::<Vec<_>>().join(" ").replace(" tip: ", "; ");
    format!("{line} ({command} --help tells more)")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{text}")]
    struct Said {
        text: &'static str,
        source: Option<Box<Said>>,
    }

    fn said(text: &'static str, source: Option<Said>) -> Said {
        Said { text, source: source.map(Box::new) }
    }

    #[test]
    fn an_error_is_one_line_and_says_nothing_twice() {
        let error = said("it broke: the cause", Some(said("the cause", None)));
        assert_eq!(one_line(&said("so", Some(error))), "so: it broke: the cause");
        assert_eq!(one_line(&said("two\nlines", None)), "two lines");
        assert_eq!(one_line(&said("\x1b[31mred\r\u{85}", None)), " [31mred  ");
    }

    #[test]
    fn a_wrong_command_line_is_told_in_one_line() {
        let text = "error: unexpected argument '--jsn' found\n\n  tip: a similar argument exists: \
                    '--json'\n\nUsage: kv-cli stat --json\n\nFor more information, try '--help'.\n";
        let expected = "unexpected argument '--jsn' found; a similar argument exists: '--json' \
                        (kv-cli --help tells more)";
        assert_eq!(usage_line("kv-cli", text), expected);
        let text = "error: it lacks:\n  <KEY>\n  <VALUE>\n\nUsage: kv-cli put\n";
        let expected = "it lacks: <KEY> <VALUE> (kv-cli --help tells more)";
        assert_eq!(usage_line("kv-cli", text), expected);
    }
}
