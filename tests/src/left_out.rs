//! Tests that this machine, or this fabric, leaves out: each says so by name, and why.

use std::io::Write;

use crate::device;

/// Says in the test's output that the test is left out.
///
/// Not by `eprintln`: of a test that passes libtest shows nothing that was printed, and one that is
/// left out passes.
pub fn left_out(when: &str, why: &str) {
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test");
    // Without anywhere to say it the test is left out all the same.
    let _ = writeln!(std::io::stderr().lock(), "left out {when}: {test}: {why}");
}

/// Whether a test is left out because the tests run over RDMA; says so.
pub fn left_out_over_rdma(why: &str) -> bool {
    let is_left_out = device().is_some();
    if is_left_out {
        left_out("over RDMA", why);
    }
    is_left_out
}

/// The address of the RDMA device; without one the test is left out, and says so.
pub fn device_or_left_out() -> Option<String> {
    let device = device();
    if device.is_none() {
        left_out("over shm", "it takes an RDMA device");
    }
    device
}
