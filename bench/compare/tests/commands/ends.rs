//! Proves that kv-bench ends on a failure or a signal, and that the server which it started always
//! ends with it. Guards against threads that wait for one that never started, and against servers
//! that keep running, with all their memory.

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use farside_linearizability::Ended;
use farside_tests::command::{CommandOutput, command};
use farside_tests::{ServerProcess, TEST_TIMEOUT, binary, send_signal, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

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
