//! The fabric of a test, which its name ends with: see `#[on(...)]` in `tests/fabrics`.

use std::collections::BTreeMap;
use std::process::Command;

use crate::left_out::left_out;
use crate::{device, is_over_tcp};

/// Runs a test of this name on a fabric: `shm`, `tcp` or `rdma`.
///
/// The processes that a test starts find the fabric in the environment. So a test over TCP runs in
/// a process of its own, and tests of other fabrics may run in this one at the same time.
///
/// # Panics
/// If the test fails.
pub fn run(test: &str, fabric: &str, body: fn()) {
    match fabric {
        "tcp" if is_over_tcp() => body(),
        "tcp" => run_over_tcp(test),
        "rdma" if device().is_none() => left_out("without RDMA", "it takes an RDMA device"),
        _ => body(),
    }
}

/// Runs a test of this program in another process, over TCP.
fn run_over_tcp(test: &str) {
    let (_, name) = test.split_once("::").unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--nocapture", "--include-ignored"]);
    let output = command.env("FARSIDE_TEST_FABRIC", "tcp").output().unwrap();
    let (stdout, stderr) = (output.stdout, output.stderr);
    // What it left out is reported here as well.
    std::io::Write::write_all(&mut std::io::stderr().lock(), &stderr).unwrap();
    let stdout = String::from_utf8_lossy(&stdout);
    assert!(output.status.success() && stdout.contains(" 1 passed"), "{name}: {stdout}");
}

/// What the name of a test ends with, and where it runs.
const FABRICS: [(&str, &str); 6] = [
    ("shm", "on shared memory"),
    ("tcp", "over TCP"),
    ("rdma", "over RDMA, in a guest"),
    ("shm_in_soak", "on shared memory, in make soak"),
    ("tcp_in_soak", "over TCP, in make soak"),
    ("rdma_in_soak", "over RDMA, in make test-rdma"),
];

/// Prints how many tests of this program there are for each fabric, and checks that there are some
/// for so many of the six.
///
/// # Panics
/// If there are none, or if a test says nothing about fabrics.
pub fn assert_each_test_says_where_it_runs(fabrics: usize) {
    let mut list = Command::new(std::env::current_exe().unwrap());
    let output = list.args(["--list", "--format", "terse"]).output().unwrap();
    let listed = String::from_utf8(output.stdout).unwrap();
    let tests = listed.lines().filter_map(|line| line.strip_suffix(": test"));
    let (mut counts, mut without) = (BTreeMap::new(), Vec::new());
    for test in tests {
        match FABRICS.iter().find(|(name, _)| test.ends_with(&format!("::{name}"))) {
            Some((_, place)) => *counts.entry(*place).or_insert(0) += 1,
            None => without.push(test),
        }
    }
    assert!(without.is_empty(), "write #[on(...)] in the place of #[test]: {without:?}");
    counts.iter().for_each(|(place, count)| println!("{count:4} {place}"));
    assert_eq!(counts.len(), fabrics, "{counts:?}");
}
