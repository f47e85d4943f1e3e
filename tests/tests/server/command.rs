//! The `kv-server` process: how it starts, stops and refuses, and that it sleeps.

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
        while Instant::now() < until {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status.success();
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        false
    }

    /// How often its threads went to sleep so far.
    fn sleeps(&self) -> u64 {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.0.id())).unwrap();
        let of_task = |path: PathBuf| {
            let status = std::fs::read_to_string(path.join("status")).unwrap();
            let line = status.lines().find_map(|l| l.strip_prefix("voluntary_ctxt_switches:"));
            line.unwrap().trim().parse::<u64>().unwrap()
        };
        tasks.map(|task| of_task(task.unwrap().path())).sum()
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
fn it_sleeps_while_clients_use_the_memory() {
    let place = Place::new();
    let arguments = arguments(&place);
    let server = Running::start(&arguments.each_ref().map(String::as_str));
    let client = place.writer();
    client.statistics();
    std::thread::sleep(Duration::from_millis(100));
    let before = server.sleeps();
    let word = client.geometry().chunk_offset(2).unwrap();
    for n in 0..100_000 {
        assert_eq!(client.region.compare_swap(word, n, n + 1).unwrap(), n);
    }
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(server.sleeps(), before, "the server woke up");
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

#[test]
fn mistakes_are_one_line_and_an_exit_code() {
    let place = Place::new();
    let listen = format!("shm://{}", place.socket().display());
    let file = place.folder.path().join("server.toml");
    std::fs::write(&file, "\ncolour = 1\n").unwrap();
    let file = file.display().to_string();
    let absent = place.folder.path().join("no/region").display().to_string();
    for (arguments, expected) in [
        (&["--colour"][..], "unexpected argument '--colour'"),
        (&["--memory", "1GB"], "`1GB` is no size; write"),
        (&["--secret", "x"], "unexpected argument '--secret'"),
        (&["--huge-pages", "yes"], "write auto, never or require"),
        (&["--listen", "kv.sock"], "write for example shm:///"),
        (&[], "listen is missing: write for example"),
        (&["--config", "/nowhere/server.toml"], "cannot read the config file /nowhere"),
        (&["--config", &file], "server.toml:2: unknown field `colour`"),
        (&["--listen", &listen, "--memory", "1TiB"], "memory = 1TiB: write a size from 8MiB"),
        (&["--listen", &listen, "--memory", "256GiB"], "of memory available: ask for less"),
        (&["--listen", &listen, "--region-file", &absent], "does not exist: create it first"),
        (&["--listen", &listen, "--memory", "8MiB", "--index", "1GiB"], "over half"),
    ] {
        let output = kv_server(arguments).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && output.stdout.is_empty(), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(said.starts_with("kv-server: ") && said.contains(expected), "{said}");
    }
}
