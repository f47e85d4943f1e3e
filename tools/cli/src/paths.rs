//! Keys as paths below a folder.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use anyhow::bail;

/// The longest path below a folder, in bytes: the system refuses longer paths.
pub const PATH_BYTES_MAX: usize = 4095;

/// Returns the path of a key's file, relative to the folder.
///
/// # Errors
/// If no path has the key's bytes, or if the path could lead out of the folder or to another key's
/// file.
pub fn path_of(key: &[u8]) -> anyhow::Result<&Path> {
    if key.contains(&0) {
        bail!("it has a NUL byte, which no path has");
    }
    if key.len() > PATH_BYTES_MAX {
        bail!("it has {} bytes, but a path has at most {PATH_BYTES_MAX}", key.len());
    }
    if key.starts_with(b"/") {
        bail!("it is an absolute path");
    }
    for part in key.split(|byte| *byte == b'/') {
        match part {
            b"" => bail!("it has an empty part, as in `a//b`"),
            b"." | b".." => bail!("it has a part `.` or `..`"),
            _ => {}
        }
    }
    Ok(Path::new(OsStr::from_bytes(key)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_that_could_leave_the_folder_are_refused() {
        for key in ["a", "a/b", "...", "a/..b", ".hidden", "a b", "\u{fc}"] {
            assert_eq!(path_of(key.as_bytes()).unwrap(), Path::new(key));
        }
        assert!(path_of(b"\xff\xfe").is_ok());
        for key in
            ["", "/", "/a", "//a", "..", "../a", "a/../b", "a/..", ".", "a/./b", "a//b", "a/"]
        {
            assert!(path_of(key.as_bytes()).is_err(), "{key}");
        }
        assert!(path_of(b"a\0b").is_err());
    }
}
