//! The lock of a region file: who has it, and nobody else, may use, replace or remove the file.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;

use super::{MemoryError, open, system};

/// Keeps other servers away from a region file as long as it lives. An open file description of its
/// own, because a lock belongs to the description, and clients hold copies of the region's: theirs
/// would keep the lock alive when the server is dead.
pub struct RegionLock {
    _file: File,
    path: PathBuf,
    is_new: bool,
}

impl RegionLock {
    /// Locks the file, which is made if there is none.
    ///
    /// # Errors
    /// [`MemoryError::Locked`], and what there is about the path.
    pub fn take(path: &Path) -> Result<Self, MemoryError> {
        let existed = path.exists();
        Self::lock(open(path, true)?, path, existed)
    }

    /// Locks the file if there is one.
    ///
    /// # Errors
    /// As [`RegionLock::take`].
    pub fn take_existing(path: &Path) -> Result<Option<Self>, MemoryError> {
        match open(path, false) {
            Ok(file) => Self::lock(file, path, true).map(Some),
            Err(MemoryError::NoFolder { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub(super) fn lock(file: File, path: &Path, existed: bool) -> Result<Self, MemoryError> {
        let locked = || MemoryError::Locked { path: path.to_owned() };
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).map_err(|error| {
            match error {
                rustix::io::Errno::WOULDBLOCK => locked(),
                other => system("lock")(other),
            }
        })?;
        let metadata = file.metadata().map_err(system("look at"))?;
        // By its own name: to remove or replace a link would leave the file alone.
        let path = fs::canonicalize(path).map_err(|_| locked())?;
        // Who had the lock before may have removed the file, and another stands there by now.
        let identity = |of: &fs::Metadata| (of.dev(), of.ino());
        if !fs::metadata(&path).is_ok_and(|found| identity(&found) == identity(&metadata)) {
            return Err(locked());
        }
        // Of several that make it, one gets it first, and may have put a region into it since.
        let is_new = !existed && metadata.len() == 0;
        Ok(Self { _file: file, path, is_new })
    }

    /// Whether there was no file before.
    pub fn is_new(&self) -> bool {
        self.is_new
    }

    /// The file's own name, without links.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the file.
    ///
    /// # Errors
    /// [`MemoryError::System`].
    pub fn remove(self) -> Result<(), MemoryError> {
        fs::remove_file(&self.path).map_err(system("remove"))
    }
}
