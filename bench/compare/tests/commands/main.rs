//! Tests of kv-bench and kv-compare: real processes, and measurements of an emulated network.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test fails where it panics, and may talk"
)]

mod servers;
mod slow_link;
mod stores;
mod workloads;

// `#[on(...)]`, which stands on each test in the place of `#[test]`.
#[macro_use]
extern crate farside_test_fabrics;

#[on(shm)]
fn each_test_says_on_which_fabrics_it_runs() {
    farside_tests::fabric::assert_each_test_says_where_it_runs(5);
}
