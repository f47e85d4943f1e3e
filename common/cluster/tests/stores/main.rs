//! Proves that the stores of records keep the promises of `RecordStore`: the same ones for a folder
//! and for etcd, and then what each does when a process, a member or an answer fails.
#![allow(clippy::unwrap_used, reason = "a test fails where it panics")]

mod contract;
mod etcd;
mod etcd_process;
mod false_gateway;
mod file;

use farside_cluster::ServerRecord;
use farside_control::cluster::Id;

/// The record of a server with this id, without a shard.
fn server(id: u8) -> ServerRecord {
    let address = "tcp://kv-1:7400".parse().unwrap();
    ServerRecord::new(Id([id; 16]), vec![address], Some("rack 1".to_owned()), 1 << 30, None)
}
