//! Secrets in config files. No error message shows them, and other users must not read them.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::ConfigError;

/// The permission bits that let all other users read or change a file.
const MODE_OTHERS: u32 = 0o006;
/// The permission bits that let the file's group read or change it.
const MODE_GROUP: u32 = 0o060;

/// Checks that other users cannot read or change a config file with a secret.
///
/// The file's group may do so if it is this process's group: a service's file often belongs to root
/// and the service's group.
///
/// # Errors
/// [`ConfigError::Exposed`] with the file's mode.
pub fn check_private(path: &Path) -> Result<(), ConfigError> {
    let Ok(metadata) = fs::metadata(path) else { return Ok(()) };
    let is_own_group = metadata.gid() == rustix::process::getegid().as_raw();
    let exposing = if is_own_group { MODE_OTHERS } else { MODE_OTHERS | MODE_GROUP };
    let mode = metadata.mode() & 0o7777;
    match mode & exposing {
        0 => Ok(()),
        _ => Err(ConfigError::Exposed { path: path.to_owned(), mode }),
    }
}
