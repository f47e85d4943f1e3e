//! Secrets in config files: neither errors nor other users are to see them.

use std::fmt;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde::{Deserialize, Deserializer};

use super::ConfigError;

/// Permissions of a file that let other users read or change it, and its group.
const MODE_OTHERS: u32 = 0o006;
const MODE_GROUP: u32 = 0o060;

/// What a client has to know to connect. Its Debug form does not show it, and neither does the
/// error for a file in which it is not written as a text.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(pub String);

impl<'de> Deserialize<'de> for Secret {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // The error for another type would quote the value.
        let quoted = |_| serde::de::Error::custom("write it in quotes, as a text");
        String::deserialize(deserializer).map(Self).map_err(quoted)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// Whether a config file with a secret in it can be read or changed by other users.
///
/// Its group does not count if it is this process's own: a service's file often belongs to root and
/// the service's group.
///
/// # Errors
/// [`ConfigError::Exposed`].
pub fn check_private(path: &Path) -> Result<(), ConfigError> {
    let Ok(found) = fs::metadata(path) else { return Ok(()) };
    let is_own_group = found.gid() == rustix::process::getegid().as_raw();
    let exposing = if is_own_group { MODE_OTHERS } else { MODE_OTHERS | MODE_GROUP };
    let mode = found.mode() & 0o7777;
    match mode & exposing {
        0 => Ok(()),
        _ => Err(ConfigError::Exposed { path: path.to_owned(), mode }),
    }
}
