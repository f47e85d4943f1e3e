//! Runs the examples in the documentation of `farside` and in README.md, each against a server of
//! its own. `cargo test --doc` only compiles them. `tests/build.rs` makes a test of each; its name
//! has the file and line of the example.
#![allow(unused, clippy::all, reason = "as in doctests")]

use std::error::Error;

use farside::{AsyncClient, Session};
use farside_tests::ServerProcess;

std::thread_local!(static SERVER: ServerProcess = ServerProcess::start("--memory 64MiB"));

/// The address in an example stands for this one.
fn address() -> String {
    SERVER.with(ServerProcess::address)
}

/// The session of an example that gets one as an argument.
fn session() -> Session {
    SERVER.with(ServerProcess::session)
}

/// The client of an example with async code.
fn async_client() -> farside::Result<AsyncClient> {
    SERVER.with(ServerProcess::client).async_client()
}

/// Runs an example on a thread of its own, whose end stops the server.
fn run(example: fn() -> Result<(), Box<dyn Error>>) {
    let thread = std::thread::spawn(move || example().map_err(|error| error.to_string()));
    assert_eq!(thread.join().expect("the example panicked"), Ok(()));
}

include!(concat!(env!("OUT_DIR"), "/doc_examples.rs"));
