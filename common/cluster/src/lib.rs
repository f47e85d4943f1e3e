//! The records of a cluster: which shards it has, and which server serves each. They are in etcd,
//! or in a folder of one machine.
//!
//! Only servers and `kv-cli cluster` read and write records. Clients get what they need from any
//! server, as a [`ClusterMap`](farside_control::cluster::ClusterMap).
#![deny(unsafe_code)]

mod etcd;
mod file;
mod options;
mod records;
mod store;

pub use options::{StoreOptions, open};
pub use records::{
    ClusterRecord, Memory, RECORD_VERSION, RecordError, ServedCopy, ServerRecord, ShardRecord,
};
pub use store::{
    Announcement, Change, Commit, Condition, Health, RecordStore, Records, Revision, StoreError,
    Versioned, random_id,
};
