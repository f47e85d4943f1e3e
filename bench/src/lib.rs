//! The parts of kv-bench.
//!
//! - [`workload`], [`distribution`], [`keys`], [`operations`]: which operation comes next.
//! - [`driver`], [`store`], [`recorder`]: the measured loops, what they drive, and what they note
//!   down.
//! - [`history`], [`journal`]: an open format for operations, and a witness that writes it.
//! - [`run`], [`server`], [`accounting`]: threads, phases, a server for the run and what it spent.
//! - [`verbs`], [`limit`]: the raw rates of a fabric and of a map in this process, the limits of
//!   everything above.
//! - [`compare`], [`peers`], [`emulation`]: the same beside what others published, on the same
//!   fabrics, and a network around them.
//! - [`report`], [`environment`], [`publish`]: JSON and tables.
#![deny(unsafe_code)]

pub mod accounting;
#[allow(unsafe_code, reason = "a global allocator is unsafe to implement")]
pub mod allocations;
pub mod args;
pub mod clock;
pub mod compare;
pub mod distribution;
pub mod driver;
pub mod emulation;
pub mod environment;
pub mod error;
pub mod history;
pub mod interrupt;
pub mod journal;
pub mod keys;
pub mod limit;
pub mod operations;
pub mod peers;
pub mod publish;
pub mod recorder;
pub mod report;
pub mod run;
pub mod server;
pub mod sizing;
pub mod store;
pub mod verbs;
pub mod workload;

pub use error::{Error, Result};
