//! Each test of this binary says on which fabrics it runs.

use std::collections::BTreeMap;
use std::process::Command;

/// What the name of a test ends with, and where it runs.
const FABRICS: [(&str, &str); 6] = [
    ("shm", "on shared memory"),
    ("tcp", "over TCP"),
    ("rdma", "over RDMA, in a guest"),
    ("shm_in_soak", "on shared memory, in make soak"),
    ("tcp_in_soak", "over TCP, in make soak"),
    ("rdma_in_soak", "over RDMA, in make test-rdma"),
];

/// Prints how many tests there are for each fabric.
#[on(shm)]
fn each_test_says_on_which_fabrics_it_runs() {
    let mut list = Command::new(std::env::current_exe().unwrap());
    let output = list.args(["--list", "--format", "terse"]).output().unwrap();
    let listed = String::from_utf8(output.stdout).unwrap();
    let tests = listed.lines().filter_map(|line| line.strip_suffix(": test"));
    let (mut counts, mut without) = (BTreeMap::new(), Vec::new());
    for test in tests {
        match FABRICS.iter().find(|(name, _)| test.ends_with(&format!("::{name}"))) {
            Some((_, place)) => *counts.entry(*place).or_insert(0) += 1,
            None => without.push(test),
        }
    }
    assert!(without.is_empty(), "write #[on(...)] in the place of #[test]: {without:?}");
    FABRICS.iter().for_each(|(_, place)| println!("{:4} {place}", counts[place]));
}
