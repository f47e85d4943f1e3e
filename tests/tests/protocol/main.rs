//! The protocol's own code at a real server, over fabrics that count, stop the clock or kill.

#![allow(clippy::unwrap_used, reason = "a test fails where it panics")]

mod deaths;
mod price_list;
mod stopped_splits;
