//! The records. Each is a JSON object with a version, under the prefix of its cluster:
//!
//! | key | record | written by |
//! |---|---|---|
//! | `cluster` | [`ClusterRecord`] | `kv-cli cluster create`, once |
//! | `shards/0007` | [`ShardRecord`] | a server that takes or leaves the shard; `assign` |
//! | `servers/ID` | [`ServerRecord`] | its server, which announces it: it ends with the server |

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use farside_control::address::Address;
use farside_control::cluster::{ClusterMap, Id, SHARDS_MAX, ShardCopy, ShardView, VIEW_NUMBER_MAX};

/// The version of the records that this program writes, and the only one that it reads.
pub const RECORD_VERSION: u32 = 2;

/// Why a record cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum RecordError {
    #[error(
        "the record {key} is damaged: {why}; `kv-cli cluster repair` writes the record of a shard \
         again. Otherwise restore the records from a backup of their store first"
    )]
    Damaged { key: String, why: String },
    #[error(
        "the record {key} has version {version}, and this program reads {RECORD_VERSION}: upgrade \
         it"
    )]
    Version { key: String, version: u64 },
    #[error(
        "the record {key} is missing; restore the records from a backup of their store, and run \
         `kv-cli cluster repair`"
    )]
    Missing { key: String },
}

/// What a cluster is. It never changes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterRecord {
    version: u32,
    /// The cluster.
    pub cluster: Id,
    /// The hash key of all its regions.
    pub hash_key: Id,
    /// The number of its shards.
    pub shards: u16,
    /// How long a client trusts a server that has answered, in milliseconds.
    pub trust_ms: u32,
}

impl ClusterRecord {
    /// The key of the record.
    pub const KEY: &str = "cluster";

    /// The record of a new cluster.
    pub fn new(cluster: Id, hash_key: Id, shards: u16, trust_ms: u32) -> Self {
        Self { version: RECORD_VERSION, cluster, hash_key, shards, trust_ms }
    }
}

/// Where a region is, which decides which servers can say that its data is lost.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Memory {
    /// In the memory of this process, with which the data ends.
    Process {
        /// Boot id, namespace of process ids, process id and start time.
        process: String,
    },
    /// In a file, which the server locks while it runs. A server with a copy of the file has
    /// another one.
    File {
        /// Boot id, device and inode; empty if it is not known any more.
        file: String,
    },
}

impl Memory {
    /// Memory of which nothing is known, after the records went back.
    pub fn unknown() -> Self {
        Self::File { file: String::new() }
    }
}

/// A copy of a shard, in its record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServedCopy {
    /// What clients need to know of it.
    #[serde(flatten)]
    pub copy: ShardCopy,
    /// Where its region is.
    pub memory: Memory,
    /// One of the two numbers in the region's superblock, another one for each serving. A copy of
    /// the region file that was served no longer, or never, does not have it. `None` after
    /// `kv-cli cluster repair`, which does not know the number.
    pub serving: Option<Id>,
    /// Whether its server has stopped and said so. A server that was killed could not.
    pub is_stopped: bool,
    /// For how long after the server's process has last answered any client may still change the
    /// region or return what it read there, in milliseconds.
    pub distrust_ms: u64,
}

/// The view of a shard, and what servers need to know of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardRecord {
    version: u32,
    /// The number of the view.
    pub number: u64,
    /// The copies: none if the shard is vacant, so that a spare may take it.
    pub copies: Vec<ServedCopy>,
    /// The copy that an operator has given up. The shard is not vacant until clients cannot trust
    /// its server any more.
    pub revoked: Option<ServedCopy>,
}

impl Default for ShardRecord {
    fn default() -> Self {
        Self { version: RECORD_VERSION, number: 0, copies: Vec::new(), revoked: None }
    }
}

impl ShardRecord {
    /// The key of the record of this shard.
    pub fn key(shard: u16) -> String {
        format!("shards/{shard:04}")
    }

    /// Checks the bounds of the record.
    ///
    /// # Errors
    /// [`RecordError::Damaged`].
    pub(crate) fn check(&self, key: &str) -> Result<(), RecordError> {
        let why = if self.copies.len() > 1 {
            format!("it has {} copies, and a shard has one", self.copies.len())
        } else if self.number > VIEW_NUMBER_MAX {
            format!("its number {} is beyond {VIEW_NUMBER_MAX}", self.number)
        } else {
            return Ok(());
        };
        Err(RecordError::Damaged { key: key.to_owned(), why })
    }

    /// Whether a spare may take the shard.
    pub fn is_vacant(&self) -> bool {
        self.copies.is_empty() && self.revoked.is_none()
    }

    /// The view, as clients get it.
    pub fn view(&self) -> ShardView {
        let copies = self.copies.iter().filter(|served| !served.is_stopped);
        ShardView {
            number: self.number,
            copies: copies.map(|served| served.copy.clone()).collect(),
        }
    }
}

/// A server that runs, with or without a shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerRecord {
    version: u32,
    /// The server process.
    pub server: Id,
    /// The addresses at which it listens.
    pub addresses: Vec<Address>,
    /// The failure domain that its operator named.
    pub label: Option<String>,
    /// The length of its region, in bytes.
    pub region_bytes: u64,
    /// The shard that it serves; `None` for a spare.
    pub shard: Option<u16>,
}

impl ServerRecord {
    /// What the keys of all these records begin with.
    pub const PREFIX: &str = "servers/";

    /// The record of a server.
    pub fn new(
        server: Id,
        addresses: Vec<Address>,
        label: Option<String>,
        region_bytes: u64,
        shard: Option<u16>,
    ) -> Self {
        Self { version: RECORD_VERSION, server, addresses, label, region_bytes, shard }
    }

    /// The key of the record.
    pub fn key(&self) -> String {
        format!("{}{}", Self::PREFIX, self.server)
    }
}

/// Returns the record in the value of a key.
///
/// # Errors
/// [`RecordError::Damaged`], [`RecordError::Version`].
pub(crate) fn decode<T: DeserializeOwned>(key: &str, value: &[u8]) -> Result<T, RecordError> {
    #[derive(Deserialize)]
    struct Header {
        version: u64,
    }
    let damaged = |error: serde_json::Error| RecordError::Damaged {
        key: key.to_owned(),
        why: error.to_string(),
    };
    let Header { version } = serde_json::from_slice(value).map_err(damaged)?;
    if version != u64::from(RECORD_VERSION) {
        return Err(RecordError::Version { key: key.to_owned(), version });
    }
    serde_json::from_slice(value).map_err(damaged)
}

/// Returns the value of a record.
pub(crate) fn encode(record: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(record).unwrap_or_default()
}

/// Returns the map of a cluster.
pub(crate) fn map(cluster: &ClusterRecord, shards: impl Iterator<Item = ShardView>) -> ClusterMap {
    let ClusterRecord { cluster, hash_key, trust_ms, .. } = *cluster;
    ClusterMap { cluster, hash_key, trust_ms, shards: shards.collect() }
}

/// Checks the bounds of a cluster's record.
///
/// # Errors
/// [`RecordError::Damaged`].
pub(crate) fn check(cluster: &ClusterRecord) -> Result<(), RecordError> {
    let is_valid = (1..=SHARDS_MAX).contains(&cluster.shards) && cluster.trust_ms > 0;
    let why = "it has too many shards, or none, or no trust_ms".to_owned();
    let key = ClusterRecord::KEY.to_owned();
    if is_valid { Ok(()) } else { Err(RecordError::Damaged { key, why }) }
}
