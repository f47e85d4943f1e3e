//! The fuzz targets of Farside's decoders. Each target decodes any bytes. It checks that the
//! decoder does not panic, that the result encodes to the same bytes, and that it is within its
//! bounds.
//!
//! The same targets run twice: under libFuzzer, by the binary in `fuzz_targets` (`make fuzz`),
//! and on mutations of their seeds in the test `smoke`, on any toolchain.
//!
//! The targets of `tcp://` connections also execute the requests that they decode.
//!
//! If a decoder checks a checksum first, its target also corrects the checksum. Otherwise the code
//! after it would never run, and an attacker who damages a region can compute a checksum, too.
#![deny(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a panic here is a finding")]

mod control;
mod layout;
pub mod mutate;
pub mod sample;
mod tcp;
mod tools;

use std::sync::LazyLock;

use farside_config::command_line::one_line;

/// A decoder under test.
#[derive(Clone, Copy)]
pub struct Target {
    /// The target's name, and the name of its folder in `kept`.
    pub name: &'static str,
    /// Decodes the bytes, and panics if a check fails. Returns whether the decoder accepted them.
    pub accepts: fn(&[u8]) -> bool,
    /// Returns encoded objects, all of which the decoder accepts.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

const fn target(
    name: &'static str,
    accepts: fn(&[u8]) -> bool,
    seeds: fn() -> Vec<Vec<u8>>,
) -> Target {
    Target { name, accepts, seeds }
}

/// All fuzz targets.
pub const TARGETS: &[Target] = &[
    target("superblock", layout::superblock, layout::superblocks),
    target("window", layout::window, layout::windows),
    target("block", layout::block, layout::blocks),
    target("request", control::request, control::requests),
    target("reply", control::reply, control::replies),
    target("hello", control::hello, control::hellos),
    target("proof", control::proof, control::proofs),
    target("welcome", control::welcome, control::welcomes),
    target("map", control::map, control::maps),
    target("cluster_records", control::cluster_records, control::some_cluster_records),
    target("tcp_requests", tcp::execute_requests, tcp::some_requests),
    target("tcp_replies", tcp::decode_replies, tcp::some_replies),
    target("server_config", tools::server, tools::servers),
    target("client_config", tools::client, tools::clients),
    target("region", sample::damaged, sample::damages),
    target("snapshot", layout::file, layout::files),
    target("records", layout::records, layout::some_records),
    target("json_lines", tools::json_lines, tools::some_json_lines),
    target("text", tools::text, tools::texts),
    target("resp", tools::requests, tools::some_requests),
];

/// The environment variable that names one of [`TARGETS`]. libFuzzer reads the arguments itself.
const CHOICE: &str = "FARSIDE_FUZZ_TARGET";

static CHOSEN: LazyLock<&Target> = LazyLock::new(|| {
    let name = std::env::var(CHOICE).unwrap_or_default();
    let named = TARGETS.iter().find(|target| target.name == name);
    named.unwrap_or_else(|| {
        panic!("{CHOICE} is {name:?}, which is no target: TARGETS lists the names")
    })
});

/// Runs the target that `FARSIDE_FUZZ_TARGET` names.
///
/// # Panics
/// If `FARSIDE_FUZZ_TARGET` names no target, and if a check fails.
pub fn run(bytes: &[u8]) {
    (CHOSEN.accepts)(bytes);
}

/// Returns the decoded object. Checks the error of a refused input.
fn decoded<T, E: std::error::Error + 'static>(result: Result<T, E>) -> Option<T> {
    result.inspect_err(|error| check_error_line(error)).ok()
}

/// Checks that the message of an error is one line without control characters, which could change
/// the reader's terminal.
fn check_error_line(error: &(dyn std::error::Error + 'static)) {
    let line = one_line(error);
    assert!(!line.is_empty() && !line.contains(char::is_control), "{line:?}");
}
