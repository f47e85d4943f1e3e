//! Proves that kv-bench reports each mistake and each failure in one line, with the exit code that
//! kv-cli has for it.

use crate::workloads::{bench, words};

/// Returns the exit code: 3 without a server, 5 for another failure, and 2 for a mistake in the
/// arguments.
pub(crate) fn expected_code(parts: &[&str]) -> i32 {
    let failures = ["did not start", "out of space", "history", "No space", "no operation"];
    if parts.iter().any(|part| part.contains("no server answers")) {
        return 3;
    }
    let is_failure = failures.iter().any(|failure| parts[0].contains(failure));
    if is_failure { 5 } else { 2 }
}

#[on(shm)]
fn each_mistake_and_failure_is_reported_in_one_line() {
    const C: &str = "ycsb --workload c";
    const FEW: &str = "--records 50 --warmup-seconds 0 --seconds 0.1";
    let nowhere = "shm:///nowhere/kv.sock";
    for (line, parts) in [
        ("ycsb --workload e", &["workload e needs range scans"][..]),
        ("ycsb", &["--workload", "--help"]),
        ("ycsb -p scanproportion=1", &["scanproportion=1", "range scans"]),
        ("ycsb -P /nowhere/a", &["/nowhere/a: No such file"]),
        ("ycsb --wrkload a", &["'--wrkload'", "'--workload'"]),
        (&format!("{C} --memory 1GiB --server {nowhere}"), &["--memory"]),
        (&format!("{C} --server {nowhere}"), &["no server answers at", nowhere]),
        (&format!("{C} --memory 250GiB"), &["did not start", "of memory available"]),
        (
            &format!("{C} --records 10000000000"),
            &["this run needs", "--memory", "--operations", "--target-rate"],
        ),
        (
            "ycsb -p insertproportion=1 --memory 16MiB",
            &["out of space", "--memory", "--operations", "--target-rate"],
        ),
        (
            &format!("{C} --history /nowhere/h"),
            &["cannot write the history /nowhere/h: No such file"],
        ),
        (&format!("{C} --history /dev/full {FEW}"), &["/dev/full: No space left"]),
        (
            &format!("{C} {FEW} --target-rate 0.001 --arrivals poisson"),
            &["no operation ended", "--seconds"],
        ),
        (&format!("{C} --history h --value-size 7"), &["--value-size of 8"]),
        (
            &format!("{C} --json /nowhere/x.json"),
            &["cannot write /nowhere/x.json: /nowhere is no folder"],
        ),
        (&format!("verbs --server {nowhere}"), &["no server answers at", nowhere]),
        ("verbs --server kv.sock", &["no scheme"]),
        ("verbs --config /nowhere/client.toml", &["/nowhere/client.toml"]),
        ("verbs --config /dev/null", &["names no server"]),
    ] {
        let output = bench(&words(line));
        output.expect_line(expected_code(parts), parts);
        assert!(output.stderr.starts_with("kv-bench: "), "{}", output.stderr);
    }
}
