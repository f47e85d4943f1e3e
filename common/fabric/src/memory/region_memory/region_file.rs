//! Region files. An existing one is locked and opened. A new one has another name until it is
//! complete.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::{MemoryError, system};
use crate::memory::own_file::{FolderEntry, is_link, is_own, lock, unlock};

/// The suffix of a region file's name until the file is complete. So a region's own name is that of
/// a complete region or of nothing, even if a server is killed.
const UNFINISHED: &str = ".restoring";
/// Limit on links from a region's path to its file.
const LINKS_MAX: u32 = 8;

/// A locked region file: no other server uses, replaces or removes it. The lock has an open file
/// description of its own. Clients have copies of the region's descriptor, which would hold the
/// lock after the server's end.
pub(super) struct RegionFile {
    pub(super) file: File,
    lock: File,
    pub(super) unfinished: Option<Unfinished>,
}

/// A new region file that is not complete. Removed when dropped, unless it got the region's name.
pub(super) struct Unfinished {
    entry: FolderEntry,
    target: FolderEntry,
    /// Whether it replaced the file of a server that was killed before the file was complete.
    pub(super) replaced: bool,
    is_named: bool,
}

impl RegionFile {
    pub(super) fn open(path: &Path) -> Result<Self, MemoryError> {
        let target = resolve(path)?;
        let entry = FolderEntry::of(&target).map_err(opening(path))?;
        if entry.exists().map_err(opening(path))? {
            return Self::existing(path, &entry);
        }
        let (unfinished, lock) = Unfinished::make(path, entry)?;
        let file = unfinished.entry.open().map_err(opening(path))?;
        Ok(Self { file, lock, unfinished: Some(unfinished) })
    }

    fn existing(path: &Path, entry: &FolderEntry) -> Result<Self, MemoryError> {
        let path_buf = || path.to_owned();
        let file = entry.open().map_err(opening(path))?;
        let found = file.metadata().map_err(system("look at"))?;
        if !found.is_file() {
            return Err(MemoryError::NotAFile { path: path_buf() });
        }
        if !is_own(&found) {
            return Err(MemoryError::OtherOwner { path: path_buf() });
        }
        let locked = entry.open().map_err(opening(path))?;
        // The previous holder of the lock may have removed the file, and a new one has its name.
        let is_ours = lock(&locked).map_err(system("lock"))?
            && entry.is(&locked).is_ok_and(|is| is)
            && entry.is(&file).is_ok_and(|is| is);
        if !is_ours {
            return Err(MemoryError::Locked { path: path_buf() });
        }
        if file.metadata().map_err(system("look at"))?.len() == 0 {
            return Err(MemoryError::Empty { path: path_buf() });
        }
        Ok(Self { file, lock: locked, unfinished: None })
    }
}

impl Drop for RegionFile {
    fn drop(&mut self) {
        // Closing is not enough: a child that is just being started may have a copy of the
        // descriptor.
        unlock(&self.lock);
    }
}

impl Unfinished {
    /// Creates an empty file. Returns it and its locked descriptor.
    fn make(path: &Path, target: FolderEntry) -> Result<(Self, File), MemoryError> {
        let locked = || MemoryError::Locked { path: path.to_owned() };
        let entry = target.beside(UNFINISHED).map_err(opening(path))?;
        let name = path.with_file_name(&entry.name);
        // While `is_named` is true, a drop removes no file: it could be another server's.
        let mut made = Self { entry, target, replaced: false, is_named: true };
        // The second attempt follows if the first one found and removed the file of a killed
        // server.
        for _ in 0..2 {
            let file = made.entry.open_own().map_err(opening(&name))?;
            if !lock(&file).map_err(system("lock"))? || !made.entry.is(&file).is_ok_and(|is| is) {
                return Err(locked());
            }
            if file.metadata().map_err(system("look at"))?.len() == 0 {
                made.is_named = false;
                // Another server may have completed its region just now.
                let exists = made.target.exists().map_err(opening(path))?;
                return if exists { Err(locked()) } else { Ok((made, file)) };
            }
            made.entry.remove().map_err(system("remove"))?;
            made.replaced = true;
        }
        Err(locked())
    }

    /// Gives the file the region's name.
    pub(super) fn name(mut self) -> Result<(), MemoryError> {
        self.entry.rename(&self.target).map_err(system("name"))?;
        self.is_named = true;
        Ok(())
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if !self.is_named {
            // If this fails, the next server that makes a region removes the file.
            let _ = self.entry.remove();
        }
    }
}

/// The path of a region file, which need not exist yet. The user has chosen the path, so links are
/// followed, even to nothing, unless they belong to other users.
fn resolve(path: &Path) -> Result<PathBuf, MemoryError> {
    let mut path = path.to_owned();
    for _ in 0..LINKS_MAX {
        let Ok(found) = fs::symlink_metadata(&path) else { return Ok(path) };
        if !found.is_symlink() {
            return Ok(path);
        }
        if !is_own(&found) && found.uid() != 0 {
            return Err(MemoryError::OtherOwner { path });
        }
        let target = fs::read_link(&path).map_err(opening(&path))?;
        path = path.parent().unwrap_or(Path::new("")).join(target);
    }
    Err(MemoryError::NotAFile { path })
}

fn opening(path: &Path) -> impl Fn(io::Error) -> MemoryError {
    move |source| {
        let path = path.to_owned();
        match source.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
                MemoryError::NoFolder { path }
            }
            io::ErrorKind::PermissionDenied if has_other_owner(&path) => {
                MemoryError::OtherOwner { path }
            }
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                MemoryError::NotWritable { path }
            }
            io::ErrorKind::IsADirectory => MemoryError::NotAFile { path },
            io::ErrorKind::InvalidInput => MemoryError::NotOwn { path },
            _ if is_link(&source) => MemoryError::NotAFile { path },
            _ => MemoryError::System { what: "open", source },
        }
    }
}

fn has_other_owner(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| !is_own(&found))
}
