//! The `kv-server` process: how it starts and stops. `server_cli.rs` of the integration tests has
//! what it refuses.

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};

use farside_tests::binary;

use farside_layout::RegionState;

use super::*;

fn kv_server(arguments: &[&str]) -> Command {
    let mut command = Command::new(binary("kv-server"));
    command.args(arguments).stdin(Stdio::null()).stderr(Stdio::piped());
    command.env_remove("NOTIFY_SOCKET");
    command
}

/// A process that is ended with its test.
pub(super) struct Running(Child);

impl Running {
    pub(super) fn start(arguments: &[&str]) -> Self {
        let mut child = kv_server(arguments).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        lines.find(|line| line.as_ref().unwrap().contains("serving")).unwrap().unwrap();
        // Goes on reading, so that the server never waits for it.
        std::thread::spawn(move || lines.for_each(drop));
        Self(child)
    }

    pub(super) fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.0);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// Whether it ends of itself.
    pub(super) fn ends_well(&mut self) -> bool {
        let until = Instant::now() + PATIENCE;
        while self.0.try_wait().unwrap().is_none() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        self.0.try_wait().unwrap().is_some_and(|status| status.success())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub(super) fn arguments(place: &Place) -> [String; 6] {
    let listen = format!("shm://{}", place.socket().display());
    let file = place.region_file().display().to_string();
    ["--listen", &listen, "--memory", "8MiB", "--region-file", &file].map(str::to_owned)
}

#[test]
fn it_stops_in_order_on_a_signal() {
    for signal in [rustix::process::Signal::TERM, rustix::process::Signal::INT] {
        let place = Place::new();
        let arguments = arguments(&place);
        let mut server = Running::start(&arguments.each_ref().map(String::as_str));
        let client = place.writer();
        // The signals are waited for a moment after the socket is served.
        std::thread::sleep(Duration::from_millis(100));
        server.signal(signal);
        assert!(server.0.wait().unwrap().success());
        assert_eq!(client.superblock().0.state().unwrap(), RegionState::Clean);
        assert!(!place.socket().exists());
    }
}

#[test]
fn a_killed_server_is_followed_by_the_next() {
    let place = Place::new();
    let arguments = arguments(&place);
    let arguments = arguments.each_ref().map(String::as_str);
    let first = Running::start(&arguments);
    // Still holding the memory, and the descriptor that came with it.
    let client = place.writer();
    drop(first);
    assert_eq!(client.superblock().0.state().unwrap(), RegionState::InUse);
    let _second = Running::start(&arguments);
    assert_eq!(client.lease(), 0, "the first server's client is fenced");
    assert_eq!(place.writer().welcome.incarnation, 2);
}

/// The client of the test maps the file, too, and does not look at it afterwards.
#[test]
fn a_region_file_that_is_cut_short_ends_it_with_one_line() {
    let place = Place::new();
    let arguments = arguments(&place);
    let mut child = kv_server(&arguments.each_ref().map(String::as_str)).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    lines.find(|line| line.contains("serving")).unwrap();
    let mut running = Running(child);
    let client = place.writer();
    let file = std::fs::OpenOptions::new().write(true).open(place.region_file()).unwrap();
    file.set_len(4096).unwrap();
    client.send(&Request::TakeBlocks { class: class(64), count: 1 });
    let told: Vec<String> = lines.filter(|line| line.contains("kv-server: ")).collect();
    let [line] = &told[..] else { panic!("{told:?}") };
    assert!(line.contains("SIGBUS") && line.contains("was made shorter"), "{line}");
    let status = running.0.wait().unwrap();
    assert_eq!(status.signal(), Some(rustix::process::Signal::BUS.as_raw()));
}

#[test]
fn it_tells_systemd_when_it_is_ready() {
    let place = Place::new();
    let socket = place.folder.path().join("notify");
    let notify = std::os::unix::net::UnixDatagram::bind(&socket).unwrap();
    notify.set_read_timeout(Some(PATIENCE)).unwrap();
    let arguments = arguments(&place);
    let mut command = kv_server(&arguments.each_ref().map(String::as_str));
    let running = Running(command.env("NOTIFY_SOCKET", &socket).spawn().unwrap());
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
    let listen = format!("shm://{}", place.socket().display());
    let file = file.display().to_string();
    let arguments = ["--config", &file, "--listen", &listen, "--log", "json", "--index", "64KiB"];
    let mut child = kv_server(&arguments).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stderr.take().unwrap()).read_line(&mut line).unwrap();
    // Its stderr is closed now, which is no reason to stop.
    let running = Running(child);
    assert!(line.starts_with('{') && line.trim().ends_with('}'), "{line}");
    let client = place.writer();
    let format = client.superblock().1;
    assert_eq!((format.grace_ms, format.region_bytes), (7, 16 << 20));
    assert_eq!(client.statistics().subtables, 8);
    drop(running);
}
