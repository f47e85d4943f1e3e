//! Files under names that a server invents: `REGION.restoring`, `SOCKET.lock`.
//!
//! The folder may be one that every user can write to, such as /dev/shm. Then another user may have
//! put something under the name: a file that another user may change, or a pipe that the server
//! would wait for. It may be a link to a file that the server would remove or make. So a name is
//! never followed and opening never waits. What was opened has to be a regular file of the server's
//! own user with no other name. The folder is opened once, and names are only looked up in it.

use std::ffi::{OsStr, OsString};
use std::fs::{File, Metadata};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

/// The user the server runs as, and no other.
const MODE: Mode = Mode::RUSR.union(Mode::WUSR);
/// How often a name is tried that others make and remove meanwhile.
const TRIES_MAX: u32 = 16;

/// A folder and a name in it.
#[derive(Debug)]
pub(super) struct Place {
    folder: OwnedFd,
    name: OsString,
}

impl Place {
    /// The place with this path. Does not check whether a file is there.
    pub(super) fn of(path: &Path) -> io::Result<Self> {
        let name = path.file_name().ok_or(Errno::ISDIR)?;
        let folder = match path.parent() {
            Some(folder) if folder != Path::new("") => folder,
            _ => Path::new("."),
        };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = rustix::fs::open(folder, flags, Mode::empty())?;
        Ok(Self { folder, name: name.to_owned() })
    }

    /// The place beside it, with more at the end of the name.
    pub(super) fn beside(&self, suffix: &str) -> io::Result<Self> {
        let mut name = self.name.clone();
        name.push(suffix);
        Ok(Self { folder: self.folder.try_clone()?, name })
    }

    pub(super) fn name(&self) -> &OsStr {
        &self.name
    }

    /// Whether there is anything, if only a link that leads nowhere.
    pub(super) fn exists(&self) -> io::Result<bool> {
        match rustix::fs::statat(&self.folder, &self.name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(_) => Ok(true),
            Err(Errno::NOENT) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Opens what is there. It may be anything, but no link.
    pub(super) fn open(&self) -> io::Result<File> {
        self.open_with(OFlags::empty())
    }

    fn open_with(&self, more: OFlags) -> io::Result<File> {
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC | more;
        Ok(File::from(rustix::fs::openat(&self.folder, &self.name, flags, MODE)?))
    }

    /// Opens the server's own file of this name, which is made if there is nothing.
    ///
    /// # Errors
    /// `InvalidInput` if there is something else, else what the system says.
    pub(super) fn open_own(&self) -> io::Result<File> {
        for _ in 0..TRIES_MAX {
            match self.open_with(OFlags::CREATE | OFlags::EXCL) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                made => return made,
            }
            match self.open() {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) if is_link(&error) => return Err(not_own()),
                // Another server has removed it since: no file of this name.
                Ok(file) if file.metadata()?.nlink() == 0 => {}
                opened => return opened.and_then(check_own),
            }
        }
        Err(Errno::AGAIN.into())
    }

    /// Whether this is still the file of this name.
    pub(super) fn is(&self, file: &File) -> io::Result<bool> {
        let found = rustix::fs::statat(&self.folder, &self.name, AtFlags::SYMLINK_NOFOLLOW)?;
        let file = file.metadata()?;
        Ok((found.st_dev, found.st_ino) == (file.dev(), file.ino()))
    }

    /// Removes the name, whatever it stands for: never what a link leads to.
    pub(super) fn remove(&self) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(&self.folder, &self.name, AtFlags::empty())?)
    }

    /// Gives what is here another name in the folder, at which there is nothing.
    pub(super) fn rename(&self, to: &Self) -> io::Result<()> {
        let flags = RenameFlags::NOREPLACE;
        match rustix::fs::renameat_with(&self.folder, &self.name, &to.folder, &to.name, flags) {
            // A file system that does not know the flag.
            Err(Errno::INVAL | Errno::NOSYS) if !to.exists()? => {
                Ok(rustix::fs::renameat(&self.folder, &self.name, &to.folder, &to.name)?)
            }
            renamed => Ok(renamed?),
        }
    }
}

/// Locks a file for as long as it is open; false if another process has it.
pub(super) fn lock(file: &File) -> io::Result<bool> {
    match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Lets go of the lock.
pub(super) fn unlock(file: &File) {
    // A file that is closed has no lock either.
    let _ = rustix::fs::flock(file, FlockOperation::Unlock);
}

/// Whether it belongs to the user of this process. Root is no exception: what another user owns, it
/// can change at any time.
pub(super) fn is_own(found: &Metadata) -> bool {
    found.uid() == rustix::process::geteuid().as_raw()
}

pub(super) fn is_link(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::LOOP.raw_os_error())
}

fn not_own() -> io::Error {
    let what = "it is no regular file of this user with one name: remove it";
    io::Error::new(io::ErrorKind::InvalidInput, what)
}

fn check_own(file: File) -> io::Result<File> {
    let found = file.metadata()?;
    let fits = found.is_file() && found.nlink() == 1;
    match (fits, is_own(&found)) {
        (true, true) => Ok(file),
        (true, false) => Err(io::ErrorKind::PermissionDenied.into()),
        (false, _) => Err(not_own()),
    }
}
