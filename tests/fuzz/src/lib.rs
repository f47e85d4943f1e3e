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
pub mod sample;
mod tcp;
mod tools;

use std::sync::LazyLock;

use farside_config::command_line::one_line;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

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

/// Limit on the length of a changed input, in bytes. A longer one is truncated.
const BYTES_MAX: usize = 4096;
/// Limit on the changes of one input.
const CHANGES_MAX: u32 = 4;
/// Integers at the limits of types and of valid values.
const INTERESTING: [u64; 12] =
    [0, 1, 7, 0x20, 0x7f, 0x80, 0xff, 0x7fff, 0xffff, u32::MAX as u64, i64::MAX as u64, u64::MAX];

/// Changes inputs at random. The same seed makes the same changes.
pub struct Mutator {
    random: SmallRng,
}

impl Mutator {
    /// Starts with this seed.
    pub fn new(seed: u64) -> Self {
        Self { random: SmallRng::seed_from_u64(seed) }
    }

    /// Returns one of these inputs with up to `CHANGES_MAX` changes. A change may insert a piece of
    /// another input.
    ///
    /// # Panics
    /// If `inputs` is empty.
    pub fn next(&mut self, inputs: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = inputs[self.below(inputs.len())].clone();
        let other = &inputs[self.below(inputs.len())];
        for _ in 0..self.random.random_range(1..=CHANGES_MAX) {
            self.change(&mut bytes, other);
        }
        bytes.truncate(BYTES_MAX);
        bytes
    }

    /// Returns a random number below `end`, or 0 if `end` is 0.
    fn below(&mut self, end: usize) -> usize {
        self.random.random_range(0..end.max(1))
    }

    fn change(&mut self, bytes: &mut Vec<u8>, other: &[u8]) {
        let start = self.below(bytes.len());
        let end = (start + 1 + self.below(16)).min(bytes.len());
        match self.below(8) {
            0 | 1 if !bytes.is_empty() => bytes[start] ^= 1 << self.below(8),
            2 if !bytes.is_empty() => bytes[start] = self.random.random(),
            3 => self.overwrite(&mut bytes[start..]),
            4 => drop(bytes.drain(start.min(end)..end)),
            5 => {
                let piece = bytes[start.min(end)..end].to_vec();
                bytes.splice(start..start, piece);
            }
            6 => bytes.truncate(start),
            _ => {
                let from = self.below(other.len()).min(other.len());
                let to = (from + 1 + self.below(64)).min(other.len());
                let start = start.min(bytes.len());
                bytes.splice(start..start, other[from..to].iter().copied());
            }
        }
    }

    /// Overwrites the first 1, 2, 4 or 8 bytes with one of `INTERESTING`.
    fn overwrite(&mut self, bytes: &mut [u8]) {
        let integer = INTERESTING[self.below(INTERESTING.len())].to_le_bytes();
        let length = (1 << self.below(4)).min(bytes.len());
        bytes[..length].copy_from_slice(&integer[..length]);
    }
}
