//! Tests that this machine or this fabric leaves out. Each prints its name and the reason.
//! Tests with two users are left out without root.

use std::io::Write;

use rustix::process::Uid;
use rustix::thread::set_thread_res_uid;

use crate::device;
use crate::network::Network;

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
