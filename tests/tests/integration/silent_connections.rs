//! Proves that connections over TCP that say nothing, or too little, keep no client out. The server
//! closes them by itself, and its memory for them is bounded.
//!
//! Guards against a silent connection that keeps its descriptor for good, and against a buffer that
//! is as long as a record's header says, before the record is there.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};

use farside::{Client, Session};
use farside_control::address::Address;
use farside_control::{Challenge, Purpose, Role, SecretKey};
use farside_tests::engine::connect_options;
use farside_tests::handshake::{self, RawClient};
use farside_tests::{
    ServerProcess, TEST_TIMEOUT, binary, example, free_tcp_address, raise_descriptor_limit,
    wait_until,
};
use rustix::process::{Pid, Resource, Rlimit, prlimit};

const CONNECTIONS: usize = 1000;
/// The most connections without a request that the server keeps, and some descriptors more: those
/// of clients that are connecting.
const DESCRIPTORS_MAX: usize = 256 + 16;
/// The memory that a server may use for connections that are no clients.
const GREETING_BYTES_MAX: u64 = 8 << 20;
/// The memory that a server may use for sessions that have sent a part of a record.
const RECORD_BYTES_MAX: u64 = 64 << 20;

/// Returns a server at a socket and at a port, and the port's address.
fn server_at_port() -> (ServerProcess, String) {
    let tcp = free_tcp_address();
    let server = ServerProcess::start(&format!("--memory 32MiB --listen {tcp}"));
    (server, tcp)
}

fn client(tcp: &str) -> Client {
    Client::builder().server(tcp).connect().unwrap()
}

fn socket_address(tcp: &str) -> SocketAddr {
    tcp.parse::<Address>().unwrap().resolve(TEST_TIMEOUT).unwrap()[0]
}

/// Checks that a session that is there already is served, and so is a new client.
fn check_served(tcp: &str, session: &mut Session) {
    for number in 0..20_u64 {
        let key = number.to_le_bytes();
        session.put(key, key).unwrap();
        assert_eq!(*session.get(key).unwrap().unwrap(), key);
    }
    let new = client(tcp);
    let mut session = new.session().unwrap();
    session.put("new", "value").unwrap();
    assert_eq!(*session.get("new").unwrap().unwrap(), *b"value");
}

/// Waits until the server has closed all descriptors that it did not have before.
fn wait_until_back(server: &ServerProcess, before: usize) {
    // Fewer, if former clients had not gone then.
    let is_back = || server.descriptors().len() <= before;
    wait_until("the server's descriptors are back", TEST_TIMEOUT, is_back);
}

/// A process that keeps this many connections of a kind open.
struct Attack(Child);

impl Attack {
    fn start(tcp: &str, kind: &str) -> Self {
        let mut command = Command::new(example("silent-connections"));
        command.args([tcp, &CONNECTIONS.to_string(), kind]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "open\n");
        Self(child)
    }

    fn end(mut self) {
        drop(self.0.stdin.take());
        assert!(self.0.wait().unwrap().success());
    }
}

impl Drop for Attack {
    fn drop(&mut self) {
        // It has ended, unless the test fails.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[on(shm)]
fn a_thousand_connections_without_a_request_keep_no_client_out() {
    let (server, tcp) = server_at_port();
    let mut session = client(&tcp).session().unwrap();
    check_served(&tcp, &mut session);
    let (before, bytes_before) = (server.descriptors().len(), server.own_bytes());
    for kind in ["silent", "half", "trickle", "unproven"] {
        let attack = Attack::start(&tcp, kind);
        for _ in 0..20 {
            check_served(&tcp, &mut session);
            let bytes = server.own_bytes();
            // Some may wait to be closed.
            let descriptors = server.descriptors().len();
            assert!(descriptors <= before + 2 * DESCRIPTORS_MAX, "{kind}: {descriptors}");
            wait_until("the server keeps few of them", TEST_TIMEOUT, || {
                server.descriptors().len() <= before + DESCRIPTORS_MAX
            });
            let more = bytes.saturating_sub(bytes_before);
            assert!(more <= GREETING_BYTES_MAX, "{kind}: {more} bytes more");
        }
        attack.end();
        wait_until_back(&server, before);
    }
    server.assert_verifies();
}

#[on(shm)]
fn a_silent_connection_is_closed_although_no_other_comes() {
    let (server, tcp) = server_at_port();
    let before = server.descriptors().len();
    let connect = || TcpStream::connect(socket_address(&tcp)).unwrap();
    let mut silent: Vec<_> = (0..10).map(|_| connect()).collect();
    silent[0].write_all(b"\x38").unwrap();
    // These do not answer the server's challenge.
    for stream in &mut silent[5..] {
        handshake::send(stream, &handshake::hello(Role::Writer, Purpose::Control).encode());
        assert!(Challenge::decode(&handshake::receive(stream).unwrap()).unwrap().is_ok());
    }
    for stream in &mut silent {
        stream.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
        assert_eq!(stream.read(&mut [0; 8]).unwrap(), 0, "the server closes it");
    }
    wait_until_back(&server, before);
}

#[on(shm)]
fn a_thousand_sessions_with_half_a_record_cost_no_more_than_they_send() {
    let (server, tcp) = server_at_port();
    raise_descriptor_limit();
    let mut session = client(&tcp).session().unwrap();
    let reader = RawClient::connect(socket_address(&tcp), Role::Reader, &SecretKey::NONE).unwrap();
    let (before, bytes_before) = (server.descriptors().len(), server.own_bytes());
    // A chain of one WRITE with a deadline, of whose payload almost 16 MiB are to come.
    let words: u64 = 2 << 20;
    let header = 1_u64 << 16 | 1 << 24 | words << 32;
    let (deadline, write, remote) = (u64::MAX, 2 | ((words - 3) * 8) << 32, 4096);
    let begun = [header, deadline, write, remote].map(u64::to_le_bytes);
    let half = [&begun.concat()[..], &[7; 100]].concat();
    let open = |_| {
        let mut stream = reader.session().unwrap();
        stream.write_all(&half).unwrap();
        // The server has to make room for these, behind the first part.
        stream.write_all(&half[8..]).unwrap();
        stream
    };
    let sessions: Vec<_> = (0..CONNECTIONS).map(open).collect();
    for _ in 0..20 {
        check_served(&tcp, &mut session);
    }
    assert!(server.descriptors().len() > CONNECTIONS, "they are open");
    let more = server.own_bytes().saturating_sub(bytes_before);
    assert!(more <= RECORD_BYTES_MAX, "{more} bytes more");
    drop(sessions);
    wait_until_back(&server, before);
    check_served(&tcp, &mut session);
    server.assert_verifies();
}

/// How many descriptors below this limit a server does not use. It may have inherited some with
/// high numbers.
fn free_below(server: &ServerProcess, limit: u64) -> u64 {
    let used = server.descriptors().into_iter().filter(|number| *number < limit).count();
    limit - used as u64
}

/// Limits a server to so many more descriptors. Returns the limit.
fn limit_descriptors(server: &ServerProcess, more: u64) -> u64 {
    let limit = (1..).find(|limit| free_below(server, *limit) == more).unwrap();
    let pid = Pid::from_raw(server.pid() as i32);
    let limits = Rlimit { current: Some(limit), maximum: Some(limit) };
    prlimit(pid, Resource::Nofile, limits).unwrap();
    limit
}

#[on(shm)]
fn a_server_out_of_descriptors_closes_silent_connections_first() {
    let (server, tcp) = server_at_port();
    let limit = limit_descriptors(&server, 20);
    let connect = |_| TcpStream::connect(socket_address(&tcp)).unwrap();
    let silent: Vec<_> = (0..100).map(connect).collect();
    wait_until("the server has no descriptor left", TEST_TIMEOUT, || {
        free_below(&server, limit) <= 1
    });
    let mut session = client(&tcp).session().unwrap();
    check_served(&tcp, &mut session);
    drop(silent);
}

/// Readers open as many sessions as the server lets them, then a writer does. An operator still
/// comes in, and disconnects the reader.
#[on(shm)]
fn sessions_leave_descriptors_to_writers_and_to_operators() {
    const DESCRIPTORS: usize = 128;
    let (server, tcp) = server_at_port();
    limit_descriptors(&server, DESCRIPTORS as u64);
    let take_all = |role| {
        let mut options = connect_options(&tcp, role, SecretKey::NONE);
        options.timeout = TEST_TIMEOUT;
        let client = options.connect().unwrap();
        let mut sessions = Vec::new();
        let refusal = loop {
            assert!(sessions.len() < DESCRIPTORS, "{role:?} is not refused");
            match client.factory.fabric(1) {
                Ok(session) => sessions.push(session),
                Err(error) => break error.to_string(),
            }
        };
        assert!(refusal.contains("keeps its last descriptors for others"), "{refusal}");
        (client, sessions)
    };
    let (reader, of_reader) = take_all(Role::Reader);
    assert!(of_reader.len() > DESCRIPTORS / 4, "{}", of_reader.len());
    check_served(&tcp, &mut client(&tcp).session().unwrap());
    let (_writer, of_writer) = take_all(Role::Writer);
    assert!(!of_writer.is_empty());
    let kicked = client(&tcp).admin().kick(reader.welcome.client_id).unwrap();
    assert!(kicked);
    drop(of_reader);
    wait_until("the reader's descriptors are free", TEST_TIMEOUT, || {
        client(&tcp).session().is_ok()
    });
}

/// The system often allows a process 1024 descriptors at first, and lets it have more.
#[on(shm, rdma_in_soak)]
fn a_server_takes_as_many_descriptors_as_it_may() {
    let folder = tempfile::tempdir().unwrap();
    let listen = format!("shm://{}", folder.path().join("kv.sock").display());
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -S -n 64; exec \"$0\" --memory 8MiB --listen \"$1\""]);
    command.arg(binary("kv-server")).arg(&listen).stderr(Stdio::null());
    let mut server = command.spawn().unwrap();
    let connected = Client::builder().server(&listen).connect_timeout(TEST_TIMEOUT).connect();
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", server.id()));
    server.kill().unwrap();
    server.wait().unwrap();
    connected.unwrap();
    let limits = limits.unwrap();
    let line = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    let [soft, hard] = line["Max open files".len()..].split_whitespace().collect::<Vec<_>>()[..2]
    else {
        panic!("{line}")
    };
    assert_eq!(soft, hard, "{line}");
}
