//! Members of etcd on this machine, each a process of its own. The integration tests of whole
//! clusters use this file, too.
#![allow(unreachable_pub, reason = "another crate has this module, too")]

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
use serde_json::{Value, json};
use tempfile::TempDir;

/// Longer than any wait of a test that passes.
pub const LONG: Duration = Duration::from_secs(30);
/// How long a member has to answer a question about the leader.
const STATUS_TIMEOUT: Duration = Duration::from_secs(1);
/// The name of the test's cluster.
const NAME: &str = "test-1";
/// Attempts to start with other ports, if another process has taken one.
const STARTS_MAX: usize = 5;

/// Whether this test has to be left out. Prints the reason.
pub fn is_left_out() -> bool {
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
pub struct Etcd {
    members: Vec<Member>,
    folder: TempDir,
    tls: TlsFiles,
}

impl Etcd {
    /// Starts this number of members, each with these arguments, and waits until they serve.
    pub fn start(count: usize, arguments: &[&str]) -> Self {
        Self::start_with(count, arguments, &TlsFiles::default())
    }

    /// Starts members that use TLS with clients if there are files for it.
    pub fn start_with(count: usize, arguments: &[&str], tls: &TlsFiles) -> Self {
        Self::start_at(&[], count, arguments, tls)
    }

    /// Starts members at which clients arrive at these addresses, too.
    pub fn start_at(hosts: &[String], count: usize, arguments: &[&str], tls: &TlsFiles) -> Self {
        for _ in 0..STARTS_MAX {
            let mut etcd = Self::spawn(hosts, count, arguments, tls);
            if etcd.wait_until_ready() {
                return etcd;
            }
        }
        panic!("etcd does not start");
    }

    fn spawn(hosts: &[String], count: usize, arguments: &[&str], tls: &TlsFiles) -> Self {
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
            let url = |host: &str| format!("{scheme}://{host}:{}", clients[index]);
            let client = url("127.0.0.1");
            let further = hosts.iter().map(|host| url(host));
            let listeners = std::iter::once(client.clone()).chain(further).collect::<Vec<_>>();
            let name = format!("m{index}");
            let data = folder.path().join(&name).display().to_string();
            let peer = peer(index);
            let own = [
                ["--name", &name],
                ["--data-dir", &data],
                ["--listen-client-urls", &listeners.join(",")],
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

    /// Returns `HOST:PORT` of a member.
    pub fn host(&self, index: usize) -> String {
        format!("127.0.0.1:{}", self.members[index].port)
    }

    /// Returns the store of a test's cluster, by all members.
    pub fn store(&self) -> Arc<dyn RecordStore> {
        open(&self.uri("127.0.0.1"), &StoreOptions::default()).unwrap()
    }

    /// Returns the same by some of the members.
    pub fn store_at(&self, members: &[usize], options: &StoreOptions) -> Arc<dyn RecordStore> {
        let hosts: Vec<_> = members.iter().map(|index| self.host(*index)).collect();
        open(&format!("etcd://{}/{NAME}", hosts.join(",")), options).unwrap()
    }

    /// Returns the URI of the records, for a process that reaches all members at this address.
    pub fn uri(&self, host: &str) -> String {
        let members = self.members.iter().map(|member| format!("{host}:{}", member.port));
        format!("etcd://{}/{NAME}", members.collect::<Vec<_>>().join(","))
    }

    /// Stops the member's process, which then accepts connections and does not answer.
    pub fn freeze(&self, index: usize) {
        self.members[index].signal(Signal::STOP);
    }

    /// Lets a frozen member go on.
    pub fn thaw(&self, index: usize) {
        self.members[index].signal(Signal::CONT);
    }

    /// Kills a member.
    pub fn kill(&mut self, index: usize) {
        self.members[index].kill();
    }

    /// Starts a killed member again, with its data.
    pub fn restart(&mut self, index: usize) {
        let member = &mut self.members[index];
        member.process = launch(&self.folder, &member.name, &member.arguments);
    }

    /// Returns the member that leads, if a member knows it.
    pub fn leader(&self) -> Option<usize> {
        let ids: Vec<_> = (0..self.members.len()).map(|index| self.ids(index)).collect();
        let leader = ids.iter().flatten().map(|(_, leader)| leader).max()?;
        ids.iter().position(|ids| ids.as_ref().is_some_and(|(own, _)| own == leader))
    }

    /// The ids of a member and of its leader. `None` if it does not answer, or knows no leader.
    fn ids(&self, index: usize) -> Option<(u64, u64)> {
        let path = "maintenance/status";
        let answer = self.ask(index, path, &json!({}), None, STATUS_TIMEOUT)?;
        let id = |value: &Value| value.as_str()?.parse::<u64>().ok();
        Some((id(&answer["header"]["member_id"])?, id(&answer["leader"])?))
    }

    /// Makes another member the leader. Returns whether the leader has agreed.
    pub fn move_leader(&self, to: usize) -> bool {
        let (Some(from), Some((target, _))) = (self.leader(), self.ids(to)) else { return false };
        let body = json!({ "targetID": target.to_string() });
        let path = "maintenance/transfer-leadership";
        from != to && self.ask(from, path, &body, None, STATUS_TIMEOUT).is_some()
    }

    /// Sends a request to the first member. Returns the answer; panics if it is an error.
    pub fn request(&self, path: &str, body: &Value) -> Value {
        self.request_with(path, body, None)
    }

    /// The same with a user's token.
    pub fn request_with(&self, path: &str, body: &Value, token: Option<&str>) -> Value {
        self.ask(0, path, body, token, LONG).unwrap()
    }

    /// Sends a request to a member. Returns the answer; `None` if there is none, or an error.
    fn ask(
        &self,
        index: usize,
        path: &str,
        body: &Value,
        token: Option<&str>,
        timeout: Duration,
    ) -> Option<Value> {
        let url = format!("http://{}/v3/{path}", self.host(index));
        let config = ureq::Agent::config_builder().proxy(None).timeout_global(Some(timeout));
        let mut request = config.build().new_agent().post(url);
        if let Some(token) = token {
            request = request.header("Authorization", token);
        }
        let mut response = request.send(body.to_string().as_bytes()).ok()?;
        serde_json::from_slice(&response.body_mut().read_to_vec().ok()?).ok()
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
pub fn until<T>(what: &str, mut attempt: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + LONG;
    loop {
        if let Some(found) = attempt() {
            return found;
        }
        assert!(Instant::now() < deadline, "{what}");
        thread::sleep(Duration::from_millis(20));
    }
}
