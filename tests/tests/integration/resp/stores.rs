//! kv-resp over TCP and with a cluster answers as it does with one server on its host. Conditional
//! stores of concurrent clients lose nothing.

use std::thread;

use farside_tests::cluster::TestCluster;
use farside_tests::{ServerProcess, TEST_TIMEOUT, free_tcp_address, wait_until};

use super::gateway::{RespClient, RespServer, request};

const KEYS: usize = 300;

/// Uses each kind of command, and values of so many bytes.
fn exercise(client: &mut RespClient, long_bytes: usize) {
    let mut requests = Vec::new();
    for number in 0..KEYS {
        requests.extend(request(&["SET", &format!("key-{number}"), &number.to_string()]));
        requests.extend(request(&["INCR", &format!("key-{number}")]));
    }
    client.send(&requests);
    for number in 0..KEYS {
        assert_eq!(client.reply(), b"+OK\r\n");
        assert_eq!(client.reply(), format!(":{}\r\n", number + 1).as_bytes());
    }
    let keys = (0..KEYS).map(|number| format!("key-{number}"));
    let all = |command: &str| [command.to_owned()].into_iter().chain(keys.clone());
    let mget = client.ask(&all("MGET").collect::<Vec<_>>());
    let bulks = (1..=KEYS).map(|number| format!("${}\r\n{number}\r\n", number.to_string().len()));
    assert_eq!(mget, format!("*{KEYS}\r\n{}", bulks.collect::<String>()).as_bytes());
    assert_eq!(client.say("DBSIZE"), format!(":{KEYS}\r\n"));
    let mut found = client.scan("COUNT 20");
    found.sort();
    let mut expected: Vec<_> = keys.clone().collect();
    expected.sort();
    assert_eq!(found, expected);
    let random = client.say("RANDOMKEY");
    assert!(expected.iter().any(|key| random.ends_with(&format!("\r\n{key}\r\n"))), "{random}");

    let long = vec![b'l'; long_bytes];
    assert_eq!(client.ask(&[&b"SET"[..], b"long", &long]), b"+OK\r\n");
    for _ in 0..2 {
        let reply = client.ask(&["GET", "long"]);
        assert!(reply.starts_with(format!("${long_bytes}\r\nll").as_bytes()));
        assert!(reply.len() > long_bytes);
    }
    assert_eq!(client.say("APPEND long x"), format!(":{}\r\n", long.len() + 1));
    assert_eq!(client.say("GETRANGE long -2 -1"), "$2\r\nlx\r\n");
    assert_eq!(client.say("GETDEL key-0"), "$1\r\n1\r\n");
    assert_eq!(client.say("SET key-1 v PXAT 4000000000123"), "+OK\r\n");
    assert_eq!(client.say("PEXPIRETIME key-1"), ":4000000000123\r\n");
    assert_eq!(client.say("PERSIST key-1"), ":1\r\n");
    assert_eq!(client.say("TTL key-1"), ":-1\r\n");
    let deleted = client.ask(&all("DEL").collect::<Vec<_>>());
    assert_eq!(deleted, format!(":{}\r\n", KEYS - 1).as_bytes());
    assert_eq!(client.say("FLUSHALL"), "+OK\r\n");
    assert_eq!(client.say("DBSIZE"), ":0\r\n");
}

#[on(any, rdma_in_soak)]
fn a_store_over_tcp() {
    let tcp = free_tcp_address();
    let server = ServerProcess::start(&format!("--memory 64MiB --listen {tcp}"));
    let gateway = RespServer::gateway_of(&tcp, &["--threads", "2"]);
    exercise(&mut gateway.connect(), 2 << 20);
    let mut session = server.session();
    session.put("from-elsewhere", "1").unwrap();
    assert_eq!(gateway.connect().say("GET from-elsewhere"), "$1\r\n1\r\n");
}

#[on(any, rdma_in_soak)]
fn a_cluster_of_three_servers() {
    let (_cluster, servers) = TestCluster::with_servers(3);
    let addresses: Vec<_> = servers.iter().map(ServerProcess::address).collect();
    let gateway = RespServer::gateway_of(&addresses.join(","), &["--threads", "2"]);
    // Servers of this size have no longer values.
    exercise(&mut gateway.connect(), 512 << 10);
}

#[on(any, rdma_in_soak)]
fn a_shard_that_goes_away_and_comes_back_is_logged_once_each() {
    let cluster = TestCluster::create(2);
    let start = |shard: u16| {
        let file = cluster.folder().join(format!("region{shard}"));
        let server = cluster.start_with_file(&file);
        cluster.wait_for_owner(shard, &server);
        server
    };
    let mut servers = [0, 1].map(start);
    let config = cluster.folder().join("client.toml");
    std::fs::write(&config, "connect_timeout_ms = 2000\n").unwrap();
    let config = ["--config", config.to_str().unwrap()];
    let gateway = RespServer::gateway_of(&servers[0].address(), &config);
    let mut client = gateway.connect();
    let mut replies = |command: &str| {
        let replies: Vec<_> = (0..50).map(|key| client.say(&format!("{command}{key} v"))).collect();
        replies.iter().filter(|reply| reply.starts_with("-LOADING")).count()
    };
    assert_eq!(replies("SET key-"), 0);
    servers[1].kill();
    wait_until("the gateway notices it", TEST_TIMEOUT, || replies("SET key-") > 0);
    let away = replies("SET key-");
    assert!(away > 0 && away < 50, "only one shard is away: {away}");
    assert_eq!(replies("SET key-"), away);
    let log = gateway.log();
    assert_eq!(log.matches("FS-061").count(), 1, "{log}");
    assert!(log.contains("lost the connection to a shard of the store"), "{log}");
    assert!(!log.contains("FS-062"), "{log}");
    servers[1].start_again();
    wait_until("the shard is back", TEST_TIMEOUT, || gateway.log().contains("FS-062"));
    wait_until("all keys can be stored", TEST_TIMEOUT, || replies("SET key-") == 0);
}

/// Several clients count with GET and SET IFEQ alone. A store on a value that has changed meanwhile
/// would lose an increment.
#[on(any, rdma_in_soak)]
fn ifeq_stores_only_over_the_value_that_was_seen() {
    const CLIENTS: usize = 4;
    const INCREMENTS: usize = 100;
    let server = ServerProcess::start("--memory 64MiB");
    let gateway = RespServer::gateway(&server, &["--threads", "2"]);
    let mut client = gateway.connect();
    assert_eq!(client.say("SET n 1 IFEQ 0"), "$-1\r\n");
    assert_eq!(client.say("SET n 0"), "+OK\r\n");
    assert_eq!(client.say("SET n 7 IFEQ 1"), "$-1\r\n");
    assert_eq!(client.say("SET n 7 IFEQ 1 GET"), "$1\r\n0\r\n");
    assert_eq!(client.say("GET n"), "$1\r\n0\r\n");
    for conflict in ["NX", "XX", "IFEQ 0"] {
        let reply = client.say(&format!("SET n 7 IFEQ 0 {conflict}"));
        assert_eq!(reply, "-ERR syntax error\r\n", "{conflict}");
    }
    assert_eq!(client.say("SET n 7 IFEQ"), "-ERR syntax error\r\n");
    assert_eq!(client.say("SET n 0 IFEQ 0 EX 100"), "+OK\r\n");
    assert_eq!(client.say("SET n 0 IFEQ 0 KEEPTTL GET"), "$1\r\n0\r\n");
    assert!(!client.say("TTL n").starts_with(":-"));
    let increment = |client: &mut RespClient| {
        loop {
            let reply = client.say("GET n");
            let number: usize = reply.split("\r\n").nth(1).unwrap().parse().unwrap();
            let reply = client.say(&format!("SET n {} IFEQ {number}", number + 1));
            if reply == "+OK\r\n" {
                break;
            }
            assert_eq!(reply, "$-1\r\n");
        }
    };
    thread::scope(|scope| {
        for _ in 0..CLIENTS {
            let mut client = gateway.connect();
            scope.spawn(move || (0..INCREMENTS).for_each(|_| increment(&mut client)));
        }
    });
    assert_eq!(client.say("GET n"), format!("$3\r\n{}\r\n", CLIENTS * INCREMENTS));
}

/// Clients of one gateway, and of two, increment the same key at the same time. None of them gives
/// up.
#[on(any, rdma_in_soak)]
fn many_clients_change_one_key() {
    const CLIENTS: usize = 20;
    const INCREMENTS: usize = 100;
    let server = ServerProcess::start("--memory 64MiB");
    let gateways = [1, 2].map(|_| RespServer::gateway::<&str>(&server, &[]));
    thread::scope(|scope| {
        for number in 0..CLIENTS {
            let mut client = gateways[number % 2].connect();
            scope.spawn(move || {
                let once = [request(&["INCR", "n"]), request(&["APPEND", "text", "x"])].concat();
                client.send(&once.repeat(INCREMENTS));
                for _ in 0..2 * INCREMENTS {
                    assert!(client.reply().starts_with(b":"));
                }
            });
        }
    });
    let mut client = gateways[0].connect();
    assert_eq!(client.say("GET n"), format!("$4\r\n{}\r\n", CLIENTS * INCREMENTS));
    assert_eq!(client.say("STRLEN text"), format!(":{}\r\n", CLIENTS * INCREMENTS));
}
