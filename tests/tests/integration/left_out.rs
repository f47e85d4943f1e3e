//! Proves that a test that is left out says so, although libtest captures the output of a passing
//! test. No test may be left out silently.

use std::process::Command;

#[on(shm)]
fn a_test_that_is_left_out_is_named_with_the_reason() {
    let test = "slices::the_welcome_names_the_slices::rdma";
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--include-ignored"]).env_remove("FARSIDE_TEST_DEVICE");
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    let line = format!("left out without RDMA: {test}: it takes an RDMA device");
    assert!(output.status.success() && said.contains(&line), "{said}");
}

/// Finds tests that return early because of `device`, which prints nothing. All other ways to ask
/// for a device print that the test is left out.
#[on(shm)]
fn no_test_is_left_out_silently() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/integration");
    let mut folders = vec![std::path::PathBuf::from(folder)];
    let mut silent = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            // `let ... else` and `if`, however their lines are broken.
            let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
            let asks = words.match_indices(concat!("device", "()")).map(|(at, _)| &words[at..]);
            let ends = |rest: &str| {
                let condition = rest.split_once('{').map_or("", |(condition, _)| condition);
                let body = rest.split_once('{').map_or("", |(_, body)| body.trim_start());
                !condition.contains(';') && body.starts_with("return")
            };
            silent.extend(asks.filter(|rest| ends(rest)).map(|_| path.display().to_string()));
        }
    }
    assert!(silent.is_empty(), "these have tests that are left out silently: {silent:?}");
}
