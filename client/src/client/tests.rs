//! Connecting: a timeout that no clock can add to, depths that no session can have, an attempt that
//! panics, and what Debug shows.

use std::panic::{AssertUnwindSafe, catch_unwind};

use farside_config::ServerConfig;
use farside_config::size::ByteSize;

use super::*;
use crate::test_server::TestServer;

/// Calls `test` with how to connect to a server.
fn with_server(test: impl FnOnce(ClientBuilder)) {
    let server =
        TestServer::start(ServerConfig { memory: Some(ByteSize::mib(8)), ..Default::default() });
    test(Client::builder().server(&server.address));
}

#[test]
fn no_timeout_is_too_long_for_the_clock() {
    with_server(|builder| {
        let client = builder.connect_timeout(Duration::MAX).connect().unwrap();
        let timeout = client.shared.connect_timeout();
        assert!(Instant::now().checked_add(timeout).is_some(), "{timeout:?}");
    });
}

#[test]
fn a_depth_out_of_range_is_refused() {
    with_server(|builder| {
        for depth in [0, 1025] {
            let error = builder.clone().pipeline_depth(depth).connect().err().unwrap();
            assert_eq!(
                error.to_string(),
                format!("pipeline_depth = {depth}: write a number from 1 to 1024")
            );
        }
        for depth in [1, 1024] {
            let client = builder.clone().pipeline_depth(depth).connect().unwrap();
            assert_eq!(client.shared.options.lanes, depth);
        }
    });
}

#[test]
fn everything_shows_what_it_is_and_no_secret() {
    with_server(|builder| {
        let secret = "open sesame";
        let builder = builder.pipeline_depth(7).secret(secret);
        let shown = format!("{builder:?}");
        assert!(shown.contains("pipeline_depth: 7") && !shown.contains(secret), "{shown}");
        assert!(!shown.contains("token"), "{shown}");
        let client = builder.connect().unwrap();
        let mut session = client.session().unwrap();
        let server = client.shared.server();
        assert_eq!(
            format!("{client:?}"),
            format!("Client {{ server: {server:?}, role: Writer, .. }}")
        );
        assert_eq!(format!("{session:?}"), format!("Session {{ server: {server:?}, .. }}"));
        let mut batch = session.batch();
        batch.get(b"a").get(b"b");
        assert_eq!(format!("{batch:?}"), "Batch { operations: 2, .. }");
        let mut pipeline = session.pipeline().unwrap();
        pipeline.get(b"a").unwrap();
        assert_eq!(format!("{pipeline:?}"), "Pipeline { depth: 7, in_flight: 1, .. }");
        drop(pipeline);
        assert_eq!(format!("{:?}", session.scan().unwrap()), "Scan { has_ended: false, .. }");
    });
}

#[test]
fn an_attempt_that_panics_leaves_nobody_waiting() {
    with_server(|builder| {
        let client = builder.connect().unwrap();
        client.shared.lock().connection.control.give_up();
        let attempt = || client.shared.connection_by(|| panic!("as it should"));
        assert!(catch_unwind(AssertUnwindSafe(attempt)).is_err());
        assert!(!client.shared.lock().is_connecting);
        client.shared.connection().unwrap();
    });
}
