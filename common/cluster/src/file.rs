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

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File, Metadata, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use farside_control::cluster::Id;

use crate::records::ServerRecord;
use crate::store::{
    Announcement, Change, Commit, Condition, Health, RecordStore, Records, Revision, StoreError,
    Versioned,
};

/// The version of `records.json`.
const VERSION: u32 = 1;
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
        store.check_folder()?;
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

    /// Checks that no other user can change the folder. Returns its metadata, or `None` if it does
    /// not exist.
    fn check_folder(&self) -> Result<Option<Metadata>> {
        let path = self.folder.display();
        let metadata = match fs::metadata(&self.folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            found => found.map_err(self.error(&self.folder))?,
        };
        let own = rustix::process::geteuid().as_raw();
        if !metadata.is_dir() {
            return Err(self.failed(format!("{path} is not a folder")));
        }
        if metadata.mode() & MODE_WRITABLE != 0 {
            let why = "other users can write to it; if its records are right, run: chmod go-w";
            return Err(self.failed(format!("{why} {path}")));
        }
        if own != 0 && ![own, 0].contains(&metadata.uid()) {
            return Err(self.failed(format!("{path} belongs to another user")));
        }
        Ok(Some(metadata))
    }

    fn contents(&self) -> Result<Contents> {
        let path = self.path("records.json");
        let bytes = match fs::read(&path) {
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

    /// Opens a file of the folder for writing. The file belongs to the owner of the folder, even if
    /// root makes it: otherwise the servers could not read it any more.
    fn create(&self, path: &Path) -> Result<File> {
        let mut how = OpenOptions::new();
        let flags = rustix::fs::OFlags::NOFOLLOW.bits().cast_signed();
        how.write(true).create(true).truncate(true).mode(0o600).custom_flags(flags);
        let file = how.open(path).map_err(self.error(path))?;
        self.give_to_owner(path)?;
        Ok(file)
    }

    fn create_folder(&self, path: &Path) -> Result<()> {
        match DirBuilder::new().mode(0o700).create(path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            made => made.map_err(self.error(path)),
        }
    }

    fn give_to_owner(&self, path: &Path) -> Result<()> {
        let owner = fs::metadata(&self.folder).map_err(self.error(&self.folder))?;
        let made = fs::symlink_metadata(path).map_err(self.error(path))?;
        if made.uid() == owner.uid() {
            return Ok(());
        }
        let (user, group) = (Some(owner.uid()), Some(owner.gid()));
        std::os::unix::fs::lchown(path, user, group).map_err(self.error(path))
    }

    /// Makes the folder if it is missing, and locks it until the file is dropped.
    fn lock(&self) -> Result<File> {
        if self.check_folder()?.is_none() {
            self.create_folder(&self.folder)?;
        }
        let servers = self.path("servers");
        self.create_folder(&servers)?;
        self.give_to_owner(&servers)?;
        let path = self.path("lock");
        let file = self.create(&path)?;
        let deadline = Instant::now() + LOCK_WAIT_MAX;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(file),
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
    fn replace(&self, contents: &Contents) -> Result<()> {
        let path = self.path("records.json.new");
        let bytes = serde_json::to_vec(contents).map_err(|error| self.failed(error.to_string()))?;
        let mut file = self.create(&path)?;
        file.write_all(&bytes).map_err(self.error(&path))?;
        fs::rename(&path, self.path("records.json")).map_err(self.error(&path))
    }

    /// The file that the server with this record locks; `None` for a record of another kind.
    fn server_lock(&self, key: &str) -> Option<PathBuf> {
        let id: Id = key.strip_prefix(ServerRecord::PREFIX)?.parse().ok()?;
        Some(self.folder.join("servers").join(id.to_string()))
    }

    /// Whether the record belongs to a server that does not run any more.
    fn has_ended(&self, key: &str) -> bool {
        self.server_lock(key).is_some_and(|path| match File::open(path) {
            // A shared lock, so that two readers do not take each other for the server.
            Ok(file) => file.try_lock_shared().is_ok(),
            Err(error) => error.kind() == io::ErrorKind::NotFound,
        })
    }

    /// Removes the records and the locks of servers that do not run any more. The folder must be
    /// locked: otherwise a server could be about to lock its file.
    fn remove_ended(&self, contents: &mut Contents) {
        let ended: Vec<_> =
            contents.records.keys().filter(|key| self.has_ended(key)).cloned().collect();
        for key in &ended {
            contents.records.remove(key);
            if let Some(path) = self.server_lock(key) {
                let _ = fs::remove_file(path);
            }
        }
        contents.revision += u64::from(!ended.is_empty());
    }

    /// Reads the contents without the records of servers that do not run any more. A reader that
    /// may not change the folder only leaves them out.
    fn read_running(&self) -> Result<Contents> {
        let mut contents = self.contents()?;
        if !contents.records.keys().any(|key| self.has_ended(key)) {
            return Ok(contents);
        }
        let removed = self.lock().and_then(|_lock| {
            let mut contents = self.contents()?;
            self.remove_ended(&mut contents);
            self.replace(&contents)?;
            Ok(contents)
        });
        removed.or_else(|error| {
            tracing::debug!(%error, "cannot remove the records of servers that have ended");
            contents.records.retain(|key, _| !self.has_ended(key));
            Ok(contents)
        })
    }

    /// Makes the changes. The folder must be locked.
    fn apply(&self, contents: &mut Contents, changes: &[Change]) -> Result<()> {
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
        self.replace(contents)
    }

    /// Writes the record of a server, and locks its file.
    fn write_server(&self, server: &ServerRecord) -> Result<File> {
        // A folder that was removed, or moved by an operator, must not come back without a cluster.
        if self.check_folder()?.is_none() {
            return Err(self.failed(format!("{} does not exist", self.folder.display())));
        }
        let _lock = self.lock()?;
        let key = server.key();
        let path = self.folder.join("servers").join(server.server.to_string());
        let file = self.create(&path)?;
        if file.try_lock().is_err() {
            return Err(self.failed(format!("another process has announced {key}")));
        }
        let mut contents = self.contents()?;
        self.apply(&mut contents, &[(key, Some(server.value()))])?;
        Ok(file)
    }
}

impl RecordStore for FileStore {
    fn read(&self) -> Result<Records> {
        if self.check_folder()?.is_none() {
            return Ok(Records::default());
        }
        let contents = self.read_running()?;
        let versioned = |stored: Stored| Versioned {
            revision: stored.revision,
            value: stored.value.into_bytes(),
        };
        let by_key = contents.records.into_iter().map(|(key, stored)| (key, versioned(stored)));
        Ok(Records { revision: contents.revision, by_key: by_key.collect() })
    }

    fn commit(&self, conditions: &[Condition], changes: &[Change]) -> Result<Commit> {
        let needs_record = conditions.iter().any(|(_, expected)| expected.is_some());
        if needs_record && self.check_folder()?.is_none() {
            return Ok(Commit::Refused);
        }
        let _lock = self.lock()?;
        let mut contents = self.contents()?;
        self.remove_ended(&mut contents);
        let holds = |(key, expected): &Condition| {
            contents.records.get(key).map(|stored| stored.revision) == *expected
        };
        if !conditions.iter().all(holds) {
            return Ok(Commit::Refused);
        }
        if !changes.is_empty() {
            self.apply(&mut contents, changes)?;
        }
        Ok(Commit::Done)
    }

    fn wait_for_change(&self, since: Revision, timeout: Duration) -> Result<()> {
        let deadline = Instant::now() + timeout;
        let path = self.path("records.json");
        let identity = || {
            let metadata = fs::metadata(&path).ok()?;
            Some((metadata.ino(), metadata.ctime(), metadata.ctime_nsec(), metadata.size()))
        };
        loop {
            let seen = identity();
            if self.contents()?.revision != since {
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
        let problem = match self.check_folder() {
            Ok(None) => Some("it does not exist; create the cluster".to_owned()),
            found => found.and_then(|_| self.contents()).err().map(|error| error.to_string()),
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
    /// Whether this is still the file that readers look at.
    fn is_in_place(&self, path: &Path) -> bool {
        let own = self.lock.as_ref().and_then(|file| file.metadata().ok());
        match (own, fs::metadata(path)) {
            (Some(own), Ok(found)) => (own.dev(), own.ino()) == (found.dev(), found.ino()),
            _ => false,
        }
    }
}

impl Announcement for FileAnnouncement {
    fn keep_alive(&mut self) -> Result<()> {
        let key = self.server.key();
        let is_written = self.store.contents()?.records.contains_key(&key);
        let path = self.store.server_lock(&key);
        if is_written && path.is_some_and(|path| self.is_in_place(&path)) {
            return Ok(());
        }
        self.lock = None;
        self.lock = Some(self.store.write_server(&self.server)?);
        let server = self.server.server;
        tracing::warn!(%server, "FS-048 the records had lost this server: it is announced again");
        Ok(())
    }

    fn update(&mut self, server: &ServerRecord) -> Result<()> {
        let _lock = self.store.lock()?;
        let mut contents = self.store.contents()?;
        self.store.apply(&mut contents, &[(server.key(), Some(server.value()))])?;
        self.server = server.clone();
        Ok(())
    }
}
