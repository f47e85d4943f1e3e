//! Proves that a full region is reported and loses nothing, that a DELETE frees memory, and that
//! overwriting needs no more memory.

use std::time::Duration;

use farside::OperationError::OutOfSpace;
use farside::{Error, Exhausted, Session};
use farside_tests::{
    ServerProcess, TEST_TIMEOUT, device, fill, fill_up, scaled, self_describing, wait_until,
};

#[on(shm, tcp_in_soak, rdma_in_soak)]
fn blocks_that_one_client_freed_can_be_used_by_the_next() {
    let server = ServerProcess::start("--memory 16MiB --index 2MiB");
    // Over RDMA, where each PUT takes long, fewer of them fill the heap.
    let bytes = if device().is_some() { 10_000 } else { 1000 };
    let stored = {
        let mut session = server.session();
        let (stored, _) = fill_up(&mut session, 0, |_| vec![1; bytes]);
        (0..stored).for_each(|n| assert!(session.delete(n.to_le_bytes()).unwrap()));
        stored
    };
    // The first client is gone. The blocks that it had rest at the server.
    std::thread::sleep(Duration::from_millis(200));
    let mut session = server.session();
    fill(&mut session, 0..stored, |_| vec![2; bytes]);
}

#[on(shm, tcp_in_soak)]
fn a_full_heap_is_reported_and_a_delete_makes_room() {
    let server = ServerProcess::start("--memory 16MiB --index 2MiB");
    let mut session = server.session();
    let (stored, error) = fill_up(&mut session, 0, |key| self_describing::value(key, 0, 0, 1000));
    let Error::Operation(OutOfSpace { what: Exhausted::Blocks { bytes: 1280 } }) = error else {
        panic!("{error}")
    };
    assert!(stored > 5000, "{stored} values of 1000 bytes in 16 MiB");
    let expect_all = |session: &mut Session| {
        for key in 0..stored {
            let value = session.get(key.to_le_bytes()).unwrap().unwrap();
            assert!(self_describing::holds(key, &value), "key {key}");
        }
    };
    expect_all(&mut session);
    server.assert_verifies();
    for key in 0..stored / 2 {
        assert!(session.delete(key.to_le_bytes()).unwrap());
    }
    std::thread::sleep(session.limits().grace);
    fill(&mut session, 0..stored / 2, |key| self_describing::value(key, 1, 0, 1000));
    expect_all(&mut session);
    server.assert_verifies();
}

/// Blocks and the index use the same chunks: either may be the first to find none.
#[on(shm, tcp_in_soak)]
fn a_region_full_of_keys_says_so() {
    let server = ServerProcess::start("--memory 16MiB");
    let mut session = server.session();
    let keys_max = scaled(1_000_000);
    let mut stored = 0u64;
    let error = loop {
        match session.put(stored.to_le_bytes(), b"") {
            Ok(()) if stored == keys_max => break None,
            Ok(()) => stored += 1,
            Err(error) => break Some(error),
        }
    };
    // Over RDMA it takes too long to fill the region.
    let is_full =
        matches!(error, Some(Error::Operation(OutOfSpace { .. }))) || scaled(keys_max) < keys_max;
    assert!(is_full, "{error:?}");
    // A key takes a block of 64 bytes and 27 to 54 bytes of index, in 14 MiB.
    assert!(stored > keys_max / 10, "{stored}");
    for key in 0..stored {
        assert!(session.get(key.to_le_bytes()).unwrap().is_some());
        assert!(session.delete(key.to_le_bytes()).unwrap());
    }
    std::thread::sleep(session.limits().grace);
    session.put(stored.to_le_bytes(), b"").unwrap();
    server.assert_verifies();
}

#[on(shm, tcp_in_soak)]
fn a_small_region_takes_ten_million_overwrites() {
    let server = ServerProcess::start("--memory 16MiB --index 1MiB");
    let mut session = server.session();
    const KEYS: u64 = 1000;
    let overwrites = scaled(10_000_000);
    for count in 0..overwrites {
        let key = count % KEYS;
        session.put(key.to_le_bytes(), count.to_le_bytes()).unwrap();
    }
    for key in 0..KEYS {
        let value = session.get(key.to_le_bytes()).unwrap().unwrap();
        assert_eq!(value.data, (overwrites - KEYS + key).to_le_bytes());
    }
    server.assert_verifies();
}

/// Chunks of other sizes are free, but can serve this one only 288 x GRACE later.
#[on(shm, tcp_in_soak, rdma_in_soak)]
fn an_emptied_store_says_when_it_has_room_for_other_sizes() {
    let server = ServerProcess::start("--memory 16MiB --index 2MiB");
    let mut session = server.session();
    let grace = session.limits().grace;
    let (stored, _) = fill_up(&mut session, 0, |_| vec![1; 1000]);
    (0..stored).for_each(|n| assert!(session.delete(n.to_le_bytes()).unwrap()));
    drop(session);
    let observer = server.client();
    wait_until("the blocks are with the server", TEST_TIMEOUT, || {
        observer.admin().statistics().unwrap().chunks_emptying > 0
    });
    let error = server.session().put("key", [2; 100_000]).unwrap_err();
    let Error::Operation(OutOfSpace { what: Exhausted::BlocksUntil { room_in_ms, .. } }) = error
    else {
        panic!("{error}")
    };
    assert!(u128::from(room_in_ms) <= 288 * grace.as_millis(), "{error}");
    assert!(error.to_string().contains("room comes in"), "{error}");
}
