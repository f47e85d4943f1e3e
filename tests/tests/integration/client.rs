//! The client library: a timeout beyond the clock's range, depths out of range, the output of
//! Debug, and operations that fail at once. Keys and values of every allowed length can be stored
//! and read, and one byte too many is an error that names both lengths. Scans of keys, counts and
//! deletions by prefix read no values.
//!
//! The library refuses a reader's changes. `tests/tests/server/clients.rs` proves that the memory
//! refuses them too, and `common/fabric/tests/verbs/connecting.rs` proves it over RDMA.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use farside::ConnectError::Refused;
use farside::OperationError::{Denied, KeyEmpty, KeyTooLong, ValueTooLong};
use farside::{Client, Error, Outcome, Role, SetupError, Store};
use farside_tests::{ServerProcess, TEST_TIMEOUT, self_describing};

fn server() -> ServerProcess {
    ServerProcess::start("--memory 8MiB")
}

#[on(shm, tcp_in_soak)]
fn no_timeout_is_too_long_for_the_clock() {
    let server = server();
    let client = server.client_builder().connect_timeout(Duration::MAX).connect().unwrap();
    assert!(client.session().is_ok());
}

#[on(shm, tcp_in_soak)]
fn a_depth_out_of_range_is_refused() {
    let server = server();
    let builder = server.client_builder();
    for depth in [0, 1025] {
        let error = builder.clone().pipeline_depth(depth).connect().err().unwrap();
        assert_eq!(
            error.to_string(),
            format!("pipeline_depth = {depth}: write a number from 1 to 1024")
        );
    }
    for depth in [1, 1024] {
        let client = builder.clone().pipeline_depth(depth).connect().unwrap();
        let mut session = client.session().unwrap();
        assert_eq!(session.pipeline().unwrap().depth(), usize::from(depth));
    }
}

#[on(shm, tcp_in_soak)]
fn debug_output_describes_every_type_and_shows_no_secret() {
    let running = server();
    let (server, secret) = (running.address(), "open sesame");
    let builder = || running.client_builder().pipeline_depth(7);
    let shown = format!("{:?}", builder().secret(secret));
    assert!(shown.contains("pipeline_depth: 7") && !shown.contains(secret), "{shown}");
    assert!(!shown.contains("secret_key"), "{shown}");
    let client = builder().connect().unwrap();
    let mut session = client.session().unwrap();
    assert_eq!(format!("{client:?}"), format!("Client {{ server: {server:?}, role: Writer, .. }}"));
    assert_eq!(format!("{session:?}"), format!("Session {{ server: {server:?}, .. }}"));
    let batch = session.batch().get(b"a").get(b"b");
    assert_eq!(format!("{batch:?}"), "Batch { operations: 2, .. }");
    let mut pipeline = session.pipeline().unwrap();
    pipeline.get(b"a").unwrap();
    assert_eq!(format!("{pipeline:?}"), "Pipeline { depth: 7, in_flight: 1, .. }");
    drop(pipeline);
    assert_eq!(format!("{:?}", session.scan().unwrap()), "Scan(Walk { has_ended: false, .. })");
}

#[on(shm, tcp_in_soak)]
fn the_expected_value_need_only_outlive_the_operation() {
    let server = server();
    let mut session = server.session();
    session.put(b"key", b"one").unwrap();
    let (one, two) = (b"one".to_vec(), b"two".to_vec());
    let batch = session.batch().store(b"key", &two, Store::if_value(&one));
    assert!(matches!(batch.run().unwrap()[..], [Ok(Outcome { applied: true, .. })]));
    let mut pipeline = session.pipeline().unwrap();
    for (expected, holds) in [(&one, false), (&two, true)] {
        pipeline.store(b"key", b"three", Store::if_value(expected)).unwrap();
        let result = pipeline.wait().unwrap().result.unwrap();
        assert_eq!(result.applied, holds);
    }
    drop(pipeline);
    assert_eq!(*session.get(b"key").unwrap().unwrap(), *b"three");
}

/// Guards against a pipeline that answers before it advances: then a caller that repeats an
/// operation which fails at once would keep all others from being executed.
#[on(shm, tcp_in_soak)]
fn an_operation_that_fails_again_and_again_holds_up_no_other() {
    let server = ServerProcess::start("--memory 16MiB");
    let mut session = server.session();
    session.put("key", "value").unwrap();
    let mut pipeline = session.pipeline().unwrap();
    let good = pipeline.get("key").unwrap();
    let started = Instant::now();
    loop {
        pipeline.get("").unwrap();
        let completed = pipeline.wait().unwrap();
        if completed.ticket == good {
            return assert!(completed.result.unwrap().applied);
        }
        assert!(completed.result.is_err());
        assert!(started.elapsed() < TEST_TIMEOUT, "the other operation does not complete");
    }
}

#[on(each, rdma_in_soak)]
fn a_reader_reads_and_is_denied_the_rest() {
    let server = ServerProcess::start("--memory 32MiB");
    server.session().put(b"key", b"value").unwrap();
    let reader = server.client_builder().role(Role::Reader).connect().unwrap();
    let mut session = reader.session().unwrap();
    assert_eq!(*session.get(b"key").unwrap().unwrap(), *b"value");
    let before = session.counters();
    assert!(matches!(session.put(b"key", b"other"), Err(Error::Operation(Denied))));
    assert!(matches!(session.insert(b"new", b"other"), Err(Error::Operation(Denied))));
    assert!(matches!(session.update(b"key", b"other"), Err(Error::Operation(Denied))));
    assert!(matches!(session.delete(b"key"), Err(Error::Operation(Denied))));
    assert!(matches!(
        session.compare_exchange(b"key", None, b"other"),
        Err(Error::Operation(Denied))
    ));
    let mut pipeline = session.pipeline().unwrap();
    pipeline.put(b"key", b"other").unwrap();
    assert!(matches!(pipeline.wait().unwrap().result, Err(Error::Operation(Denied))));
    drop(pipeline);
    assert_eq!(session.counters(), before, "the region was not touched");
    assert_eq!(*session.get(b"key").unwrap().unwrap(), *b"value");
}

#[on(each, rdma_in_soak)]
fn the_secret_decides_whether_a_client_may_write() {
    let config = "secret = 'writers'\nreader_secret = 'readers'\n";
    let server = ServerProcess::start_with_config(config, "--memory 32MiB");
    let connect = |secret: &str, role| {
        Client::builder().server(&server.address()).secret(secret).role(role).connect()
    };
    assert!(connect("writers", Role::Writer).is_ok());
    assert!(connect("writers", Role::Reader).is_ok());
    assert!(connect("readers", Role::Reader).is_ok());
    for refused in [connect("readers", Role::Writer), connect("guess", Role::Reader)] {
        let error = refused.err().unwrap();
        assert!(matches!(error, SetupError::Connect(Refused { .. })), "{error}");
        assert!(error.to_string().contains("secret"), "{error}");
    }
    let without = server.client_builder().connect();
    assert!(matches!(without, Err(SetupError::Connect(Refused { .. }))));
}

#[on(each, rdma_in_soak)]
fn keys_and_values_of_all_lengths_can_be_stored_and_read() {
    let server = ServerProcess::start("--memory 64MiB --value-bytes-max 1048576");
    let mut session = server.session();
    let limits = session.limits();
    let values = [0, 1, 7, 8, 9, 31, 32, 33, 4096, 65_536, 1 << 20];
    assert_eq!(limits.value_bytes_max, 1 << 20);
    for (n, bytes) in values.into_iter().enumerate() {
        for key_bytes in [1, 2, 8, 100, limits.key_bytes_max] {
            let mut key = vec![0xff; key_bytes];
            key[0] = n as u8;
            let value: Vec<u8> =
                self_describing::value(1, 2, 3, bytes.max(24)).split_off(24.min(bytes));
            let value = if bytes < 24 { vec![n as u8; bytes] } else { value };
            for round in 0..2 {
                session.put(&key, &value).unwrap();
                assert_eq!(session.get(&key).unwrap().unwrap().data, value, "round {round}");
                session.clear_cache();
                assert_eq!(session.get(&key).unwrap().unwrap().data, value, "uncached");
            }
            assert!(session.delete(&key).unwrap());
        }
    }
}

#[on(each, rdma_in_soak)]
fn similar_binary_keys_are_distinguished() {
    let server = ServerProcess::start("--memory 32MiB");
    let mut session = server.session();
    let keys: Vec<Vec<u8>> = (0..=255u8)
        .flat_map(|byte| [vec![byte], vec![byte, 0], vec![0, byte, 0], vec![byte; 64]])
        .collect();
    let mut distinct: Vec<&Vec<u8>> = keys.iter().collect();
    distinct.sort_unstable();
    distinct.dedup();
    for key in &distinct {
        session.put(key, key).unwrap();
    }
    for key in &distinct {
        assert_eq!(session.get(key).unwrap().unwrap().data, **key);
    }
    assert_eq!(session.scan().unwrap().count(), distinct.len());
}

#[on(each, rdma_in_soak)]
fn one_byte_too_many_is_refused() {
    let server = ServerProcess::start("--memory 32MiB --value-bytes-max 1000");
    let mut session = server.session();
    let before = session.counters();
    let long_key = session.put([0; 1025], b"value").unwrap_err();
    assert!(
        matches!(long_key, Error::Operation(KeyTooLong { bytes: 1025, max: 1024 })),
        "{long_key}"
    );
    assert!(long_key.to_string().contains("1025") && long_key.to_string().contains("1024"));
    assert!(matches!(session.get([0; 1025]), Err(Error::Operation(KeyTooLong { .. }))));
    assert!(matches!(
        session.delete([0; 70_000]),
        Err(Error::Operation(KeyTooLong { bytes: 70_000, .. }))
    ));
    let long_value = session.put(b"key", [0; 1001]).unwrap_err();
    assert!(
        matches!(long_value, Error::Operation(ValueTooLong { bytes: 1001, max: 1000 })),
        "{long_value}"
    );
    assert!(matches!(session.put(b"", b"value"), Err(Error::Operation(KeyEmpty))));
    let mut pipeline = session.pipeline().unwrap();
    pipeline.put(b"key", [0; 1001]).unwrap();
    let completed = pipeline.wait().unwrap();
    assert!(matches!(completed.result, Err(Error::Operation(ValueTooLong { .. }))));
    drop(pipeline);
    assert_eq!(session.counters(), before, "nothing was sent");
    session.put([1; 1024], [1; 1000]).unwrap();
    assert_eq!(session.get([1; 1024]).unwrap().unwrap().len(), 1000);
}

#[on(each, rdma_in_soak)]
fn keys_and_values_of_the_largest_limits_can_be_stored() {
    let key_bytes = 65_535;
    let value_bytes = (4 << 20) - 32 - key_bytes;
    // A READ of 4 MiB takes 100 ms over RDMA in emulation.
    let server = ServerProcess::start(&format!(
        "--memory 64MiB --grace-ms 2000 --key-bytes-max {key_bytes} --value-bytes-max {value_bytes}"
    ));
    let mut session = server.session();
    let (key, value) = (vec![7; key_bytes], self_describing::value(1, 1, 1, value_bytes));
    session.put(&key, &value).unwrap();
    assert_eq!(session.get(&key).unwrap().unwrap().data, value);
    server.assert_verifies();
    assert!(session.delete(&key).unwrap());
}

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
