//! Helpers of the tests: real processes, faults, and self-describing values.
#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    clippy::print_stdout,
    reason = "only tests use this"
)]

#[path = "../../bench/src/allocations.rs"]
pub mod allocations;
pub mod cluster;
pub mod command;
pub mod counters;
pub mod engine;
#[path = "../../common/cluster/tests/stores/etcd_process.rs"]
pub mod etcd_process;
pub mod fabric;
pub mod faults;
pub mod handshake;
pub mod lanes;
pub mod network;
pub mod recorder;
pub mod self_describing;
mod server_process;

use std::net::TcpListener;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use farside::{Client, Error, Session};
use farside_layout::{ExtentShape, class_for};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, setrlimit};

pub use fabric::{
    OTHER_USER, as_other_user, device_or_left_out, left_out, left_out_without_netem,
    left_out_without_root, left_out_without_time_namespaces, network_or_left_out,
};
pub use server_process::{RDMA_GRACE_MS, ServerProcess, Worker};

/// Waits until the server has all blocks that are not linked.
pub fn wait_for_all_blocks(observer: &Client) {
    wait_until("all blocks are back", TEST_TIMEOUT, || blocks_with_clients(observer) == 0);
}

/// Makes `gets` GETs of the keys below `keys` in turn, and fills the pipeline with them. Each must
/// find a value of `bytes` bytes.
pub fn get_in_turn(session: &mut Session, gets: u64, keys: u64, bytes: usize) {
    let mut pipeline = session.pipeline().unwrap();
    let mut started = 0;
    for _ in 0..gets {
        while started < gets && pipeline.get((started % keys).to_le_bytes()).is_ok() {
            started += 1;
        }
        let result = pipeline.wait().unwrap().result;
        assert_eq!(result.unwrap().value.map(|value| value.len()), Some(bytes));
    }
}

/// Returns the path of the binary of this name, built from the present sources (unless
/// `FARSIDE_BUILT` is set).
pub fn binary(name: &str) -> PathBuf {
    built("--bin", name, "")
}

/// Returns the path of an example in client/examples, built as [`binary`] is.
pub fn example(name: &str) -> PathBuf {
    built("--example", name, "examples")
}

/// Builds a binary or an example, once for each process. Returns its path, which is in `subfolder`
/// of the profile's folder.
fn built(kind: &'static str, name: &str, subfolder: &str) -> PathBuf {
    static BUILT: Mutex<Vec<(&'static str, String)>> = Mutex::new(Vec::new());
    // The test binary is target/<profile>/deps/<name>, or target/<profile>/<name>.
    let test_binary = std::env::current_exe().unwrap();
    let folder = test_binary.ancestors().skip(1).find(|folder| !folder.ends_with("deps")).unwrap();
    let path = folder.join(subfolder).join(name);
    // `make test` builds everything first and sets this; a guest cannot build anything.
    if std::env::var_os("FARSIDE_BUILT").is_some() {
        return path;
    }
    let mut built = BUILT.lock().unwrap_or_else(PoisonError::into_inner);
    if !built.iter().any(|known| *known == (kind, name.to_owned())) {
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
        cargo.args(["build", "--quiet", "--workspace", kind, name]);
        if folder.ends_with("release") {
            cargo.arg("--release");
        }
        cargo.arg("--target-dir").arg(folder.parent().unwrap());
        cargo.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap());
        assert!(cargo.status().unwrap().success(), "cargo build {kind} {name} failed");
        built.push((kind, name.to_owned()));
    }
    path
}

/// Sets its flag when dropped, which tells threads to stop. Without this, the scope of a test that
/// fails would wait for its threads without end.
pub struct StopOnDrop<'f>(pub &'f AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Timeout of steps that are quick on an idle machine: far more than they take on a busy one.
pub const TEST_TIMEOUT: Duration = Duration::from_secs(60);

/// How long a client tries to reach a server that a test has stopped: no longer than it may take to
/// connect to one that runs.
pub fn short_timeout() -> Duration {
    Duration::from_millis(if device().is_some() { 3000 } else { 500 })
}

/// Waits until a condition holds; panics with its description `what` after the timeout.
pub fn wait_until(what: &str, timeout: Duration, mut holds: impl FnMut() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < timeout, "after {timeout:?} still waiting: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Lets this process have as many descriptors as the system allows.
pub fn raise_descriptor_limit() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
}

/// Returns the address of the RDMA device to test with. `None` without a device: then tests use
/// shared memory.
pub fn device() -> Option<String> {
    std::env::var("FARSIDE_TEST_DEVICE").ok().filter(|address| !address.is_empty())
}

/// Whether the tests run over TCP: `FARSIDE_TEST_FABRIC=tcp`.
pub fn is_over_tcp() -> bool {
    std::env::var_os("FARSIDE_TEST_FABRIC").is_some_and(|fabric| fabric == "tcp")
}

/// Whether the tests run on shared memory.
pub fn is_over_shm() -> bool {
    device().is_none() && !is_over_tcp()
}

/// Returns `count`, reduced over RDMA, where an operation takes a hundred times as long, and even
/// longer in emulation.
pub fn scaled(count: u64) -> u64 {
    if device().is_some() { count.div_ceil(50) } else { count }
}

/// Returns a number that differs between calls, and mostly between processes.
fn next_number() -> u32 {
    static SERVERS: AtomicU32 = AtomicU32::new(0);
    std::process::id() * 97 + SERVERS.fetch_add(1, Ordering::Relaxed)
}

/// Returns a `tcp://` address of this host at which no program listens.
pub fn free_tcp_address() -> String {
    // Below the ports that the system gives to connections.
    let mut ports = std::iter::repeat_with(|| 10_000 + (next_number() % 22_000) as u16);
    let is_free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    format!("tcp://127.0.0.1:{}", ports.find(is_free).unwrap())
}

/// Returns an address at which no server listens.
pub fn new_address(folder: &Path) -> String {
    match device() {
        None if is_over_tcp() => free_tcp_address(),
        None => format!("shm://{}", folder.join("kv.sock").display()),
        Some(device) => format!("rdma://{device}:{}", 10_000 + next_number() % 50_000),
    }
}

/// Returns the number of blocks that clients hold: neither the server has them, nor a slot links
/// them. No client may be at work.
pub fn blocks_with_clients(client: &Client) -> i64 {
    let mut session = client.session().unwrap();
    let linked: i64 = session.scan().unwrap().map(|entry| blocks_of(&entry.unwrap())).sum();
    let classes = client.admin().statistics().unwrap().classes;
    classes.iter().map(|class| (class.blocks - class.blocks_free) as i64).sum::<i64>() - linked
}

/// The number of blocks of an entry.
fn blocks_of(entry: &farside::Entry) -> i64 {
    let (key_bytes, value_bytes) = (entry.key.len(), entry.value.len());
    let extents = ExtentShape::OF_REGIONS.count(key_bytes, value_bytes as u64) as i64;
    1 + if class_for(key_bytes, value_bytes).is_none() { extents } else { 0 }
}

/// Sends a child a signal.
pub fn send_signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

/// Stores a value under each of these keys.
pub fn fill<V: AsRef<[u8]>>(session: &mut Session, keys: Range<u64>, value: impl Fn(u64) -> V) {
    for key in keys {
        session.put(key.to_le_bytes(), value(key).as_ref()).unwrap();
    }
}

/// Stores values under `from` and the keys after it until a PUT fails. Returns the key of that PUT,
/// and its error.
pub fn fill_up<V: AsRef<[u8]>>(
    session: &mut Session,
    from: u64,
    value: impl Fn(u64) -> V,
) -> (u64, Error) {
    let mut key = from;
    loop {
        match session.put(key.to_le_bytes(), value(key).as_ref()) {
            Ok(()) => key += 1,
            Err(error) => return (key, error),
        }
    }
}
