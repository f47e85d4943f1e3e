//! Proves that no block is lost when a client signs off. Forgotten pipelines are harmless, and so
//! are pipelines whose server died or is stopped.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use farside::ConnectError::Unreachable;
use farside::Error;
use farside::OperationError::OutOfSpace;
use farside_tests::{
    ServerProcess, TEST_TIMEOUT, blocks_with_clients, device, fill, fill_up, is_over_shm, scaled,
    wait_until,
};
use rustix::process::Signal;

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
