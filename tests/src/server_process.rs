//! `kv-server` as a process. Worker processes: binaries of the tests that use a server and check
//! what they see.

use std::ffi::OsStr;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use farside::{Client, ClientBuilder, Session};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, waitid};
use tempfile::TempDir;

use crate::command::{CommandOutput, command};
use crate::network::{Network, command_by};
use crate::{
    TEST_TIMEOUT, binary, device, free_tcp_address, is_over_shm, new_address, send_signal,
};

/// The shortest GRACE over RDMA. In emulation a READ or the answer of a client now and then takes
/// longer than the default allows.
pub const RDMA_GRACE_MS: u64 = 250;

/// The shortest GRACE over TCP, the default of servers. They fence a client that does not answer
/// for a part of it, as one on a busy machine may not.
const TCP_GRACE_MS: u64 = 100;

/// Returns a server's arguments, with a GRACE that suits the fabric.
fn adapted(arguments: &str) -> Vec<String> {
    let least = match device() {
        Some(_) => RDMA_GRACE_MS,
        None if is_over_shm() => 0,
        None => TCP_GRACE_MS,
    };
    let mut adapted: Vec<String> = arguments.split_whitespace().map(str::to_owned).collect();
    if let Some(at) = adapted.iter().position(|argument| argument == "--grace-ms") {
        let value = &mut adapted[at + 1];
        *value = value.parse().unwrap_or(least).max(least).to_string();
    } else if device().is_some() {
        adapted.extend(["--grace-ms".to_owned(), least.to_string()]);
    }
    adapted
}

/// A kv-server process; killed when dropped. Its arguments are words without spaces.
pub struct ServerProcess {
    folder: PathBuf,
    /// The folder, if the server has a folder of its own, which is removed when this is dropped.
    _own_folder: Option<TempDir>,
    address: String,
    arguments: Vec<String>,
    /// The words before the server's command, such as `ip netns exec NAME`.
    launcher: Vec<String>,
    child: Child,
}

impl ServerProcess {
    /// Starts `kv-server --listen ... <arguments>` in its own folder, and connects to it.
    pub fn start(arguments: &str) -> Self {
        Self::in_own_folder(tempfile::tempdir().unwrap(), arguments).connected()
    }

    /// Starts a server with a region file, which survives [`ServerProcess::kill`].
    pub fn start_with_file(arguments: &str) -> Self {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let region = folder.path().join("region");
        let arguments = format!("--region-file {} {arguments}", region.display());
        Self::in_own_folder(folder, &arguments).connected()
    }

    /// Starts a server with a config file of this text. Waits until the server listens,
    /// and connects no client, which the server may refuse.
    pub fn start_with_config(config: &str, arguments: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("server.toml");
        std::fs::write(&file, config).unwrap();
        let server =
            Self::in_own_folder(folder, &format!("--config {} {arguments}", file.display()));
        server.wait_for_log("serving");
        server
    }

    fn in_own_folder(folder: TempDir, arguments: &str) -> Self {
        let mut server = Self::spawn_in(folder.path(), arguments, |command| command);
        server._own_folder = Some(folder);
        server
    }

    /// Starts a server in an existing folder, where it appends to the file `log`. `configure` may
    /// change the command.
    pub fn spawn_in(
        folder: &Path,
        arguments: &str,
        configure: impl FnOnce(&mut Command) -> &mut Command,
    ) -> Self {
        Self::spawn_at(new_address(folder), Vec::new(), folder, arguments, configure)
    }

    fn spawn_at(
        address: String,
        launcher: Vec<String>,
        folder: &Path,
        arguments: &str,
        configure: impl FnOnce(&mut Command) -> &mut Command,
    ) -> Self {
        let (folder, arguments) = (folder.to_owned(), adapted(arguments));
        let mut command = kv_server(&launcher, &folder, &address, &arguments);
        let child = configure(&mut command).spawn().unwrap();
        Self { folder, _own_folder: None, address, arguments, launcher, child }
    }

    /// Starts a server in an existing folder, on the server's host of a network and at this port.
    pub fn spawn_behind(network: &Network, port: u16, folder: &Path, arguments: &str) -> Self {
        let (address, launcher) = (network.server_address_at(port), network.on_host());
        Self::spawn_at(address, launcher, folder, arguments, |command| command)
    }

    /// Starts a server in an existing folder, at an address of TCP. Its clocks are so far ahead, as
    /// those of a host that booted earlier may be.
    pub fn spawn_ahead(ahead: Duration, folder: &Path, arguments: &str) -> Self {
        let seconds = ahead.as_secs().to_string();
        let launcher = ["unshare", "--time", "--boottime", &seconds, "--monotonic", &seconds];
        let launcher = launcher.map(str::to_owned).into();
        Self::spawn_at(free_tcp_address(), launcher, folder, arguments, |command| command)
    }

    /// Starts a server with a region file on the server's host of a network. It also listens at
    /// [`Network::LOCAL_ADDRESS`] there, which no failure of the network affects.
    pub fn start_in(network: &Network, arguments: &str) -> Self {
        let own_folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let folder = own_folder.path().to_owned();
        let (region, local) = (folder.join("region"), Network::LOCAL_ADDRESS);
        let arguments = format!("--listen {local} --region-file {} {arguments}", region.display());
        let (address, launcher) = (network.server_address(), network.on_host());
        let mut server = Self::spawn_at(address, launcher, &folder, &arguments, |command| command);
        server._own_folder = Some(own_folder);
        server.connected()
    }

    fn connected(self) -> Self {
        self.wait_until_serving();
        self
    }

    fn wait_until_serving(&self) {
        self.client_builder().connect_timeout(TEST_TIMEOUT).connect().unwrap_or_else(|error| {
            panic!("{error}; the server's log: {}", self.log());
        });
    }

    /// Waits until this text is in the log.
    pub fn wait_for_log(&self, text: &str) {
        let started = Instant::now();
        while !self.log().contains(text) {
            assert!(started.elapsed() < TEST_TIMEOUT, "no `{text}` in the log: {}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Returns the address at which the server listens.
    pub fn address(&self) -> String {
        self.address.clone()
    }

    /// Returns the path of the server's region file, if the server was started with one.
    pub fn region_file(&self) -> PathBuf {
        self.folder.join("region")
    }

    /// Returns a folder for the test's own files.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the text that the server has logged.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.join("log")).unwrap_or_default()
    }

    /// Returns a builder of clients that connect to the server.
    pub fn client_builder(&self) -> ClientBuilder {
        Client::builder().server(&self.address())
    }

    /// Connects a client that may write.
    pub fn client(&self) -> Client {
        self.client_builder().connect().unwrap()
    }

    /// Connects a client, and opens its only session.
    pub fn session(&self) -> Session {
        self.client().session().unwrap()
    }

    /// Returns the server's process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends the server a signal.
    pub fn signal(&self, signal: Signal) {
        send_signal(&self.child, signal);
    }

    /// Sends SIGSTOP, and returns when all threads of the server have stopped.
    pub fn pause(&self) {
        self.signal(Signal::STOP);
        waitid(WaitId::Pid(Pid::from_child(&self.child)), WaitIdOptions::STOPPED).unwrap();
    }

    /// Sends SIGKILL, and waits for the server's exit.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Sends SIGTERM, waits for the server's exit, and returns the exit code.
    pub fn terminate(&mut self) -> Option<i32> {
        self.signal(Signal::TERM);
        self.wait().code()
    }

    /// Whether the server has exited.
    pub fn has_exited(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// Waits for the server's exit.
    pub fn wait(&mut self) -> ExitStatus {
        let started = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(
                started.elapsed() < TEST_TIMEOUT,
                "kv-server has not exited in time: {}",
                self.log()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Starts the server again with the same arguments, after its exit.
    pub fn restart(&mut self) {
        self.start_again();
        self.wait_until_serving();
    }

    /// Starts the server again, without waiting until it serves.
    pub fn start_again(&mut self) {
        let mut command = kv_server(&self.launcher, &self.folder, &self.address, &self.arguments);
        self.child = command.spawn().unwrap();
    }

    /// Returns the number of voluntary context switches of the server's threads. Each is a sleep.
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

    /// Returns the server's descriptors.
    pub fn descriptors(&self) -> Vec<u64> {
        let folder = std::fs::read_dir(format!("/proc/{}/fd", self.pid())).unwrap();
        let names = folder.filter_map(|entry| entry.unwrap().file_name().into_string().ok());
        names.map(|name| name.parse().unwrap()).collect()
    }

    /// Returns the memory that the server uses, without the region, in bytes.
    pub fn own_bytes(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let field = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        field.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10
    }

    /// Returns a command of Farside that connects to the server.
    pub fn command(&self, name: &str) -> Command {
        let mut command = command(name);
        command.env("FARSIDE_SERVER", self.address());
        command
    }

    /// Runs `kv-cli <arguments>` against the server.
    pub fn cli(&self, arguments: &[&str]) -> CommandOutput {
        CommandOutput::of(self.command("kv-cli").args(arguments))
    }

    /// Checks that `kv-cli verify` finds no problem.
    pub fn assert_verifies(&self) {
        self.cli(&["verify"]).succeeded();
    }
}

fn kv_server(launcher: &[String], folder: &Path, address: &str, arguments: &[String]) -> Command {
    let log = folder.join("log");
    let log = std::fs::OpenOptions::new().create(true).append(true).open(log).unwrap();
    let mut command = command_by(launcher, binary("kv-server"));
    command.args(["--listen", address]).args(arguments).env_remove("NOTIFY_SOCKET");
    // Not the test's stdout: a server that outlives a failing test would keep it open.
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    command
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A worker process; killed when dropped.
pub struct Worker {
    child: Child,
    errors: PathBuf,
}

impl Worker {
    /// Starts a program with the server's address and then `arguments`. Its stderr goes to a file
    /// with this number in the server's folder.
    pub fn start<A: AsRef<OsStr>>(
        program: &str,
        server: &ServerProcess,
        number: u64,
        arguments: impl IntoIterator<Item = A>,
    ) -> Self {
        Self::start_at(&server.address(), program, server.folder(), number, arguments)
    }

    /// As [`Worker::start`], with another address of the server, or seeds of a cluster. The file is
    /// in this folder.
    pub fn start_at<A: AsRef<OsStr>>(
        address: &str,
        program: &str,
        folder: &Path,
        number: u64,
        arguments: impl IntoIterator<Item = A>,
    ) -> Self {
        let mut command = Command::new(program);
        command.arg(address).args(arguments);
        Self::spawn(command, folder, number)
    }

    /// As [`Worker::start`], on the host of a server that is behind a network.
    pub fn start_beside<A: AsRef<OsStr>>(
        network: &Network,
        program: &str,
        folder: &Path,
        number: u64,
        arguments: impl IntoIterator<Item = A>,
    ) -> Self {
        let mut command = command_by(&network.on_host(), program);
        command.arg(Network::LOCAL_ADDRESS).args(arguments);
        Self::spawn(command, folder, number)
    }

    fn spawn(mut command: Command, folder: &Path, number: u64) -> Self {
        let errors = folder.join(format!("worker-{number}"));
        let child = command
            .stdin(Stdio::null())
            .stderr(std::fs::File::create(&errors).unwrap())
            .spawn()
            .unwrap();
        Self { child, errors }
    }

    fn errors(&self) -> String {
        std::fs::read_to_string(&self.errors).unwrap()
    }

    /// Checks that the process has not failed.
    pub fn check(&mut self) {
        if let Some(status) = self.child.try_wait().unwrap() {
            assert!(status.success(), "a worker failed: {status}: {}", self.errors());
        }
    }

    /// Kills the process, and checks that it had reported no error.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.wait_checked();
    }

    /// Returns whether SIGKILL has ended the process. The process may have sent the signal itself.
    /// Panics if the process failed in another way.
    pub fn was_killed(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some() && self.wait_checked()
    }

    /// Waits until the process exits, and returns whether SIGKILL ended it. Panics if the
    /// process failed in another way.
    pub fn wait_checked(&mut self) -> bool {
        let status = self.child.wait().unwrap();
        assert_eq!(self.errors(), "", "a worker that ended had reported an error");
        let is_killed = status.signal() == Some(Signal::KILL.as_raw());
        assert!(is_killed || status.success(), "a worker failed: {status}");
        is_killed
    }

    /// Stops the process, as a debugger would; returns once it is stopped.
    pub fn stop(&self) {
        crate::send_signal(&self.child, Signal::STOP);
        let status = format!("/proc/{}/status", self.child.id());
        while !std::fs::read_to_string(&status).unwrap().contains("State:\tT") {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }

    /// Continues a stopped process.
    pub fn resume(&self) {
        crate::send_signal(&self.child, Signal::CONT);
    }

    /// Waits until the process exits, and checks that it succeeded.
    pub fn wait(mut self) {
        assert!(!self.wait_checked(), "a worker was killed");
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
