//! kv-resp over TCP and with a cluster answers as it does with one server on its host. Conditional
//! stores of concurrent clients lose nothing. It answers an error before it changes anything, or
//! says what it has changed. It tells of its store, and moves little for that.
//!
//! Commands on one key are linearizable across clients of two gateways: the checker of the
//! library's own histories accepts what they saw. A history with one wrong answer is refused.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::Instant;

use farside_linearizability::{Ended, HistoryOperation, Record, check};
use farside_tests::cluster::TestCluster;
use farside_tests::{ServerProcess, TEST_TIMEOUT, free_tcp_address, scaled, wait_until};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

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
    let (_server, gateway) = RespServer::with_server(&["--threads", "2"]);
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

#[on(any, rdma_in_soak)]
fn nothing_between_multi_and_exec_is_executed() {
    let (_server, gateway) = RespServer::with_server(&[]);
    let (mut client, mut other) = (gateway.connect(), gateway.connect());
    // As redis-py and others send a transaction.
    let all = ["MULTI", "SET a 1", "INCR n", "NOTHING", "FLUSHALL", "EXEC", "GET a", "GET n"];
    let words = |text: &&str| request(&text.split(' ').collect::<Vec<_>>());
    client.send(&all.iter().flat_map(words).collect::<Vec<_>>());
    assert_eq!(client.reply(), b"+OK\r\n");
    for _ in 0..4 {
        let refused = client.reply();
        assert!(refused.starts_with(b"-ERR there are no transactions"), "{refused:?}");
    }
    assert!(client.reply().starts_with(b"-EXECABORT "));
    assert_eq!((client.reply(), client.reply()), (b"$-1\r\n".to_vec(), b"$-1\r\n".to_vec()));

    assert!(client.say("EXEC").starts_with("-ERR EXEC without MULTI"));
    assert!(client.say("DISCARD").starts_with("-ERR DISCARD without MULTI"));
    assert!(client.say("MULTI now").starts_with("-ERR wrong number of arguments"));
    for end in ["DISCARD", "RESET"] {
        assert_eq!(client.say("MULTI"), "+OK\r\n");
        assert!(client.say("MULTI").starts_with("-ERR MULTI calls can not be nested"));
        assert!(client.say("SET a 1").starts_with("-ERR there are no transactions"));
        assert_eq!(other.say("SET b 1"), "+OK\r\n");
        assert!(client.say(end).starts_with('+'));
        assert_eq!(client.say("GET a"), "$-1\r\n");
    }
    assert_eq!(client.say("MULTI"), "+OK\r\n");
    assert_eq!(client.say("QUIT"), "+OK\r\n");
}

#[on(any, rdma_in_soak)]
fn commands_on_several_keys_change_none_if_one_is_too_long() {
    let server = ServerProcess::start("--memory 64MiB --value-bytes-max 4194304");
    let gateway = RespServer::gateway::<&str>(&server, &[]);
    let mut client = gateway.connect();
    let long = "k".repeat(5000);
    let refused = client.ask(&["MSET", "a", "1", &long, "2"]);
    assert!(refused.starts_with(b"-ERR the key is 5000 bytes long"), "{refused:?}");
    assert_eq!(client.say("GET a"), "$-1\r\n");
    // A helper would store the long value.
    let mut value = vec![b"MSET".to_vec(), b"a".to_vec(), vec![b'v'; 2 << 20]];
    value.extend([long.clone().into_bytes(), b"2".to_vec()]);
    assert!(client.ask(&value).starts_with(b"-ERR the key is 5000 bytes long"));
    assert_eq!(client.say("GET a"), "$-1\r\n");
    assert_eq!(client.say("SET a 1"), "+OK\r\n");
    for command in ["DEL", "UNLINK"] {
        assert!(client.ask(&[command, "a", &long]).starts_with(b"-ERR the key is 5000 bytes long"));
        assert_eq!(client.say("GET a"), "$1\r\n1\r\n");
    }
}

/// The store has room for some of the keys only. So it is with short values, and with long ones,
/// which a helper stores.
#[on(any, rdma_in_soak)]
fn an_error_says_how_many_keys_were_stored_all_the_same() {
    for value_bytes in [500_000, 1 << 20] {
        let server = ServerProcess::start("--memory 64MiB --value-bytes-max 2097152");
        let gateway = RespServer::gateway::<&str>(&server, &[]);
        let mut client = gateway.connect();
        let mut mset = vec![b"MSET".to_vec()];
        for number in 0..150 {
            mset.extend([format!("key-{number}").into_bytes(), vec![b'v'; value_bytes]]);
        }
        let refused = String::from_utf8(client.ask(&mset)).unwrap();
        let keys = client.say("DBSIZE");
        let stored = keys.trim_matches([':', '\r', '\n']);
        // What redis says, and then what the library says.
        assert!(refused.starts_with("-OOM command not allowed"), "{refused}");
        assert!(refused.contains("out of space: no free block of"), "{refused}");
        let all_the_same = format!("; {stored} of 150 keys are stored\r\n");
        assert!(refused.ends_with(&all_the_same), "{refused} {keys}");
    }
}

/// Few keys, so that commands meet.
const HOT_KEYS: u64 = 8;
const CONNECTIONS: u64 = 6;
/// Commands of a connection that are on their way at once.
const PIPELINED: usize = 3;

/// A command on a key with a number as its value, as the history names it.
fn next_command(random: &mut SmallRng, process: u64, seen: &[String]) -> (Vec<String>, Record) {
    use HistoryOperation as Kind;
    let key = format!("key-{}", random.random_range(0..HOT_KEYS));
    let value = random.random_range(1..1_000_000_u32).to_string();
    let expected = || seen.last().cloned().unwrap_or_else(|| "0".to_owned());
    let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
    let (operation, words, expected) = match random.random_range(0..12) {
        0 => (Kind::Put, words(&format!("SET {key} {value}")), None),
        1 => (Kind::Insert, words(&format!("SET {key} {value} NX")), None),
        2 => (Kind::Update, words(&format!("SET {key} {value} XX")), None),
        3 => (Kind::Delete, words(&format!("DEL {key}")), None),
        4 => (Kind::Take, words(&format!("GETDEL {key}")), None),
        5 | 6 => (Kind::Increment, words(&format!("INCRBY {key} {value}")), None),
        7 | 8 => {
            let expected = expected();
            let text = format!("SET {key} {value} IFEQ {expected} GET");
            (Kind::Exchange, words(&text), Some(expected))
        }
        _ => (Kind::Get, words(&format!("GET {key}")), None),
    };
    let record = Record {
        process,
        operation,
        key,
        argument: operation.stores().then_some(value),
        expected,
        result: Ended::Done,
        found: None,
        version: None,
        invoke: 0,
        returned: None,
    };
    (words, record)
}

/// Enters a reply into the record of its command.
fn answer(record: &mut Record, reply: &[u8]) {
    use HistoryOperation as Kind;
    let text = str::from_utf8(reply).unwrap();
    // The text of a string or a number; none of nothing.
    let content = match text.as_bytes()[0] {
        b'$' => text.split("\r\n").nth(1).filter(|_| !text.starts_with("$-1")),
        b':' => text[1..].strip_suffix("\r\n"),
        b'+' => Some("OK"),
        _ => panic!("{record}: {text}"),
    };
    let is_done = match record.operation {
        Kind::Delete => content == Some("1"),
        Kind::Exchange => content == record.expected.as_deref(),
        _ => content.is_some(),
    };
    record.result = if is_done { Ended::Done } else { Ended::Refused };
    record.found = match record.operation {
        Kind::Get | Kind::Take | Kind::Increment => content.map(str::to_owned),
        Kind::Exchange if !is_done => content.map(str::to_owned),
        _ => None,
    };
}

#[on(any, rdma_in_soak)]
fn commands_on_one_key_are_linearizable() {
    let server = ServerProcess::start("--memory 64MiB");
    let gateways = [1, 2].map(|_| RespServer::gateway(&server, &["--threads", "2"]));
    let clock = Instant::now();
    let now = || clock.elapsed().as_nanos() as u64;
    let run = &|process: u64| {
        let mut client = gateways[process as usize % gateways.len()].connect();
        let mut random = SmallRng::seed_from_u64(process);
        let (mut history, mut seen) = (Vec::new(), Vec::new());
        for _ in 0..scaled(300) {
            let commands: Vec<_> =
                (0..PIPELINED).map(|_| next_command(&mut random, process, &seen)).collect();
            let invoke = now();
            client.send(&commands.iter().flat_map(|(words, _)| request(words)).collect::<Vec<_>>());
            for (_, mut record) in commands {
                answer(&mut record, &client.reply());
                (record.invoke, record.returned) = (invoke, Some(now()));
                seen.extend(record.found.clone());
                history.push(record);
            }
        }
        history
    };
    let mut history: Vec<Record> = thread::scope(|scope| {
        let clients: Vec<_> =
            (0..CONNECTIONS).map(|process| scope.spawn(move || run(process))).collect();
        clients.into_iter().flat_map(|client| client.join().unwrap()).collect()
    });
    let done = |kind| {
        let is_done = |record: &&Record| (record.operation, record.result) == (kind, Ended::Done);
        history.iter().filter(is_done).count()
    };
    assert!(done(HistoryOperation::Get) > 0 && done(HistoryOperation::Increment) > 0);
    check(&history).unwrap_or_else(|violation| panic!("{violation}"));

    // A value that no client has ever stored.
    let is_get = |record: &&mut Record| record.operation == HistoryOperation::Get;
    let get = history.iter_mut().find(is_get).unwrap();
    (get.result, get.found) = (Ended::Done, Some("-1".to_owned()));
    assert!(check(&history).is_err());
}

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
    let (_server, gateway) = RespServer::with_server(&[]);
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
    let (_server, gateway) = RespServer::with_server(&[]);
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
