//! Records in a folder, for servers and clients of one machine.
//!
//! | file | contents |
//! |---|---|
//! | `records.json` | all records and the revision |
//! | `lock` | empty; locked during a change |
//! | `servers/ID` | empty; locked by the announcing process for as long as it runs |
//!
//! A change replaces `records.json` by a rename, so a reader sees all of it or nothing, even if the
//! writer is killed. The kernel releases the locks of a process that ends. The record of a server
//! without a lock is left out by readers, and the first of them removes it.
//!
//! The folder belongs to the user of the process, or to root, and no other user can write to it.
//! Each operation opens it once, and looks all names up in it.

use std::collections::BTreeMap;
use std::fs::{File, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use farside_control::cluster::Id;
use farside_fabric::trusted_path::TrustedFolder;

use crate::records::ServerRecord;
use crate::store::{
    Announcement, Change, Commit, Condition, Health, RecordStore, Records, Revision, StoreError,
    Versioned,
};

/// The version of `records.json`.
const VERSION: u32 = 1;
const RECORDS: &str = "records.json";
const NEW_RECORDS: &str = "records.json.new";
const SERVERS: &str = "servers";
/// The longest wait for another process that changes the records.
const LOCK_WAIT_MAX: Duration = Duration::from_secs(2);
/// The interval between two attempts to lock the folder.
const LOCK_RETRY: Duration = Duration::from_millis(2);
/// The interval at which a waiting process looks at `records.json`.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
/// The permission bits with which users other than the owner can write.
const MODE_WRITABLE: u32 = 0o022;

type Result<T> = std::result::Result<T, StoreError>;

/// The records of one folder.
#[derive(Clone, Debug)]
pub(crate) struct FileStore {
    uri: String,
    folder: PathBuf,
}

/// The contents of `records.json`.
#[derive(Debug, Serialize, Deserialize)]
struct Contents {
    version: u32,
    revision: Revision,
    records: BTreeMap<String, Stored>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Stored {
    revision: Revision,
    value: String,
}

impl Default for Contents {
    fn default() -> Self {
        Self { version: VERSION, revision: 0, records: BTreeMap::new() }
    }
}

impl FileStore {
    /// The store in the folder with this path, which the first change makes.
    pub(crate) fn open(uri: &str, path: &str) -> Result<Self> {
        let wrong = |why| StoreError::Uri { uri: uri.to_owned(), why };
        let folder = PathBuf::from(path);
        if !folder.is_absolute() {
            return Err(wrong("the path is not absolute"));
        }
        let parent = folder.parent().ok_or(wrong("it needs a folder of its own"))?;
        if !parent.is_dir() {
            return Err(wrong("the folder that contains it does not exist"));
        }
        let store = Self { uri: uri.to_owned(), folder };
        store.folder()?;
        Ok(store)
    }

    fn failed(&self, why: String) -> StoreError {
        StoreError::Failed { uri: self.uri.clone(), why }
    }

    /// Returns what makes the error of an operation on this path.
    fn error<'a>(&'a self, path: &'a Path) -> impl Fn(io::Error) -> StoreError + 'a {
        use io::ErrorKind::{QuotaExceeded, StorageFull};
        move |error| match error.kind() {
            StorageFull | QuotaExceeded => {
                StoreError::NoSpace { uri: self.uri.clone(), why: error.to_string() }
            }
            _ => self.failed(format!("{}: {error}", path.display())),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Opens the folder, if it exists, and checks that no other user can change it.
    fn folder(&self) -> Result<Option<TrustedFolder>> {
        let path = self.folder.display();
        let folder = match TrustedFolder::open(&self.folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
                return Err(self.failed(format!("{path} is not a folder")));
            }
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                let why = "run this as the user of the servers, and write a path without links";
                return Err(self.failed(format!("{path}: {error}; {why}")));
            }
            opened => opened.map_err(self.error(&self.folder))?,
        };
        if folder.metadata().map_err(self.error(&self.folder))?.mode() & MODE_WRITABLE != 0 {
            let why = "other users can write to it; if its records are right, run: chmod go-w";
            return Err(self.failed(format!("{why} {path}")));
        }
        Ok(Some(folder))
    }

    /// Opens the folder, which must exist.
    fn present_folder(&self) -> Result<TrustedFolder> {
        let missing = || self.failed(format!("{} does not exist", self.folder.display()));
        self.folder()?.ok_or_else(missing)
    }

    fn contents(&self, folder: &TrustedFolder) -> Result<Contents> {
        let path = self.path(RECORDS);
        let mut bytes = Vec::new();
        let opened = folder.open_file(RECORDS);
        match opened.and_then(|mut file| file.read_to_end(&mut bytes)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Contents::default()),
            read => read.map_err(self.error(&path))?,
        };
        let damaged = |why: &dyn std::fmt::Display| {
            let path = path.display();
            self.failed(format!("{path} is damaged ({why}); restore it from a backup"))
        };
        let found: Contents = serde_json::from_slice(&bytes).map_err(|error| damaged(&error))?;
        match found.version {
            VERSION => Ok(found),
            version => Err(damaged(&format!("its version is {version}, not {VERSION}"))),
        }
    }

    /// Makes the folder if it is missing, and locks it until the file is dropped.
    fn lock(&self) -> Result<(TrustedFolder, File)> {
        let folder = match self.folder()? {
            Some(folder) => folder,
            None => {
                TrustedFolder::make(&self.folder).map_err(self.error(&self.folder))?;
                self.present_folder()?
            }
        };
        folder.make_folder(SERVERS).map_err(self.error(&self.path(SERVERS)))?;
        let path = self.path("lock");
        let file = folder.create_file("lock").map_err(self.error(&path))?;
        let deadline = Instant::now() + LOCK_WAIT_MAX;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok((folder, file)),
                Err(TryLockError::Error(error)) => return Err(self.error(&path)(error)),
                Err(TryLockError::WouldBlock) if Instant::now() < deadline => {
                    thread::sleep(LOCK_RETRY);
                }
                Err(TryLockError::WouldBlock) => {
                    let why = format!("another process keeps {} locked", path.display());
                    return Err(StoreError::Unreachable { uri: self.uri.clone(), why });
                }
            }
        }
    }

    /// Replaces the contents. The folder must be locked.
    fn replace(&self, folder: &TrustedFolder, contents: &Contents) -> Result<()> {
        let bytes = serde_json::to_vec(contents).map_err(|error| self.failed(error.to_string()))?;
        let written = folder.create_file(NEW_RECORDS).and_then(|mut file| file.write_all(&bytes));
        written.map_err(self.error(&self.path(NEW_RECORDS)))?;
        folder.rename(NEW_RECORDS, RECORDS).map_err(self.error(&self.path(RECORDS)))
    }

    /// Whether the record belongs to a server that does not run any more.
    fn has_ended(folder: &TrustedFolder, key: &str) -> bool {
        let Some(name) = server_lock(key) else { return false };
        match folder.folder(SERVERS).and_then(|servers| servers.open_file(&name)) {
            // A shared lock, so that two readers do not take each other for the server.
            Ok(file) => file.try_lock_shared().is_ok(),
            Err(error) => error.kind() == io::ErrorKind::NotFound,
        }
    }

    /// Removes the records and the locks of servers that do not run any more. The folder must be
    /// locked: otherwise a server could be about to lock its file.
    fn remove_ended(folder: &TrustedFolder, contents: &mut Contents) {
        let ended = contents.records.keys().filter(|key| Self::has_ended(folder, key));
        let ended: Vec<_> = ended.cloned().collect();
        for key in &ended {
            contents.records.remove(key);
            if let Some(name) = server_lock(key) {
                let _ = folder.folder(SERVERS).and_then(|servers| servers.remove(&name));
            }
        }
        contents.revision += u64::from(!ended.is_empty());
    }

    /// Reads the contents without the records of servers that do not run any more. A reader that
    /// may not change the folder only leaves them out.
    fn read_running(&self, folder: &TrustedFolder) -> Result<Contents> {
        let mut contents = self.contents(folder)?;
        if !contents.records.keys().any(|key| Self::has_ended(folder, key)) {
            return Ok(contents);
        }
        let removed = self.lock().and_then(|(folder, _lock)| {
            let mut contents = self.contents(&folder)?;
            Self::remove_ended(&folder, &mut contents);
            self.replace(&folder, &contents)?;
            Ok(contents)
        });
        removed.or_else(|error| {
            tracing::debug!(%error, "cannot remove the records of servers that have ended");
            contents.records.retain(|key, _| !Self::has_ended(folder, key));
            Ok(contents)
        })
    }

    /// Makes the changes. The folder must be locked.
    fn apply(
        &self,
        folder: &TrustedFolder,
        contents: &mut Contents,
        changes: &[Change],
    ) -> Result<()> {
        contents.revision += 1;
        let revision = contents.revision;
        for (key, value) in changes {
            let Some(value) = value else {
                contents.records.remove(key);
                continue;
            };
            let value = String::from_utf8(value.clone())
                .map_err(|_| self.failed(format!("the record {key} is no text")))?;
            contents.records.insert(key.clone(), Stored { revision, value });
        }
        self.replace(folder, contents)
    }

    /// Writes the record of a server, and locks its file.
    fn write_server(&self, server: &ServerRecord) -> Result<File> {
        // A folder that was removed, or moved by an operator, must not come back without a cluster.
        self.present_folder()?;
        let (folder, _lock) = self.lock()?;
        let key = server.key();
        let name = server.server.to_string();
        let file = folder.folder(SERVERS).and_then(|servers| servers.create_file(&name));
        let file = file.map_err(self.error(&self.path(SERVERS).join(name)))?;
        if file.try_lock().is_err() {
            return Err(self.failed(format!("another process has announced {key}")));
        }
        let mut contents = self.contents(&folder)?;
        self.apply(&folder, &mut contents, &[(key, Some(server.value()))])?;
        Ok(file)
    }
}

/// The name of the file that the server with this record locks; `None` for a record of another
/// kind.
fn server_lock(key: &str) -> Option<String> {
    let id: Id = key.strip_prefix(ServerRecord::PREFIX)?.parse().ok()?;
    Some(id.to_string())
}

impl RecordStore for FileStore {
    fn read(&self) -> Result<Records> {
        let Some(folder) = self.folder()? else { return Ok(Records::default()) };
        let contents = self.read_running(&folder)?;
        let versioned = |stored: Stored| Versioned {
            revision: stored.revision,
            value: stored.value.into_bytes(),
        };
        let by_key = contents.records.into_iter().map(|(key, stored)| (key, versioned(stored)));
        Ok(Records { revision: contents.revision, by_key: by_key.collect() })
    }

    fn commit(&self, conditions: &[Condition], changes: &[Change]) -> Result<Commit> {
        let needs_record = conditions.iter().any(|(_, expected)| expected.is_some());
        if needs_record && self.folder()?.is_none() {
            return Ok(Commit::Refused);
        }
        let (folder, _lock) = self.lock()?;
        let mut contents = self.contents(&folder)?;
        Self::remove_ended(&folder, &mut contents);
        let holds = |(key, expected): &Condition| {
            contents.records.get(key).map(|stored| stored.revision) == *expected
        };
        if !conditions.iter().all(holds) {
            return Ok(Commit::Refused);
        }
        if !changes.is_empty() {
            self.apply(&folder, &mut contents, changes)?;
        }
        Ok(Commit::Done)
    }

    fn wait_for_change(&self, since: Revision, timeout: Duration) -> Result<()> {
        let deadline = Instant::now() + timeout;
        let identity = || {
            let metadata = self.folder().ok()??.open_file(RECORDS).ok()?.metadata().ok()?;
            Some((metadata.ino(), metadata.ctime(), metadata.ctime_nsec(), metadata.size()))
        };
        loop {
            let seen = identity();
            let contents = self.folder()?.map(|folder| self.contents(&folder)).transpose()?;
            if contents.unwrap_or_default().revision != since {
                return Ok(());
            }
            while identity() == seen {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Ok(());
                }
                thread::sleep(left.min(LOOK_INTERVAL));
            }
        }
    }

    fn announce(&self, server: &ServerRecord) -> Result<Box<dyn Announcement>> {
        let lock = Some(self.write_server(server)?);
        Ok(Box::new(FileAnnouncement { store: self.clone(), server: server.clone(), lock }))
    }

    fn health(&self) -> Result<Vec<Health>> {
        let subject = self.folder.display().to_string();
        let problem = match self.folder() {
            Ok(None) => Some("it does not exist; create the cluster".to_owned()),
            Ok(Some(folder)) => self.contents(&folder).err().map(|error| error.to_string()),
            Err(error) => Some(error.to_string()),
        };
        Ok(vec![Health { subject, problem }])
    }
}

/// A server's record in a folder.
struct FileAnnouncement {
    store: FileStore,
    server: ServerRecord,
    /// The locked file; `None` after an error.
    lock: Option<File>,
}

impl FileAnnouncement {
    /// Whether this is still the file that readers look at, in a folder with the record.
    fn is_in_place(&self) -> Result<bool> {
        let (folder, key) = (self.store.present_folder()?, self.server.key());
        if !self.store.contents(&folder)?.records.contains_key(&key) {
            return Ok(false);
        }
        let servers = folder.folder(SERVERS);
        let found = servers.and_then(|servers| servers.open_file(&self.server.server.to_string()));
        let found = found.and_then(|file| file.metadata());
        let own = self.lock.as_ref().and_then(|file| file.metadata().ok());
        Ok(match (own, found) {
            (Some(own), Ok(found)) => (own.dev(), own.ino()) == (found.dev(), found.ino()),
            _ => false,
        })
    }
}

impl Announcement for FileAnnouncement {
    fn keep_alive(&mut self) -> Result<()> {
        if self.is_in_place()? {
            return Ok(());
        }
        self.lock = None;
        self.lock = Some(self.store.write_server(&self.server)?);
        let server = self.server.server;
        tracing::warn!(%server, "FS-048 the records had lost this server: it is announced again");
        Ok(())
    }

    fn update(&mut self, server: &ServerRecord) -> Result<()> {
        let (folder, _lock) = self.store.lock()?;
        let mut contents = self.store.contents(&folder)?;
        self.store.apply(&folder, &mut contents, &[(server.key(), Some(server.value()))])?;
        self.server = server.clone();
        Ok(())
    }
}
