//! Proves that no memory is lost. All blocks of killed clients are freed, and no others, while
//! other clients continue. After a collection each block is free, linked, or with a living client.
//! A client that signs off loses no block either. Forgotten pipelines are harmless, and so are
//! pipelines whose server died or is stopped. A full region is reported and loses nothing, a DELETE
//! frees memory, and overwriting needs no more memory.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use farside::ConnectError::Unreachable;
use farside::OperationError::OutOfSpace;
use farside::{Client, Error, Exhausted, Session};
use farside_tests::{
    ServerProcess, StopOnDrop, TEST_TIMEOUT, Worker, blocks_with_clients, device, fill, fill_up,
    is_over_shm, scaled, self_describing, wait_for_all_blocks, wait_until,
};
use rustix::process::Signal;

/// Waits until at least `count` clients are connected.
fn wait_for_clients(observer: &Client, count: u64) {
    wait_until("the clients connect", TEST_TIMEOUT, || {
        observer.admin().statistics().unwrap().clients >= count
    });
}

/// The number of clients of a worker.
const CLIENTS: u64 = 2;
/// The number of sessions of a worker.
const SESSIONS: u64 = 2;

/// Starts a process that runs operations until it is killed.
fn worker(server: &ServerProcess, number: u64) -> Worker {
    let folder = server.folder().join("histories");
    std::fs::create_dir_all(&folder).unwrap();
    let first = number * SESSIONS;
    let mut arguments = vec![folder.display().to_string()];
    arguments.extend([first.to_string(), SESSIONS.to_string(), "endless".to_owned()]);
    Worker::start(env!("CARGO_BIN_EXE_history-worker"), server, number, arguments)
}

#[on(each, rdma_in_soak)]
fn blocks_of_killed_clients_are_freed_without_a_request() {
    let server = ServerProcess::start("--memory 256MiB --index 2MiB --grace-ms 20");
    let observer = server.client();
    const WORKERS: u64 = 4;
    let workers: Vec<Worker> = (0..WORKERS).map(|number| worker(&server, number)).collect();
    wait_for_clients(&observer, CLIENTS * WORKERS + 1);
    std::thread::sleep(Duration::from_millis(300));
    workers.into_iter().for_each(Worker::kill);
    wait_for_all_blocks(&observer);
    let statistics = observer.admin().statistics().unwrap();
    assert_eq!(statistics.clients_lost, CLIENTS * WORKERS);
    assert!(statistics.blocks_collected > WORKERS, "{statistics:?}");
    server.assert_verifies();
}

#[on(each)]
fn collections_harm_no_living_client_and_miss_no_dead_one() {
    let server = ServerProcess::start("--memory 512MiB --index 2MiB --grace-ms 20");
    let observer = server.client();
    const LIVING: usize = 3;
    let mut workers: Vec<Worker> = (0..LIVING as u64 + 1).map(|n| worker(&server, n)).collect();
    let mut started = workers.len() as u64;
    let kills = scaled(20).max(10);
    for _ in 0..kills {
        wait_for_clients(&observer, CLIENTS * (LIVING as u64 + 1) + 1);
        // A worker is killed at some moment of the collection, and another one starts.
        let victim = workers.swap_remove(LIVING);
        std::thread::scope(|scope| {
            let collecting = scope.spawn(|| observer.admin().collect().unwrap());
            victim.kill();
            workers.push(worker(&server, started));
            started += 1;
            collecting.join().unwrap();
        });
    }
    workers.into_iter().for_each(Worker::kill);
    let statistics = observer.admin().collect().unwrap();
    assert_eq!(blocks_with_clients(&observer), 0, "{statistics:?}");
    assert!(statistics.collections > kills);
    // Some workers were killed before they connected.
    let lost = statistics.clients_lost;
    assert!((kills / 2..=CLIENTS * started).contains(&lost), "{statistics:?}");
    server.assert_verifies();
}

#[on(each, rdma_in_soak)]
fn a_collection_takes_no_block_from_an_idle_session() {
    let server = ServerProcess::start("--memory 32MiB --grace-ms 5");
    let client = server.client();
    let mut idle = client.session().unwrap();
    for n in 0..1000u64 {
        idle.put(n.to_le_bytes(), [1; 100]).unwrap();
        idle.delete(n.to_le_bytes()).unwrap();
    }
    let observer = server.client();
    // In this collection the client reported its blocks, so the blocks it requested have arrived.
    observer.admin().collect().unwrap();
    let held = blocks_with_clients(&observer);
    assert!(held > 0);
    // The server asks the client's control thread which blocks it holds. The session need not wake.
    let after = observer.admin().collect().unwrap();
    assert_eq!(after.blocks_collected, 0);
    assert_eq!(blocks_with_clients(&observer), held);
    fill(&mut idle, 0..1000, |_| [2; 100]);
    drop((idle, client));
    wait_for_all_blocks(&observer);
}

/// Over RDMA the server fences a stopped process by destroying its queue pairs, its only access to
/// the region.
#[on(each)]
fn a_client_that_does_not_answer_is_fenced_and_others_continue() {
    let server = ServerProcess::start("--memory 64MiB --grace-ms 20");
    let mut stopped = worker(&server, 0);
    let observer = server.client();
    wait_until("the worker has blocks", TEST_TIMEOUT, || blocks_with_clients(&observer) != 0);
    stopped.stop();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let stop_guard = StopOnDrop(&stop);
        let working = scope.spawn(|| {
            let mut session = observer.session().unwrap();
            let mut count = 0u64;
            while !stop.load(Ordering::Relaxed) {
                // Not a key that the worker uses.
                let key = [b"observed ", &(count % 100).to_le_bytes()[..]].concat();
                session.put(&key, count.to_le_bytes()).unwrap();
                count += 1;
            }
            count
        });
        let statistics = observer.admin().collect().unwrap();
        assert_eq!((statistics.clients_lost, statistics.clients), (CLIENTS, 1));
        drop(stop_guard);
        assert!(working.join().unwrap() > 0);
    });
    // The resumed worker finds its clients fenced, so they reconnect and continue.
    stopped.resume();
    wait_until("the worker reconnects", TEST_TIMEOUT, || {
        stopped.check();
        observer.admin().statistics().unwrap().clients > CLIENTS
    });
    stopped.kill();
    observer.admin().collect().unwrap();
    assert_eq!(blocks_with_clients(&observer), 0);
    server.assert_verifies();
}

#[on(each, rdma_in_soak)]
fn a_goodbye_loses_no_block() {
    let server = ServerProcess::start("--memory 32MiB --grace-ms 5");
    let observer = server.client();
    for round in 0..20u64 {
        let client = server.client();
        let mut session = client.session().unwrap();
        // Each length has its own class. The last PUT of a class requests more blocks, which arrive
        // after the client is gone.
        for n in 0..66u64 {
            let bytes = (n % 7) as usize * 60;
            session.put((round * 66 + n).to_le_bytes(), vec![1; bytes]).unwrap();
        }
        for n in 0..20u64 {
            assert!(session.delete((round * 66 + n).to_le_bytes()).unwrap());
        }
        drop((session, client));
    }
    wait_until("the last client signs off", TEST_TIMEOUT, || {
        observer.admin().statistics().unwrap().clients == 1
    });
    assert_eq!(blocks_with_clients(&observer), 0);
    assert_eq!(observer.admin().statistics().unwrap().clients_lost, 0);
}

#[on(each, rdma_in_soak)]
fn blocks_that_one_session_frees_can_be_used_by_another() {
    let server = ServerProcess::start("--memory 16MiB --index 2MiB --grace-ms 5");
    let client = server.client();
    // Over RDMA, where each PUT takes long, fewer of them fill the heap.
    let value = vec![1; if device().is_some() { 4000 } else { 400 }];
    let mut first = client.session().unwrap();
    let (stored, _) = fill_up(&mut first, 0, |_| &value);
    let mut second = client.session().unwrap();
    let denied = second.put(b"new", &value);
    assert!(matches!(denied, Err(Error::Operation(OutOfSpace { .. }))), "{denied:?}");
    for n in 0..stored {
        assert!(first.delete(n.to_le_bytes()).unwrap());
        if n % 1000 == 0 {
            std::thread::sleep(first.limits().grace);
        }
    }
    std::thread::sleep(3 * first.limits().grace);
    // With its next DELETE the first session gives back the blocks that it freed within GRACE.
    first.put(b"one", &value).unwrap();
    first.delete(b"one").unwrap();
    let (usable, _) = fill_up(&mut second, 0, |_| &value);
    assert!(usable > stored / 2, "{usable} of {stored}");
    server.assert_verifies();
}

#[on(each, rdma_in_soak)]
fn a_pipeline_is_disconnected_when_its_server_is_killed() {
    let mut server = ServerProcess::start("--memory 32MiB");
    let client = server.client();
    let mut session = client.session().unwrap();
    let mut pipeline = session.pipeline().unwrap();
    pipeline.put(b"key", b"value").unwrap();
    assert!(pipeline.wait().unwrap().result.unwrap().applied);
    server.kill();
    server.restart();
    let error = loop {
        pipeline.put(b"key", b"value").unwrap();
        match pipeline.wait().unwrap().result {
            // The client has not noticed the server's death yet.
            Ok(_) => std::thread::yield_now(),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::Disconnected { .. }), "{error}");
    drop(pipeline);
    assert_eq!(session.get(b"key").unwrap(), None);
}

#[on(each, rdma_in_soak)]
fn a_forgotten_pipeline_does_no_harm() {
    let server = ServerProcess::start("--memory 32MiB --grace-ms 5");
    let mut session = server.session();
    for round in 0..10u64 {
        session.put(b"key", round.to_le_bytes()).unwrap();
        let mut pipeline = session.pipeline().unwrap();
        pipeline.put(b"key", b"in flight").unwrap();
        pipeline.poll();
        pipeline.put(b"key", b"also in flight").unwrap();
        std::mem::forget(pipeline);
        let mut next = session.pipeline().unwrap();
        next.put(b"key", b"next").unwrap();
        assert!(next.wait().unwrap().result.unwrap().applied);
        drop(next);
        session.put(b"key", round.to_le_bytes()).unwrap();
        assert_eq!(session.get(b"key").unwrap().unwrap().data, round.to_le_bytes());
    }
    server.assert_verifies();
}

#[on(each, rdma_in_soak)]
fn a_pipeline_that_a_panic_ends_does_no_harm() {
    let server = ServerProcess::start("--memory 32MiB --grace-ms 5");
    let mut session = server.session();
    let fails = AssertUnwindSafe(|| {
        let mut pipeline = session.pipeline().unwrap();
        pipeline.put(b"key", b"in flight").unwrap();
        resume_unwind(Box::new("not printed"));
    });
    assert!(catch_unwind(fails).is_err());
    session.put(b"key", b"next").unwrap();
    assert_eq!(session.get(b"key").unwrap().unwrap(), "next");
    server.assert_verifies();
}

// Not over TCP: how far a poll comes depends on the network.
#[on(shm, rdma_in_soak)]
fn an_unfinished_insert_of_a_forgotten_pipeline_is_cleared() {
    let server = ServerProcess::start("--memory 32MiB");
    let observer = server.client();
    let client = server.client();
    let mut session = client.session().unwrap();
    // Uses all slots that "new" can have, so its INSERT must claim one with a PENDING word.
    for _ in 0..300 {
        session.put(b"new", b"value").unwrap();
        assert!(session.delete(b"new").unwrap());
    }
    let mut pipeline = session.pipeline().unwrap();
    pipeline.insert(b"new", b"value").unwrap();
    // READ window; claim a slot, READ window. The deciding chain is posted, but never rung.
    assert!(pipeline.poll().is_none() && pipeline.poll().is_none());
    std::mem::forget(pipeline);
    drop((session, client));
    wait_until("the client is lost", TEST_TIMEOUT, || {
        observer.admin().statistics().unwrap().clients_lost > 0
    });
    server.wait_for_log("cleared the unfinished inserts of lost clients");
    assert!(observer.session().unwrap().insert(b"new", b"other").unwrap());
    server.assert_verifies();
}

// Not over TCP: the server executes the verbs, so no session goes on.
#[on(shm, rdma_in_soak)]
fn a_session_that_waits_in_vain_for_a_stopped_server_disturbs_no_other() {
    let server = ServerProcess::start("--memory 64MiB");
    let client = server.client();
    let [mut writer, mut reader] = [(); 2].map(|()| client.session().unwrap());
    reader.put(b"key", b"value").unwrap();
    server.pause();
    // The writer fails once it has no block left.
    let (_, error) = fill_up(&mut writer, 0, |_| [0; 10_000]);
    assert!(matches!(error, Error::Connect(Unreachable { .. })), "{error}");
    // Over RDMA a new session needs an answer of the server.
    match client.session() {
        Ok(_) => assert!(is_over_shm()),
        Err(error) => {
            assert!(matches!(error, Error::Connect(Unreachable { .. })), "{error}")
        }
    }
    assert_eq!(*reader.get(b"key").unwrap().unwrap(), *b"value");
    server.signal(Signal::CONT);
    writer.put(b"key", [0; 10_000]).unwrap();
    reader.put(b"key", b"other").unwrap();
    assert_eq!(server.client().admin().statistics().unwrap().clients_lost, 0);
}

#[on(each, rdma_in_soak)]
fn a_batch_waits_for_a_stopped_server_once() {
    const DEPTH: u16 = 4;
    let new: Vec<_> = (0..DEPTH).map(u16::to_le_bytes).collect();
    let server = ServerProcess::start("--memory 64MiB");
    server.session().put(b"key", b"value").unwrap();
    let client = server.client_builder().pipeline_depth(DEPTH).connect().unwrap();
    let mut session = client.session().unwrap();
    server.pause();
    let mut batch = session.batch();
    // The session has no block yet. GETs need none, but queue after operations that wait for some.
    for key in &new {
        batch = batch.put(key, b"value");
    }
    for key in &new {
        batch = batch.get(b"key").insert(key, b"value");
    }
    let results = batch.run().unwrap();
    let has_waited = |error: &Error| match error {
        Error::Connect(Unreachable { tried, .. }) => !tried.is_zero(),
        _ => false,
    };
    assert_eq!(results.len(), 3 * usize::from(DEPTH));
    assert!(results.iter().all(|result| result.as_ref().is_err_and(has_waited)), "{results:?}");
    server.signal(Signal::CONT);
    assert!(session.insert(new[0], b"value").unwrap(), "the failed PUT stored nothing");
    assert_eq!(*session.get(b"key").unwrap().unwrap(), *b"value");
}

#[on(each, rdma_in_soak)]
fn a_client_can_be_dropped_while_its_server_is_stopped() {
    let server = ServerProcess::start("--memory 64MiB --grace-ms 5");
    let client = server.client();
    let mut session = client.session().unwrap();
    let keys = scaled(100_000);
    fill(&mut session, 0..keys, |_| b"value");
    (0..keys).for_each(|n| assert!(session.delete(n.to_le_bytes()).unwrap()));
    server.pause();
    // The drop must return although the blocks that it gives back do not fit into the socket.
    drop((session, client));
    server.signal(Signal::CONT);
}

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
