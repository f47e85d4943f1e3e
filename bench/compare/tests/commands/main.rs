//! Tests of kv-bench and kv-compare: real processes, and measurements of an emulated network.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test fails where it panics, and may talk"
)]

// `#[on(...)]`, which stands on each test in the place of `#[test]`.
#[macro_use]
extern crate farside_test_fabrics;

mod cluster;
mod ends;
mod memory;
mod mistakes;
mod report;
mod slow_link;
mod stores;
mod verbs;
mod workloads;

#[on(shm)]
fn each_test_says_on_which_fabrics_it_runs() {
    farside_tests::fabric::assert_each_test_says_where_it_runs(5);
}
