//! Proves that kv-bench ends when it cannot go on or is not to. Guards against threads that wait
//! for one that never started.

use std::process::{Command, Stdio};

use farside_tests::{ServerProcess, binary};

use crate::cli::Said;

#[test]
fn a_thread_that_cannot_be_started_is_one_line() {
    let server = ServerProcess::start(&["--memory", "64MiB"]);
    let run = format!("--records 50 --seconds 600 --threads 64 --server {}", server.address());
    // Stacks of 1 GiB, and address space for some of them.
    let limited = format!("ulimit -v {}; exec $0 ycsb --workload c {run}", 16 << 20);
    let mut command = Command::new("sh");
    command.arg("-c").arg(limited).arg(binary("kv-bench")).stdin(Stdio::null());
    command.env("HOME", "/nowhere").env("RUST_MIN_STACK", (1 << 30).to_string());
    Said::new(command.output().unwrap()).expect_line(2, &["starting a thread: "]);
}
