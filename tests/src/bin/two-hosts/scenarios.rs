//! Failures of hosts and processes, and the results that clients must get. Each scenario uses the
//! server in the state that the previous one left. The last two cut the power of a host. Commands
//! run in the other guests through the folder that all guests share.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use farside::ConnectError::Unreachable;
use farside::{Client, Session, SetupError};
use farside_fabric::rdma::Options;
use farside_tests::counters::{COUNTERS, Ledger};
use farside_tests::{TEST_TIMEOUT, counters, wait_until};

use crate::load::{Finished, Load, LoadMix, SESSIONS, counter_name, number, own_name};

type Scenario = fn(&mut World) -> String;

/// All scenarios, in their order.
pub(crate) const ALL: &[(&str, Scenario)] = &[
    ("two hosts, four sessions each, on hot keys", two_client_hosts),
    ("kill -9 of the server", killed_server),
    ("the server's host freezes and thaws", frozen_server_host),
    ("a stopped server", stopped_server),
    ("kill -9 of a client", killed_client),
    ("a client's host freezes and thaws", frozen_client_host),
    ("a stopped client, whose device continues", stopped_client),
    ("power-off of a client's host", dead_client_host),
    ("power-off of the server's host", dead_server_host),
];

/// Limit on a call while a process dies: its device still reports the broken connection.
const CALL_MAX: Duration = Duration::from_secs(30);
/// The time that emulated processors may take in addition to the timeouts, on a busy machine.
const SLACK: Duration = Duration::from_secs(30);
const ADDRESS: &str = "10.9.0.1:7400";

/// The hosts, and the server that runs there.
pub(crate) struct World {
    server_host: Guest,
    other_host: Guest,
    server: Option<Running>,
    former_logs: String,
    ledger: PathBuf,
    /// For each counter the bounds in the other host's ledger, when it was last read.
    elsewhere: Vec<(u64, u64)>,
    next_writer: u64,
}

impl World {
    pub(crate) fn new() -> Self {
        let share = PathBuf::from(std::env::var_os("FARSIDE_VM_SHARE").unwrap());
        let ledger = PathBuf::from(LEDGER);
        Ledger::create(&ledger);
        Self {
            server_host: Guest::new("server", &share),
            other_host: Guest::new("other", &share),
            server: None,
            former_logs: String::new(),
            ledger,
            elsewhere: vec![(0, 0); COUNTERS as usize],
            next_writer: 1,
        }
    }

    /// Returns the logs of all servers so far.
    pub(crate) fn log(&self) -> String {
        let present = self.server.as_ref().map(Running::output).unwrap_or_default();
        format!("{}{present}", self.former_logs)
    }

    /// Starts a server if none runs, on the region file if there is one.
    fn serve(&mut self) -> &Running {
        if self.server.is_none() {
            let server = self.server_host.start(&format!(
                "exec {} --listen rdma://{ADDRESS} --memory 64MiB --index 256KiB \
                 --region-file /dev/shm/region",
                program("kv-server").display()
            ));
            server.wait_for("serving", TEST_TIMEOUT);
            self.server = Some(server);
        }
        self.server.as_ref().unwrap()
    }

    fn kill_server(&mut self) {
        let server = self.server.take().unwrap();
        self.server_host.signal("KILL", &server);
        self.former_logs += &server.output();
    }

    fn client(&mut self) -> Client {
        self.serve();
        Client::builder().server(&format!("rdma://{ADDRESS}")).connect().unwrap()
    }

    fn new_writer(&mut self) -> u64 {
        self.next_writer += SESSIONS;
        self.next_writer - SESSIONS
    }

    /// Sessions at work on this host.
    fn load(&mut self) -> Load {
        let (client, writer) = (self.client(), self.new_writer());
        let mut load = Load::start(client, LoadMix::Mixed, writer, &self.ledger);
        load.wait_for(5, TEST_TIMEOUT);
        load
    }

    /// Sessions at work on the other host.
    fn load_elsewhere(&mut self, kind: &str, seconds: u64) -> Running {
        self.serve();
        let (program, writer) = (program("two-hosts"), self.new_writer());
        let load = self.other_host.start(&format!(
            "exec {} load rdma://{ADDRESS} {kind} {writer} {seconds} {LEDGER}",
            program.display()
        ));
        load.wait_for("under way", TEST_TIMEOUT);
        load
    }

    /// Returns the number of clients that servers lost. The server loses a dead host by a failed
    /// probe, or because an answer to it could not be delivered.
    fn lost(&self) -> usize {
        self.log().matches("lost a client").count()
    }

    /// Waits until more than `before` clients are lost; returns how long that took.
    fn wait_for_loss(&self, before: usize) -> Duration {
        let started = Instant::now();
        wait_until("the server notices", TEST_TIMEOUT, || self.lost() > before);
        started.elapsed()
    }

    /// Reads the bounds in the other host's ledger.
    fn read_ledger_elsewhere(&mut self) {
        let bytes = COUNTERS * 16;
        let text = self.other_host.run(&format!("od -An -v -w16 -N{bytes} -t u8 {LEDGER}"));
        let numbers = |line: &str| -> Vec<u64> {
            line.split_whitespace().map(|number| number.parse().unwrap()).collect()
        };
        let rows: Vec<Vec<u64>> = text.lines().map(numbers).collect();
        assert_eq!(rows.len(), COUNTERS as usize, "{text}");
        self.elsewhere = rows.iter().map(|row| (row[1], row[0])).collect();
    }

    /// Ends sessions, none of whose calls may have taken longer than `call_max`. Checks what they
    /// stored; returns their figures.
    fn finish(&mut self, load: Load, call_max: Duration) -> String {
        let finished = load.stop_within(call_max);
        let figures = finished.figures.clone();
        self.check(finished);
        figures
    }

    /// Checks that every acknowledged write is there, no increment is lost, the region is intact,
    /// and no other client is connected.
    fn check(&mut self, finished: Finished) {
        let client = self.client();
        let mut session = client.session().unwrap();
        finished.check(&mut session);
        drop(finished);
        let ledger = Ledger::open(&self.ledger);
        for (counter, elsewhere) in (0..).zip(&self.elsewhere) {
            let value = session.get(counter_name(counter).as_bytes()).unwrap();
            let value = number(value.as_ref().map(|value| value.data.as_slice()));
            let (min, max) = ledger.bounds(counter);
            let possible = min + elsewhere.0..=max.saturating_add(elsewhere.1);
            assert!(possible.contains(&value), "counter {counter} is {value}, not {possible:?}");
        }
        wait_until("the server has lost all other clients", TEST_TIMEOUT, || {
            client.admin().statistics().is_ok_and(|now| now.clients == 1)
        });
        let verified = cli(&["verify"]);
        let text = String::from_utf8_lossy(&verified.stdout);
        assert!(verified.status.success(), "kv-cli verify: {verified:?}");
        for state in ["PENDING", "ABORTED"] {
            assert!(!text.contains(state), "there are {state} words: {text}");
        }
    }
}

/// The ledger's path: each client host has its own, in memory.
const LEDGER: &str = "/dev/shm/ledger";

/// Returns a binary beside this one.
fn program(name: &str) -> PathBuf {
    std::env::current_exe().unwrap().with_file_name(name)
}

fn cli(arguments: &[&str]) -> std::process::Output {
    let mut command = Command::new(program("kv-cli"));
    command.args(arguments).env("FARSIDE_SERVER", format!("rdma://{ADDRESS}")).output().unwrap()
}

/// Limit on a call while a host dies: the device's retries, then the attempts to reconnect.
fn dead_host_max() -> Duration {
    let Options { retry_count, ack_timeout, .. } = Options::default();
    let retries = Duration::from_nanos(4096 << ack_timeout) * (u32::from(retry_count) + 1);
    retries + Duration::from_secs(3) + SLACK
}

fn two_client_hosts(world: &mut World) -> String {
    let lost = world.lost();
    let mut load = world.load();
    let other = world.load_elsewhere("mixed", 5);
    other.wait(Duration::from_secs(60));
    load.wait_for(1, TEST_TIMEOUT);
    let finished = load.stop();
    world.read_ledger_elsewhere();
    let output = other.output();
    let elsewhere = output.lines().filter_map(|line| {
        let (counter, value) = line.strip_prefix("increment ")?.split_once(' ')?;
        Some((counter.parse().unwrap(), value.parse().unwrap()))
    });
    let elsewhere: Vec<(u64, u64)> = elsewhere.collect();
    let here = finished.seen().into_iter().filter(|seen| seen.is_increment);
    let here: Vec<(u64, u64)> = here.map(|seen| (seen.counter, seen.value)).collect();
    assert!(!here.is_empty() && !elsewhere.is_empty(), "{} and {}", here.len(), elsewhere.len());
    let summary = format!(
        "{}; elsewhere {}; {} and {} increments",
        finished.figures,
        output.lines().last().unwrap_or_default(),
        here.len(),
        elsewhere.len()
    );
    counters::check_unique(here.into_iter().chain(elsewhere)).unwrap();
    world.check(finished);
    assert_eq!(world.lost(), lost, "every client signs off");
    summary
}

fn killed_server(world: &mut World) -> String {
    let mut load = world.load();
    world.kill_server();
    // No server comes back in time: every session has a call that fails.
    load.wait_for_unreachable(TEST_TIMEOUT);
    world.serve();
    load.wait_for(5, TEST_TIMEOUT);
    let first = world.finish(load, CALL_MAX);
    // A server that is back at once: calls wait for it.
    let mut load = world.load();
    world.kill_server();
    world.serve();
    load.wait_for(5, TEST_TIMEOUT);
    format!("{first}; back at once: {}", world.finish(load, CALL_MAX))
}

fn frozen_server_host(world: &mut World) -> String {
    let mut load = world.load();
    world.server_host.power("freeze");
    load.wait_for_unreachable(TEST_TIMEOUT);
    let down = load.describe();
    world.server_host.power("thaw");
    load.wait_for(5, TEST_TIMEOUT);
    format!("frozen: {down}; thawed: {}", world.finish(load, dead_host_max()))
}

fn stopped_server(world: &mut World) -> String {
    // More than half of the blocks that a session asks for first: it asks for more, in vain.
    const KEYS: u64 = 40;
    let client = world.client();
    let writer = world.new_writer();
    let mut sessions: Vec<Session> = (0..SESSIONS).map(|_| client.session().unwrap()).collect();
    for (number, session) in (writer..).zip(&mut sessions) {
        session.put(own_name(number, 0).to_le_bytes(), b"before").unwrap();
    }
    let server = world.server.as_ref().unwrap();
    world.server_host.signal("STOP", server);
    for (number, session) in (writer..).zip(&mut sessions) {
        for key in 0..KEYS {
            let name = own_name(number, key).to_le_bytes();
            session.put(name, key.to_le_bytes()).unwrap();
            assert_eq!(*session.get(name).unwrap().unwrap(), key.to_le_bytes());
        }
    }
    let started = Instant::now();
    drop(sessions);
    let sessions_took = started.elapsed();
    drop(client);
    let all_took = started.elapsed();
    world.server_host.signal("CONT", server);
    assert!(all_took < CALL_MAX, "a client took {all_took:?} to end");
    let client = world.client();
    wait_until("the server knows that the client ended", TEST_TIMEOUT, || {
        client.admin().statistics().is_ok_and(|now| now.clients == 1)
    });
    format!("four sessions ended in {sessions_took:?}, the client in {all_took:?}")
}

fn killed_client(world: &mut World) -> String {
    let mut load = world.load();
    let mut summary = Vec::new();
    for _ in 0..2 {
        let other = world.load_elsewhere("churn", 600);
        let lost = world.lost();
        world.other_host.signal("KILL", &other);
        summary.push(format!("{:.2} s", world.wait_for_loss(lost).as_secs_f64()));
    }
    load.wait_for(1, CALL_MAX);
    world.read_ledger_elsewhere();
    format!("noticed after {}; others: {}", summary.join(", "), world.finish(load, CALL_MAX))
}

/// The host stays frozen for half a minute after the loss: longer than any of its proofs lasts.
fn frozen_client_host(world: &mut World) -> String {
    let thaw = |host: &Guest, _: &Running| {
        std::thread::sleep(Duration::from_secs(30));
        host.power("thaw");
    };
    let summary = paused_client(world, |host, _| host.power("freeze"), thaw);
    // A network card would still answer probes: only the scenario of a stopped client shows that.
    format!("{summary}; its soft-RoCE device froze with it, which a network card would not")
}

/// The device of a stopped client answers probes: only the silence of its process shows the stop.
fn stopped_client(world: &mut World) -> String {
    let (lost, logged) = (world.lost(), world.log().len());
    let stop = |host: &Guest, client: &Running| host.signal("STOP", client);
    let summary = paused_client(world, stop, |host, client| host.signal("CONT", client));
    let log = world.log()[logged..].to_owned();
    assert!(log.contains("its process did not answer for"), "{log}");
    assert_eq!(world.lost(), lost + 1, "a client that was not stopped is lost: {log}");
    summary
}

fn paused_client(
    world: &mut World,
    pause: impl Fn(&Guest, &Running),
    resume: impl Fn(&Guest, &Running),
) -> String {
    let mut load = world.load();
    let other = world.load_elsewhere("mixed", 8);
    let lost = world.lost();
    pause(&world.other_host, &other);
    let noticed = world.wait_for_loss(lost);
    resume(&world.other_host, &other);
    // The client finds itself fenced, reconnects, and checks all its keys at the end.
    other.wait(Duration::from_secs(60));
    load.wait_for(1, CALL_MAX);
    world.read_ledger_elsewhere();
    let others = world.finish(load, CALL_MAX);
    let output = other.output();
    let itself = output.lines().last().unwrap_or_default();
    format!("noticed after {:.2} s; others: {others}; itself: {itself}", noticed.as_secs_f64())
}

fn dead_client_host(world: &mut World) -> String {
    let mut load = world.load();
    let _other = world.load_elsewhere("churn", 600);
    let lost = world.lost();
    world.other_host.power("kill");
    let noticed = world.wait_for_loss(lost);
    load.wait_for(1, CALL_MAX);
    let others = world.finish(load, CALL_MAX);
    format!("noticed after {:.2} s; others: {others}", noticed.as_secs_f64())
}

fn dead_server_host(world: &mut World) -> String {
    let mut load = world.load();
    world.server_host.power("kill");
    load.wait_for_unreachable(TEST_TIMEOUT);
    let finished = load.stop_within(dead_host_max());
    let summary = finished.figures.clone();
    let started = Instant::now();
    drop(finished);
    let client_took = started.elapsed();
    assert!(client_took < CALL_MAX, "a client took {client_took:?} to end");
    let started = Instant::now();
    let output = cli(&["get", "key"]);
    let cli_took = started.elapsed();
    let line = String::from_utf8_lossy(&output.stderr).trim_end().to_owned();
    assert!(!output.status.success() && cli_took < CALL_MAX + SLACK, "{cli_took:?}: {output:?}");
    assert!(line.lines().count() == 1 && line.contains("no server answers at"), "{line}");
    let error = Client::builder().server(&format!("rdma://{ADDRESS}")).connect().map(drop);
    assert!(matches!(error, Err(SetupError::Connect(Unreachable { .. }))), "{error:?}");
    format!(
        "{summary}; the client ended in {client_took:?}; kv-cli after {:.1} s: {line}",
        cli_took.as_secs_f64()
    )
}

/// A guest that runs tests/vm/hosts-agent.
pub(crate) struct Guest {
    pub(crate) name: &'static str,
    share: PathBuf,
    commands: Cell<u32>,
}

/// A command in a guest.
pub(crate) struct Running {
    /// The guest's name and the command, for messages.
    description: String,
    /// The path of its files, without their extensions.
    path: PathBuf,
}

/// Timeout of a guest's boot: three guests take half a minute on a busy machine.
const BOOT_TIMEOUT: Duration = Duration::from_secs(180);

impl Guest {
    /// Waits until the guest has booted.
    pub(crate) fn new(name: &'static str, share: &Path) -> Self {
        let guest = Self { name, share: share.to_owned(), commands: Cell::new(0) };
        wait_until("a guest is up", BOOT_TIMEOUT, || guest.folder().join("ready").exists());
        guest
    }

    fn folder(&self) -> PathBuf {
        self.share.join(self.name)
    }

    /// Starts a line of bash. With `exec` at its start, signals reach the program instead of bash.
    pub(crate) fn start(&self, command: &str) -> Running {
        let number = self.commands.replace(self.commands.get() + 1);
        let path = self.folder().join(number.to_string());
        std::fs::write(path.with_extension("new"), command).unwrap();
        std::fs::rename(path.with_extension("new"), path.with_extension("command")).unwrap();
        let running = Running { description: format!("{}: {command}", self.name), path };
        wait_until(&running.description, TEST_TIMEOUT, || running.pid().is_some());
        running
    }

    /// Runs a command that has to succeed; returns its output.
    pub(crate) fn run(&self, command: &str) -> String {
        let running = self.start(command);
        running.wait(TEST_TIMEOUT);
        running.output()
    }

    /// Sends a signal to a command.
    pub(crate) fn signal(&self, signal: &str, running: &Running) {
        self.run(&format!("kill -{signal} {}", running.pid().unwrap()));
    }

    /// Controls the guest's power: `freeze`, `thaw` or `kill`.
    pub(crate) fn power(&self, verb: &str) {
        let control = Command::new("tests/vm/hosts-control")
            .arg(&self.share)
            .args([verb, self.name])
            .output()
            .unwrap();
        assert!(control.status.success(), "{verb} {}: {control:?}", self.name);
    }
}

impl Running {
    fn read(&self, extension: &str) -> Option<String> {
        std::fs::read_to_string(self.path.with_extension(extension)).ok()
    }

    fn pid(&self) -> Option<u32> {
        self.read("pid")?.trim().parse().ok()
    }

    /// Returns the command's output so far, of both streams.
    pub(crate) fn output(&self) -> String {
        self.read("output").unwrap_or_default()
    }

    /// Waits until the command's output contains `text`.
    pub(crate) fn wait_for(&self, text: &str, timeout: Duration) {
        let started = Instant::now();
        while !self.output().contains(text) {
            let Self { description, .. } = self;
            let is_late = started.elapsed() > timeout;
            assert!(!is_late, "{description}: no `{text}` in {timeout:?}: {}", self.output());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until the command ends, and checks that it succeeded.
    pub(crate) fn wait(&self, timeout: Duration) {
        wait_until(&self.description, timeout, || self.read("code").is_some());
        let code = self.read("code").unwrap();
        assert_eq!(code.trim(), "0", "{}: {}", self.description, self.output());
    }
}
