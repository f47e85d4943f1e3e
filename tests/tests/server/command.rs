//! The `kv-server` process: how it starts and stops. The integration tests' `server_cli.rs` covers
//! what it refuses.

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};

use farside_layout::RegionState;
use farside_tests::binary;
use rustix::process::Signal;

use super::*;

fn kv_server(folder: &TestFolder, arguments: &[&str]) -> Command {
    let mut command = Command::new(binary("kv-server"));
    command.arg("--listen").arg(format!("shm://{}", folder.socket().display())).args(arguments);
    command.env_remove("NOTIFY_SOCKET").stdin(Stdio::null());
    command
}

/// A `kv-server` process whose log is in a file; killed when dropped.
pub(super) struct Running {
    child: Child,
    log: PathBuf,
}

impl Running {
    /// Starts a server on the region file in the test's folder.
    pub(super) fn start(folder: &TestFolder) -> Self {
        let file = folder.region_file().display().to_string();
        Self::start_with(folder, &["--memory", "8MiB", "--region-file", &file])
    }

    /// Starts a server in the test's folder, with additional arguments.
    pub(super) fn start_with(folder: &TestFolder, arguments: &[&str]) -> Self {
        let log = folder.dir.path().join("log");
        let stderr = File::create(&log).unwrap();
        let child = kv_server(folder, arguments).stderr(stderr).spawn().unwrap();
        let running = Self { child, log };
        eventually("it serves", || running.log().contains("serving"));
        running
    }

    pub(super) fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap()
    }

    pub(super) fn signal(&self, signal: Signal) {
        farside_tests::send_signal(&self.child, signal);
    }

    /// Waits until the process exits; returns whether it succeeded within the timeout.
    pub(super) fn exits_well(&mut self) -> bool {
        let deadline = Instant::now() + PATIENCE;
        while self.child.try_wait().unwrap().is_none() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        self.child.try_wait().unwrap().is_some_and(|status| status.success())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_signal_stops_the_server_cleanly() {
    for signal in [Signal::TERM, Signal::INT] {
        let folder = TestFolder::new();
        let mut server = Running::start(&folder);
        let client = folder.writer();
        // The server handles signals only a moment after it serves the socket.
        std::thread::sleep(Duration::from_millis(100));
        server.signal(signal);
        assert!(server.child.wait().unwrap().success());
        assert_eq!(client.superblock().0.state().unwrap(), RegionState::Clean);
        assert!(!folder.socket().exists());
    }
}

#[test]
fn a_server_starts_on_the_region_of_a_killed_one() {
    let folder = TestFolder::new();
    let first = Running::start(&folder);
    // The client still maps the memory, and has its descriptor.
    let client = folder.writer();
    drop(first);
    assert_eq!(client.superblock().0.state().unwrap(), RegionState::InUse);
    let _second = Running::start(&folder);
    assert_eq!(client.lease(), 0, "the first server's client is fenced");
    assert_eq!(folder.writer().welcome.incarnation, 2);
}

/// The test's client maps the file, too, and must not access the mapping once the file is
/// truncated.
#[test]
fn a_truncated_region_file_ends_the_server_with_one_line() {
    let folder = TestFolder::new();
    let mut running = Running::start(&folder);
    let client = folder.writer();
    let file = std::fs::OpenOptions::new().write(true).open(folder.region_file()).unwrap();
    file.set_len(4096).unwrap();
    client.send(&Request::TakeBlocks { class: class(64), count: 1 });
    let status = running.child.wait().unwrap();
    assert_eq!(status.signal(), Some(Signal::BUS.as_raw()));
    let log = running.log();
    let lines: Vec<&str> = log.lines().filter(|line| line.contains("kv-server: ")).collect();
    let [line] = &lines[..] else { panic!("{lines:?}") };
    assert!(line.contains("SIGBUS") && line.contains("truncated its file"), "{line}");
}

#[test]
fn the_server_tells_systemd_when_it_is_ready() {
    let folder = TestFolder::new();
    let socket = folder.dir.path().join("notify");
    let notify = std::os::unix::net::UnixDatagram::bind(&socket).unwrap();
    notify.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut command = kv_server(&folder, &["--memory", "8MiB"]);
    let child = command.env("NOTIFY_SOCKET", &socket).stderr(Stdio::null()).spawn().unwrap();
    let running = Running { child, log: PathBuf::new() };
    let mut buffer = [0; 64];
    let bytes = notify.recv(&mut buffer).unwrap();
    assert_eq!(String::from_utf8_lossy(&buffer[..bytes]).trim(), "READY=1");
    folder.writer();
    drop(running);
}

#[test]
fn flags_override_the_config_file_and_a_json_log_is_json() {
    let folder = TestFolder::new();
    let file = folder.dir.path().join("server.toml");
    let text = "listen = 'shm:///nowhere/kv.sock'\nmemory = '16MiB'\ngrace_ms = 7\n";
    std::fs::write(&file, format!("{text}region_file = '{}'", folder.region_file().display()))
        .unwrap();
    let file = file.display().to_string();
    let mut command = kv_server(&folder, &["--config", &file, "--log", "json", "--index", "64KiB"]);
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stderr.take().unwrap()).read_line(&mut line).unwrap();
    // The server's stderr is closed now, which must not stop it.
    let running = Running { child, log: PathBuf::new() };
    assert!(line.starts_with('{') && line.trim().ends_with('}'), "{line}");
    let client = folder.writer();
    let format = client.superblock().1;
    assert_eq!((format.grace_ms, format.region_bytes), (7, 16 << 20));
    assert_eq!(client.statistics().subtables, 8);
    drop(running);
}
