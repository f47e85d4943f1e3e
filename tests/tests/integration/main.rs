//! Farside's integration tests: real kv-server processes, real client processes, one binary.
#![allow(clippy::unwrap_used)]

mod allocations;
mod bench_cli;
mod chaos;
mod cli;
mod damage;
mod depot;
mod growth;
mod limits;
mod model;
mod reader;
mod reconnect;
mod server_cli;
mod slow_pipeline;
mod space;
mod tidy;
mod verb_counts;
mod wakeups;
