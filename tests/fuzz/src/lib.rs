//! What Farside's decoders are fuzzed with. Each target takes any bytes, decodes them and asserts
//! what has to hold: no panic, what was decoded encodes to the same bytes, what was accepted is
//! within its bounds.
//!
//! The same targets run twice: under libFuzzer, by the binary in `fuzz_targets` (`make fuzz`),
//! and on mutations of their seeds in the test `smoke`, on any toolchain.
//!
//! Where a checksum stands before the rest of a decoder, a target also puts it right: nothing
//! behind it would be reached otherwise, and an attacker who damages a region can compute one.
#![deny(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "what panics here is a finding")]

mod config;
mod control;
mod layout;
pub mod mutate;
mod region;
pub mod sample;
mod snapshot;
mod tools;

use std::sync::LazyLock;

use farside_config::command_line::one_line;

/// Something that takes any bytes.
#[derive(Clone, Copy)]
pub struct Target {
    /// The name of its folder of kept inputs, too.
    pub name: &'static str,
    /// Decodes the bytes; panics if anything does not hold. Whether they were accepted.
    pub accepts: fn(&[u8]) -> bool,
    /// Freshly encoded objects, all of which are accepted.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

const fn target(
    name: &'static str,
    accepts: fn(&[u8]) -> bool,
    seeds: fn() -> Vec<Vec<u8>>,
) -> Target {
    Target { name, accepts, seeds }
}

/// All of them.
pub const TARGETS: &[Target] = &[
    target("superblock", layout::superblock, layout::superblocks),
    target("window", layout::window, layout::windows),
    target("block", layout::block, layout::blocks),
    target("request", control::request, control::requests),
    target("reply", control::reply, control::replies),
    target("hello", control::hello, control::hellos),
    target("welcome", control::welcome, control::welcomes),
    target("server_config", config::server, config::servers),
    target("client_config", config::client, config::clients),
    target("region", region::damaged, region::damages),
    target("snapshot", snapshot::file, snapshot::files),
    target("records", snapshot::records, snapshot::some_records),
    target("json_lines", tools::json_lines, tools::some_json_lines),
    target("text", tools::text, tools::texts),
];

/// The environment variable that names one of [`TARGETS`]. libFuzzer reads the arguments itself.
const CHOICE: &str = "FARSIDE_FUZZ_TARGET";

static CHOSEN: LazyLock<&Target> = LazyLock::new(|| {
    let name = std::env::var(CHOICE).unwrap_or_default();
    let named = TARGETS.iter().find(|target| target.name == name);
    named.unwrap_or_else(|| panic!("{CHOICE} is {name:?}, which names no target"))
});

/// Runs the target that `FARSIDE_FUZZ_TARGET` names.
///
/// # Panics
/// When it names none, and with every finding.
pub fn run(bytes: &[u8]) {
    (CHOSEN.accepts)(bytes);
}

/// What people are told is one line, and does nothing to their terminal.
fn is_told_in_one_line(error: &(dyn std::error::Error + 'static)) {
    let line = one_line(error);
    assert!(!line.is_empty() && !line.contains(char::is_control), "{line:?}");
}
