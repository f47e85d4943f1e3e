//! kv-resp's limits: what clients can take of it, and when they lose their connections.

use std::fs;
use std::io::{ErrorKind, Write};

use farside_tests::command::{CommandOutput, command};
use farside_tests::{ServerProcess, TEST_TIMEOUT, free_tcp_address, wait_until};
use rustix::net::sockopt;

use super::gateway::{RespClient, RespServer, request};

/// A connection with little room for bytes on their way, a long key with a value of so many bytes,
/// and the request for it. Its requests fill the room as well as its replies.
fn with_long_key(gateway: &RespServer, value_bytes: usize) -> (RespClient, Vec<u8>) {
    let mut client = gateway.connect();
    sockopt::set_socket_recv_buffer_size(&client.socket, 32 << 10).unwrap();
    sockopt::set_socket_send_buffer_size(&client.socket, 32 << 10).unwrap();
    let (key, value) = ("k".repeat(400), "v".repeat(value_bytes));
    assert_eq!(client.ask(&["SET", &key, &value]), b"+OK\r\n");
    (client, request(&["GET", &key]))
}

#[on(any, rdma_in_soak)]
fn a_client_may_send_all_of_its_requests_before_it_reads() {
    const REQUESTS: usize = 30_000;
    let server = ServerProcess::start("--memory 64MiB");
    let gateway = RespServer::gateway::<&str>(&server, &[]);
    let (mut client, get) = with_long_key(&gateway, 1000);
    client.send(&[get.repeat(REQUESTS), request(&["QUIT"])].concat());
    let replies = client.rest();
    let expected = [b"$1000\r\n".as_slice(), &[b'v'; 1000], b"\r\n"].concat().repeat(REQUESTS);
    assert_eq!(replies.len(), expected.len() + 5);
    assert!(replies.starts_with(&expected) && replies.ends_with(b"+OK\r\n"));
}

#[on(any, rdma_in_soak)]
fn a_client_that_never_reads_loses_its_connection() {
    let server = ServerProcess::start("--memory 64MiB");
    let gateway = RespServer::gateway::<&str>(&server, &[]);
    let (mut client, get) = with_long_key(&gateway, 1000);
    let (requests, mut sent) = (get.repeat(1000), 0);
    let failure = loop {
        match client.socket.write(&requests) {
            Ok(bytes) => sent += bytes,
            Err(error) => break error,
        }
    };
    // Not a write that has waited too long.
    let is_reset = [ErrorKind::ConnectionReset, ErrorKind::BrokenPipe].contains(&failure.kind());
    assert!(is_reset, "{failure} after {sent} bytes");
    assert!((32 << 20..160 << 20).contains(&sent), "{sent}");
    wait_until("its memory is freed", TEST_TIMEOUT, || gateway.own_bytes() < 48 << 20);
    assert!(gateway.log().contains("FS-065 closed a connection"), "{}", gateway.log());
    assert_eq!(gateway.connect().say("PING"), "+PONG\r\n");
}

/// The gateway's connections with an established peer, by the kernel's list: whether it will probe
/// the peer's host.
fn probes(gateway: &RespServer) -> Vec<bool> {
    let port: u16 = gateway.port().parse().unwrap();
    let text = fs::read_to_string("/proc/net/tcp").unwrap();
    let lines = text.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
    let own =
        lines.filter(|fields| fields[1].ends_with(&format!(":{port:04X}")) && fields[3] == "01");
    own.map(|fields| fields[5].starts_with("02:")).collect()
}

#[on(any, rdma_in_soak)]
fn the_hosts_of_clients_are_probed() {
    let server = ServerProcess::start("--memory 64MiB");
    let gateway = RespServer::gateway::<&str>(&server, &[]);
    let mut client = gateway.connect();
    assert_eq!(client.say("PING"), "+PONG\r\n");
    wait_until("the system probes", TEST_TIMEOUT, || probes(&gateway) == [true]);
}

#[on(any, rdma_in_soak)]
fn silent_strangers_lock_no_client_out() {
    let server = ServerProcess::start("--memory 64MiB");
    let gateway = RespServer::gateway(&server, &["--clients-max", "20"]);
    let mut client = gateway.connect();
    assert_eq!(client.say("PING"), "+PONG\r\n");
    let strangers: Vec<_> = (0..60).map(|_| gateway.connect()).collect();
    let mut clients: Vec<_> = (0..19).map(|_| gateway.connect()).collect();
    for client in &mut clients {
        assert_eq!(client.say("PING"), "+PONG\r\n");
    }
    assert_eq!(client.say("PING"), "+PONG\r\n");
    // Now there are only clients.
    assert!(gateway.connect().rest().starts_with(b"-ERR max number of clients"));
    drop(strangers);
}

#[on(any, rdma_in_soak)]
fn strangers_that_need_a_password_are_few_and_try_few() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("password");
    fs::write(&file, "secret").unwrap();
    let server = ServerProcess::start("--memory 64MiB");
    let gateway = RespServer::gateway(&server, &["--password-file", file.to_str().unwrap()]);
    let mut client = gateway.connect();
    assert_eq!(client.say("AUTH secret"), "+OK\r\n");
    let strangers: Vec<_> = (0..400).map(|_| gateway.connect()).collect();
    let mut another = gateway.connect();
    assert_eq!(another.say("AUTH secret"), "+OK\r\n");
    let info = client.say("INFO clients");
    let line = info.split("\r\n").find_map(|line| line.strip_prefix("connected_clients:"));
    assert!(line.unwrap().parse::<usize>().unwrap() <= 256 + 2, "{info}");
    drop(strangers);

    let mut guessing = gateway.connect();
    guessing.send(&request(&["AUTH", "guess"]).repeat(500));
    let replies = String::from_utf8(guessing.rest()).unwrap();
    let wrong = replies.matches("-WRONGPASS ").count();
    assert!((1..20).contains(&wrong), "{wrong} tries");
    assert!(gateway.log().contains("FS-066 a client gave a wrong password"), "{}", gateway.log());
    assert_eq!(client.say("PING"), "+PONG\r\n");
}

#[on(any, rdma_in_soak)]
fn an_idle_limit_closes_connections() {
    let server = ServerProcess::start("--memory 64MiB");
    let gateway = RespServer::gateway(&server, &["--idle-timeout", "1"]);
    let mut client = gateway.connect();
    assert_eq!(client.say("CONFIG GET timeout"), "*2\r\n$7\r\ntimeout\r\n$1\r\n1\r\n");
    assert_eq!(client.rest(), b"");
}

#[on(any, rdma_in_soak)]
fn no_gateway_serves_other_hosts_without_being_told_to() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("password");
    fs::write(&file, "secret").unwrap();
    let server = ServerProcess::start("--memory 64MiB");
    let open = || free_tcp_address().replace("127.0.0.1", "0.0.0.0");
    let mut refused = command("kv-resp");
    refused.args(["--server", &server.address(), "--listen", &open()]);
    let advice = ["--password-file", "--tls-ca", "--no-password"];
    CommandOutput::of(&mut refused).expect_line(2, &advice);
    for (arguments, warns) in
        [(vec!["--no-password"], true), (vec!["--password-file", file.to_str().unwrap()], false)]
    {
        let listen = open();
        let gateway =
            RespServer::gateway(&server, &[&["--listen", &listen][..], &arguments].concat());
        let warning = format!("FS-067 every host that reaches {listen} can read");
        assert_eq!(gateway.log().contains(&warning), warns, "{}", gateway.log());
    }
}
