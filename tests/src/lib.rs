//! Helpers of the integration tests: real processes, and values that carry their own proof.
#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "only tests use this")]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use farside::{Client, ClientBuilder};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};

pub mod counters;
pub mod engine;
pub mod faults;
pub mod ledger;
mod left_out;
pub mod proof;
pub mod recorder;
mod worker;

pub use left_out::{device_or_left_out, left_out, left_out_over_rdma};
pub use worker::Worker;

/// The binary of this name, built from the present sources (unless `FARSIDE_BUILT` is set).
pub fn binary(name: &str) -> PathBuf {
    static BUILT: Mutex<Vec<String>> = Mutex::new(Vec::new());
    // The test binary is target/<profile>/deps/<name>, or target/<profile>/<name>.
    let test_binary = std::env::current_exe().unwrap();
    let folder = test_binary.ancestors().skip(1).find(|folder| !folder.ends_with("deps")).unwrap();
    // `make test` builds all binaries first and sets this; a guest cannot build anything.
    if std::env::var_os("FARSIDE_BUILT").is_some() {
        return folder.join(name);
    }
    let mut built = BUILT.lock().unwrap_or_else(PoisonError::into_inner);
    if !built.iter().any(|known| known == name) {
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
        cargo.args(["build", "--quiet", "--workspace", "--bin", name]);
        if folder.ends_with("release") {
            cargo.arg("--release");
        }
        cargo.arg("--target-dir").arg(folder.parent().unwrap());
        cargo.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap());
        assert!(cargo.status().unwrap().success(), "cargo build --bin {name} failed");
        built.push(name.to_owned());
    }
    folder.join(name)
}

/// Tells threads to stop, also when the test fails: otherwise a scope would wait for them forever.
pub struct StopOnDrop<'f>(pub &'f AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Timeout of steps that are quick on an idle machine: far more than they take on a busy one.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until a condition holds; panics with its description `what` after the timeout.
pub fn wait_until(what: &str, timeout: Duration, mut holds: impl FnMut() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < timeout, "after {timeout:?} still waiting: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The address of the RDMA device to test with; without one, tests use shared memory.
pub fn device() -> Option<String> {
    std::env::var("FARSIDE_TEST_DEVICE").ok().filter(|address| !address.is_empty())
}

/// `count`, reduced over RDMA, where an operation takes a hundred times as long, and even longer in
/// emulation.
pub fn scaled(count: u64) -> u64 {
    if device().is_some() { count.div_ceil(50) } else { count }
}

/// A server's arguments, with GRACE raised to its default over RDMA: in emulation a READ often
/// takes longer than a shorter GRACE.
fn adapted(arguments: &[&str]) -> Vec<String> {
    const GRACE_MS_MIN: u64 = 100;
    let mut adapted: Vec<String> = arguments.iter().map(|&text| text.to_owned()).collect();
    let grace = adapted.iter().position(|argument| argument == "--grace-ms");
    if let Some(value) = grace.and_then(|at| adapted.get_mut(at + 1))
        && device().is_some()
    {
        *value = value.parse().unwrap_or(GRACE_MS_MIN).max(GRACE_MS_MIN).to_string();
    }
    adapted
}

/// An address at which no server listens.
pub fn new_address(folder: &Path) -> String {
    static SERVERS: AtomicU32 = AtomicU32::new(0);
    match device() {
        None => format!("shm://{}", folder.join("kv.sock").display()),
        Some(device) => {
            let number = SERVERS.fetch_add(1, Ordering::Relaxed);
            let port = 10_000 + (std::process::id() * 97 + number) % 50_000;
            format!("rdma://{device}:{port}")
        }
    }
}

/// A kv-server process with its own folder; killed when dropped.
pub struct ServerProcess {
    folder: tempfile::TempDir,
    address: String,
    arguments: Vec<String>,
    child: Child,
}

impl ServerProcess {
    /// Starts `kv-server --listen ... <arguments>` and waits until it serves.
    pub fn start(arguments: &[&str]) -> Self {
        let server = Self::new(tempfile::tempdir().unwrap(), arguments);
        server.wait_until_serving();
        server
    }

    /// Starts a server, but waits only until it listens: it may refuse this process.
    pub fn start_unchecked(arguments: &[&str]) -> Self {
        Self::new(tempfile::tempdir().unwrap(), arguments).listening()
    }

    /// Starts a server with a config file of this text, and waits until it listens.
    pub fn start_with_config(config: &str, arguments: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("server.toml");
        std::fs::write(&file, config).unwrap();
        let file = file.display().to_string();
        Self::new(folder, &[&["--config", &file], arguments].concat()).listening()
    }

    fn listening(self) -> Self {
        let started = Instant::now();
        while !self.log().contains("serving") {
            assert!(started.elapsed() < PATIENCE, "it does not listen: {}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
        self
    }

    /// Starts a server with a region file, which survives [`ServerProcess::kill`].
    pub fn start_with_file(arguments: &[&str]) -> Self {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let file = folder.path().join("region").display().to_string();
        let server = Self::new(folder, &[&["--region-file", &file], arguments].concat());
        server.wait_until_serving();
        server
    }

    fn new(folder: tempfile::TempDir, arguments: &[&str]) -> Self {
        let (arguments, address) = (adapted(arguments), new_address(folder.path()));
        let child = Self::spawn(folder.path(), &address, &arguments);
        Self { folder, address, arguments, child }
    }

    fn spawn(folder: &Path, address: &str, arguments: &[String]) -> Child {
        let log = folder.join("log");
        let log = std::fs::OpenOptions::new().create(true).append(true).open(log).unwrap();
        Command::new(binary("kv-server"))
            .arg("--listen")
            .arg(address)
            .args(arguments)
            .stdin(Stdio::null())
            // Not the test's stdout: a server that outlives a failing test would keep it open.
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap()
    }

    fn wait_until_serving(&self) {
        self.client_builder().connect_timeout(PATIENCE).connect().unwrap_or_else(|error| {
            panic!("{error}; the server's log: {}", self.log());
        });
    }

    /// The address at which it listens.
    pub fn address(&self) -> String {
        self.address.clone()
    }

    /// Its region file, if it was started with one.
    pub fn region_file(&self) -> PathBuf {
        self.folder.path().join("region")
    }

    /// A folder for the test's own files.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The text that it logged.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    /// A builder of clients that connect to it.
    pub fn client_builder(&self) -> ClientBuilder {
        Client::builder().server(&self.address())
    }

    /// Connects a client that may write.
    pub fn client(&self) -> Client {
        self.client_builder().connect().unwrap()
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        send_signal(&self.child, signal);
    }

    /// Sends SIGSTOP, and returns when all its threads have stopped.
    pub fn pause(&self) {
        self.signal(Signal::STOP);
        waitid(WaitId::Pid(Pid::from_child(&self.child)), WaitIdOptions::STOPPED).unwrap();
    }

    /// Sends SIGKILL, and waits for its exit.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Sends SIGTERM, waits for its exit, and returns the exit code.
    pub fn terminate(&mut self) -> Option<i32> {
        self.signal(Signal::TERM);
        let started = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(started.elapsed() < PATIENCE, "it does not stop: {}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Starts it again with the same arguments, after [`ServerProcess::kill`] or
    /// [`ServerProcess::terminate`].
    pub fn restart(&mut self) {
        self.start_again();
        self.wait_until_serving();
    }

    /// Starts it again, without waiting until it serves.
    pub fn start_again(&mut self) {
        self.child = Self::spawn(self.folder.path(), &self.address, &self.arguments);
    }

    /// The number of voluntary context switches of its threads, that is, how often they slept.
    pub fn wakeups(&self) -> u64 {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.pid())).unwrap();
        tasks
            .map(|task| {
                let status = std::fs::read_to_string(task.unwrap().path().join("status")).unwrap();
                let field =
                    status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
                field.unwrap().trim().parse::<u64>().unwrap()
            })
            .sum()
    }

    /// Runs `kv-cli <arguments>` against it.
    pub fn cli(&self, arguments: &[&str]) -> Output {
        Command::new(binary("kv-cli"))
            .args(arguments)
            .env("FARSIDE_SERVER", self.address())
            .stdin(Stdio::null())
            .output()
            .unwrap()
    }

    /// Checks that `kv-cli verify` finds no problem.
    pub fn assert_verifies(&self) {
        let output = self.cli(&["verify"]);
        assert!(output.status.success(), "kv-cli verify: {output:?}");
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The number of blocks that are neither with the server nor linked. No client may be at work.
pub fn blocks_with_clients(client: &Client) -> i64 {
    let linked = client.session().unwrap().scan().unwrap().count() as i64;
    let classes = client.statistics().unwrap().classes;
    classes.iter().map(|class| (class.blocks - class.blocks_free) as i64).sum::<i64>() - linked
}

/// Sends a child a signal.
pub fn send_signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}
