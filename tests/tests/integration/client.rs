//! The client library: a timeout beyond the clock's range, depths out of range, the output of
//! Debug, and operations that fail at once.

use std::time::{Duration, Instant};

use farside::{Outcome, Store};
use farside_tests::{ServerProcess, TEST_TIMEOUT};

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
