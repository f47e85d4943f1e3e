//! The fabric of a test, which its name ends with: see `#[on(...)]` in `tests/fabrics`.

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
