//! kv-resp's connections: their order, long values, slow readers, a server that restarts. What
//! clients can take of it, when they lose their connections, passwords and TLS, and clients that
//! say nothing.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::time::{Duration, Instant};

use farside_tests::command::{CommandOutput, command};
use farside_tests::{
    ServerProcess, TEST_TIMEOUT, free_tcp_address, left_out, send_signal, wait_until,
};
use rustix::net::sockopt;
use rustix::process::Signal;

use super::gateway::{RespClient, RespServer, request};
use crate::tls::write_certificate;

const TIMEOUT: Duration = Duration::from_secs(60);

#[on(any, rdma_in_soak)]
fn commands_of_a_connection_take_effect_in_order() {
    let (_server, gateway) = RespServer::with_server(&["--threads", "2"]);
    let mut client = gateway.connect();
    let (mut sent, mut expected) = (Vec::new(), Vec::new());
    let mut add = |words: &[&str], reply: &str| {
        sent.extend(request(words));
        expected.extend(reply.as_bytes());
    };
    for round in 0..200 {
        let (key, value) = (format!("k{}", round % 3), format!("{round:04}"));
        add(&["SET", &key, &value], "+OK\r\n");
        add(&["GET", &key], &format!("$4\r\n{value}\r\n"));
        add(&["GET", &key], &format!("$4\r\n{value}\r\n"));
        add(&["MSET", &key, "a", &key, "b"], "+OK\r\n");
        add(&["MGET", &key, "none", &key], "*3\r\n$1\r\nb\r\n$-1\r\n$1\r\nb\r\n");
        add(&["DEL", &key, &key], ":1\r\n");
        add(&["INCR", "count"], &format!(":{}\r\n", round + 1));
        add(
            &["GETEX", "count", "EX", "100"],
            &format!("${}\r\n{0}\r\n", round + 1).replace(
                &format!("${}", round + 1),
                &format!("${}", (round + 1).to_string().len()),
            ),
        );
        add(&["PERSIST", "count"], ":1\r\n");
        add(&["PING"], "+PONG\r\n");
        if round % 50 == 0 {
            add(&["SET", &key, "x"], "+OK\r\n");
            add(&["DBSIZE"], ":2\r\n");
            add(&["DEL", &key], ":1\r\n");
        }
    }
    client.send(&sent);
    client.send(&request(&["QUIT"]));
    expected.extend(b"+OK\r\n");
    assert_eq!(client.rest().escape_ascii().to_string(), expected.escape_ascii().to_string());
}

#[on(any, rdma_in_soak)]
fn the_metrics_of_a_gateway_count_what_its_clients_do() {
    let server = ServerProcess::start("--memory 64MiB");
    let address = free_tcp_address();
    let address = address.strip_prefix("tcp://").unwrap();
    let gateway = RespServer::gateway(&server, &["--metrics", address]);
    let mut client = gateway.connect();
    assert_eq!(client.say("SET key one"), "+OK\r\n");
    assert_eq!(client.say("GET key"), "$3\r\none\r\n");
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    assert!(response.starts_with("HTTP/1.1 200 OK\r\n"), "{response}");
    for (operation, result) in [("put", "applied"), ("get", "found")] {
        let labels = format!("operation=\"{operation}\",result=\"{result}\"");
        let line = format!("farside_client_operations_total{{{labels}}} 1\n");
        assert!(response.contains(&line), "{response}");
    }
    let mut second = command("kv-resp");
    second.args(["--server", &server.address(), "--listen", &free_tcp_address()]);
    let output = CommandOutput::of(second.args(["--metrics", address]));
    assert!(output.stderr.contains("another program listens there"), "{}", output.stderr);
    assert_eq!(output.code, Some(5));
}

#[on(any, rdma_in_soak)]
fn long_values_and_refused_ones() {
    let server = ServerProcess::start("--memory 256MiB --value-bytes-max 67108864");
    let gateway = RespServer::gateway::<&str>(&server, &[]);
    let mut client = gateway.connect();
    for bytes in [100_000, 4 << 20, 64 << 20] {
        let value: Vec<u8> = (0..bytes).map(|at: u32| (at % 251) as u8).collect();
        assert_eq!(client.ask(&[&b"SET"[..], b"long", &value]), b"+OK\r\n");
        for _ in 0..2 {
            let reply = client.ask(&["GET", "long"]);
            assert!(
                reply.ends_with(b"\r\n")
                    && reply[reply.len() - 2 - value.len()..].starts_with(&value)
            );
        }
        assert_eq!(client.say("STRLEN long"), format!(":{bytes}\r\n"));
        assert_eq!(client.say("GETRANGE long 250 251"), "$2\r\n\u{fffd}\0\r\n");
    }
    let reply = client.ask(&[&b"SET"[..], b"long", &vec![0; (64 << 20) + 1]]);
    let reply = String::from_utf8(reply).unwrap();
    assert!(reply.starts_with("-ERR ") && reply.contains("67108865"), "{reply}");
    assert_eq!(client.say("STRLEN long"), format!(":{}\r\n", 64 << 20));
    let reply = client.ask(&["SET", &"k".repeat(5000), "v"]);
    assert!(reply.starts_with(b"-ERR the key is 5000 bytes long"), "{}", reply.escape_ascii());
}

#[on(any, rdma_in_soak)]
fn scans_return_every_key_once() {
    let (server, gateway) = RespServer::with_server(&[]);
    let mut client = gateway.connect();
    let mut session = server.session();
    session.put_many((0..5000).map(|n| (format!("key-{n}"), "v"))).unwrap();
    let mut keys = client.scan("COUNT 50 MATCH key-*");
    keys.sort();
    let all = keys.len();
    keys.dedup();
    assert_eq!((all, keys.len()), (5000, 5000));
    assert_eq!(client.say("DBSIZE"), ":5000\r\n");
    assert_eq!(client.say("FLUSHDB"), "+OK\r\n");
    assert_eq!(client.say("RANDOMKEY"), "$-1\r\n");
}

#[on(any, rdma_in_soak)]
fn a_slow_reader_stops_no_other_client() {
    let (_server, gateway) = RespServer::with_server(&[]);
    let (mut slow, mut other) = (gateway.connect(), gateway.connect());
    let value = vec![b'v'; 100_000];
    assert_eq!(slow.ask(&[&b"SET"[..], b"big", &value]), b"+OK\r\n");
    let requests = request(&["GET", "big"]).repeat(1000);
    slow.send(&requests);
    for number in 1..=100 {
        assert_eq!(other.say("INCR n"), format!(":{number}\r\n"));
    }
    // The replies have a hundred times the bytes that a connection may keep.
    let kept = gateway.own_bytes();
    assert!(kept < 32 << 20, "{kept}");
    for _ in 0..1000 {
        assert_eq!(slow.reply().len(), value.len() + 11);
    }
}

#[on(any, rdma_in_soak)]
fn clients_get_errors_while_the_server_restarts() {
    let mut server = ServerProcess::start_with_file("--memory 64MiB");
    let gateway = RespServer::gateway::<&str>(&server, &[]);
    let mut client = gateway.connect();
    assert_eq!(client.say("SET a 1"), "+OK\r\n");
    server.kill();
    let begin = Instant::now();
    let mut reply = client.say("SET a 2");
    while reply == "+OK\r\n" && begin.elapsed() < TIMEOUT {
        reply = client.say("SET a 2");
    }
    assert!(reply.starts_with("-LOADING ") || reply.starts_with("-ERR "), "{reply}");
    assert_eq!(client.say("PING"), "+PONG\r\n");
    server.start_again();
    wait_until("the store is back", TIMEOUT, || client.say("SET a 3") == "+OK\r\n");
    assert_eq!(client.say("GET a"), "$1\r\n3\r\n");
}

#[on(any, rdma_in_soak)]
fn it_ends_on_a_signal_and_explains_mistakes() {
    let folder = tempfile::tempdir().unwrap();
    let server = ServerProcess::start("--memory 64MiB");
    let socket = folder.path().join("resp.sock");
    let listen = format!("unix://{}", socket.display());
    let mut gateway = RespServer::gateway(&server, &["--listen", &listen]);
    assert!(socket.exists());
    let run = |arguments: &[&str]| CommandOutput::of(command("kv-resp").args(arguments));
    let address = server.address();
    let taken = format!("tcp://{}", gateway.address);
    for listen in [&taken, &listen] {
        run(&["--server", &address, "--listen", listen]).expect_line(5, &["another program"]);
    }
    run(&["--server", &address, "--listen", "nothing"]).expect_line(2, &["tcp://HOST:PORT"]);
    run(&["--listen", &free_tcp_address()]).expect_line(2, &["--server"]);
    let nowhere = format!("shm://{}", folder.path().join("none.sock").display());
    run(&["--server", &nowhere, "--listen", &free_tcp_address()]).expect_line(3, &["none.sock"]);
    send_signal(&gateway.child, Signal::TERM);
    assert_eq!(gateway.child.wait().unwrap().code(), Some(0));
    assert!(!socket.exists());
}

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
    let (_server, gateway) = RespServer::with_server(&[]);
    let (mut client, get) = with_long_key(&gateway, 1000);
    client.send(&[get.repeat(REQUESTS), request(&["QUIT"])].concat());
    let replies = client.rest();
    let expected = [b"$1000\r\n".as_slice(), &[b'v'; 1000], b"\r\n"].concat().repeat(REQUESTS);
    assert_eq!(replies.len(), expected.len() + 5);
    assert!(replies.starts_with(&expected) && replies.ends_with(b"+OK\r\n"));
}

#[on(any, rdma_in_soak)]
fn a_client_that_never_reads_loses_its_connection() {
    let (_server, gateway) = RespServer::with_server(&[]);
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
    let (_server, gateway) = RespServer::with_server(&[]);
    let mut client = gateway.connect();
    assert_eq!(client.say("PING"), "+PONG\r\n");
    wait_until("the system probes", TEST_TIMEOUT, || probes(&gateway) == [true]);
}

#[on(any, rdma_in_soak)]
fn silent_strangers_lock_no_client_out() {
    let (_server, gateway) = RespServer::with_server(&["--clients-max", "20"]);
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
    let (_server, gateway) = RespServer::with_server(&["--password-file", file.to_str().unwrap()]);
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
    let (_server, gateway) = RespServer::with_server(&["--idle-timeout", "1"]);
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

#[on(any, rdma_in_soak)]
fn a_password_is_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("password");
    fs::write(&file, "secret\n").unwrap();
    let (_server, gateway) = RespServer::with_server(&["--password-file", file.to_str().unwrap()]);
    let mut client = gateway.connect();
    assert_eq!(client.say("GET a"), "-NOAUTH Authentication required.\r\n");
    assert!(client.say("HELLO 3").starts_with("-NOAUTH HELLO must be called"));
    // An error changes nothing.
    let words = ["HELLO", "3", "AUTH", "default", "secret", "SETNAME", "a b"];
    assert!(client.ask(&words).starts_with(b"-ERR Client names cannot contain"));
    assert_eq!(client.say("GET a"), "-NOAUTH Authentication required.\r\n");
    assert!(client.say("AUTH wrong!").starts_with("-WRONGPASS "));
    assert_eq!(client.say("AUTH secret"), "+OK\r\n");
    assert_eq!(client.say("GET a"), "$-1\r\n");
    assert_eq!(client.say("RESET"), "+RESET\r\n");
    assert!(client.say("GET a").starts_with("-NOAUTH "));
    assert!(client.say("HELLO 3 AUTH default secret").starts_with("%7\r\n"));
    assert_eq!(client.say("GET a"), "_\r\n");
    let mut client = gateway.connect();
    client.send(b"*11\r\n");
    assert!(client.rest().ends_with(b"unauthenticated multibulk length\r\n"));
    let mut client = gateway.connect();
    client.send(b"*2\r\n$16385\r\n");
    assert!(client.rest().ends_with(b"unauthenticated bulk length\r\n"));
}

/// A folder with a certificate and a password, and arguments of a gateway that uses both.
fn encrypted() -> (tempfile::TempDir, Vec<String>) {
    let folder = tempfile::tempdir().unwrap();
    write_certificate(folder.path());
    fs::write(folder.path().join("password"), "secret").unwrap();
    let flag = |(flag, file): (&str, &str)| {
        [flag.to_owned(), folder.path().join(file).display().to_string()]
    };
    let flags = [
        ("--tls-certificate", "certificate.pem"),
        ("--tls-key", "key.pem"),
        ("--password-file", "password"),
    ];
    let arguments = flags.into_iter().flat_map(flag).collect();
    (folder, arguments)
}

#[on(any, rdma_in_soak)]
fn tls_and_a_password_together() {
    let server = ServerProcess::start("--memory 64MiB");
    let (folder, mut arguments) = encrypted();
    let certificate = folder.path().join("certificate.pem").display().to_string();
    let run = |gateway: &RespServer, arguments: &[&str]| {
        let mut program = Command::new("redis-cli");
        program.args(["--no-auth-warning", "--tls", "--cacert", &certificate]);
        program.args(["-h", "127.0.0.1", "-p", gateway.port()]).args(arguments).output().ok()
    };
    let gateway = RespServer::gateway(&server, &arguments);
    let text = |words: &[&str]| {
        let output = run(&gateway, words).map(CommandOutput::new);
        output.map(|output| output.succeeded().text().trim_end().to_owned())
    };
    let Some(refused) = text(&["get", "a"]) else {
        return left_out("without redis", "it runs redis-cli");
    };
    assert_eq!(refused, "NOAUTH Authentication required.");
    assert_eq!(text(&["-a", "secret", "set", "a", "1"]).unwrap(), "OK");
    assert_eq!(text(&["-3", "-a", "secret", "incr", "a"]).unwrap(), "2");
    assert!(text(&["-a", "wrong!", "get", "a"]).unwrap().contains("NOAUTH"));
    let value = "v".repeat(100_000);
    assert_eq!(text(&["-a", "secret", "set", "long", &value]).unwrap(), "OK");
    assert_eq!(text(&["-a", "secret", "get", "long"]).unwrap(), value);
    // Bytes that are not encrypted end the connection.
    let mut plain = gateway.connect();
    plain.send(b"PING\r\n");
    assert!(!plain.rest().starts_with(b"+PONG"));

    // With a CA, a client needs a certificate.
    arguments.extend(["--tls-ca".to_owned(), certificate.clone()]);
    let gateway = RespServer::gateway(&server, &arguments);
    let key = folder.path().join("key.pem").display().to_string();
    let own = ["--cert", &certificate, "--key", &key, "-a", "secret", "get", "a"];
    assert_eq!(CommandOutput::new(run(&gateway, &own).unwrap()).succeeded().text(), "2\n");
    let without = run(&gateway, &["-a", "secret", "get", "a"]).unwrap();
    assert!(!String::from_utf8_lossy(&without.stdout).contains('2'));
}

#[on(any, rdma_in_soak)]
fn clients_that_do_not_log_in_are_closed() {
    let server = ServerProcess::start("--memory 64MiB");
    let (_folder, arguments) = encrypted();
    let encrypted = RespServer::gateway(&server, &arguments);
    let with_password = RespServer::gateway(&server, &arguments[4..]);
    let mut logged_in = with_password.connect();
    assert_eq!(logged_in.say("AUTH secret"), "+OK\r\n");
    let (mut silent, mut no_handshake) = (with_password.connect(), encrypted.connect());
    assert_eq!(silent.rest(), b"");
    // An alert may come before the end.
    assert!(no_handshake.rest().len() < 64);
    assert_eq!(logged_in.say("PING"), "+PONG\r\n");
}
