//! Region files: one that is there is locked and opened, a new one is made under another name until
//! it is complete.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::{MemoryError, system};
use crate::shm::own_file::{Place, is_link, is_own, lock, unlock};

/// What a region file is called until it is complete: the name of a region leads to a whole one or
/// to nothing, whenever a server is killed.
const UNFINISHED: &str = ".restoring";
/// How many links lead to a region file at most.
const LINKS_MAX: u32 = 8;

/// A region file that is locked: no other server uses, replaces or removes it. The lock is that of
/// an open file description of its own, because clients hold copies of the region's descriptor:
/// theirs would keep the lock alive when the server is dead.
pub(super) struct RegionFile {
    pub(super) file: File,
    lock: File,
    pub(super) unfinished: Option<Unfinished>,
}

/// A new file's name, and the one that it gets. Removed when dropped.
pub(super) struct Unfinished {
    place: Place,
    target: Place,
    /// A server was killed before its own was complete.
    pub(super) replaced: bool,
    is_named: bool,
}

impl RegionFile {
    pub(super) fn open(path: &Path) -> Result<Self, MemoryError> {
        let target = resolve(path)?;
        let place = Place::of(&target).map_err(opening(path))?;
        if place.exists().map_err(opening(path))? {
            return Self::existing(path, &place);
        }
        let made = Unfinished::make(path, place)?;
        let file = made.0.place.open().map_err(opening(path))?;
        Ok(Self { file, lock: made.1, unfinished: Some(made.0) })
    }

    fn existing(path: &Path, place: &Place) -> Result<Self, MemoryError> {
        let path_buf = || path.to_owned();
        let file = place.open().map_err(opening(path))?;
        let found = file.metadata().map_err(system("look at"))?;
        if !found.is_file() {
            return Err(MemoryError::NotAFile { path: path_buf() });
        }
        if !is_own(&found) {
            return Err(MemoryError::OfAnother { path: path_buf() });
        }
        let locked = place.open().map_err(opening(path))?;
        // The last holder of the lock may have removed the file, and another stands there by now.
        let is_ours = lock(&locked).map_err(system("lock"))?
            && place.is(&locked).is_ok_and(|is| is)
            && place.is(&file).is_ok_and(|is| is);
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
        // Explicitly, for a child that is just being started may hold a copy of the descriptor.
        unlock(&self.lock);
    }
}

impl Unfinished {
    /// A new and empty file, and its lock.
    fn make(path: &Path, target: Place) -> Result<(Self, File), MemoryError> {
        let locked = || MemoryError::Locked { path: path.to_owned() };
        let place = target.beside(UNFINISHED).map_err(opening(path))?;
        let name = path.with_file_name(place.name());
        let mut made = Self { place, target, replaced: false, is_named: true };
        // Twice, if a server was killed that had one.
        for _ in 0..2 {
            let file = made.place.open_own().map_err(opening(&name))?;
            if !lock(&file).map_err(system("lock"))? || !made.place.is(&file).is_ok_and(|is| is) {
                return Err(locked());
            }
            if file.metadata().map_err(system("look at"))?.len() == 0 {
                made.is_named = false;
                // Another server may have completed its own just now.
                let exists = made.target.exists().map_err(opening(path))?;
                return if exists { Err(locked()) } else { Ok((made, file)) };
            }
            made.place.remove().map_err(system("remove"))?;
            made.replaced = true;
        }
        Err(locked())
    }

    /// Gives it the region's name.
    pub(super) fn name(mut self) -> Result<(), MemoryError> {
        self.place.rename(&self.target).map_err(system("name"))?;
        self.is_named = true;
        Ok(())
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if !self.is_named {
            // What is wrong is said; the next to make a region would remove it, too.
            let _ = self.place.remove();
        }
    }
}

/// The place of a region file, which may not exist yet. The user has named it, so links are
/// followed, also one that leads to nothing yet; but not those of other users.
fn resolve(path: &Path) -> Result<PathBuf, MemoryError> {
    let mut path = path.to_owned();
    for _ in 0..LINKS_MAX {
        let Ok(found) = fs::symlink_metadata(&path) else { return Ok(path) };
        if !found.is_symlink() {
            return Ok(path);
        }
        if !is_own(&found) && found.uid() != 0 {
            return Err(MemoryError::OfAnother { path });
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
            io::ErrorKind::PermissionDenied if is_of_another(&path) => {
                MemoryError::OfAnother { path }
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

fn is_of_another(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| !is_own(&found))
}
