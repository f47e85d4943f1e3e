//! Files that decide what this process does, such as keys, and folders that it writes to.
//!
//! Another user may own a folder on the way. That user can make any entry there: a link to a file
//! that this process would read or replace, or a pipe for which it would wait. So a path is walked
//! from the root, step by step. A link is followed only if it belongs to root or to this user. What
//! the path ends at must belong to one of them, too, and opening never waits.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;

/// Limit on the links of a path.
const LINKS_MAX: usize = 16;
/// The longest file that [`read`] reads, in bytes.
const FILE_BYTES_MAX: u64 = 16 << 20;
const FOLDER: OFlags =
    OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
const FILE: OFlags =
    OFlags::NOFOLLOW.union(OFlags::NONBLOCK).union(OFlags::NOCTTY).union(OFlags::CLOEXEC);

/// Reads a whole file.
///
/// # Errors
/// The system's error. `PermissionDenied` or `InvalidInput` if the path leads over another user's
/// link, or to anything but a regular file of root or of this user.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let (folder, name) = resolve(path)?;
    let name = name.ok_or(Errno::ISDIR)?;
    let file = checked(rustix::fs::openat(&folder, &name, FILE, Mode::empty())?)?;
    let mut bytes = Vec::new();
    if file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes)? as u64 > FILE_BYTES_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is too long"));
    }
    Ok(bytes)
}

/// A folder, which is opened once: its entries are looked up in it, wherever its path leads by now.
#[derive(Debug)]
pub struct TrustedFolder(OwnedFd);

impl TrustedFolder {
    /// Opens a folder of root or of this user.
    ///
    /// # Errors
    /// The system's error: `NotFound` without it, `NotADirectory` if it is something else,
    /// `PermissionDenied` if it or a link on the way belongs to another user.
    pub fn open(path: &Path) -> io::Result<Self> {
        let (folder, name) = resolve(path)?;
        let folder = match name {
            Some(name) => rustix::fs::openat(&folder, &name, FOLDER, Mode::empty())?,
            None => folder,
        };
        let opened = Self(folder);
        check_owner(&opened.metadata()?)?;
        Ok(opened)
    }

    /// Makes the folder with this path, for this user only. The folder that contains it must exist.
    ///
    /// # Errors
    /// The system's error.
    pub fn make(path: &Path) -> io::Result<()> {
        let (folder, name) = resolve(path)?;
        make(&folder, &name.ok_or(Errno::EXIST)?)
    }

    /// Makes a folder in this one, if it is missing.
    ///
    /// # Errors
    /// The system's error.
    pub fn make_folder(&self, name: &str) -> io::Result<()> {
        make(&self.0, OsStr::new(name))
    }

    /// Opens a folder in this one.
    ///
    /// # Errors
    /// The system's error.
    pub fn folder(&self, name: &str) -> io::Result<Self> {
        Ok(Self(rustix::fs::openat(&self.0, name, FOLDER, Mode::empty())?))
    }

    /// What the system knows of the folder.
    ///
    /// # Errors
    /// The system's error.
    pub fn metadata(&self) -> io::Result<Metadata> {
        File::from(self.0.try_clone()?).metadata()
    }

    /// Opens a file to read it.
    ///
    /// # Errors
    /// The system's error, or `InvalidInput` for anything but a file.
    pub fn open_file(&self, name: &str) -> io::Result<File> {
        checked(rustix::fs::openat(&self.0, name, FILE, Mode::empty())?)
    }

    /// Opens a file to write it, and makes an empty one of it.
    ///
    /// # Errors
    /// As [`TrustedFolder::open_file`].
    pub fn create_file(&self, name: &str) -> io::Result<File> {
        let flags = FILE | OFlags::WRONLY | OFlags::CREATE;
        let mode = Mode::RUSR | Mode::WUSR;
        let file = checked(rustix::fs::openat(&self.0, name, flags, mode)?)?;
        file.set_len(0)?;
        Ok(file)
    }

    /// Renames an entry, over another one if there is one.
    ///
    /// # Errors
    /// The system's error.
    pub fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        Ok(rustix::fs::renameat(&self.0, from, &self.0, to)?)
    }

    /// Removes a file.
    ///
    /// # Errors
    /// The system's error.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(&self.0, name, AtFlags::empty())?)
    }
}

fn make(folder: &OwnedFd, name: &OsStr) -> io::Result<()> {
    match rustix::fs::mkdirat(folder, name, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn is_trusted(user: u32) -> bool {
    [0, rustix::process::geteuid().as_raw()].contains(&user)
}

fn check_owner(found: &Metadata) -> io::Result<()> {
    if is_trusted(found.uid()) {
        return Ok(());
    }
    let why = format!("it belongs to another user ({})", found.uid());
    Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
}

fn checked(opened: OwnedFd) -> io::Result<File> {
    let file = File::from(opened);
    let found = file.metadata()?;
    if !found.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file"));
    }
    check_owner(&found)?;
    Ok(file)
}

/// Walks to the entry with this path. Returns the folder that has it, and its name; no name for a
/// path that ends with the root or with `..`.
fn resolve(path: &Path) -> io::Result<(OwnedFd, Option<OsString>)> {
    let root = || rustix::fs::open("/", FOLDER, Mode::empty());
    let mut left = steps(&std::path::absolute(path)?);
    let (mut folder, mut links) = (root()?, 0);
    while let Some(step) = left.pop_front() {
        if step == ".." {
            folder = rustix::fs::openat(&folder, "..", FOLDER, Mode::empty())?;
            continue;
        }
        let found = match rustix::fs::statat(&folder, &step, AtFlags::SYMLINK_NOFOLLOW) {
            // The last one may be made.
            Err(Errno::NOENT) if left.is_empty() => return Ok((folder, Some(step))),
            found => found?,
        };
        if FileType::from_raw_mode(found.st_mode) == FileType::Symlink {
            links += 1;
            if links > LINKS_MAX {
                return Err(Errno::LOOP.into());
            }
            if !is_trusted(found.st_uid) {
                let link = step.to_string_lossy();
                let why = format!("the link {link} on its path belongs to another user");
                return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
            }
            let target = rustix::fs::readlinkat(&folder, &step, Vec::new())?;
            let target = PathBuf::from(OsString::from_vec(target.into_bytes()));
            if target.is_absolute() {
                folder = root()?;
            }
            let mut steps = steps(&target);
            steps.append(&mut left);
            left = steps;
        } else if left.is_empty() {
            return Ok((folder, Some(step)));
        } else {
            folder = rustix::fs::openat(&folder, &step, FOLDER, Mode::empty())?;
        }
    }
    Ok((folder, None))
}

fn steps(path: &Path) -> VecDeque<OsString> {
    let steps = path.components().filter_map(|component| match component {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    });
    steps.collect()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{lchown, symlink};

    use super::*;

    const OTHER: u32 = 54321;

    /// Gives a file to another user; false if this user may not.
    fn give_away(path: &Path) -> bool {
        lchown(path, Some(OTHER), None).is_ok()
    }

    #[test]
    fn own_files_are_read_over_own_links() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("a")).unwrap();
        fs::write(at("a/file"), "content").unwrap();
        symlink("a", at("relative")).unwrap();
        symlink(at("a"), at("absolute")).unwrap();
        symlink("../a/file", at("a/link")).unwrap();
        for path in ["a/file", "relative/file", "absolute/../a/link", "a/../absolute/link"] {
            assert_eq!(read(&at(path)).unwrap(), b"content", "{path}");
        }
        symlink("loop", at("loop")).unwrap();
        for path in ["loop", "loop/file", "none", "a/file/none", "a", "a/.."] {
            assert!(read(&at(path)).is_err(), "{path}");
        }
        rustix::fs::mknodat(
            rustix::fs::CWD,
            at("pipe"),
            FileType::Fifo,
            Mode::RUSR | Mode::WUSR,
            0,
        )
        .unwrap();
        // It has no writer, and the read does not wait for one.
        let error = read(&at("pipe")).unwrap_err();
        assert!(error.to_string().contains("no regular file"), "{error}");
    }

    #[test]
    fn entries_of_other_users_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("a")).unwrap();
        fs::write(at("a/file"), "content").unwrap();
        symlink("a", at("link")).unwrap();
        assert!(TrustedFolder::open(&at("link")).is_ok());
        if !give_away(&at("link")) {
            return;
        }
        for refused in [read(&at("link/file")).err(), TrustedFolder::open(&at("link")).err()] {
            let error = refused.unwrap();
            assert!(error.to_string().contains("link link on its path"), "{error}");
        }
        assert!(give_away(&at("a/file")));
        let error = read(&at("a/file")).unwrap_err().to_string();
        assert!(error.contains("belongs to another user"), "{error}");
        // Another user's folder may contain own ones.
        fs::create_dir(at("a/own")).unwrap();
        assert!(give_away(&at("a")));
        assert!(TrustedFolder::open(&at("a")).is_err());
        assert!(TrustedFolder::open(&at("a/own")).is_ok());
    }
}
