//! The fabric of a test, which its name ends with: see `#[on(...)]` in `tests/fabrics`. Tests that
//! this machine or this fabric leaves out print their name and the reason.

use std::collections::BTreeMap;
use std::io::Write;
use std::process::Command;

use rustix::process::Uid;
use rustix::thread::set_thread_res_uid;

use crate::network::Network;
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

/// Prints that this test is left out, and why. `circumstance` is a phrase such as "over RDMA".
///
/// Writes to stderr directly: libtest hides the output of `eprintln` in a test that passes, and a
/// test that is left out passes.
pub fn left_out(circumstance: &str, why: &str) {
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test");
    // The test is left out even if stderr is closed.
    let _ = writeln!(std::io::stderr().lock(), "left out {circumstance}: {test}: {why}");
}

/// Returns whether this test is left out, and prints that it is.
fn left_out_if(is_left_out: bool, circumstance: &str, why: &str) -> bool {
    if is_left_out {
        left_out(circumstance, why);
    }
    is_left_out
}

/// Returns the address of the RDMA device. Without a device, prints that this test is left out.
pub fn device_or_left_out() -> Option<String> {
    let device = device();
    if device.is_none() {
        left_out("without RDMA", "it takes an RDMA device");
    }
    device
}

/// Returns whether this test is left out because it takes root, and prints that it is.
pub fn left_out_without_root(why: &str) -> bool {
    left_out_if(!rustix::process::geteuid().is_root(), "without root", why)
}

/// Returns whether this test is left out because the system makes no time namespaces, and prints
/// that it is.
pub fn left_out_without_time_namespaces() -> bool {
    let arguments = ["--time", "--boottime", "60", "--monotonic", "60", "true"];
    let made = std::process::Command::new("unshare").args(arguments).output();
    let is_made = made.is_ok_and(|made| made.status.success());
    left_out_if(!is_made, "without time namespaces", "it has hosts with different clocks")
}

/// Makes a network. Without root or `ip`, or if the system refuses, prints that this test is left
/// out.
pub fn network_or_left_out() -> Option<Network> {
    if left_out_without_root("it makes network namespaces") {
        return None;
    }
    match Network::new() {
        Ok(network) => Some(network),
        Err(why) => {
            left_out("without network namespaces", &why);
            None
        }
    }
}

/// Returns whether this test is left out because the kernel emulates no bad network, and prints
/// that it is.
pub fn left_out_without_netem(network: &Network) -> bool {
    let degraded = network.degrade("delay 0ms");
    if let Err(why) = &degraded {
        left_out("without netem", &format!("it takes the kernel module sch_netem: {why}"));
    }
    degraded.is_err()
}

/// Runs `work` on a thread of a user that is neither root nor the user of the tests. Needs root.
pub fn as_other_user<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    let become_other_user_and_work = || {
        // The system call changes only this thread, not the process.
        let user = Uid::from_raw(OTHER_USER);
        set_thread_res_uid(user, user, user).unwrap();
        work()
    };
    std::thread::scope(|scope| scope.spawn(become_other_user_and_work).join().unwrap())
}

/// The user id of [`as_other_user`].
pub const OTHER_USER: u32 = 54_321;
