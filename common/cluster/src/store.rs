//! The trait of the stores that hold the records, and the records that were read together.

use std::collections::BTreeMap;
use std::time::Duration;

use farside_control::Secret;
use farside_control::cluster::{ClusterMap, Id};
use farside_fabric::tcp::TlsFiles;
use serde::Deserialize;

use crate::records::{self, ClusterRecord, RecordError, ServerRecord, ShardRecord};

/// The number of a change of the store. It rises with every change of any record.
pub type Revision = u64;

/// A value, and the revision of its last change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Versioned {
    /// The revision.
    pub revision: Revision,
    /// The bytes.
    pub value: Vec<u8>,
}

/// All records of a cluster, read together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Records {
    /// The revision at which they were read.
    pub revision: Revision,
    /// The records, by key without the cluster's prefix.
    pub by_key: BTreeMap<String, Versioned>,
}

impl Records {
    /// The cluster's record.
    ///
    /// # Errors
    /// [`RecordError`]; `Missing` if there is no such cluster.
    pub fn cluster(&self) -> Result<ClusterRecord, RecordError> {
        let cluster = self.get(ClusterRecord::KEY)?;
        records::check(&cluster)?;
        Ok(cluster)
    }

    /// The record of a shard, and its revision.
    ///
    /// # Errors
    /// [`RecordError`].
    pub fn shard(&self, shard: u16) -> Result<(ShardRecord, Revision), RecordError> {
        let key = ShardRecord::key(shard);
        let revision = self.by_key.get(&key).map_or(0, |found| found.revision);
        let record: ShardRecord = self.get(&key)?;
        record.check(&key)?;
        Ok((record, revision))
    }

    /// The copies in the record of a shard whose number may be beyond all bounds, for a repair.
    /// `None` if the record cannot be read otherwise.
    pub fn shard_of_any_number(&self, shard: u16) -> Option<ShardRecord> {
        let key = ShardRecord::key(shard);
        let mut record: ShardRecord = self.get(&key).ok()?;
        record.number = 0;
        record.check(&key).is_ok().then_some(record)
    }

    /// The records of the servers that run. A damaged one is an error in its place.
    pub fn servers(&self) -> impl Iterator<Item = Result<ServerRecord, RecordError>> {
        let keys = self.by_key.iter().filter(|(key, _)| key.starts_with(ServerRecord::PREFIX));
        keys.map(|(key, found)| records::decode(key, &found.value))
    }

    /// The map of the cluster.
    ///
    /// # Errors
    /// [`RecordError`].
    pub fn map(&self) -> Result<ClusterMap, RecordError> {
        let cluster = self.cluster()?;
        let views = (0..cluster.shards).map(|shard| Ok(self.shard(shard)?.0.view()));
        let views = views.collect::<Result<Vec<_>, RecordError>>()?;
        Ok(records::map(&cluster, views.into_iter()))
    }

    fn get<T: serde::de::DeserializeOwned>(&self, key: &str) -> Result<T, RecordError> {
        let missing = || RecordError::Missing { key: key.to_owned() };
        records::decode(key, &self.by_key.get(key).ok_or_else(missing)?.value)
    }
}

/// What must hold for a commit: the revision of the record's last change, or `None` if there must
/// be no such record.
pub type Condition = (String, Option<Revision>);

/// A change of a record: its new value, or `None` to remove it.
pub type Change = (String, Option<Vec<u8>>);

/// The result of a commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Commit {
    /// All changes were made.
    Done,
    /// A condition did not hold, so nothing was changed.
    Refused,
}

/// Why the store did not do what it was asked.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum StoreError {
    /// No endpoint answered in time. The outcome of a commit is unknown.
    #[error("the records at {uri} cannot be reached: {why}")]
    Unreachable { uri: String, why: String },
    /// The store refuses this user.
    #[error("the store at {uri} refuses access: {why}; check the user and the password")]
    Denied { uri: String, why: String },
    /// The store has no room for a change.
    #[error("the store at {uri} has no space: {why}")]
    NoSpace { uri: String, why: String },
    /// The store answered something else.
    #[error("the store at {uri} failed: {why}")]
    Failed { uri: String, why: String },
    /// The URI is wrong.
    #[error(
        "`{uri}` names no cluster ({why}); write etcd://HOST:2379,HOST:2379/NAME or file:///PATH"
    )]
    Uri { uri: String, why: &'static str },
}

/// A problem that the store has, for `kv-cli cluster check`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Health {
    /// What was looked at, such as the address of a member of etcd.
    pub subject: String,
    /// The problem; `None` if there is none.
    pub problem: Option<String>,
}

/// A store of records. Every call has a deadline of its own, of a few seconds at most.
pub trait RecordStore: Send + Sync {
    /// Reads all records of the cluster; none if there is no such cluster.
    ///
    /// # Errors
    /// [`StoreError`].
    fn read(&self) -> Result<Records, StoreError>;

    /// Makes all changes if all conditions hold, in one step.
    ///
    /// # Errors
    /// [`StoreError`]. After `Unreachable` the changes may have been made, or may be made later,
    /// when a stopped member of etcd goes on: read again. A later commit with the same conditions
    /// settles it, as only one of the two can succeed.
    fn commit(&self, conditions: &[Condition], changes: &[Change]) -> Result<Commit, StoreError>;

    /// Waits until a record has probably changed since this revision, or until the timeout. A
    /// change may be missed, so the caller also reads without a hint. A folder misses the end of a
    /// server, until a read has removed its record.
    ///
    /// # Errors
    /// [`StoreError`]. `Unreachable` comes about when the timeout ends, so the caller may wait
    /// again at once. It has to pause after another error.
    fn wait_for_change(&self, since: Revision, timeout: Duration) -> Result<(), StoreError>;

    /// Announces a running server: writes its record, which disappears some seconds after the
    /// announcement was dropped or its process has ended.
    ///
    /// # Errors
    /// [`StoreError`].
    fn announce(&self, server: &ServerRecord) -> Result<Box<dyn Announcement>, StoreError>;

    /// Looks at the store itself.
    ///
    /// # Errors
    /// [`StoreError`].
    fn health(&self) -> Result<Vec<Health>, StoreError>;
}

/// The announcement of a server.
pub trait Announcement: Send {
    /// Keeps the record alive; to be called about once a second. Writes the record again if the
    /// store has lost it.
    ///
    /// # Errors
    /// [`StoreError`]. The server continues, and calls this again.
    fn keep_alive(&mut self) -> Result<(), StoreError>;

    /// Replaces the record of the same server.
    ///
    /// # Errors
    /// [`StoreError`].
    fn update(&mut self, server: &ServerRecord) -> Result<(), StoreError>;
}

impl ShardRecord {
    /// The change that writes this record.
    pub fn change(&self, shard: u16) -> Change {
        (Self::key(shard), Some(records::encode(self)))
    }
}

impl ClusterRecord {
    /// The change that writes this record.
    pub fn change(&self) -> Change {
        (Self::KEY.to_owned(), Some(records::encode(self)))
    }
}

impl ServerRecord {
    /// The value of this record.
    pub fn value(&self) -> Vec<u8> {
        records::encode(self)
    }
}

/// Returns a random id.
///
/// # Errors
/// The system's error.
pub fn random_id() -> std::io::Result<Id> {
    let mut bytes = [0; 16];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    Ok(Id(bytes))
}

/// How to get access to the records: keys of the table `[cluster]` of a config file. A store of
/// files needs none of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct StoreOptions {
    /// The user of etcd. Unset if etcd has no authentication.
    pub user: Option<String>,
    /// The password of this user. It cannot be a part of the URI, because other users of a host see
    /// the arguments of a process.
    pub password: Option<Secret>,
    /// The files for TLS with etcd. With `ca` the connections use TLS. With `certificate` and `key`
    /// etcd accepts them if it wants certificates of its clients. A user is always named by `user`:
    /// etcd's JSON gateway does not take the name in a certificate.
    pub tls: TlsFiles,
}
