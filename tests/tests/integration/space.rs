//! Proves that a full server says so and loses nothing, that deleting makes room, and that
//! overwriting needs none.

use std::time::Duration;

use farside::{Error, Exhausted};
use farside_tests::{ServerProcess, device, proof, scaled};

#[test]
fn a_full_heap_says_so_and_deleting_makes_room() {
    let server = ServerProcess::start(&["--memory", "16MiB", "--index", "2MiB"]);
    let client = server.client();
    let mut session = client.session().unwrap();
    let mut stored = 0u64;
    let error = loop {
        match session.put(&stored.to_le_bytes(), &proof::value(stored, 0, 0, 1000)) {
            Ok(()) => stored += 1,
            Err(error) => break error,
        }
    };
    let Error::OutOfSpace { what: Exhausted::Blocks { bytes: 1280 } } = error else {
        panic!("{error}")
    };
    assert!(stored > 5000, "{stored} values of 1000 bytes in 16 MiB");
    for key in 0..stored {
        let value = session.get(&key.to_le_bytes()).unwrap().unwrap();
        assert!(proof::holds(key, &value), "key {key}");
    }
    server.assert_verifies();
    for key in 0..stored / 2 {
        assert!(session.delete(&key.to_le_bytes()).unwrap());
    }
    std::thread::sleep(session.limits().grace);
    for key in 0..stored / 2 {
        session.put(&key.to_le_bytes(), &proof::value(key, 1, 0, 1000)).unwrap();
    }
    for key in 0..stored {
        let value = session.get(&key.to_le_bytes()).unwrap().unwrap();
        assert!(proof::holds(key, &value), "key {key}");
    }
    server.assert_verifies();
}

#[test]
fn what_one_client_deletes_another_can_use() {
    let server = ServerProcess::start(&["--memory", "16MiB", "--index", "2MiB"]);
    // Fewer fill the heap where each takes long.
    let bytes = if device().is_some() { 10_000 } else { 1000 };
    let stored = {
        let mut session = server.client().session().unwrap();
        let fill = |n: &u64| session.put(&n.to_le_bytes(), &vec![1; bytes]).is_ok();
        let stored = (0u64..).take_while(fill).count() as u64;
        (0..stored).for_each(|n| assert!(session.delete(&n.to_le_bytes()).unwrap()));
        stored
    };
    // The first client is gone; what it held rests at the server.
    std::thread::sleep(Duration::from_millis(200));
    let mut session = server.client().session().unwrap();
    for n in 0..stored {
        session.put(&n.to_le_bytes(), &vec![2; bytes]).unwrap();
    }
}

#[test]
fn a_full_index_says_so() {
    let server = ServerProcess::start(&["--memory", "16MiB", "--index", "8KiB"]);
    let mut session = server.client().session().unwrap();
    let mut stored = 0u64;
    let error = loop {
        match session.put(&stored.to_le_bytes(), b"") {
            Ok(()) => stored += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::OutOfSpace { what: Exhausted::Index }), "{error}");
    // 448 places in 8 KiB: a single subtable fills to about two thirds before a window is full.
    assert!(stored > 150, "{stored}");
    for key in 0..stored {
        assert!(session.get(&key.to_le_bytes()).unwrap().is_some());
        assert!(session.delete(&key.to_le_bytes()).unwrap());
    }
    session.put(&stored.to_le_bytes(), b"").unwrap();
}

#[test]
fn ten_million_overwrites_in_a_small_region() {
    let server = ServerProcess::start(&["--memory", "16MiB", "--index", "1MiB"]);
    let mut session = server.client().session().unwrap();
    const KEYS: u64 = 1000;
    let overwrites = scaled(10_000_000);
    for count in 0..overwrites {
        let key = count % KEYS;
        session.put(&key.to_le_bytes(), &count.to_le_bytes()).unwrap();
    }
    for key in 0..KEYS {
        let value = session.get(&key.to_le_bytes()).unwrap().unwrap();
        assert_eq!(value.data, (overwrites - KEYS + key).to_le_bytes());
    }
    server.assert_verifies();
}
