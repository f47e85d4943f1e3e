//! The parts of kv-bench. kv-compare (`bench/compare`) uses them too, with other stores.
//!
//! - [`command`], [`args`], [`properties`]: the command line, and the property files of upstream
//!   YCSB.
//! - [`workload`], [`distribution`], [`zipfian`], [`keys`], [`records`], [`value_size`],
//!   [`pattern`], [`operations`]: the generator of operations.
//! - [`driver`], [`arrivals`], [`store`], [`recorder`], [`latencies`]: the measured loops, the
//!   schedule of their operations, the store that they drive, and the records that they keep.
//! - [`journal`]: writes every measured operation to a history.
//! - [`run`], [`phases`], [`thread_measurement`]: threads, their phases and sums.
//! - [`server`], [`own_cluster`], [`daemon`], [`raw_connection`], [`sizing`], [`accounting`]: a
//!   server or a cluster for the run, a way to it without the client library, its memory, and what
//!   it spent.
//! - [`emulation`], [`shares`]: an emulated network, and the share of each shard of a cluster.
//! - [`verbs`]: the rates of raw verbs, the limit of everything above.
//! - [`price`]: the least that an operation costs, in verbs and bytes.
//! - [`report`], [`environment`], [`publish`]: the result as JSON and as a table, and its files.
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
pub mod environment;
pub mod error;
pub mod html;
pub mod journal;
pub mod keys;
pub mod latencies;
pub mod operations;
pub mod own_cluster;
pub mod pattern;
pub mod phases;
pub mod price;
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
pub mod thread_measurement;
pub mod value_size;
pub mod verbs;
pub mod workload;
pub mod zipfian;

pub use error::{Error, Result};
