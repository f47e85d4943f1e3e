//! Farside's integration tests: real kv-server processes, real client processes, one binary.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test fails where it panics, and may talk"
)]

mod allocations;
mod async_client;
mod balance;
mod cli;
mod client;
mod cluster;
mod connecting;
mod damage;
mod doc_examples;
mod eviction;
mod examples;
mod extents;
mod growth;
mod histories;
mod long_puts;
mod long_values;
mod memory;
mod metrics;
mod model;
mod modifications;
mod network;
mod operators;
mod pins;
mod pipelines;
mod proofs;
mod public_api;
mod reconnect;
mod region_memory;
mod resp;
mod scripts;
mod server_cli;
mod several_addresses;
mod silent_connections;
mod snapshots;
mod strangers;
mod tidy;
mod tls;
mod two_regions;
mod verb_counts;

// `#[on(...)]`, which stands on each test in the place of `#[test]`.
#[macro_use]
extern crate farside_test_fabrics;
