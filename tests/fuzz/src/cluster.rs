//! Targets: the map of a cluster, and its records.

use farside_cluster::{
    ClusterRecord, Memory, Records, ServedCopy, ServerRecord, ShardRecord, Versioned,
};
use farside_control::address::Address;
use farside_control::cluster::{ClusterMap, Id, ShardCopy, ShardView};

use crate::{check_error_line, decoded};

fn addresses() -> Vec<Address> {
    ["rdma://[fe80::1]:7400", "tcp://kv-1.rack:7400"].map(|text| text.parse().unwrap()).into()
}

fn copy() -> ShardCopy {
    let (server, region_id) = (Id([1; 16]), Id([2; 16]));
    ShardCopy { server, region_id, incarnation: 3, addresses: addresses(), host: "here".into() }
}

fn map_of(shards: Vec<ShardView>) -> ClusterMap {
    ClusterMap { cluster: Id([3; 16]), hash_key: Id([4; 16]), trust_ms: 2000, shards }
}

pub(crate) fn maps() -> Vec<Vec<u8>> {
    let served = ShardView { number: 7, copies: vec![copy()] };
    let maps = [map_of(vec![ShardView::default()]), map_of(vec![served.clone(), served])];
    maps.map(|map| map.encode()).into()
}

/// A server's message with the map of its cluster.
pub(crate) fn map(bytes: &[u8]) -> bool {
    let Some(map) = decoded(ClusterMap::decode(bytes)) else { return false };
    check_map(&map);
    let mut other = map_of(vec![ShardView { number: u64::MAX, copies: vec![copy()] }]);
    other.cluster = map.cluster;
    let before = other.number();
    other.merge(&map);
    assert!(other.number() >= before);
    true
}

/// Checks what clients rely on.
fn check_map(map: &ClusterMap) {
    assert_eq!(ClusterMap::decode(&map.encode()).as_ref(), Ok(map));
    let router = map.router();
    for key in 0..64_u32 {
        assert!(router.shard(router.hasher.hash(&key.to_le_bytes())) < map.shards.len());
    }
    for copy in map.shards.iter().flat_map(|view| &view.copies) {
        assert!(copy.reachable().count() <= copy.addresses.len());
    }
}

/// All records of a cluster: a line for each, with the key, a space and the value.
pub(crate) fn some_cluster_records() -> Vec<Vec<u8>> {
    let memory = Memory::File { file: "host 8 9".into() };
    let (copy, serving) = (copy(), Some(Id([5; 16])));
    let served = ServedCopy { copy, memory, serving, is_stopped: false, distrust_ms: 2100 };
    let record = |copies: &[ServedCopy], revoked: Option<&ServedCopy>| {
        let mut record = ShardRecord::default();
        (record.number, record.copies, record.revoked) = (5, copies.to_vec(), revoked.cloned());
        record
    };
    let label = Some("rack 1".into());
    let server = ServerRecord::new(Id([1; 16]), addresses(), label, 64 << 20, Some(0));
    let lines = |shards: &[ShardRecord]| {
        let count = shards.len() as u16;
        let cluster = ClusterRecord::new(Id([3; 16]), Id([4; 16]), count, 2000).change();
        let shards = shards.iter().zip(0..).map(|(record, shard)| record.change(shard));
        let changes = [cluster, (server.key(), Some(server.value()))].into_iter().chain(shards);
        let lines = changes.map(|(key, value)| [key.as_bytes(), b" ", &value.unwrap()].concat());
        lines.collect::<Vec<_>>().join(&b'\n')
    };
    vec![
        lines(&[ShardRecord::default()]),
        lines(&[record(std::slice::from_ref(&served), None), record(&[], Some(&served))]),
    ]
}

/// The records of a cluster, of which other programs may have changed each.
pub(crate) fn cluster_records(bytes: &[u8]) -> bool {
    let lines = bytes.split(|byte| *byte == b'\n').filter_map(|line| {
        let space = line.iter().position(|byte| *byte == b' ')?;
        let key = String::from_utf8(line[..space].to_vec()).ok()?;
        Some((key, Versioned { revision: 1, value: line[space + 1..].to_vec() }))
    });
    let records = Records { revision: 1, by_key: lines.collect() };
    records.servers().filter_map(Result::err).for_each(|error| check_error_line(&error));
    let Some(map) = decoded(records.map()) else { return false };
    check_map(&map);
    true
}
