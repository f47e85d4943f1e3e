//! The verbs fabric on a device, with both ends of the queue pairs in this process. Without an
//! RDMA device each test prints one line and passes; `tests/vm` runs them on soft-RoCE.
//!
//! FARSIDE_TEST_DEVICE is the address of the device to use. By default it is the first device that
//! has an IPv4 address.
#![cfg(feature = "verbs")]
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test fails where it panics")]

mod chains;
mod connecting;
mod control;
mod harness;
mod losses;
mod regions;
mod slices;
