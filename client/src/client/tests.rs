//! Connecting: a timeout that no clock can add to, depths that no session can have, and an attempt
//! that panics.

use std::panic::{AssertUnwindSafe, catch_unwind};

use farside_common::config::ServerConfig;
use farside_common::size::ByteSize;

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
