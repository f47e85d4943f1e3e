//! Farside's integration tests: real kv-server processes, real client processes, one binary.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test fails where it panics, and may talk"
)]

// `#[on(...)]`, which stands on each test in the place of `#[test]`.
#[macro_use]
extern crate farside_test_fabrics;

mod allocations;
mod async_client;
mod balance;
mod cli;
mod cli_output;
mod client;
mod cluster;
mod collector;
mod connect_policy;
mod damage;
mod demo;
mod deny;
mod depot;
mod doc_examples;
mod eviction;
mod examples;
mod expiry;
mod extents;
mod former_versions;
mod full_log;
mod growth;
mod histories;
mod host_names;
mod huge_pages;
mod key_scans;
mod left_out;
mod limits;
mod long_puts;
mod long_values;
mod metrics;
mod model;
mod modifications;
mod network;
mod operators;
mod pins;
mod proofs;
mod public_api;
mod reader;
mod reconnect;
mod refusals;
mod resp;
mod server_cli;
mod several_addresses;
mod shared_chains;
mod silent_connections;
mod slices;
mod slow_pipeline;
mod snapshots;
mod space;
mod strangers;
mod tidy;
mod tls;
mod two_regions;
mod unfinished_files;
mod verb_counts;
mod wakeups;
