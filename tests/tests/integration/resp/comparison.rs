//! Proves that kv-resp answers as redis-server 7 does, byte for byte, wherever the answer is
//! determined: the same requests go to both, in RESP2 and in RESP3.

use std::collections::HashSet;

use farside_tests::{ServerProcess, left_out};

use super::gateway::{RespClient, RespServer};
use super::requests::{CORNERS, REQUESTS};

/// The least number of different requests.
const REQUESTS_MIN: usize = 500;

/// Starts both servers. Without a redis-server prints that the test is left out.
fn both(folder: &tempfile::TempDir, server: &ServerProcess) -> Option<(RespServer, RespServer)> {
    let Some(redis) = RespServer::redis(folder.path()) else {
        left_out("without redis", "it compares with redis-server");
        return None;
    };
    Some((redis, RespServer::gateway::<&str>(server, &[])))
}

/// The words of a request.
fn words(text: &str) -> Vec<Vec<u8>> {
    text.split(' ').map(|word| if word == "~" { Vec::new() } else { word.into() }).collect()
}

/// Whether this is a version of redis whose answers the gateway gives.
fn is_known(version: &str) -> bool {
    version.contains("v=7.")
}

/// Whether these are replies to TTL that differ by a second at most: the servers start to count one
/// after the other, and round.
fn is_same_ttl(request: &str, expected: &str, reply: &str) -> bool {
    let seconds = |reply: &str| reply.strip_prefix(':')?.strip_suffix("\\r\\n")?.parse().ok();
    let two: (Option<i64>, Option<i64>) = (seconds(expected), seconds(reply));
    request[..request.len().min(4)].eq_ignore_ascii_case("ttl ")
        && matches!(two, (Some(a), Some(b)) if a > 0 && b > 0 && (a - b).abs() <= 1)
}

#[on(any, rdma_in_soak)]
fn replies_are_those_of_redis() {
    let folder = tempfile::tempdir().unwrap();
    let server = ServerProcess::start("--memory 64MiB");
    let Some((redis, gateway)) = both(&folder, &server) else { return };
    let version = std::process::Command::new("redis-server").arg("--version").output().unwrap();
    if !is_known(&String::from_utf8_lossy(&version.stdout)) {
        return left_out("with another redis", "it compares with redis 7");
    }
    let mut exchanges = 0;
    for protocol in ["2", "3"] {
        let mut clients = [redis.connect(), gateway.connect()];
        for client in &mut clients {
            client.say(&format!("HELLO {protocol}"));
        }
        for text in REQUESTS.iter().chain(CORNERS) {
            let [expected, reply] = clients.each_mut().map(|client| client.ask(&words(text)));
            let (expected, reply) = (expected.escape_ascii(), reply.escape_ascii());
            let (expected, reply) = (expected.to_string(), reply.to_string());
            if !is_same_ttl(text, &expected, &reply) {
                assert_eq!(reply, expected, "RESP{protocol}: {text:?}");
            }
            exchanges += 1;
        }
    }
    let different: HashSet<_> = REQUESTS.iter().chain(CORNERS).collect();
    assert!(different.len() >= REQUESTS_MIN, "{}", different.len());
    println!("{exchanges} exchanges compared, {} different requests", different.len());
}

/// Bytes after which both servers close the connection, or which have several replies at once.
const STREAMS: &[&[u8]] = &[
    b"*x\r\nPING\r\n",
    b"*1\r\n:1\r\n",
    b"*1\r\n$-1\r\n",
    b"*1\r\n$x\r\n",
    b"*1\r\n$536870913\r\n",
    b"*2147483648\r\n",
    b"*1\r\nabc\r\n",
    b"set \"a\r\n",
    b"set 'a'b\r\n",
    b"\r\n\r\nPING\r\nQUIT\r\n",
    b"*0\r\n*-1\r\nPING\r\nQUIT\r\n",
    b"SET k \"a\\x41\\n\"\r\nGET k\r\nset k 'it\\'s'\r\nget k\nQUIT\r\n",
    b"PING\r\n*1\r\n$4\r\nPING\r\nPING x\r\nQUIT\r\nPING\r\n",
    b"RESET\r\nHELLO 3\r\nGET nokey\r\nRESET\r\nGET nokey\r\nQUIT\r\n",
    b"SET a 1\r\nINCR a\r\nINCR a\r\nGET a\r\nAPPEND a 0\r\nGET a\r\nDEL a\r\nGET a\r\nQUIT\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"PING\nQUIT\n",
    b"  PING  \r\nQUIT\r\n",
    b"*1\r\n$4\r\nPINGxx*1\r\n$4\r\nQUIT\r\n",
    b"*2\r\n$4\r\nECHO\r\n$0\r\n\r\nQUIT\r\n",
    b"*-5\r\nPING\r\nQUIT\r\n",
    b"*1\r\n$ 4\r\nPING\r\nQUIT\r\n",
    b"*+1\r\n$4\r\nPING\r\nQUIT\r\n",
    b"*01\r\n$4\r\nPING\r\nQUIT\r\n",
    b"*1\r\n$04\r\nPING\r\nQUIT\r\n",
    b"*1\r\n$+4\r\nPING\r\n",
    b"\"PING\"\r\nQUIT\r\n",
    b"ECHO \"\\x00\\xff\\t\\a\\b\\q\"\r\nQUIT\r\n",
    b"ECHO 'a\\nb'\r\nQUIT\r\n",
    b"ECHO \"unterminated\r\n",
    b"GET  a   b\r\nQUIT\r\n",
    b"$3\r\nfoo\r\nQUIT\r\n",
    b"Host: x\r\n\r\n",
    b"host: x\r\n",
    b"*2\r\n$3\r\nGET\r\n$-1\r\n",
    b"*1\r\n$\r\n",
    b"*\r\nPING\r\nQUIT\r\n",
    b"*1\r\n\r\n",
    b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n:1\r\n",
    b"*1\r\n$4 \r\nPING\r\n",
    b"* 1\r\n$4\r\nPING\r\n",
    b"*1 \r\n",
    b"*99999999999999999999\r\n",
    b"*1\r\n$99999999999999999999\r\n",
    b"*-99999999999999999999\r\n",
    b"ECHO \"a\"\"b\"\r\n",
    b"ECHO \"\" ''\r\nECHO ''\r\nQUIT\r\n",
    b"\tPING\t\r\nQUIT\r\n",
    b"set k v ex\r\nget k\r\nQUIT\r\n",
    b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\nQUIT\r\n",
    b"QUIT x\r\nPING\r\n",
    b"RESET\r\nRESET x\r\nQUIT\r\n",
    b"POST\r\n",
    b"*1\r\n$4\r\nPOST\r\n",
    b"*1\r\n$5\r\nhost:\r\n",
    b"HELLO\r\nHELLO 3\r\nHELLO 2\r\nQUIT\r\n",
    b"PING\r\r\nQUIT\r\n",
    b"*0\r\n$4\r\nQUIT\r\n",
];

#[on(any, rdma_in_soak)]
fn wrong_bytes_end_connections_as_in_redis() {
    let folder = tempfile::tempdir().unwrap();
    let server = ServerProcess::start("--memory 64MiB");
    let Some((redis, gateway)) = both(&folder, &server) else { return };
    let long_lines = [vec![b'a'; 70_000], [b"*", &[b'1'; 70_000][..]].concat()];
    for stream in STREAMS.iter().map(|stream| stream.to_vec()).chain(long_lines) {
        let all = |mut client: RespClient| {
            client.send(&stream);
            client.rest().escape_ascii().to_string()
        };
        let (expected, reply) = (all(redis.connect()), all(gateway.connect()));
        // Only the number of the connection differs.
        let without_id = |text: &str| {
            let mut parts = text.split("$2\\r\\nid\\r\\n:");
            let first = parts.next().unwrap_or_default().to_owned();
            parts.fold(first, |all, part| {
                all + " id " + part.trim_start_matches(|digit: char| digit.is_ascii_digit())
            })
        };
        assert_eq!(
            without_id(&reply),
            without_id(&expected),
            "{}",
            stream[..stream.len().min(80)].escape_ascii()
        );
    }
}
