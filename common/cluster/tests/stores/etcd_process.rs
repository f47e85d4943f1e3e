//! Members of etcd on loopback, each a process of its own.

use std::fs::File;
use std::io::Write;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use farside_cluster::{RecordStore, StoreOptions, open};
use farside_fabric::tcp::TlsFiles;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use crate::contract::LONG;

/// Attempts to start with other ports, if another process has taken one.
const STARTS_MAX: usize = 5;

/// Whether this test has to be left out. Prints the reason.
pub(crate) fn is_left_out() -> bool {
    let found = Command::new("etcd").arg("--version").stdout(Stdio::null()).status();
    if found.is_err() {
        let name = thread::current().name().unwrap_or_default().to_owned();
        // Not captured, so that the report shows it.
        let _ = writeln!(std::io::stderr().lock(), "left out: etcd is not installed: {name}");
    }
    found.is_err()
}

struct Member {
    name: String,
    port: u16,
    arguments: Vec<String>,
    process: Child,
}

impl Member {
    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).unwrap();
    }

    fn kill(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The members of one cluster. They are killed when this is dropped.
pub(crate) struct Etcd {
    members: Vec<Member>,
    folder: TempDir,
    tls: TlsFiles,
}

impl Etcd {
    /// Starts this number of members, each with these arguments, and waits until they serve.
    pub(crate) fn start(count: usize, arguments: &[&str]) -> Self {
        Self::start_with(count, arguments, &TlsFiles::default())
    }

    /// Starts members that use TLS with clients if there are files for it.
    pub(crate) fn start_with(count: usize, arguments: &[&str], tls: &TlsFiles) -> Self {
        for _ in 0..STARTS_MAX {
            let mut etcd = Self::spawn(count, arguments, tls);
            if etcd.wait_until_ready() {
                return etcd;
            }
        }
        panic!("etcd does not start");
    }

    fn spawn(count: usize, arguments: &[&str], tls: &TlsFiles) -> Self {
        let folder = ["/dev/shm", "."].iter().find_map(|parent| TempDir::new_in(parent).ok());
        let folder = folder.expect("a folder for the data");
        let listeners: Vec<_> =
            (0..2 * count).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let ports: Vec<_> =
            listeners.iter().map(|listener| listener.local_addr().unwrap().port()).collect();
        drop(listeners);
        let (clients, peers) = ports.split_at(count);
        let peer = |index: usize| format!("http://127.0.0.1:{}", peers[index]);
        let all: Vec<_> = (0..count).map(|index| format!("m{index}={}", peer(index))).collect();
        let scheme = if tls.is_used() { "https" } else { "http" };
        let member = |index: usize| {
            let client = format!("{scheme}://127.0.0.1:{}", clients[index]);
            let name = format!("m{index}");
            let data = folder.path().join(&name).display().to_string();
            let peer = peer(index);
            let own = [
                ["--name", &name],
                ["--data-dir", &data],
                ["--listen-client-urls", &client],
                ["--advertise-client-urls", &client],
                ["--listen-peer-urls", &peer],
                ["--initial-advertise-peer-urls", &peer],
                ["--initial-cluster", &all.join(",")],
                ["--log-level", "error"],
                ["--logger", "zap"],
            ];
            let own = own.concat().into_iter().chain(arguments.iter().copied());
            let arguments: Vec<_> = own.map(str::to_owned).collect();
            let process = launch(&folder, &name, &arguments);
            Member { name, port: clients[index], arguments, process }
        };
        let members = (0..count).map(member).collect();
        Self { members, folder, tls: TlsFiles { ca: tls.ca.clone(), ..TlsFiles::default() } }
    }

    /// Waits until every member answers a read. Returns whether all run.
    fn wait_until_ready(&mut self) -> bool {
        if self.tls.is_used() {
            // The test waits itself: only it has the files.
            return true;
        }
        for index in 0..self.members.len() {
            let store = self.store_at(&[index], &StoreOptions::default());
            let deadline = Instant::now() + LONG;
            while store.read().is_err() {
                if self.members[index].process.try_wait().unwrap().is_some() {
                    return false;
                }
                assert!(Instant::now() < deadline, "a member of etcd does not serve");
            }
        }
        true
    }

    /// `HOST:PORT` of a member.
    pub(crate) fn host(&self, index: usize) -> String {
        format!("127.0.0.1:{}", self.members[index].port)
    }

    /// The store of a test's cluster, by all members.
    pub(crate) fn store(&self) -> Arc<dyn RecordStore> {
        let all: Vec<_> = (0..self.members.len()).collect();
        self.store_at(&all, &StoreOptions::default())
    }

    /// The same by some of the members.
    pub(crate) fn store_at(
        &self,
        members: &[usize],
        options: &StoreOptions,
    ) -> Arc<dyn RecordStore> {
        let hosts: Vec<_> = members.iter().map(|index| self.host(*index)).collect();
        open(&format!("etcd://{}/test-1", hosts.join(",")), options).unwrap()
    }

    /// Stops the member's process, which then accepts connections and does not answer.
    pub(crate) fn freeze(&self, index: usize) {
        self.members[index].signal(Signal::STOP);
    }

    /// Lets a frozen member go on.
    pub(crate) fn thaw(&self, index: usize) {
        self.members[index].signal(Signal::CONT);
    }

    /// Kills a member.
    pub(crate) fn kill(&mut self, index: usize) {
        self.members[index].kill();
    }

    /// Starts a killed member again, with its data.
    pub(crate) fn restart(&mut self, index: usize) {
        let member = &mut self.members[index];
        member.process = launch(&self.folder, &member.name, &member.arguments);
    }

    /// Sends a request to the first member. Returns the answer; panics if it is an error.
    pub(crate) fn request(&self, path: &str, body: &Value) -> Value {
        self.request_with(path, body, None)
    }

    /// The same with a user's token.
    pub(crate) fn request_with(&self, path: &str, body: &Value, token: Option<&str>) -> Value {
        let url = format!("http://{}/v3/{path}", self.host(0));
        let config = ureq::Agent::config_builder().proxy(None).timeout_global(Some(LONG));
        let mut request = config.build().new_agent().post(url);
        if let Some(token) = token {
            request = request.header("Authorization", token);
        }
        let mut response = request.send(body.to_string().as_bytes()).unwrap();
        serde_json::from_slice(&response.body_mut().read_to_vec().unwrap()).unwrap()
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        for member in &mut self.members {
            member.kill();
        }
    }
}

fn launch(folder: &TempDir, name: &str, arguments: &[String]) -> Child {
    let log = File::create(folder.path().join(format!("{name}.log"))).unwrap();
    Command::new("etcd")
        .args(arguments)
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .unwrap()
}

/// Calls again until there is a result. Panics if that takes too long.
pub(crate) fn until<T>(what: &str, mut attempt: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + LONG;
    loop {
        if let Some(found) = attempt() {
            return found;
        }
        assert!(Instant::now() < deadline, "{what}");
        thread::sleep(Duration::from_millis(20));
    }
}
