//! Farside's integration tests: real kv-server processes, real client processes, one binary.
#![allow(clippy::unwrap_used)]

mod allocations;
mod chaos;
mod depot;
mod limits;
mod model;
mod reader;
mod reconnect;
mod space;
mod verb_counts;
mod wakeups;
