//! kv-resp's connections: their order, long values, slow readers, a server that restarts.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use farside_tests::command::{CommandOutput, command};
use farside_tests::{ServerProcess, free_tcp_address, send_signal, wait_until};
use rustix::process::Signal;

use super::gateway::{RespServer, request};

const TIMEOUT: Duration = Duration::from_secs(60);

#[on(any, rdma_in_soak)]
fn commands_of_a_connection_take_effect_in_order() {
    let server = ServerProcess::start("--memory 64MiB");
    let gateway = RespServer::gateway(&server, &["--threads", "2"]);
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
    let server = ServerProcess::start("--memory 64MiB");
    let gateway = RespServer::gateway::<&str>(&server, &[]);
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
    let server = ServerProcess::start("--memory 64MiB");
    let gateway = RespServer::gateway::<&str>(&server, &[]);
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
