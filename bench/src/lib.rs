//! The parts of kv-bench. kv-compare (`bench/compare`) uses them too, with other stores.
//!
//! - [`command`], [`args`], [`properties`]: the command line, and the property files of upstream
//!   YCSB.
//! - [`workload`], [`distribution`], [`records`], [`pattern`], [`operations`]: the generator of
//!   operations, and the least that an operation costs, in verbs and bytes.
//! - [`driver`], [`arrivals`], [`store`], [`recorder`]: the measured loops, the schedule of their
//!   operations, the store that they drive, and the records that they keep.
//! - [`journal`]: writes every measured operation to a history.
//! - [`run`], [`phases`]: threads and their phases.
//! - [`server`], [`daemon`], [`raw_connection`], [`sizing`], [`accounting`]: a server or a cluster
//!   for the run, a way to it without the client library, its memory, and what it spent.
//! - [`emulation`], [`shares`]: an emulated network, and the share of each shard of a cluster.
//! - [`verbs`]: the rates of raw verbs, the limit of everything above.
//! - [`report`], [`publish`]: the result as JSON and as a table, and its files.
//! - [`html`]: an HTML page of results.
#![deny(unsafe_code)]

pub mod accounting;
#[allow(unsafe_code, reason = "a global allocator is unsafe to implement")]
pub mod allocations;
pub mod args;
pub mod arrivals;
pub mod command;
pub mod daemon;
pub mod distribution;
pub mod driver;
pub mod emulation;
pub mod error;
pub mod html;
pub mod journal;
pub mod operations;
pub mod pattern;
pub mod phases;
pub mod properties;
pub mod publish;
pub mod raw_connection;
pub mod recorder;
pub mod records;
pub mod report;
pub mod run;
pub mod server;
pub mod shares;
pub mod sizing;
pub mod store;
pub mod verbs;
pub mod workload;

pub use error::{Error, Result};
