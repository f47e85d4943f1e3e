//! Error replies, worded as redis words them where it has the error.

use std::fmt::Write;

use farside::{Error, OperationError};
use farside_config::command_line::one_line;

pub(crate) const SYNTAX: &str = "ERR syntax error";
pub(crate) const NOT_AN_INTEGER: &str = "ERR value is not an integer or out of range";
pub(crate) const NO_INDEX: &str =
    "ERR value is out of range, value must between -2147483648 and 2147483647";
pub(crate) const OVERFLOW: &str = "ERR increment or decrement would overflow";
pub(crate) const NO_AUTH: &str = "NOAUTH Authentication required.";
pub(crate) const WRONG_PASSWORD: &str =
    "WRONGPASS invalid username-password pair or user is disabled.";
pub(crate) const NO_PASSWORD_SET: &str = "ERR AUTH <password> called without any password \
    configured for the default user. Are you \
     sure your configuration is correct?";
pub(crate) const CONTENDED: &str = "ERR other clients kept changing the key: repeat the command";

/// The most bytes of a name or of arguments that an error quotes. As in redis.
const QUOTED_BYTES_MAX: usize = 128;

/// The error reply for a failed operation of the library.
pub(crate) fn of_operation(error: &Error) -> String {
    match error {
        Error::Operation(OperationError::OutOfSpace { .. }) => {
            // As redis words it; then what the library says, such as when there is room again.
            format!("OOM command not allowed when used memory > 'maxmemory': {}", one_line(error))
        }
        Error::Operation(OperationError::NotANumber) => NOT_AN_INTEGER.into(),
        Error::Operation(OperationError::NumberOverflow) => OVERFLOW.into(),
        Error::Operation(OperationError::Denied) => {
            "READONLY this gateway is a reader: its config file has role = \"reader\"".into()
        }
        Error::Operation(OperationError::Contended { attempts }) => format!(
            "ERR gave up after {attempts} attempts, and stored nothing: other clients kept \
             changing the key, or the store was too slow; send the command again"
        ),
        Error::Operation(OperationError::Indeterminate) => {
            "ERR the gateway lost its connection to \
             the store during this command, which may have taken effect or not: read the key"
                .into()
        }
        Error::Operation(OperationError::Layout(layout)) => format!(
            "ERR the stored value is damaged ({layout}): store or delete the key, and have the \
             store's operator run `kv-cli verify`"
        ),
        Error::Disconnected { server } => format!(
            "LOADING the gateway lost its connection to the store at {server}, and this command \
             was not executed: send it again later"
        ),
        Error::Connect(_) | Error::Unavailable { .. } => {
            format!("LOADING the gateway does not reach the store: {}", one_line(error))
        }
        Error::PipelineFull(_) => "ERR the gateway is busy: send the command again".into(),
        other => format!("ERR {}", one_line(other)),
    }
}

/// The error of a command on `of` keys that has changed some of them all the same.
pub(crate) fn after(error: String, changed: i64, of: usize, done: Option<&str>) -> String {
    match done {
        Some(done) if changed > 0 => format!("{error}; {changed} of {of} keys are {done}"),
        _ => error,
    }
}

/// The error reply for an argument that was dropped because of its length.
pub(crate) fn too_long(bytes: usize, max: usize) -> String {
    format!("ERR an argument is {bytes} bytes long; the store's values have at most {max}")
}

pub(crate) fn wrong_arity(name: &str) -> String {
    format!("ERR wrong number of arguments for '{name}' command")
}

pub(crate) fn invalid_expire(name: &str) -> String {
    format!("ERR invalid expire time in '{name}' command")
}

/// The error for a command that the gateway does not have.
pub(crate) fn unknown_command<'a>(
    name: &[u8],
    arguments: impl Iterator<Item = &'a [u8]>,
) -> Vec<u8> {
    let mut text = b"ERR unknown command '".to_vec();
    text.extend_from_slice(cut(name));
    text.extend_from_slice(b"', with args beginning with: ");
    let start = text.len();
    for argument in arguments {
        let used = text.len() - start;
        if used >= QUOTED_BYTES_MAX {
            break;
        }
        text.push(b'\'');
        let room = QUOTED_BYTES_MAX - used;
        text.extend_from_slice(c_string(&argument[..argument.len().min(room)]));
        text.extend_from_slice(b"' ");
    }
    text
}

/// The error for a subcommand that the gateway does not have.
pub(crate) fn unknown_subcommand(command: &str, subcommand: &[u8]) -> Vec<u8> {
    let mut text = b"ERR unknown subcommand '".to_vec();
    text.extend_from_slice(cut(subcommand));
    let mut rest = String::new();
    // A string has room for everything.
    let _ = write!(rest, "'. Try {} HELP.", command.to_uppercase());
    text.extend_from_slice(rest.as_bytes());
    text
}

fn cut(name: &[u8]) -> &[u8] {
    c_string(&name[..name.len().min(QUOTED_BYTES_MAX)])
}

/// The bytes before the first zero byte, with which a string of C ends.
fn c_string(bytes: &[u8]) -> &[u8] {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    &bytes[..end]
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use farside::{ConnectError, Contact, Exhausted, LayoutError};

    use super::*;

    #[test]
    fn errors_are_in_the_words_of_users_of_redis() {
        let server = || "shm:///run/kv.sock".to_owned();
        let unreachable = ConnectError::Unreachable {
            server: server(),
            tried: Duration::from_secs(1),
            contact: Contact::Lost,
            source: None,
        };
        let damage = LayoutError::Checksum { what: "block", offset: 64 };
        let blocks = Exhausted::Blocks { bytes: 64 };
        let cases: [(Error, &str, &str); 9] = [
            (Error::Disconnected { server: server() }, "LOADING ", "was not executed"),
            (unreachable.into(), "LOADING ", "shm:///run/kv.sock"),
            (farside::PipelineFull.into(), "ERR ", "again"),
            (OperationError::OutOfSpace { what: blocks }.into(), "OOM ", "no free block of 64"),
            (OperationError::Contended { attempts: 7 }.into(), "ERR ", "7 attempts"),
            (OperationError::Indeterminate.into(), "ERR ", "may have taken effect"),
            (OperationError::Layout(damage).into(), "ERR ", "kv-cli verify"),
            (OperationError::Denied.into(), "READONLY ", "config file"),
            (OperationError::ExpiryTooLate.into(), "ERR ", "10889"),
        ];
        for (error, code, part) in cases {
            let text = of_operation(&error);
            assert!(text.starts_with(code) && text.contains(part), "{text}");
            for word in ["pipeline", "session", "scan", "slot", "grace_ms"] {
                assert!(!text.contains(word), "{text}");
            }
        }
    }
}
