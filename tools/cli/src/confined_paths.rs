//! Paths that cannot leave a folder, whatever other users change in it meanwhile.
//!
//! Each part of a path is opened from the descriptor of its parent folder, and no symbolic link is
//! followed. So a folder or file that is replaced by a link during a `load` or `dump` leads nowhere
//! else. The type of an opened file is checked through its descriptor, not by its name.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat, fchmod, fstat, mkdirat, openat, renameat,
    statat, unlinkat,
};
use rustix::io::Errno;
use rustix::process::geteuid;

/// The mode of a new folder: only its user has access, because the names in it are keys.
const FOLDER_MODE: Mode = Mode::RWXU;
/// The mode of a new file: only its user has access.
const FILE_MODE: Mode = Mode::RUSR.union(Mode::WUSR);
/// Limit on the names that are tried for an unfinished file, before creating it fails.
const NAMES_MAX: u32 = 1000;

/// An open folder.
pub(crate) struct Folder(OwnedFd);

/// An entry of a folder.
pub(crate) struct Child {
    pub(crate) name: OsString,
    pub(crate) kind: FileType,
}

impl Folder {
    /// Opens the folder that the user named. Links in this path are followed.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self(openat(CWD, path, flags, Mode::empty())?))
    }

    /// Opens a folder in this one.
    fn child(&self, name: &OsStr) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = openat(&self.0, name, flags, Mode::empty());
        opened.map(Self).map_err(|error| explain_link(error, name))
    }

    /// Opens the folder at a relative path below this one.
    pub(crate) fn descend(&self, path: &Path) -> io::Result<Self> {
        self.walk(path, Self::child)
    }

    /// As [`Folder::descend`], but creates missing folders.
    pub(crate) fn descend_or_make(&self, path: &Path) -> io::Result<Self> {
        self.walk(path, |folder, name| match mkdirat(&folder.0, name, FOLDER_MODE) {
            Ok(()) | Err(Errno::EXIST) => folder.child(name),
            Err(error) => Err(error.into()),
        })
    }

    fn walk(
        &self,
        path: &Path,
        step: impl Fn(&Self, &OsStr) -> io::Result<Self>,
    ) -> io::Result<Self> {
        let mut folder = Self(self.0.try_clone()?);
        for name in path.iter() {
            folder = step(&folder, name)?;
        }
        Ok(folder)
    }

    /// Opens a regular file for reading. Refuses anything else: it does not wait for the other end
    /// of a pipe.
    pub(crate) fn file(&self, name: &OsStr) -> io::Result<File> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY;
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(&self.0, name, flags, Mode::empty());
        let file = file.map_err(|error| explain_link(error, name))?;
        if !is_regular(&fstat(&file)?) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file"));
        }
        Ok(file.into())
    }

    /// Lists this folder's entries, without `.` and `..`.
    pub(crate) fn children(&self) -> io::Result<Vec<Child>> {
        let mut children = Vec::new();
        // The folder itself is open only as part of paths: its user may write into it, not list it.
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        for entry in Dir::new(openat(&self.0, c".", flags, Mode::empty())?)? {
            let entry = entry?;
            let name = OsString::from_vec(entry.file_name().to_bytes().to_vec());
            if name == "." || name == ".." {
                continue;
            }
            let kind = match entry.file_type() {
                // Some file systems do not say what an entry is.
                FileType::Unknown => match statat(&self.0, &name, AtFlags::SYMLINK_NOFOLLOW) {
                    Ok(found) => FileType::from_raw_mode(found.st_mode),
                    Err(Errno::NOENT) => continue,
                    Err(error) => return Err(error.into()),
                },
                kind => kind,
            };
            children.push(Child { name, kind });
        }
        Ok(children)
    }

    /// Creates a file that gets its name in this folder once it is finished. Only a regular file
    /// may be replaced.
    pub(crate) fn create(&self, name: &OsStr) -> io::Result<NewFile<'_>> {
        let mode = mode_to_keep(statat(&self.0, name, AtFlags::SYMLINK_NOFOLLOW))?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        for unfinished in unfinished_names() {
            // A file of this name may exist: it can be that of a key.
            let file = match openat(&self.0, &unfinished, flags, FILE_MODE) {
                Err(Errno::EXIST) => continue,
                file => File::from(file?),
            };
            let (name, folder) = (name.to_owned(), self);
            let new = NewFile { file, folder, unfinished: Some(unfinished), name };
            if let Some(mode) = mode {
                fchmod(&new.file, mode)?;
            }
            return Ok(new);
        }
        Err(io::Error::new(io::ErrorKind::AlreadyExists, "all names of unfinished files are taken"))
    }
}

/// Returns the names that a file or folder may have until it is finished.
pub(crate) fn unfinished_names() -> impl Iterator<Item = String> {
    let process = std::process::id();
    (0..NAMES_MAX).map(move |number| format!(".kv-cli-{process}.{number}.unfinished"))
}

/// A file that has a temporary name until it is finished. It is removed if it is dropped before.
pub(crate) struct NewFile<'f> {
    pub(crate) file: File,
    folder: &'f Folder,
    /// The temporary name; `None` once the file is finished.
    unfinished: Option<String>,
    name: OsString,
}

impl NewFile<'_> {
    /// Gives the file its final name.
    pub(crate) fn finish(mut self) -> io::Result<()> {
        if let Some(unfinished) = &self.unfinished {
            renameat(&self.folder.0, unfinished, &self.folder.0, &self.name)?;
            self.unfinished = None;
        }
        Ok(())
    }
}

impl Drop for NewFile<'_> {
    fn drop(&mut self) {
        if let Some(unfinished) = &self.unfinished {
            let _ = unlinkat(&self.folder.0, unfinished, AtFlags::empty());
        }
    }
}

/// Returns the mode that a new file takes from the regular file that it replaces. `None` if there
/// is none, or if it is another user's: it may have been put there for its mode.
fn mode_to_keep(replaced: Result<Stat, Errno>) -> io::Result<Option<Mode>> {
    match replaced {
        Ok(stat) if !is_regular(&stat) => {
            let why = "it is no regular file: write to another name";
            Err(io::Error::new(io::ErrorKind::InvalidInput, why))
        }
        Ok(stat) if stat.st_uid == geteuid().as_raw() => {
            Ok(Some(Mode::from_raw_mode(stat.st_mode & 0o777)))
        }
        Ok(_) | Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn is_regular(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
}

/// Explains the system's errors for links that are not followed, which are misleading.
fn explain_link(error: Errno, name: &OsStr) -> io::Error {
    let name = String::from_utf8_lossy(name.as_bytes());
    match error {
        Errno::LOOP | Errno::NOTDIR => io::Error::new(
            io::ErrorKind::NotADirectory,
            format!("`{name}` is a symbolic link, which is not followed, or no folder"),
        ),
        error => error.into(),
    }
}
