//! The `kv-server` process: how it starts and stops. `server_cli.rs` of the integration tests has
//! what it refuses.

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};

use farside_layout::RegionState;
use farside_tests::binary;
use rustix::process::Signal;

use super::*;

fn kv_server(place: &Place, arguments: &[&str]) -> Command {
    let mut command = Command::new(binary("kv-server"));
    command.arg("--listen").arg(format!("shm://{}", place.socket().display())).args(arguments);
    command.env_remove("NOTIFY_SOCKET").stdin(Stdio::null());
    command
}

/// A `kv-server` process whose log is in a file; ended with its test.
pub(super) struct Running {
    child: Child,
    log: PathBuf,
}

impl Running {
    /// Serves the region file of the place.
    pub(super) fn start(place: &Place) -> Self {
        let file = place.region_file().display().to_string();
        Self::start_with(place, &["--memory", "8MiB", "--region-file", &file])
    }

    /// Serves at the place, with these arguments besides.
    pub(super) fn start_with(place: &Place, arguments: &[&str]) -> Self {
        let log = place.folder.path().join("log");
        let stderr = File::create(&log).unwrap();
        let child = kv_server(place, arguments).stderr(stderr).spawn().unwrap();
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

    /// Whether it ends of itself.
    pub(super) fn ends_well(&mut self) -> bool {
        let until = Instant::now() + PATIENCE;
        while self.child.try_wait().unwrap().is_none() && Instant::now() < until {
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
fn it_stops_in_order_on_a_signal() {
    for signal in [Signal::TERM, Signal::INT] {
        let place = Place::new();
        let mut server = Running::start(&place);
        let client = place.writer();
        // The signals are waited for a moment after the socket is served.
        std::thread::sleep(Duration::from_millis(100));
        server.signal(signal);
        assert!(server.child.wait().unwrap().success());
        assert_eq!(client.superblock().0.state().unwrap(), RegionState::Clean);
        assert!(!place.socket().exists());
    }
}

#[test]
fn a_killed_server_is_followed_by_the_next() {
    let place = Place::new();
    let first = Running::start(&place);
    // Still holding the memory, and the descriptor that came with it.
    let client = place.writer();
    drop(first);
    assert_eq!(client.superblock().0.state().unwrap(), RegionState::InUse);
    let _second = Running::start(&place);
    assert_eq!(client.lease(), 0, "the first server's client is fenced");
    assert_eq!(place.writer().welcome.incarnation, 2);
}

/// The client of the test maps the file, too, and does not look at it afterwards.
#[test]
fn a_region_file_that_is_cut_short_ends_it_with_one_line() {
    let place = Place::new();
    let mut running = Running::start(&place);
    let client = place.writer();
    let file = std::fs::OpenOptions::new().write(true).open(place.region_file()).unwrap();
    file.set_len(4096).unwrap();
    client.send(&Request::TakeBlocks { class: class(64), count: 1 });
    let status = running.child.wait().unwrap();
    assert_eq!(status.signal(), Some(Signal::BUS.as_raw()));
    let log = running.log();
    let told: Vec<&str> = log.lines().filter(|line| line.contains("kv-server: ")).collect();
    let [line] = &told[..] else { panic!("{told:?}") };
    assert!(line.contains("SIGBUS") && line.contains("truncated its file"), "{line}");
}

#[test]
fn it_tells_systemd_when_it_is_ready() {
    let place = Place::new();
    let socket = place.folder.path().join("notify");
    let notify = std::os::unix::net::UnixDatagram::bind(&socket).unwrap();
    notify.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut command = kv_server(&place, &["--memory", "8MiB"]);
    let child = command.env("NOTIFY_SOCKET", &socket).stderr(Stdio::null()).spawn().unwrap();
    let running = Running { child, log: PathBuf::new() };
    let mut buffer = [0; 64];
    let bytes = notify.recv(&mut buffer).unwrap();
    assert_eq!(String::from_utf8_lossy(&buffer[..bytes]).trim(), "READY=1");
    place.writer();
    drop(running);
}

#[test]
fn flags_override_the_file_and_json_is_json() {
    let place = Place::new();
    let file = place.folder.path().join("server.toml");
    let text = "listen = 'shm:///nowhere/kv.sock'\nmemory = '16MiB'\ngrace_ms = 7\n";
    std::fs::write(&file, format!("{text}region_file = '{}'", place.region_file().display()))
        .unwrap();
    let file = file.display().to_string();
    let mut command = kv_server(&place, &["--config", &file, "--log", "json", "--index", "64KiB"]);
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stderr.take().unwrap()).read_line(&mut line).unwrap();
    // Its stderr is closed now, which is no reason to stop.
    let running = Running { child, log: PathBuf::new() };
    assert!(line.starts_with('{') && line.trim().ends_with('}'), "{line}");
    let client = place.writer();
    let format = client.superblock().1;
    assert_eq!((format.grace_ms, format.region_bytes), (7, 16 << 20));
    assert_eq!(client.statistics().subtables, 8);
    drop(running);
}
