//! The protocol's code against a real server, over fabrics that count verbs, control the clock, or
//! kill the client.

#![allow(clippy::unwrap_used, reason = "a test fails where it panics")]

mod deaths;
mod late_long_puts;
mod price_list;
mod stopped_splits;
