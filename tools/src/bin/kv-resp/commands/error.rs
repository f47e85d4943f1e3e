//! Error replies, worded as redis words them where it has the error.

use std::fmt::Write;

use farside::{Error, OperationError};

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
            "OOM command not allowed when used memory > 'maxmemory'.".into()
        }
        Error::Operation(OperationError::NotANumber) => NOT_AN_INTEGER.into(),
        Error::Operation(OperationError::NumberOverflow) => OVERFLOW.into(),
        Error::Operation(OperationError::Denied) => {
            "READONLY this gateway is a reader: its config file has role = \"reader\"".into()
        }
        Error::Disconnected { .. } | Error::Connect(_) | Error::Unavailable { .. } => {
            format!("LOADING {}", farside_config::command_line::one_line(error))
        }
        other => format!("ERR {}", farside_config::command_line::one_line(other)),
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
