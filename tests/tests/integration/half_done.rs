//! Proves that a restore, a snapshot and a dump leave no unfinished file. They get a signal, or the
//! file would be longer than the system allows.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use farside_config::signals::is_ignored;
use farside_tests::{PATIENCE, ServerProcess, binary, left_out, proof, send_signal, wait_until};
use rustix::process::Signal;

use crate::cli::{Said, command};

/// A server with so many keys that a signal arrives while they are written to a file.
fn with_many_keys() -> ServerProcess {
    let server = ServerProcess::start(&["--memory", "96MiB"]);
    let mut session = server.client().session().unwrap();
    for key in 0..20_000u64 {
        session.put(&key.to_le_bytes(), &proof::value(key, 0, 0, 1000)).unwrap();
    }
    server
}

/// A server with so many keys that a signal arrives while they are restored.
fn with_very_many_keys() -> ServerProcess {
    let server = ServerProcess::start(&["--memory", "96MiB"]);
    let mut session = server.client().session().unwrap();
    let mut pipeline = session.pipeline().unwrap();
    for key in 0..100_000u64 {
        while pipeline.put(&key.to_le_bytes(), b"value").is_err() {
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

#[test]
fn an_unfinished_snapshot_or_dump_is_removed() {
    let server = with_many_keys();
    let folder = tempfile::tempdir().unwrap();
    for (what, name) in [("snapshot", "all.snap"), ("dump", "all.jsonl")] {
        let to = folder.path().join(name);
        let mut command = command("kv-cli");
        command.arg(what).arg(&to).env("FARSIDE_SERVER", server.address());
        let child = command.spawn().unwrap();
        wait_until("it has begun", PATIENCE, || !names(folder.path()).is_empty());
        send_signal(&child, Signal::TERM);
        let said = Said::new(child.wait_with_output().unwrap());
        said.expect_line(143, &["kv-cli: cannot write ", name, "stopped by SIGTERM"]);
        assert_eq!(names(folder.path()), [""; 0]);
        let mut limited = Command::new("sh");
        // At most 1 MiB, whatever the shell counts in.
        limited.args(["-c", "ulimit -f 1024; exec \"$0\" \"$@\""]).arg(binary("kv-cli"));
        limited.arg(what).arg(&to).env("FARSIDE_SERVER", server.address());
        let said = Said::of(&mut limited);
        said.expect_line(5, &["kv-cli: cannot write ", name, "File too large"]);
        assert_eq!(names(folder.path()), [""; 0]);
    }
}

#[test]
fn a_stopped_restore_leaves_no_region_file() {
    let server = with_very_many_keys();
    let file = server.folder().join("snapshot");
    assert!(server.cli(&["snapshot", file.to_str().unwrap()]).status.success());
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let log = server.folder().join("log of the other");
    let mut command = Command::new(binary("kv-server"));
    command.args(["--listen", &format!("shm://{}", server.folder().join("other").display())]);
    command.args(["--memory", "96MiB", "--region-file"]).arg(folder.path().join("region"));
    command.arg("--restore").arg(&file).stdin(Stdio::null()).stdout(Stdio::null());
    let mut child = command.stderr(fs::File::create(&log).unwrap()).spawn().unwrap();
    let read = || fs::read_to_string(&log).unwrap();
    wait_until("it has begun", PATIENCE, || read().contains("restoring a snapshot"));
    send_signal(&child, Signal::TERM);
    assert_eq!(child.wait().unwrap().code(), Some(1), "{}", read());
    let last = read().lines().last().unwrap_or_default().to_owned();
    assert!(last.starts_with("kv-server: cannot restore ") && last.contains("told to stop"));
    assert_eq!(names(folder.path()), [""; 0]);
}

#[test]
fn a_server_whose_terminal_closes_stops_cleanly() {
    if is_ignored(Signal::HUP.as_raw()) {
        left_out("under nohup", "SIGHUP is ignored");
        return;
    }
    let server = ServerProcess::start(&["--memory", "16MiB"]);
    server.signal(Signal::HUP);
    wait_until("it stops", PATIENCE, || server.log().contains("stopped"));
}
