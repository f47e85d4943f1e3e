//! Proves that operations allocate nothing on the heap in the steady state.

use std::time::{Duration, Instant};

use farside::Store;
use farside_tests::allocations::{CountingAllocator, of_this_thread};
use farside_tests::{ServerProcess, TEST_TIMEOUT, scaled, wait_until};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Allocations of this thread during the call.
fn allocations(call: impl FnOnce()) -> u64 {
    let before = of_this_thread();
    call();
    of_this_thread() - before
}

/// Asserts that a call makes just this many allocations. A call may make more while the system
/// delays the client or its server: the client then requests blocks, or proves locations anew. So
/// the call is repeated. An operation that always allocates more does so in every call.
#[track_caller]
fn assert_allocates(expected: u64, mut call: impl FnMut()) {
    let deadline = Instant::now() + TEST_TIMEOUT;
    let mut least = u64::MAX;
    while least > expected && Instant::now() < deadline {
        least = least.min(allocations(&mut call));
    }
    assert_eq!(least, expected);
}

#[on(each, rdma_in_soak)]
fn the_counter_counts() {
    assert_eq!(allocations(|| drop(std::hint::black_box(Box::new(1)))), 1);
}

const KEYS: u64 = 100;

/// The server of a full cache wants to know what is read.
#[on(each, rdma_in_soak)]
fn reads_that_are_reported_allocate_nothing() {
    let server = ServerProcess::start("--memory 16MiB --grace-ms 1 --evict");
    let client = server.client();
    let mut session = client.session().unwrap();
    let mut next = KEYS;
    session.get(u64::MAX.to_le_bytes()).unwrap();
    wait_until("the client has reported its reads", TEST_TIMEOUT, || {
        (next..next + 1000).for_each(|n| session.put(n.to_le_bytes(), [1; 1000]).unwrap());
        next += 1000;
        client.admin().statistics().unwrap().reads_absent > 0
    });
    let mut value = Vec::with_capacity(100);
    (0..KEYS).for_each(|n| session.put(n.to_le_bytes(), [1; 100]).unwrap());
    let mut round = |clear: bool| {
        for n in 0..KEYS {
            if clear {
                session.clear_cache();
            }
            session.get_into(n.to_le_bytes(), &mut value).unwrap();
        }
    };
    round(true);
    assert_eq!(allocations(|| (0..100).for_each(|_| round(false))), 0);
    assert_allocates(0, || round(true));
}

#[on(each, rdma)]
fn operations_allocate_nothing() {
    let server = ServerProcess::start("--memory 64MiB --index 4MiB --grace-ms 1");
    let mut session = server.session();
    let mut value = Vec::with_capacity(100);
    let mut round = |clear: bool| {
        for n in 0..KEYS {
            let key = n.to_le_bytes();
            if clear {
                session.clear_cache();
            }
            session.put(key, [1; 100]).unwrap();
            session.get_into(key, &mut value).unwrap().unwrap();
            session.update(key, [2; 100]).unwrap();
            session.insert(key, [3; 100]).unwrap();
            session
                .compare_exchange_version(key, farside::Version::from_u64(1), b"x")
                .map(drop)
                .unwrap();
            session.store(key, [4; 100], Store::always().keep_ttl()).unwrap();
            session.touch(key, Duration::from_secs(1000)).unwrap();
            session.append(key, [5; 100]).unwrap();
            session.exists(key).unwrap();
            session.delete(key).unwrap();
            session.increment(key, 7).unwrap();
            session.delete(key).unwrap();
            session.get_into(key, &mut value).unwrap();
        }
    };
    // What comes after this is repeated until the steady state.
    (0..20).for_each(|_| round(false));
    // A mismatch of compare-and-exchange returns the value: one allocation for the caller.
    assert_allocates(KEYS, || round(false));
    assert_allocates(KEYS, || round(true));
}

#[on(each, rdma_in_soak)]
fn long_values_allocate_nothing() {
    let server = ServerProcess::start("--memory 64MiB --index 4MiB --grace-ms 1");
    let mut session = server.session();
    let (long, mut vector, mut slice) = ([7; 10_000], Vec::with_capacity(10_000), [0; 10_000]);
    let mut round = || {
        for n in 0..KEYS {
            let key = n.to_le_bytes();
            session.put(key, long).unwrap();
            session.get_into(key, &mut vector).unwrap().unwrap();
            session.get_into(key, &mut slice).unwrap().unwrap();
        }
    };
    (0..100).for_each(|_| round());
    assert_allocates(0, round);
}

/// Values with extents have a way of their own, and 1 MiB is the longest usual value without them.
#[on(each)]
fn values_of_many_mib_allocate_nothing() {
    const MIB: usize = 1 << 20;
    let server = ServerProcess::start("--memory 256MiB --value-bytes-max 20971520 --grace-ms 1");
    let mut session = server.session();
    for bytes in [MIB, 5 * MIB, 16 * MIB + 8] {
        println!("{bytes} bytes");
        let long = vec![7; bytes];
        let (mut vector, mut slice) = (Vec::with_capacity(bytes), vec![0; bytes]);
        let mut round = || {
            for n in 0..3u64 {
                let key = n.to_le_bytes();
                session.put(key, &long).unwrap();
                session.get_into(key, &mut vector).unwrap().unwrap();
                session.get_into(key, &mut slice[..]).unwrap().unwrap();
            }
        };
        (0..10).for_each(|_| round());
        assert_allocates(0, round);
        assert!(vector == long && slice == long);
        // What `get` returns is the only allocation.
        let get = || drop(session.get(0u64.to_le_bytes()).unwrap().unwrap());
        assert_allocates(1, get);
    }
}

#[on(each, rdma_in_soak)]
fn a_pipeline_allocates_nothing_once_it_is_warm() {
    let server = ServerProcess::start("--memory 64MiB --index 4MiB --grace-ms 1");
    let client = server.client_builder().pipeline_depth(16).connect().unwrap();
    let mut session = client.session().unwrap();
    let mut pipeline = session.pipeline().unwrap();
    let operations = scaled(25_000);
    let mut round = || {
        for n in 0..operations {
            let key = (n % 100).to_le_bytes();
            while pipeline.free_lanes() == 0 {
                pipeline.wait().unwrap().result.unwrap();
            }
            match n % 3 {
                0 => pipeline.put(key, [1; 100]).unwrap(),
                1 => pipeline.get(key).unwrap(),
                _ => pipeline.delete(key).unwrap(),
            };
        }
    };
    for _ in 0..20 {
        round();
    }
    assert_allocates(0, round);
}

/// A batch allocates what it returns: the list of outcomes, and each value that a GET found.
#[on(each, rdma_in_soak)]
fn a_batch_allocates_only_what_it_returns() {
    const BATCH: u64 = 32;
    let server = ServerProcess::start("--memory 64MiB --index 4MiB --grace-ms 1");
    let client = server.client_builder().pipeline_depth(BATCH as u16).connect().unwrap();
    let mut session = client.session().unwrap();
    let keys: Vec<[u8; 8]> = (0..BATCH).map(u64::to_le_bytes).collect();
    let mut batch = |puts: bool| {
        let batch = keys.iter().fold(session.batch(), |batch, key| match puts {
            true => batch.put(key, [7; 100]),
            false => batch.get(key),
        });
        assert!(batch.run().unwrap().iter().all(Result::is_ok));
    };
    for _ in 0..scaled(2_000) {
        batch(true);
        batch(false);
    }
    assert_allocates(1, || batch(true));
    assert_allocates(1 + BATCH, || batch(false));
}

#[on(each, rdma_in_soak)]
fn a_batch_allocates_the_same_at_any_depth() {
    let server = ServerProcess::start("--memory 32MiB");
    let batch_of_two = |depth| {
        let client = server.client_builder().pipeline_depth(depth).connect().unwrap();
        let mut session = client.session().unwrap();
        let [a, b] = [0, 1].map(u64::to_le_bytes);
        let mut batch = || drop(session.batch().get(a).get(b).run().unwrap());
        (0..10).map(|_| allocations(&mut batch)).min()
    };
    assert_eq!(batch_of_two(2), batch_of_two(1024));
}
