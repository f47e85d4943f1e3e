//! Files below a folder, whatever other users do in there meanwhile.
//!
//! Every step of a path is taken from the descriptor of the folder before it, and follows no
//! symbolic link. So a folder or a file that is replaced by a link in the middle of a `load` or a
//! `dump` leads nowhere else. What is opened is looked at through its descriptor, not by its name.

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

/// A folder that is made here is for its user alone, because the names in it are keys.
const FOLDER_MODE: Mode = Mode::RWXU;
/// A file that is made here is for its user alone.
const FILE_MODE: Mode = Mode::RUSR.union(Mode::WUSR);
/// How many names of unfinished files may be taken before this is an error.
const NAMES_MAX: u32 = 1000;

/// An open folder.
pub(crate) struct Folder(OwnedFd);

/// What a folder has.
pub(crate) struct Child {
    pub(crate) name: OsString,
    pub(crate) kind: FileType,
}

impl Folder {
    /// Opens the folder that the user named: links on the way there are followed.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self(openat(CWD, path, flags, Mode::empty())?))
    }

    fn step(&self, name: &OsStr) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = openat(&self.0, name, flags, Mode::empty());
        opened.map(Self).map_err(|error| in_the_way(error, name))
    }

    /// The folder at a relative path below this one.
    pub(crate) fn descend(&self, path: &Path) -> io::Result<Self> {
        self.walk(path, Self::step)
    }

    /// [`Folder::descend`]; folders that are not there are made.
    pub(crate) fn descend_or_make(&self, path: &Path) -> io::Result<Self> {
        self.walk(path, |folder, name| match mkdirat(&folder.0, name, FOLDER_MODE) {
            Ok(()) | Err(Errno::EXIST) => folder.step(name),
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

    /// Opens a regular file to be read. What is something else is refused, without waiting for it.
    pub(crate) fn file(&self, name: &OsStr) -> io::Result<File> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY;
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(&self.0, name, flags, Mode::empty());
        let file = file.map_err(|error| in_the_way(error, name))?;
        if !is_regular(&fstat(&file)?) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file"));
        }
        Ok(file.into())
    }

    /// Everything in this folder, itself and its parent left out.
    pub(crate) fn children(&self) -> io::Result<Vec<Child>> {
        let mut children = Vec::new();
        for entry in Dir::read_from(&self.0)? {
            let entry = entry?;
            let name = OsString::from_vec(entry.file_name().to_bytes().to_vec());
            if name == "." || name == ".." {
                continue;
            }
            let kind = match entry.file_type() {
                // Not every file system says.
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

    /// A file that gets its name in this folder once it is finished. Only a regular file is
    /// replaced.
    pub(crate) fn create(&self, name: &OsStr) -> io::Result<NewFile<'_>> {
        let mode = mode_to_keep(statat(&self.0, name, AtFlags::SYMLINK_NOFOLLOW))?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        for number in 0..NAMES_MAX {
            // A key may have this name.
            let unfinished = format!(".kv-cli-{}.{number}.unfinished", std::process::id());
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

/// A file under another name than its own until it is finished. If it is dropped before, nothing
/// is left of it.
pub(crate) struct NewFile<'f> {
    pub(crate) file: File,
    folder: &'f Folder,
    /// Its name so far.
    unfinished: Option<String>,
    name: OsString,
}

impl NewFile<'_> {
    /// Gives it its name.
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

/// The mode that a new file takes over from the one it replaces: that of a regular file of this
/// user. Another user's file may have been put there for its mode.
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

/// What the system says of a link that it was told not to follow is of no help.
fn in_the_way(error: Errno, name: &OsStr) -> io::Error {
    let name = String::from_utf8_lossy(name.as_bytes());
    match error {
        Errno::LOOP | Errno::NOTDIR => io::Error::new(
            io::ErrorKind::NotADirectory,
            format!("`{name}` is a symbolic link, which is not followed, or no folder"),
        ),
        error => error.into(),
    }
}
