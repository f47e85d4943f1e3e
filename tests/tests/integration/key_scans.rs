//! Scans of keys, counts and deletions by prefix read no values.

use std::collections::BTreeMap;

use farside_tests::ServerProcess;

/// Of a block as much is read for its key, and for its row.
const KEY_READ_BYTES: u64 = 256 + 128;
const SUBTABLE_BYTES: u64 = 8 << 10;

#[on(any, rdma_in_soak)]
fn scans_of_keys_read_no_values() {
    let server = ServerProcess::start("--memory 128MiB --value-bytes-max 16777216");
    let mut session = server.session();
    let long_key = format!("long/{}", "k".repeat(900));
    let mut expected = BTreeMap::from([
        (b"extents".to_vec(), 9_000_000),
        (b"empty".to_vec(), 0),
        (long_key.clone().into_bytes(), 300_000),
    ]);
    expected.extend((0..40).map(|n| (format!("key-{n}").into_bytes(), 1_000_000 + n)));
    expected.extend((0..40).map(|n| (format!("short-{n}").into_bytes(), 10 * n)));
    for (key, bytes) in &expected {
        session.put(key, vec![7; *bytes as usize]).unwrap();
    }
    let before = session.counters();
    let entries = session.scan_keys("").unwrap().map(Result::unwrap);
    let found: BTreeMap<_, _> = entries.map(|entry| (entry.key, entry.value_bytes)).collect();
    assert_eq!(found, expected);
    let counters = session.counters() - before;
    let keys = expected.len() as u64;
    let subtables = counters.reads - 2 * (keys + 1);
    // The key that does not fit is read again, and a head has a table of its value.
    let bytes_max = keys * KEY_READ_BYTES + subtables * SUBTABLE_BYTES + 4096 + 4096 + 128;
    assert!(counters.read_bytes <= bytes_max, "{counters:?}");

    let before = session.counters();
    assert_eq!(session.count_keys().unwrap(), keys);
    let counters = session.counters() - before;
    let parts = (subtables, subtables * SUBTABLE_BYTES);
    assert_eq!((counters.reads, counters.read_bytes), parts, "the index alone");

    let before = session.counters();
    assert_eq!(session.delete_prefix("key-").unwrap(), 40);
    assert!((session.counters() - before).read_bytes <= bytes_max);
    assert_eq!(session.count_keys().unwrap(), keys - 40);
    // In pieces, and with a prefix.
    let position = farside::ScanPosition::default();
    assert_eq!(session.scan_keys_from(position).unwrap().count() as u64, keys - 40);
    let entry = session.scan_keys("long/").unwrap().next().unwrap().unwrap();
    assert_eq!(session.version(&long_key).unwrap(), Some(entry.version));
    assert_eq!((entry.key, entry.is_pinned), (long_key.into_bytes(), false));
}

#[on(any, rdma_in_soak)]
fn values_that_have_expired_have_no_key() {
    let server = ServerProcess::start("--memory 64MiB");
    let mut session = server.session();
    for bytes in [10_usize, 1000] {
        let key = format!("key-{bytes}");
        session.put_with_ttl(&key, vec![7; bytes], std::time::Duration::ZERO).unwrap();
        session.put(format!("kept-{bytes}"), vec![7; bytes]).unwrap();
    }
    let keys = session.scan_keys("").unwrap().map(|entry| entry.unwrap().key);
    let mut keys: Vec<_> = keys.collect();
    keys.sort();
    assert_eq!(keys, [b"kept-10".to_vec(), b"kept-1000".to_vec()]);
}
