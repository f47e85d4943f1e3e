//! Proves that keys and values of every allowed length can be stored and read, and that one byte
//! too many is an error that names both lengths.

use farside::Error;
use farside::OperationError::{KeyEmpty, KeyTooLong, ValueTooLong};
use farside_tests::{ServerProcess, self_describing};

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
