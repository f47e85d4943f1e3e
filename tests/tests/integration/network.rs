//! Proves that clients and a server survive failures of the network between them over TCP. The
//! network is short of a cable, loses packets, resets connections, or is gone. The server's host
//! may restart meanwhile.
//!
//! Guards against calls that hang, values that are lost, clients that do not reconnect, and what a
//! server keeps for a client that is gone. `tests/src/network.rs` makes the network of namespaces,
//! which takes root.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use farside::{Client, ConnectError, Error, Role, Session};
use farside_tests::network::Network;
use farside_tests::{
    ServerProcess, TEST_TIMEOUT, blocks_with_clients, left_out_without_netem, network_or_left_out,
    self_describing, wait_until,
};

use crate::histories::run::Plan;
use crate::histories::{assert_good, runs, soak_time};

/// A failure of the network.
type Fail = fn(&Network);

/// The longest time of a call: a dead host is noticed within 7.5 s, and then the client tries to
/// reconnect for 3 s. The rest is for a busy machine.
const CALL_MAX: Duration = TEST_TIMEOUT;
/// An outage after which both sides have given their connections up.
const LONG_OUTAGE: Duration = Duration::from_secs(8);
const VERY_LONG_OUTAGE: Duration = Duration::from_secs(60);

/// Returns a network, and a server on its other host.
fn hosts() -> Option<(Network, ServerProcess)> {
    let network = network_or_left_out()?;
    let server = ServerProcess::start_in(&network, "--memory 64MiB");
    Some((network, server))
}

/// Runs `work` with a client on the server's host, which no failure of the network affects.
fn beside_server<T: Send>(network: &Network, work: impl FnOnce(Client) -> T + Send) -> T {
    network.on_server_host(|| {
        let builder = Client::builder().server(Network::LOCAL_ADDRESS);
        work(builder.connect_timeout(TEST_TIMEOUT).connect().unwrap())
    })
}

/// Waits until the server has fenced all clients on the other host, and has their blocks.
fn wait_until_freed(network: &Network, clients: u64) {
    beside_server(network, |client| {
        let statistics = || client.admin().statistics().unwrap();
        wait_until("clients that are gone are fenced", TEST_TIMEOUT, || statistics().clients == 1);
        assert_eq!(statistics().clients_lost, clients);
        wait_until("their blocks are collected", TEST_TIMEOUT, || {
            client.admin().collect().unwrap();
            blocks_with_clients(&client) == 0
        });
    });
}

#[on(shm)]
fn a_short_outage_interrupts_calls_and_no_more() {
    let Some((network, server)) = hosts() else { return };
    let client = server.client();
    let failures: [Fail; 2] = [Network::pull_cable, Network::lose_packets];
    for (fail, first) in failures.into_iter().zip([0, SESSIONS]) {
        let load = Load::start(&client, first);
        load.wait_for_calls();
        fail(&network);
        // Replies that had arrived are still read.
        std::thread::sleep(Duration::from_millis(100));
        let before = load.done();
        std::thread::sleep(Duration::from_secs(1));
        let done = load.done() - before;
        assert!(done <= SESSIONS, "{done} calls were answered without a network");
        network.plug_in();
        load.wait_for_calls();
        load.finish();
    }
    server.assert_verifies();
}

/// A client's calls fail, and the server gets rid of the client. When the network is back, the
/// same sessions continue, with all values.
fn outlast(fail: Fail, outage: Duration) {
    let Some((network, server)) = hosts() else { return };
    let client = server.client();
    let mut idle = Writer::new(&client, SESSIONS);
    idle.put_all();
    assert!(blocks_with_clients(&client) > 0, "the server has no block to free");
    // The server asks writers for their clocks, so only a reader is lost as a host that is silent.
    let reader = server.client_builder().role(Role::Reader).connect().unwrap();
    let mut reading = reader.session().unwrap();
    assert!(reading.get("absent").unwrap().is_none());
    let load = Load::start(&client, 0);
    load.wait_for_calls();
    fail(&network);
    let failed_at = Instant::now();
    load.wait_for_unreachable();
    let slowest = load.slowest();
    assert!(slowest < CALL_MAX, "a call took {slowest:?}");
    wait_until_freed(&network, 2);
    for line in ["its process did not answer", "its host does not answer"] {
        assert!(server.log().contains(line), "{line}: {}", server.log());
    }
    std::thread::sleep(outage.saturating_sub(failed_at.elapsed()));
    network.plug_in();
    load.wait_for_calls();
    idle.check();
    assert!(reading.get("absent").unwrap().is_none());
    load.finish();
    server.assert_verifies();
}

#[on(shm)]
fn a_client_outlasts_a_cable_that_is_out_for_long() {
    outlast(Network::pull_cable, LONG_OUTAGE);
}

#[on(shm)]
fn a_client_outlasts_a_long_loss_of_packets() {
    outlast(Network::lose_packets, LONG_OUTAGE);
}

#[on(shm)]
#[ignore = "the network is out for a minute, twice; run by make soak"]
fn a_client_outlasts_a_very_long_outage() {
    outlast(Network::pull_cable, VERY_LONG_OUTAGE);
    outlast(Network::lose_packets, VERY_LONG_OUTAGE);
}

/// Guards against attempts to connect that pause for as long as the outage has lasted.
#[on(shm)]
#[ignore = "takes half a minute; run by make soak"]
fn a_client_reconnects_soon_after_an_outage_however_long_it_waits() {
    // The system repeats its first packet 31 s after it began, and then 63 s after.
    const OUTAGE: Duration = Duration::from_secs(33);
    const SOON: Duration = Duration::from_secs(25);
    let Some((network, server)) = hosts() else { return };
    let client = server.client_builder().connect_timeout(TEST_TIMEOUT).connect().unwrap();
    let load = Load::start(&client, 0);
    load.wait_for_calls();
    network.lose_packets();
    std::thread::sleep(OUTAGE);
    network.plug_in();
    let started = Instant::now();
    load.wait_for_calls();
    let waited = started.elapsed();
    assert!(waited < SOON, "the client reconnected after {waited:?}");
    load.finish();
}

/// After a question that was not acknowledged, the system names the missing route as the cause.
#[on(shm)]
fn a_host_that_is_not_reached_is_called_silent() {
    let Some(network) = network_or_left_out() else { return };
    // The server waits for an answer longer than the system for the host.
    let server = ServerProcess::start_in(&network, "--memory 32MiB --grace-ms 250");
    let client = server.client();
    network.pull_cable_here();
    server.wait_for_log("lost a client and fenced it");
    assert!(server.log().contains("its host does not answer"), "{}", server.log());
    network.plug_in();
    client.session().unwrap().put("key", "value").unwrap();
}

/// Resets each connection of a client alone, its control channel first. Then resets all together,
/// again and again.
// Not over RDMA: a server that listens at rdma:// listens nowhere else.
#[on(shm)]
fn a_client_whose_connections_are_reset_reconnects() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let server = ServerProcess::start(&format!("--memory 64MiB --listen tcp://{address}"));
    let direct = server.client();
    let lost = || direct.admin().statistics().unwrap().clients_lost;
    let proxy = ResetProxy::start(address);
    let client = Client::builder().server(&proxy.server_address()).connect().unwrap();
    let load = Load::start(&client, 0);
    let connections = 1 + SESSIONS as usize;
    for only in (0..connections).map(Some).chain([None; 12]) {
        wait_until("all sessions are connected", TEST_TIMEOUT, || {
            proxy.connections() >= connections
        });
        load.wait_for_calls();
        let before = lost();
        proxy.reset(only);
        wait_until("the server loses the client", TEST_TIMEOUT, || lost() > before);
        load.wait_for_calls();
    }
    assert_eq!(load.unreachable(), 0, "{}", load.describe());
    load.finish();
    server.assert_verifies();
}

/// A server is replaced while the network is out, so that the client's connections are unknown to
/// the new one.
fn replace_server(fail: Fail, restarts_host: bool) {
    let Some((network, mut server)) = hosts() else { return };
    let client = server.client();
    let mut idle = Writer::new(&client, SESSIONS);
    idle.put_all();
    let load = Load::start(&client, 0);
    load.wait_for_calls();
    let incarnation = client.admin().statistics().unwrap().incarnation;
    fail(&network);
    server.kill();
    if restarts_host {
        network.restart_server_host();
    }
    server.start_again();
    beside_server(&network, |client| {
        assert_eq!(client.admin().statistics().unwrap().incarnation, incarnation + 1);
    });
    network.plug_in();
    load.wait_for_calls();
    idle.check();
    assert_eq!(client.admin().statistics().unwrap().incarnation, incarnation + 1);
    load.finish();
    server.assert_verifies();
}

#[on(shm)]
fn a_client_finds_the_server_that_replaced_a_killed_one_during_an_outage() {
    replace_server(Network::lose_packets, false);
}

#[on(shm)]
fn a_client_finds_the_server_of_a_host_that_restarted_during_an_outage() {
    replace_server(Network::pull_cable, true);
}

#[on(shm)]
fn calls_end_when_the_network_is_gone_for_good() {
    let Some((network, server)) = hosts() else { return };
    let client = server.client();
    let mut idle = Writer::new(&client, SESSIONS);
    idle.put_all();
    let load = Load::start(&client, 0);
    load.wait_for_calls();
    network.vanish();
    load.wait_for_unreachable();
    let slowest = load.slowest();
    assert!(slowest < CALL_MAX, "a call took {slowest:?}");
    let Err(error) = client.session() else { panic!("a session was opened without a network") };
    let is_unreachable = matches!(error, Error::Connect(ConnectError::Unreachable { .. }));
    assert!(is_unreachable && error.is_retryable(), "{error}");
    println!("{}; {error}", load.describe());
    wait_until_freed(&network, 1);
    drop((load.stop(), idle, client));
}

/// For how long the network fails while histories are recorded.
const HISTORY_TIME: Duration = Duration::from_secs(15);
/// The time of a soak's run, after which the next one begins on a new region.
const ROUND: Duration = Duration::from_secs(30);
/// What netem does to the packets of each host.
const BAD_NETWORK: &str = "delay 2ms 1ms loss 1% reorder 5%";

/// Records and checks histories over a network that fails again and again, and is bad between.
fn record_histories(netem: Option<&'static str>, round: Duration, total: Duration) {
    let figures = runs(Plan::with_outages(netem), round, total);
    assert_good(&figures);
    assert!(figures.outages > 0, "{figures}");
}

#[on(shm)]
fn histories_over_a_network_with_outages_are_linearizable() {
    if network_or_left_out().is_some() {
        record_histories(None, HISTORY_TIME, HISTORY_TIME);
    }
}

/// Returns whether this kernel has netem, and checks that a network that netem delays is slow.
fn can_be_bad() -> bool {
    const DELAY: Duration = Duration::from_millis(20);
    let Some((network, server)) = hosts() else { return false };
    if left_out_without_netem(&network) {
        return false;
    }
    let mut session = server.session();
    network.degrade(&format!("delay {}ms", DELAY.as_millis())).unwrap();
    let started = Instant::now();
    session.get("key").unwrap();
    assert!(started.elapsed() >= 2 * DELAY, "a GET took {:?}", started.elapsed());
    true
}

#[on(shm)]
fn histories_over_a_slow_network_that_loses_packets_are_linearizable() {
    if can_be_bad() {
        record_histories(Some(BAD_NETWORK), HISTORY_TIME, HISTORY_TIME);
    }
}

#[on(shm)]
#[ignore = "takes FARSIDE_SOAK_MINUTES; run by make soak"]
fn soak() {
    let netem = can_be_bad().then_some(BAD_NETWORK);
    if network_or_left_out().is_some() {
        record_histories(netem, ROUND, soak_time());
    }
}

#[on(shm)]
fn a_value_that_is_lost_is_noticed() {
    let server = ServerProcess::start("--memory 32MiB");
    let mut writer = Writer::new(&server.client(), 0);
    writer.put_all();
    writer.check();
    assert!(server.session().delete(7_u64.to_le_bytes()).unwrap());
    let check = std::panic::AssertUnwindSafe(|| writer.check());
    assert!(std::panic::catch_unwind(check).is_err());
}

#[on(shm)]
fn a_machine_without_ip_leaves_these_tests_out() {
    let test = "network::calls_end_when_the_network_is_gone_for_good::shm";
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    let output = command.args(["--exact", test]).env("PATH", "/nowhere").output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && said.contains("left out without "), "{said}");
    assert!(said.contains(test), "{said}");
}

/// The number of sessions of a load.
const SESSIONS: u64 = 4;
/// The number of keys of a session.
const KEYS: u64 = 64;
const VALUE_BYTES: usize = 200;

/// The calls of one session so far.
#[derive(Default)]
struct Progress {
    done: AtomicU64,
    unreachable: AtomicU64,
    indeterminate: AtomicU64,
    slowest_ms: AtomicU64,
}

/// A session and its keys.
struct Writer {
    session: Session,
    number: u64,
    count: u64,
    /// For each key, the numbers of the values that it may have. 0 stands for no value.
    possible: Vec<Vec<u64>>,
    /// The values that the counter of the session may have.
    sum: RangeInclusive<i64>,
}

impl Writer {
    fn new(client: &Client, number: u64) -> Self {
        let session = client.session().unwrap();
        Self { session, number, count: 0, possible: vec![vec![0]; KEYS as usize], sum: 0..=0 }
    }

    fn key(&self, at: u64) -> u64 {
        self.number * KEYS + at
    }

    /// Stores a new value under the next key.
    fn put(&mut self) -> Result<(), Error> {
        self.count += 1;
        let (at, count) = (self.count % KEYS, self.count);
        let key = self.key(at);
        let value = self_describing::value(key, self.number, count, VALUE_BYTES);
        let result = self.session.put(key.to_le_bytes(), value);
        let possible = &mut self.possible[at as usize];
        match &result {
            Ok(()) => *possible = vec![count],
            Err(error) if error.is_indeterminate() => possible.push(count),
            Err(_) => {}
        }
        result
    }

    /// Reads a key, and checks that its value is a possible one. From then on no other is.
    fn get(&mut self, at: u64) -> Result<(), Error> {
        let key = self.key(at);
        let found = self.session.get(key.to_le_bytes())?;
        let count = found.map_or(0, |value| self_describing::count_in(key, &value).unwrap());
        let possible = &mut self.possible[at as usize];
        assert!(possible.contains(&count), "key {key} has value {count} instead of {possible:?}");
        *possible = vec![count];
        Ok(())
    }

    /// Adds a number to the session's counter, and checks the sum.
    fn add(&mut self, addend: i64) -> Result<(), Error> {
        let (low, high) = (*self.sum.start() + addend, *self.sum.end() + addend);
        match self.session.increment(format!("counter {}", self.number), addend) {
            Ok(sum) => {
                assert!((low..=high).contains(&sum), "{sum} instead of {low} to {high}");
                self.sum = sum..=sum;
                Ok(())
            }
            Err(error) => {
                if error.is_indeterminate() {
                    self.sum = *self.sum.start()..=high;
                }
                Err(error)
            }
        }
    }

    /// Stores a value under each key.
    fn put_all(&mut self) {
        (0..KEYS).for_each(|_| self.put().unwrap());
    }

    /// Reads all keys.
    fn check(&mut self) {
        (0..KEYS).for_each(|at| self.get(at).unwrap());
        self.add(0).unwrap();
    }

    fn run(mut self, stop: &AtomicBool, progress: &Progress) -> Self {
        for step in (0..3).cycle().take_while(|_| !stop.load(Ordering::Relaxed)) {
            let began = Instant::now();
            let result = match step {
                0 => self.get(self.count * 7 % KEYS),
                1 => self.put(),
                _ => self.add(1),
            };
            let ms = began.elapsed().as_millis() as u64;
            progress.slowest_ms.fetch_max(ms, Ordering::Relaxed);
            let counter = match &result {
                Ok(()) => &progress.done,
                Err(error) if error.is_indeterminate() && step > 0 => &progress.indeterminate,
                Err(Error::Connect(farside::ConnectError::Unreachable { .. })) => {
                    &progress.unreachable
                }
                Err(error) => panic!("a call failed in an unexpected way: {error}"),
            };
            counter.fetch_add(1, Ordering::Relaxed);
        }
        self
    }
}

/// Sessions of one client, each on a thread of its own.
struct Load {
    stop: Arc<AtomicBool>,
    /// Not scoped, so that a call without an end does not keep a failed test from ending.
    sessions: Vec<(Arc<Progress>, JoinHandle<Writer>)>,
}

impl Load {
    /// Starts sessions with the number `first` and the next ones, which have stored nothing yet.
    fn start(client: &Client, first: u64) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let start = |number| {
            let (writer, progress) = (Writer::new(client, number), Arc::new(Progress::default()));
            let (stop, its_progress) = (stop.clone(), progress.clone());
            (progress, std::thread::spawn(move || writer.run(&stop, &its_progress)))
        };
        let sessions = (first..first + SESSIONS).map(start).collect();
        Self { stop, sessions }
    }

    fn counts(&self, counter: impl Fn(&Progress) -> &AtomicU64) -> Vec<u64> {
        let sessions = self.sessions.iter();
        sessions.map(|(progress, _)| counter(progress).load(Ordering::Relaxed)).collect()
    }

    /// Waits until each session has counted this many more.
    fn wait(&self, what: &str, more: u64, counter: impl Fn(&Progress) -> &AtomicU64) {
        let (started, before) = (Instant::now(), self.counts(&counter));
        while self.counts(&counter).iter().zip(&before).any(|(now, before)| *now < before + more) {
            let has_ended = self.sessions.iter().any(|(_, thread)| thread.is_finished());
            assert!(!has_ended, "a session has ended, as above");
            let waited = started.elapsed();
            assert!(waited < TEST_TIMEOUT, "no {what} within {waited:?}: {}", self.describe());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until each session has made some more successful calls.
    fn wait_for_calls(&self) {
        self.wait("successful calls", 20, |progress| &progress.done);
    }

    /// Waits until a further call of each session has found no server.
    fn wait_for_unreachable(&self) {
        self.wait("unreachable server", 1, |progress| &progress.unreachable);
    }

    /// Returns the number of successful calls.
    fn done(&self) -> u64 {
        self.counts(|progress| &progress.done).iter().sum()
    }

    /// Returns the number of calls that found no server.
    fn unreachable(&self) -> u64 {
        self.counts(|progress| &progress.unreachable).iter().sum()
    }

    /// Returns the time of the slowest call that has ended.
    fn slowest(&self) -> Duration {
        let slowest_ms = self.counts(|progress| &progress.slowest_ms);
        Duration::from_millis(slowest_ms.into_iter().max().unwrap_or(0))
    }

    /// Returns the figures so far, for the test's output.
    fn describe(&self) -> String {
        let indeterminate: u64 = self.counts(|progress| &progress.indeterminate).iter().sum();
        format!(
            "{} calls, {} Unreachable, {indeterminate} Indeterminate, slowest {:?}",
            self.done(),
            self.unreachable(),
            self.slowest()
        )
    }

    /// Ends all sessions. Returns them.
    fn stop(mut self) -> Vec<Writer> {
        self.stop.store(true, Ordering::Relaxed);
        std::mem::take(&mut self.sessions).into_iter().map(|(_, it)| it.join().unwrap()).collect()
    }

    /// Ends all sessions, and checks that no value is lost.
    fn finish(self) {
        println!("{}", self.describe());
        self.stop().iter_mut().for_each(Writer::check);
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// A proxy on this host. Its threads end with the process.
struct ResetProxy {
    address: SocketAddr,
    /// The two sockets of each connection, in the order in which the connections were made.
    connections: Arc<Mutex<Vec<[TcpStream; 2]>>>,
}

/// Copies bytes until one of both connections ends. Then ends the other one in the same direction.
fn forward(mut from: TcpStream, mut to: TcpStream) {
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut from, &mut to);
        let _ = to.shutdown(std::net::Shutdown::Write);
    });
}

impl ResetProxy {
    /// Starts a proxy that forwards to this server.
    fn start(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let connections = Arc::new(Mutex::new(Vec::new()));
        let accepted = connections.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let Ok(server) = TcpStream::connect(server) else { continue };
                [&client, &server].iter().for_each(|it| it.set_nodelay(true).unwrap());
                let copy = |socket: &TcpStream| socket.try_clone().unwrap();
                forward(copy(&client), copy(&server));
                forward(copy(&server), copy(&client));
                accepted.lock().unwrap().push([client, server]);
            }
        });
        Self { address, connections }
    }

    /// Returns the address of the server, by way of this proxy.
    fn server_address(&self) -> String {
        format!("tcp://{}", self.address)
    }

    /// Returns the number of connections since the last reset.
    fn connections(&self) -> usize {
        self.connections.lock().unwrap().len()
    }

    /// Resets one connection, or all of them. Forgets the others.
    fn reset(&self, only: Option<usize>) {
        let connections = std::mem::take(&mut *self.connections.lock().unwrap());
        for (number, sockets) in connections.iter().enumerate() {
            if only.is_none_or(|only| only == number) {
                // This sends a reset, although threads still hold the sockets.
                sockets.iter().for_each(|it| rustix::net::connect_unspec(it).unwrap());
            }
        }
    }
}
