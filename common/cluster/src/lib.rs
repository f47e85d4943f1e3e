//! The records of a cluster: which shards it has, and which server serves each. They are in etcd,
//! or in a folder of one machine.
//!
//! Only servers and `kv-cli cluster` read and write records. Clients get what they need from any
//! server, as a [`ClusterMap`](farside_control::cluster::ClusterMap).
#![deny(unsafe_code)]

mod etcd;
mod file;
mod records;
mod store;

use std::sync::Arc;

use etcd::EtcdStore;
use file::FileStore;

pub use records::{
    ClusterRecord, Memory, RECORD_VERSION, RecordError, ServedCopy, ServerRecord, ShardRecord,
};
pub use store::{
    Announcement, Change, Commit, Condition, Health, RecordStore, Records, Revision, StoreError,
    StoreOptions, Versioned, random_id,
};

/// Opens the store with this URI: `etcd://HOST:2379,HOST:2379/NAME`, or `file:///PATH`. It need not
/// be reachable yet. The name has up to 63 letters from a to z, digits and hyphens.
///
/// # Errors
/// [`StoreError::Uri`], and [`StoreError::Failed`] for a folder or options that cannot be used.
pub fn open(uri: &str, options: &StoreOptions) -> Result<Arc<dyn RecordStore>, StoreError> {
    match uri.split_once("://") {
        Some(("file", path)) => Ok(Arc::new(FileStore::open(uri, path)?)),
        Some(("etcd", rest)) => Ok(Arc::new(EtcdStore::open(uri, rest, options)?)),
        _ => Err(StoreError::Uri { uri: uri.to_owned(), why: "its scheme is unknown" }),
    }
}
