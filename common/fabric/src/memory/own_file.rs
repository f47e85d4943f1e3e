//! Files whose names a server chooses: `REGION.restoring`, `SOCKET.lock`.
//!
//! Every user can write to some folders, such as /dev/shm. There another user may have created an
//! entry with this name: a file which that user can change, or a pipe for which the server would
//! wait. It may also be a link to a file that the server would remove or create. So links are never
//! followed, and opening never waits. An opened file must be a regular file of the server's own
//! user without another name. The folder is opened once, and names are only looked up in it.

use std::ffi::OsString;
use std::fs::{File, Metadata};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

/// Only the server's user may open such a file.
const MODE: Mode = Mode::RUSR.union(Mode::WUSR);
/// Limit on attempts to open a file that other servers create and remove at the same time.
const TRIES_MAX: u32 = 16;

/// A folder and a name in it.
#[derive(Debug)]
pub(crate) struct FolderEntry {
    folder: OwnedFd,
    pub(super) name: OsString,
}

impl FolderEntry {
    /// The entry with this path. The folder must exist, the file need not.
    pub(crate) fn of(path: &Path) -> io::Result<Self> {
        let name = path.file_name().ok_or(Errno::ISDIR)?;
        let folder = match path.parent() {
            Some(folder) if folder != Path::new("") => folder,
            _ => Path::new("."),
        };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = rustix::fs::open(folder, flags, Mode::empty())?;
        Ok(Self { folder, name: name.to_owned() })
    }

    /// An entry of the same folder, whose name is this entry's name with a suffix.
    pub(super) fn beside(&self, suffix: &str) -> io::Result<Self> {
        let mut name = self.name.clone();
        name.push(suffix);
        Ok(Self { folder: self.folder.try_clone()?, name })
    }

    /// Whether the entry exists. It may be a link to nothing.
    pub(super) fn exists(&self) -> io::Result<bool> {
        match rustix::fs::statat(&self.folder, &self.name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(_) => Ok(true),
            Err(Errno::NOENT) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Opens the file, which may be of any kind except a link.
    pub(super) fn open(&self) -> io::Result<File> {
        self.open_with(OFlags::empty())
    }

    fn open_with(&self, more: OFlags) -> io::Result<File> {
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC | more;
        Ok(File::from(rustix::fs::openat(&self.folder, &self.name, flags, MODE)?))
    }

    /// Opens the server's own file of this name, and creates it if the name is free.
    ///
    /// # Errors
    /// `InvalidInput` if the entry is anything else, otherwise the system's error.
    pub(crate) fn open_own(&self) -> io::Result<File> {
        for _ in 0..TRIES_MAX {
            match self.open_with(OFlags::CREATE | OFlags::EXCL) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                made => return made,
            }
            match self.open() {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) if is_link(&error) => return Err(not_own()),
                opened => {
                    let file = opened?;
                    let found = file.metadata()?;
                    // Without a name, another server has removed the file since.
                    if found.nlink() > 0 {
                        return check_own(&found).map(|()| file);
                    }
                }
            }
        }
        Err(Errno::AGAIN.into())
    }

    /// Whether this file still has this name.
    pub(super) fn is(&self, file: &File) -> io::Result<bool> {
        let found = rustix::fs::statat(&self.folder, &self.name, AtFlags::SYMLINK_NOFOLLOW)?;
        let file = file.metadata()?;
        Ok((found.st_dev, found.st_ino) == (file.dev(), file.ino()))
    }

    /// Removes the entry. If it is a link, removes the link and not its target.
    pub(super) fn remove(&self) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(&self.folder, &self.name, AtFlags::empty())?)
    }

    /// Renames the file to a name that is free.
    pub(super) fn rename(&self, to: &Self) -> io::Result<()> {
        let flags = RenameFlags::NOREPLACE;
        match rustix::fs::renameat_with(&self.folder, &self.name, &to.folder, &to.name, flags) {
            // The file system does not know the flag.
            Err(Errno::INVAL | Errno::NOSYS) if !to.exists()? => {
                Ok(rustix::fs::renameat(&self.folder, &self.name, &to.folder, &to.name)?)
            }
            renamed => Ok(renamed?),
        }
    }
}

/// Locks a file for as long as it is open. Returns false if another process has the lock.
pub(crate) fn lock(file: &File) -> io::Result<bool> {
    match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

pub(crate) fn unlock(file: &File) {
    // If this fails, closing the file ends the lock.
    let _ = rustix::fs::flock(file, FlockOperation::Unlock);
}

/// Whether the file belongs to the user of this process. This applies to root as well, because the
/// owner of a file can change it at any time.
pub(super) fn is_own(found: &Metadata) -> bool {
    found.uid() == rustix::process::geteuid().as_raw()
}

pub(super) fn is_link(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::LOOP.raw_os_error())
}

fn not_own() -> io::Error {
    let why = "it is no regular file of this user, or it has another name (a hard link): remove it";
    io::Error::new(io::ErrorKind::InvalidInput, why)
}

fn check_own(found: &Metadata) -> io::Result<()> {
    let fits = found.is_file() && found.nlink() == 1;
    match (fits, is_own(found)) {
        (true, true) => Ok(()),
        (true, false) => Err(io::ErrorKind::PermissionDenied.into()),
        (false, _) => Err(not_own()),
    }
}
