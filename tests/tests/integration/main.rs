//! Farside's integration tests: real kv-server processes, real client processes, one binary.
#![allow(clippy::unwrap_used)]

mod allocations;
mod bench_cli;
mod chaos;
mod cli;
mod damage;
mod depot;
mod eviction;
mod expiry;
mod limits;
mod model;
mod reader;
mod reconnect;
mod restarts;
mod server_cli;
mod slow_pipeline;
mod snapshots;
mod space;
mod tidy;
mod verb_counts;
mod wakeups;
