//! The parts of kv-compare, which uses the measured loops, the workloads and the reports of
//! `farside-bench`.
//!
//! - [`args`]: the command line.
//! - [`run`]: a whole run, and the stores that take turns in it.
//! - [`peers`]: drivers of published protocols, over Farside's fabrics and in its region.
//! - [`services`]: servers that are reached over a Unix socket.
//! - [`cache`]: full caches on the same requests.
//! - [`report`]: the result as JSON and as tables.
#![deny(unsafe_code)]

pub mod args;
pub mod cache;
pub mod peers;
pub mod report;
pub mod run;
pub mod services;
#[cfg(test)]
mod test_operations;
