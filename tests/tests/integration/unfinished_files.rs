//! Proves that a restore, a snapshot and a dump leave no unfinished file. They get a signal, or the
//! file would be longer than the system allows.

use std::fs;
use std::path::Path;
use std::process::Command;

use farside_config::signals::is_ignored;
use farside_tests::command::CommandOutput;
use farside_tests::{
    ServerProcess, TEST_TIMEOUT, binary, fill, left_out, self_describing, send_signal, wait_until,
};
use rustix::process::Signal;

/// Returns a server with so many keys that a signal arrives while they are written to a file.
fn with_many_keys() -> ServerProcess {
    let server = ServerProcess::start("--memory 96MiB");
    fill(&mut server.session(), 0..20_000, |key| self_describing::value(key, 0, 0, 1000));
    server
}

/// Returns a server with so many keys that a signal arrives while they are restored.
fn with_very_many_keys() -> ServerProcess {
    let server = ServerProcess::start("--memory 96MiB");
    let mut session = server.session();
    let mut pipeline = session.pipeline().unwrap();
    for key in 0..100_000u64 {
        while pipeline.put(key.to_le_bytes(), b"value").is_err() {
            pipeline.wait().unwrap().result.unwrap();
        }
    }
    drop(pipeline);
    server
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[on(shm, tcp_in_soak)]
fn an_unfinished_snapshot_or_dump_is_removed() {
    let server = with_many_keys();
    let folder = tempfile::tempdir().unwrap();
    for (what, name) in [("snapshot", "all.snap"), ("dump", "all.jsonl")] {
        let to = folder.path().join(name);
        let child = server.command("kv-cli").arg(what).arg(&to).spawn().unwrap();
        wait_until("it has begun", TEST_TIMEOUT, || !names(folder.path()).is_empty());
        send_signal(&child, Signal::TERM);
        let output = CommandOutput::new(child.wait_with_output().unwrap());
        output.expect_line(143, &["kv-cli: cannot write ", name, "stopped by SIGTERM"]);
        assert_eq!(names(folder.path()), [""; 0]);
        let mut limited = Command::new("sh");
        // At most 1 MiB, whatever the shell counts in.
        limited.args(["-c", "ulimit -f 1024; exec \"$0\" \"$@\""]).arg(binary("kv-cli"));
        limited.arg(what).arg(&to).env("FARSIDE_SERVER", server.address());
        let output = CommandOutput::of(&mut limited);
        output.expect_line(5, &["kv-cli: cannot write ", name, "File too large"]);
        assert_eq!(names(folder.path()), [""; 0]);
    }
}

#[on(shm, tcp_in_soak)]
fn a_stopped_restore_leaves_no_region_file() {
    let server = with_very_many_keys();
    let file = server.folder().join("snapshot");
    server.cli(&["snapshot", file.to_str().unwrap()]).succeeded();
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let region = folder.path().join("region");
    let arguments =
        format!("--memory 96MiB --region-file {} --restore {}", region.display(), file.display());
    let elsewhere = tempfile::tempdir().unwrap();
    let mut other = ServerProcess::spawn_in(elsewhere.path(), &arguments, |command| command);
    other.wait_for_log("restoring a snapshot");
    assert_eq!(other.terminate(), Some(1), "{}", other.log());
    let last = other.log().lines().last().unwrap_or_default().to_owned();
    assert!(last.starts_with("kv-server: cannot restore ") && last.contains("told to stop"));
    assert_eq!(names(folder.path()), [""; 0]);
}

#[on(shm, tcp_in_soak)]
fn a_server_whose_terminal_closes_stops_cleanly() {
    if is_ignored(Signal::HUP.as_raw()) {
        left_out("under nohup", "SIGHUP is ignored");
        return;
    }
    let server = ServerProcess::start("--memory 16MiB");
    server.signal(Signal::HUP);
    server.wait_for_log("stopped");
}
