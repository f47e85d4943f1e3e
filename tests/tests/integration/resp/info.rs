//! What kv-resp tells of its store, and how much it moves for that.

use std::io::{Read, Write};
use std::net::TcpStream;

use farside_tests::{ServerProcess, TEST_TIMEOUT, free_tcp_address, wait_until};

use super::gateway::{RespClient, RespServer};

/// The number of a line of INFO.
fn figure(client: &mut RespClient, name: &str) -> u64 {
    let info = client.say("INFO");
    let mut lines = info.split("\r\n");
    let line = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let number = line.unwrap_or_else(|| panic!("no {name} in {info}"));
    let number = number.strip_prefix("keys=").unwrap_or(number);
    number.split([',', '.']).next().unwrap().parse().unwrap()
}

#[on(any, rdma_in_soak)]
fn info_has_the_figures_of_the_store() {
    let server = ServerProcess::start("--memory 64MiB");
    let gateway = RespServer::gateway::<&str>(&server, &[]);
    let mut client = gateway.connect();
    assert!(!client.say("INFO keyspace").contains("db0"));
    let before = figure(&mut client, "used_memory");
    for number in 0..20 {
        let key = format!("key-{number}");
        assert_eq!(client.ask(&["SET", &key, &"v".repeat(500_000)]), b"+OK\r\n");
    }
    assert!(figure(&mut client, "used_memory") >= before + 10_000_000);
    assert!(figure(&mut client, "used_memory") <= figure(&mut client, "maxmemory"));
    assert_eq!(figure(&mut client, "evicted_keys"), 0);
    // Fractions of a second.
    let _ = (figure(&mut client, "used_cpu_sys"), figure(&mut client, "used_cpu_user"));
    // The last count of the keys is used again for as long as nineteen counts take.
    wait_until("it counts", TEST_TIMEOUT, || client.say("INFO keyspace").contains("db0:keys=20,"));
    let policy = "*2\r\n$16\r\nmaxmemory-policy\r\n$10\r\nnoeviction\r\n";
    assert_eq!(client.say("CONFIG GET maxmemory-policy"), policy);
}

#[on(any, rdma_in_soak)]
fn info_tells_of_a_cache() {
    let server = ServerProcess::start("--memory 64MiB --evict");
    let gateway = RespServer::gateway::<&str>(&server, &[]);
    let mut client = gateway.connect();
    let policy = "*2\r\n$16\r\nmaxmemory-policy\r\n$11\r\nallkeys-lru\r\n";
    assert_eq!(client.say("CONFIG GET maxmemory-policy"), policy);
    assert!(client.say("INFO memory").contains("\r\nmaxmemory_policy:allkeys-lru\r\n"));
    let value = "v".repeat(500_000);
    for number in 0..200 {
        let _ = client.ask(&["SET", &format!("key-{number}"), &value]);
    }
    assert!(figure(&mut client, "evicted_keys") > 0);
}

/// The bytes that a gateway with metrics at this address has read from the store.
fn read_bytes(metrics: &str) -> u64 {
    let mut stream = TcpStream::connect(metrics).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    let name = "farside_client_read_bytes_total ";
    let line = response.lines().find_map(|line| line.strip_prefix(name));
    line.unwrap_or_else(|| panic!("{response}")).parse().unwrap()
}

#[on(any, rdma_in_soak)]
fn commands_on_all_keys_read_no_values() {
    let server = ServerProcess::start("--memory 128MiB");
    let address = free_tcp_address();
    let metrics = address.strip_prefix("tcp://").unwrap();
    let gateway = RespServer::gateway(&server, &["--metrics", metrics]);
    let mut client = gateway.connect();
    let mut session = server.session();
    for number in 0..100 {
        session.put(format!("key-{number}"), vec![7; 900_000]).unwrap();
    }
    assert_eq!(client.scan("COUNT 1000").len(), 100);
    assert_eq!(client.say("DBSIZE"), ":100\r\n");
    assert!(client.say("KEYS *").starts_with("*100\r\n"));
    assert!(client.say("RANDOMKEY").contains("key-"));
    assert_eq!(client.say("FLUSHDB"), "+OK\r\n");
    assert_eq!(client.say("DBSIZE"), ":0\r\n");
    // One value has as many bytes.
    assert!(read_bytes(metrics) < 900_000, "{}", read_bytes(metrics));
}

/// A command on all keys of a large store takes long.
#[on(any, rdma_in_soak)]
fn commands_on_all_keys_and_long_values_do_not_wait_for_each_other() {
    let server = ServerProcess::start("--memory 64MiB --value-bytes-max 4194304");
    let gateway = RespServer::gateway::<&str>(&server, &[]);
    let mut client = gateway.connect();
    assert_eq!(client.ask(&["SET", "long", &"v".repeat(2 << 20)]), b"+OK\r\n");
    assert!(client.say("KEYS *").starts_with("*1\r\n"));
    assert_eq!(client.say("DBSIZE"), ":1\r\n");
    let tasks = std::fs::read_dir(format!("/proc/{}/task", gateway.child.id())).unwrap();
    let names: Vec<_> = tasks
        .map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).unwrap())
        .collect();
    for name in ["resp-keys\n", "resp-store\n", "resp-values\n"] {
        assert!(names.iter().any(|found| found == name), "{name} in {names:?}");
    }
}

/// PTTL never tells more than was given.
#[on(any, rdma_in_soak)]
fn ttls_are_not_longer_than_they_were_given() {
    let server = ServerProcess::start("--memory 64MiB");
    let gateway = RespServer::gateway::<&str>(&server, &[]);
    let mut client = gateway.connect();
    let left = |reply: String| reply.trim_matches([':', '\r', '\n']).parse::<u64>().unwrap();
    for number in 0..40 {
        assert_eq!(client.say("SET key value"), "+OK\r\n");
        let longest = 100_000 + number;
        assert_eq!(client.say(&format!("PEXPIRE key {longest}")), ":1\r\n");
        let found = left(client.say("PTTL key"));
        assert!(found <= longest, "{found} of {longest}");
        assert_eq!(client.say("EXPIRE key 100"), ":1\r\n");
        let found = left(client.say("PTTL key"));
        assert!(found <= 100_000, "{found}");
    }
}
