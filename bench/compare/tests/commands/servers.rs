//! Proves that kv-bench starts a server or a cluster of its own, measures it, and leaves nothing of
//! it behind: on a failure or a signal it ends, and its servers always end with it. It works in the
//! memory of its own server, and takes no block of another server that its clients could need. It
//! measures a cluster which runs already. A benchmark of verbs keeps the blocks that it took, as
//! any client does, and the server does not take it for one that is lost.
//!
//! Guards against threads that wait for one that never started, and against servers that keep
//! running, with all their memory.

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use farside_bench::raw_connection::RawConnection;
use farside_config::ClientConfig;
use farside_control::HELD_PER_MESSAGE_MAX;
use farside_layout::SizeClass;
use farside_linearizability::Ended;
use farside_tests::cluster::TestCluster;
use farside_tests::command::{CommandOutput, command};
use farside_tests::{
    ServerProcess, TEST_TIMEOUT, binary, blocks_with_clients, send_signal, wait_for_all_blocks,
    wait_until,
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value as Json;
use tempfile::TempDir;

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

#[on(shm)]
fn a_thread_that_cannot_be_started_is_reported_in_one_line() {
    let server = ServerProcess::start("--memory 64MiB");
    let run = format!("--records 50 --seconds 600 --threads 64 --server {}", server.address());
    // Each stack takes 1 GiB, and the address space has room for only some of them.
    let limited = format!("ulimit -v {}; exec $0 ycsb --workload c {run}", 16 << 20);
    let mut command = Command::new("sh");
    command.arg("-c").arg(limited).arg(binary("kv-bench")).stdin(Stdio::null());
    command.env("HOME", "/nowhere").env("RUST_MIN_STACK", (1 << 30).to_string());
    CommandOutput::new(command.output().unwrap()).expect_line(5, &["starting a thread: "]);
}

/// A run without an end, and the server it started.
struct Run {
    /// The folder of its temporary files.
    folder: TempDir,
    child: Child,
    server: Pid,
}

impl Run {
    fn start() -> Self {
        binary("kv-server");
        let folder = tempfile::tempdir().unwrap();
        let line = "ycsb --workload c --records 50 --seconds 600";
        let mut command = Command::new("env");
        // Resets SIGHUP, which nohup would make the tests and the run ignore.
        command.arg("--default-signal=HUP").arg(binary("kv-bench")).args(line.split(' '));
        command.env("HOME", "/nowhere").env("TMPDIR", folder.path());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().unwrap();
        let mut server = None;
        wait_until("it starts a server", TEST_TIMEOUT, || {
            server = process_with(folder.path());
            server.is_some()
        });
        Self { server: server.unwrap(), folder, child }
    }

    /// Checks the run's exit code, and that its server ends.
    fn expect_end(mut self, code: Option<i32>) {
        assert_eq!(self.child.wait().unwrap().code(), code);
        let folder = self.folder.path();
        wait_until("its server ends", TEST_TIMEOUT, || process_with(folder).is_none());
    }

    fn expect_no_files(&self) {
        let files: Vec<PathBuf> =
            self.folder.path().read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(files.is_empty(), "{files:?}");
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the process whose command line names a socket in this folder.
fn process_with(folder: &Path) -> Option<Pid> {
    let socket = format!("shm://{}", folder.display());
    let processes = Path::new("/proc").read_dir().unwrap();
    let mut numbers = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let is_it = |number: &i32| {
        let line = std::fs::read(format!("/proc/{number}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(&socket)
    };
    numbers.find(is_it).and_then(Pid::from_raw)
}

#[on(shm)]
fn a_run_that_a_signal_ends_leaves_no_files_and_no_server() {
    for signal in [Signal::HUP, Signal::INT, Signal::QUIT, Signal::TERM] {
        let mut run = Run::start();
        send_signal(&run.child, signal);
        run.child.wait().unwrap();
        run.expect_no_files();
        run.expect_end(Some(130));
    }
}

#[on(shm)]
fn the_second_signal_ends_a_run_whose_server_does_not_stop() {
    let mut run = Run::start();
    kill_process(run.server, Signal::STOP).unwrap();
    // Before it has stopped, the server may still create a file.
    let stat = format!("/proc/{}/stat", run.server.as_raw_nonzero());
    wait_until("it stops", TEST_TIMEOUT, || {
        std::fs::read_to_string(&stat).unwrap().contains(") T ")
    });
    wait_until("it ends", TEST_TIMEOUT, || {
        send_signal(&run.child, Signal::INT);
        std::thread::sleep(Duration::from_millis(20));
        run.child.try_wait().unwrap().is_some()
    });
    run.expect_no_files();
    kill_process(run.server, Signal::CONT).unwrap();
    run.expect_end(Some(130));
}

#[on(shm)]
fn a_run_that_is_killed_leaves_no_server() {
    let mut run = Run::start();
    run.child.kill().unwrap();
    assert_eq!(run.child.wait().unwrap().signal(), Some(Signal::KILL.as_raw()));
    run.expect_end(None);
}

/// The history of a run whose server dies has all operations until then. The next run, which finds
/// no server, does not overwrite it.
#[on(shm)]
fn a_history_survives_the_death_of_its_server() {
    const LANES: usize = 2 * 16;
    let mut server = ServerProcess::start("--memory 64MiB");
    let history = server.folder().join("history.jsonl");
    let bench = || {
        let line = "ycsb --workload a --records 50 --seconds 600 --threads 2 --depth 16";
        let mut command = command("kv-bench");
        command.args(line.split(' ')).args(["--limit-seconds", "0", "--warmup-seconds", "0"]);
        command.args(["--server", &server.address(), "--history"]).arg(&history);
        command
    };
    let child = bench().spawn().unwrap();
    let bytes = || std::fs::metadata(&history).map_or(0, |found| found.len());
    wait_until("operations are recorded", TEST_TIMEOUT, || bytes() > 0);
    let mut second_run = bench();
    server.kill();
    let result = CommandOutput::new(child.wait_with_output().unwrap());
    assert_eq!(result.code, Some(3), "{}", result.stderr);
    let text = std::fs::read(&history).unwrap();
    let records = farside_linearizability::read(&text[..]).unwrap();
    let unknown = records.iter().filter(|record| record.result == Ended::Unknown).count();
    assert!((1..=LANES).contains(&unknown) && records.len() > 1000, "{unknown}");
    CommandOutput::of(&mut second_run).expect_line(3, &["no server answers"]);
    assert!(std::fs::read(&history).unwrap() == text, "the run without a server overwrote it");
}

#[on(shm)]
fn a_run_works_in_less_memory_than_all_its_inserts_could_take() {
    let json = measured("--workload d --seconds 0.3 --threads 8 --memory 64MiB");
    assert!(count(&json) > 0);
}

#[on(shm)]
fn raw_verbs_take_no_block_that_others_could_need() {
    let verbs = |server: &ServerProcess, span: &str| {
        let address = server.address();
        bench(&words(&format!("verbs --server {address} --span {span} --seconds 0.05")))
    };
    let roomy = ServerProcess::start("--memory 32MiB");
    let mut session = roomy.session();
    verbs(&roomy, "32MiB").expect_line(5, &["can spare", "--span"]);
    assert_eq!(verbs(&roomy, "4MiB").code, Some(0));
    session.put(b"key", [0; 1000]).unwrap();
    roomy.assert_verifies();
    let cache = ServerProcess::start("--memory 8MiB --grace-ms 10 --evict");
    let client = cache.client();
    let mut session = client.session().unwrap();
    let evicted = || client.admin().statistics().unwrap().keys_evicted;
    (0..20_000u64).for_each(|key| session.put(key.to_le_bytes(), [0; 1000]).unwrap());
    // The server evicts ahead of demand, so it goes on for a moment.
    let mut before = evicted();
    wait_until("no more keys are evicted", TEST_TIMEOUT, || {
        std::thread::sleep(Duration::from_millis(100));
        let now = evicted();
        now > 0 && std::mem::replace(&mut before, now) == now
    });
    verbs(&cache, "1MiB").expect_line(5, &["can spare", "--span"]);
    assert_eq!(evicted(), before);
}

#[on(shm)]
fn the_raw_limit_is_measured_for_few_records_or_the_report_says_why_not() {
    let rest = "--workload c --warmup-seconds 0 --operations 999 --limit-seconds 0.1";
    for (line, part) in [
        ("--records 100 --depth 128 --value-size 64", "by raw verbs alone"),
        ("--records 9 --depth 256 --value-size 400000", "not measured: 256 operations"),
    ] {
        let output = bench(&words(&format!("ycsb {line} {rest}")));
        assert!(String::from_utf8_lossy(&output.stdout).contains(part), "{:?}", output.stderr);
    }
}

#[on(each, rdma_in_soak)]
fn a_collection_takes_no_block_from_a_benchmark_of_verbs() {
    let server = ServerProcess::start("--memory 64MiB --grace-ms 5");
    let observer = server.client();
    let config = ClientConfig { server: Some(server.address()), ..ClientConfig::default() };
    let mut connection = RawConnection::connect(&config).unwrap();
    // More blocks than fit into a message.
    const BLOCKS: usize = HELD_PER_MESSAGE_MAX + 1;
    connection.take_blocks(SizeClass::for_bytes(64).unwrap(), BLOCKS).unwrap();
    let after = std::thread::scope(|scope| {
        let collecting = scope.spawn(|| observer.admin().collect().unwrap());
        while !collecting.is_finished() {
            connection.answer_all().unwrap();
            std::thread::sleep(Duration::from_millis(1));
        }
        collecting.join().unwrap()
    });
    assert_eq!((after.blocks_collected, after.clients_lost), (0, 0));
    assert_eq!(blocks_with_clients(&observer), BLOCKS as i64);
    connection.give_back().unwrap();
    wait_for_all_blocks(&observer);
}

/// Over RDMA the server fences a client whose process does not answer for 4 seconds.
#[on(each, rdma_in_soak)]
fn a_benchmark_of_verbs_answers_the_server_and_is_not_fenced() {
    let server = ServerProcess::start("--memory 64MiB");
    // Four verbs, and a warm-up: a little more than 6 seconds.
    bench(&["verbs", "--server", &server.address(), "--span", "1MiB", "--seconds", "1.5"])
        .succeeded();
    let observer = server.client();
    assert_eq!(observer.admin().statistics().unwrap().clients_lost, 0);
    wait_for_all_blocks(&observer);
}
