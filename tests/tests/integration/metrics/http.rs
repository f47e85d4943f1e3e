//! Proves that metrics come in two formats, that only requests for them are answered, and that no
//! client of HTTP can stop the server or use much of it. Guards against connections that say
//! nothing, too much, or garbage.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use farside_tests::command::CommandOutput;
use farside_tests::{ServerProcess, TEST_TIMEOUT, wait_until};
use rustix::process::Signal;

use super::scrape::{METRICS, OPEN_METRICS, Scrape, address, ask, connect, metrics};
use crate::server_cli;

#[on(shm)]
fn both_formats_have_the_same_samples() {
    let server = ServerProcess::start(&format!("--memory 16MiB {METRICS}"));
    let mut session = server.session();
    session.put(b"key", b"value").unwrap();
    let (plain, open) = (metrics(&server, ""), metrics(&server, OPEN_METRICS));
    assert!(open.ends_with("\n# EOF\n") && !plain.contains("# EOF") && !plain.contains("# UNIT"));
    assert!(open.contains("\n# TYPE farside_fences counter\n"), "{open}");
    assert!(open.contains("\n# UNIT farside_class_bytes bytes\n"), "{open}");
    assert!(plain.contains("\n# TYPE farside_fences_total counter\n"), "{plain}");
    let names = |text: &str| -> Vec<String> {
        let samples = text.lines().filter(|line| !line.starts_with('#'));
        samples.map(|line| line.rsplit_once(' ').unwrap().0.to_owned()).collect()
    };
    assert_eq!(names(&plain), names(&open));
}

#[on(shm)]
fn only_get_of_metrics_is_answered() {
    let server = ServerProcess::start(&format!("--memory 16MiB {METRICS}"));
    for (request, status, text) in [
        ("GET / HTTP/1.1\r\n\r\n", 404, "the metrics are at /metrics\n"),
        ("GET /metrics/x HTTP/1.1\r\n\r\n", 404, "the metrics are at /metrics\n"),
        ("HEAD /metrics HTTP/1.1\r\n\r\n", 405, ""),
        ("POST /metrics HTTP/1.1\r\nContent-Length: 4\r\n\r\nbody", 405, ""),
        ("\x16\x03\x01\r\n\r\n", 400, "this is no request of HTTP/1.1\n"),
    ] {
        let (got, head, said) = ask(&server, request);
        assert_eq!(got, status, "{request:?}: {head}");
        assert!(said.starts_with(text) && head.contains("\r\nConnection: close"), "{said}{head}");
    }
    let long = format!("GET /metrics HTTP/1.1\r\nA: {}", "a".repeat(1 << 20));
    let mut stream = connect(&server);
    // The server closes before it has read all.
    let _ = stream.write_all(long.as_bytes());
    let mut response = Vec::new();
    let _ = stream.read_to_end(&mut response);
    assert!(response.is_empty() || response.starts_with(b"HTTP/1.1 431 "), "{response:?}");
    assert!(Scrape::of(&server).value("farside_incarnation") == 1.0);
}

/// A request that comes byte by byte, and several at once.
#[on(shm)]
fn a_request_may_come_in_parts() {
    let server = ServerProcess::start(&format!("--memory 16MiB {METRICS}"));
    let mut streams: Vec<_> = (0..8).map(|_| connect(&server)).collect();
    for byte in b"GET /metrics HTTP/1.1\r\nAccept: text/plain\r\n\r\n" {
        streams.iter_mut().for_each(|stream| stream.write_all(&[*byte]).unwrap());
    }
    for mut stream in streams {
        let mut response = String::new();
        stream.read_to_string(&mut response).unwrap();
        assert!(response.starts_with("HTTP/1.1 200 OK\r\n"), "{response}");
    }
}

/// How many silent connections there are at a time: far more than the server keeps.
const SILENT: usize = 200;
/// The connections that the server keeps, and some descriptors more.
const DESCRIPTORS_MAX: usize = 32 + 8;
/// The memory that these connections may take.
const BYTES_MAX: u64 = 4 << 20;

#[on(shm)]
fn silent_slow_and_garbage_connections_keep_no_one_out() {
    let server = ServerProcess::start(&format!("--memory 32MiB {METRICS}"));
    let mut session = server.session();
    session.put(b"key", b"value").unwrap();
    Scrape::of(&server);
    let (before, bytes_before) = (server.descriptors().len(), server.own_bytes());
    let garbage = vec![b'x'; 4 << 10];
    for sent in [&b""[..], b"GET /met", &garbage, b"\0", b"GET /metrics HTTP/1.1\r\n\r\n"] {
        // The last ones send a request, and do not read the response.
        let silent: Vec<TcpStream> = (0..SILENT)
            .map(|_| {
                let mut stream = connect(&server);
                let _ = stream.write_all(sent);
                stream
            })
            .collect();
        for _ in 0..20 {
            assert_eq!(Scrape::of(&server).value("farside_incarnation"), 1.0);
            assert_eq!(*session.get(b"key").unwrap().unwrap(), *b"value");
            session.put(b"key", b"value").unwrap();
        }
        let descriptors = server.descriptors().len();
        assert!(descriptors <= before + DESCRIPTORS_MAX, "{descriptors}, {before} before");
        let more = server.own_bytes().saturating_sub(bytes_before);
        assert!(more <= BYTES_MAX, "{more} bytes more");
        drop(silent);
    }
    let threads = std::fs::read_dir(format!("/proc/{}/task", server.pid())).unwrap().count();
    assert!(threads < 16, "{threads}");
    // A silent connection is closed although no other comes.
    let started = Instant::now();
    let mut silent = connect(&server);
    assert_eq!(silent.read(&mut [0; 8]).unwrap(), 0, "the server closes it");
    assert!(started.elapsed() >= Duration::from_secs(10), "{:?}", started.elapsed());
    wait_until("the descriptors are back", TEST_TIMEOUT, || server.descriptors().len() <= before);
}

#[on(shm)]
fn a_server_stops_although_requests_are_pending() {
    let mut server = ServerProcess::start(&format!("--memory 16MiB {METRICS}"));
    let pending: Vec<_> = (0..10).map(|_| connect(&server)).collect();
    server.signal(Signal::TERM);
    assert!(server.wait().success());
    drop(pending);
}

/// Runs a server that must not start.
fn refused(arguments: &str) -> CommandOutput {
    let folder = tempfile::tempdir().unwrap();
    let address = server_cli::address(folder.path());
    server_cli::server(&format!("--listen {address} --memory 16MiB {arguments}"))
}

#[on(shm)]
fn an_address_that_cannot_be_used_is_reported_in_one_line() {
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let in_use = other.local_addr().unwrap();
    refused(&format!("--metrics {in_use}"))
        .expect_line(1, &["cannot serve metrics at ", &in_use.to_string(), "another program"]);
    // An address for documentation, which no host has.
    refused("--metrics 192.0.2.1:9400")
        .expect_line(1, &["cannot serve metrics at 192.0.2.1:9400", "no address of this host"]);
    for malformed in ["9400", ":9400", "localhost:9400", "127.0.0.1", "127.0.0.1:99999", "[::1]"] {
        let parts = ["--metrics", malformed, "write an IP address and a port, such as"];
        refused(&format!("--metrics {malformed}")).expect_line(2, &parts);
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("server.toml");
    std::fs::write(&file, "metrics = \"here\"\n").unwrap();
    refused(&format!("--config {}", file.display()))
        .expect_line(1, &["server.toml:1: `here` is no address for metrics; write an IP address"]);
}

/// The flag overrides the file, and IPv6 works.
#[on(shm)]
fn the_config_file_has_the_address_too() {
    let config = "metrics = \"[::1]:0\"\n";
    if TcpListener::bind("[::1]:0").is_err() {
        farside_tests::left_out("without IPv6", "it listens at [::1]");
        return;
    }
    let server = ServerProcess::start_with_config(config, "--memory 16MiB");
    assert!(address(&server).starts_with("[::1]:"), "{}", address(&server));
    assert_eq!(Scrape::of(&server).value("farside_incarnation"), 1.0);
    let server = ServerProcess::start_with_config(config, &format!("--memory 16MiB {METRICS}"));
    assert!(address(&server).starts_with("127.0.0.1:"), "{}", address(&server));
}
