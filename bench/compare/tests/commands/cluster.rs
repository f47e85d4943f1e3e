//! Proves that kv-bench starts a cluster of its own, measures it, and leaves nothing of it behind,
//! and that it measures a cluster which runs already. Guards against servers that outlive the run.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use farside_tests::cluster::TestCluster;
use farside_tests::{TEST_TIMEOUT, binary, send_signal, wait_until};
use rustix::process::Signal;
use serde_json::Value as Json;

use crate::workloads::{bench, count, expect_fields, measured, words};

/// The number of processes whose command line names a socket in this folder.
fn servers_in(folder: &Path) -> usize {
    let socket = format!("shm://{}", folder.display());
    let processes = Path::new("/proc").read_dir().unwrap().filter_map(Result::ok);
    let lines = processes.map(|it| std::fs::read(it.path().join("cmdline")).unwrap_or_default());
    lines.filter(|line| String::from_utf8_lossy(line).contains(&socket)).count()
}

/// Starts kv-bench with its temporary files in this folder.
fn run_in(folder: &Path, line: &str) -> Child {
    binary("kv-server");
    let mut command = Command::new(binary("kv-bench"));
    command.args(words(line)).env("HOME", "/nowhere").env("TMPDIR", folder);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit());
    command.spawn().unwrap()
}

fn expect_nothing_in(folder: &Path) {
    wait_until("all servers end", TEST_TIMEOUT, || servers_in(folder) == 0);
    let files: Vec<_> = folder.read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(files.is_empty(), "{files:?}");
}

const SMALL: &str = "--records 500 --memory 96MiB --warmup-seconds 0 --json -";

#[on(any)]
fn a_run_starts_a_cluster_and_stops_it() {
    let folder = tempfile::tempdir().unwrap();
    let line = format!("ycsb --workload a --servers 3 --operations 2000 --clients 2 {SMALL}");
    let output = run_in(folder.path(), &line).wait_with_output().unwrap();
    assert!(output.status.success());
    let json: Json = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&json["servers"], &json["clients"]), (&3.into(), &2.into()));
    assert_eq!((count(&json), &json["unexpected"]), (2000, &0.into()));
    assert_eq!((&json["fabric"], &json["emulated"]), (&"shm".into(), &Json::Null));
    assert!(json["server"]["cpu_s"].is_number() && json["limit"].is_null());
    expect_nothing_in(folder.path());
}

#[on(any)]
fn a_signal_ends_a_run_with_a_cluster_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let mut run =
        run_in(folder.path(), &format!("ycsb --workload c --servers 3 --seconds 600 {SMALL}"));
    wait_until("all servers start", TEST_TIMEOUT, || servers_in(folder.path()) == 3);
    send_signal(&run, Signal::INT);
    assert_eq!(run.wait().unwrap().code(), Some(130));
    expect_nothing_in(folder.path());
}

#[on(any)]
fn an_emulated_device_limits_each_server_and_the_result_says_so() {
    let line = "--workload c --distribution uniform --memory 64MiB --seconds 0.5 --depth 64";
    for servers in [1, 2] {
        let json = measured(&format!("{line} --servers {servers} --emulate-rate 500"));
        let fabric = json["fabric"].as_str().unwrap();
        assert!(fabric.contains("emulated network (500 chains/s"), "{fabric}");
        let emulated = &json["emulated"];
        let fields = ["chains_per_s", "bytes_per_s", "round_trip_ns", "predicted_ops_s", "shards"];
        expect_fields(emulated, &fields);
        let shards = emulated["shards"].as_array().unwrap();
        assert_eq!(shards.len(), servers);
        let seconds = json["seconds"].as_f64().unwrap();
        // Operations in flight when the measurement starts were asked for before it.
        let executed_max = 500.0 * servers as f64 * seconds + 64.0;
        assert!((count(&json) as f64) < 2.0 * executed_max, "{json}");
        assert!(shards.iter().all(|shard| shard["chains"].as_u64() > Some(0)), "{emulated}");
    }
}

#[on(any)]
fn a_cluster_that_runs_is_measured() {
    let (_cluster, servers) = TestCluster::with_servers(2);
    let seed = servers[1].address();
    let line = format!("--workload b --seconds 0.2 --server {seed} --records 500");
    let output = bench(&words(&format!("ycsb {line} --warmup-seconds 0 --json -"))).succeeded();
    let json: Json = serde_json::from_slice(&output.stdout).unwrap();
    assert!(count(&json) > 0);
    assert_eq!((&json["servers"], &json["limit"]), (&2.into(), &Json::Null));
}

#[on(any)]
fn each_mistake_is_reported_in_one_line() {
    for (line, parts) in [
        ("--servers 2 --server shm:///x", &["--servers", "--server"][..]),
        ("--servers 65", &["65", "1..=64"]),
        ("--servers 2 --emulate-rate 0", &["--emulate-rate", "1..="]),
        ("--emulate-rate 5", &["--servers"]),
        ("--servers 2 --emulate-rate 5 --emulate-bandwidth 0B", &["above 0"]),
    ] {
        bench(&words(&format!("ycsb --workload c {line}"))).expect_line(2, parts);
    }
    let output = bench(&words("ycsb --workload c --servers 4 --memory 16MiB"));
    output.expect_line(5, &["did not start", "memory = 4MiB"]);
}
