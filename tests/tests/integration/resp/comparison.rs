//! Proves that kv-resp answers as redis-server 7 does, byte for byte, wherever the answer is
//! determined: the same requests go to both, in RESP2 and in RESP3. Programs and libraries for
//! redis work with it: redis-cli, redis-benchmark, the Rust crate, redis-py and ioredis.

use std::collections::HashSet;
use std::path::PathBuf;
use std::process::Command;

use farside_tests::command::CommandOutput;
use farside_tests::{ServerProcess, binary, left_out};

use super::gateway::{RespClient, RespServer};

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

/// Requests, one after the other on one connection; words between spaces.
#[rustfmt::skip]
pub(super) const REQUESTS: &[&str] = &[
    "FLUSHDB", "GET a", "SET a 1", "GET a", "get a", "GeT a", "GET", "GET a b", "SET", "SET a",
    "SET a b c", "SET a b EX", "SET a b EX 10 PX 10", "SET a b NX XX", "SET a b EX 0",
    "SET a b EX -1", "SET a b EX x", "SET a b EX 9223372036854775807",
    "SET a b PX 9223372036854775807", "SET a b EX 10 KEEPTTL", "SET a b KEEPTTL EX 10",
    "SET a b FOO", "SET a b GET GET", "SET a 2 NX", "GET a", "SET n 2 NX", "GET n", "SET z 2 XX",
    "GET z", "SET n 3 XX", "GET n", "SET n 4 GET", "GET n", "SET q 4 GET", "GET q",
    "SET q 5 XX GET", "SET qq 5 XX GET", "SET q 6 NX GET", "SET q2 6 NX GET", "GET q2",
    "SET e v EX 100", "TTL e", "SET e w KEEPTTL", "TTL e", "GET e", "SET e x", "TTL e", "PTTL e",
    "SET e v EXAT 4000000000", "EXPIRETIME e", "PEXPIRETIME e", "SET e v PXAT 4000000000123",
    "PEXPIRETIME e", "EXPIRETIME e", "SET e v EXAT 1", "GET e", "TTL e", "EXISTS e",
    "SET e v PXAT 1", "GET e", "set e v ex 50 get", "ttl e", "SET e v EX 1.5", "SET e v PX 0",
    "SET e v EXAT 0", "SET e v PXAT -5", "SETNX s 1", "SETNX s 2", "GET s", "SETNX s",
    "SETEX s 100 v", "TTL s", "GET s", "SETEX s 0 v", "SETEX s -1 v", "SETEX s x v",
    "SETEX s 100", "PSETEX s 100000 v", "TTL s", "PSETEX s 0 v", "PSETEX s x v",
    "SETEX s 9223372036854775807 v", "GETSET s new", "GET s", "TTL s", "GETSET absent1 v",
    "GET absent1", "GETSET s", "GETDEL s", "GETDEL s", "GET s", "GETDEL", "SET g Hello",
    "GETEX g", "TTL g", "GETEX g EX 100", "TTL g", "GETEX g PERSIST", "TTL g",
    "GETEX g PX 100000", "TTL g", "GETEX g EXAT 4000000000", "EXPIRETIME g",
    "GETEX g PXAT 4000000000001", "PEXPIRETIME g", "GETEX g EX 0", "GETEX g EX x", "GETEX g EX",
    "GETEX g FOO", "GETEX g EX 10 PERSIST", "GETEX g PERSIST EX 10", "GETEX nokey",
    "GETEX nokey EX 10", "GETEX nokey EX x", "GETEX nokey PERSIST", "GETEX g EXAT 1", "GET g",
    "GETEX", "GETEX g NX", "SET r Hello_World", "GETRANGE r 0 4", "GETRANGE r 0 -1",
    "GETRANGE r -5 -1", "GETRANGE r 5 3", "GETRANGE r 100 200", "GETRANGE r -100 3",
    "GETRANGE r -1 -5", "GETRANGE r -100 -200", "GETRANGE r 0 0", "GETRANGE r x 1",
    "GETRANGE r 1 x", "GETRANGE r 1", "GETRANGE nokey 0 -1", "GETRANGE r 3 9223372036854775807",
    "GETRANGE r -9223372036854775808 2", "GETRANGE r 9223372036854775808 2", "STRLEN r",
    "STRLEN nokey", "STRLEN", "APPEND r xyz", "GET r", "APPEND ap 1", "APPEND ap 2",
    "APPEND ap ~", "GET ap", "APPEND ap", "SET c 10", "INCR c", "DECR c", "INCRBY c 5",
    "DECRBY c 7", "GET c", "INCR cc", "DECR dd", "INCRBY ee -5", "DECRBY ff -5", "INCRBY c x",
    "INCRBY c 1.5", "INCRBY c +1", "INCRBY c 01", "INCRBY c -0", "INCRBY c", "INCR", "INCR c 1",
    "SET c abc", "INCR c", "SET c ~", "INCR c", "SET c 01", "INCR c", "SET c +1", "INCR c",
    "SET c -0", "INCR c", "SET c 1.0", "INCR c", "SET c 9223372036854775807", "INCR c",
    "INCRBY c 1", "GET c", "DECR c", "SET c -9223372036854775808", "DECR c", "DECRBY c 1",
    "DECRBY c -9223372036854775808", "INCRBY c -9223372036854775808",
    "INCRBY c 9223372036854775808", "SET c 9223372036854775808", "INCR c", "SET c 5 EX 100",
    "INCR c", "TTL c", "APPEND c 0", "TTL c", "GET c", "MSET m1 a m2 b m3 c", "MGET m1 m2 m3",
    "MGET m1 nokey m3", "MGET m1 m1 m1", "MGET", "MSET", "MSET a", "MSET a b c",
    "MSET d 1 d 2 d 3", "GET d", "DEL m1 m2 nokey", "DEL m1", "DEL", "DEL m3 m3",
    "UNLINK d nokey", "UNLINK d", "UNLINK", "SET x 1", "EXISTS x", "EXISTS x x x",
    "EXISTS x nokey", "EXISTS nokey", "EXISTS", "TOUCH x nokey x", "TOUCH", "TYPE x",
    "TYPE nokey", "TYPE", "TYPE x y", "SET t v", "TTL t", "PTTL t", "TTL nokey", "PTTL nokey",
    "EXPIRETIME nokey", "PEXPIRETIME nokey", "EXPIRETIME t", "EXPIRE t 100", "TTL t", "PERSIST t",
    "TTL t", "PERSIST t", "PERSIST nokey", "PERSIST", "EXPIRE nokey 100", "EXPIRE t x",
    "EXPIRE t", "EXPIRE t 100 FOO", "EXPIRE t 100 NX XX", "EXPIRE t 100 NX GT",
    "EXPIRE t 100 GT LT", "EXPIRE t 100 XX", "TTL t", "EXPIRE t 100 NX", "TTL t",
    "EXPIRE t 200 NX", "TTL t", "EXPIRE t 200 XX", "TTL t", "EXPIRE t 150 GT", "TTL t",
    "EXPIRE t 300 GT", "TTL t", "EXPIRE t 400 LT", "TTL t", "EXPIRE t 250 LT", "TTL t",
    "PERSIST t", "EXPIRE t 100 GT", "TTL t", "EXPIRE t 100 LT", "TTL t", "EXPIRE t 120 XX GT",
    "EXPIRE t 50 XX LT", "EXPIRE nokey 100 NX", "EXPIRE nokey x NX",
    "EXPIRE t 9223372036854775807", "EXPIRE t -9223372036854775808",
    "EXPIRE t 9223372036854775808", "PEXPIRE t 9223372036854775807", "PEXPIRE t 100000", "TTL t",
    "PEXPIRE t x", "EXPIREAT t 4000000000", "EXPIRETIME t", "PEXPIREAT t 4000000000500",
    "PEXPIRETIME t", "EXPIRETIME t", "EXPIREAT t x", "EXPIREAT t 4000000001 GT", "EXPIRETIME t",
    "EXPIREAT t 3000000000 LT", "EXPIRETIME t", "GET t", "EXPIRE t -1", "GET t", "EXISTS t",
    "SET t v", "EXPIRE t 0", "GET t", "SET t v", "EXPIREAT t 1", "GET t", "SET t v",
    "PEXPIRE t -1", "GET t", "SET t v EX 10", "EXPIRE t -1 XX", "GET t", "SET t v",
    "EXPIRE t -1 XX", "GET t", "EXPIRE t -5 LT", "GET t", "FLUSHDB", "DBSIZE", "RANDOMKEY",
    "KEYS *", "SCAN 0", "SET only 1", "DBSIZE", "RANDOMKEY", "KEYS *", "KEYS o*", "KEYS x*",
    "KEYS [o]n?y", "KEYS", "KEYS a b", "SCAN 0 MATCH *", "SCAN 0 MATCH z*", "SCAN 0 COUNT 100",
    "SCAN 0 COUNT 0", "SCAN 0 COUNT -1", "SCAN 0 COUNT x", "SCAN 0 COUNT", "SCAN x", "SCAN -1x",
    "SCAN", "SCAN 0 FOO bar", "SCAN 0 TYPE string", "SCAN 0 TYPE list",
    "SCAN 0 MATCH o* COUNT 5 TYPE string", "scan 0 match o*", "DBSIZE x", "RANDOMKEY x",
    "FLUSHDB FOO", "FLUSHDB ASYNC", "DBSIZE", "FLUSHDB SYNC", "FLUSHDB ASYNC SYNC", "FLUSHALL",
    "SET only 1", "FLUSHALL", "GET only", "SET ~ empty", "GET ~", "EXISTS ~", "KEYS *", "DBSIZE",
    "APPEND ~ x", "STRLEN ~", "DEL ~", "GET ~", "SET v ~", "GET v", "STRLEN v", "GETRANGE v 0 -1",
    "GETSET v x", "SET b\0in \x00\x7f\r\n", "GET b\0in", "STRLEN b\0in", "KEYS b*", "DEL b\0in",
    "PING", "PING hi", "PING a b", "ping", "ECHO hi", "ECHO ~", "ECHO", "ECHO a b", "SELECT 0",
    "SELECT 1", "SELECT -1", "SELECT x", "SELECT", "SELECT 99999999999", "AUTH x",
    "AUTH default x", "AUTH other x", "AUTH a b c", "AUTH", "HELLO 1", "HELLO 4", "HELLO x",
    "HELLO 2 FOO", "HELLO 2 AUTH", "HELLO 2 AUTH a", "HELLO 2 AUTH other x", "HELLO 2 SETNAME",
    "CLIENT GETNAME", "CLIENT SETNAME me", "CLIENT GETNAME", "CLIENT SETNAME ~", "CLIENT GETNAME",
    "CLIENT SETNAME a\nb", "CLIENT SETNAME", "CLIENT SETNAME a b", "CLIENT", "CLIENT FOO",
    "CLIENT ID x", "CLIENT GETNAME x", "CLIENT LIST TYPE foo", "CLIENT LIST TYPE master",
    "CLIENT LIST FOO", "CLIENT LIST ID x", "CONFIG", "CONFIG FOO", "CONFIG GET",
    "CONFIG GET save", "CONFIG GET databases", "CONFIG GET appendonly", "CONFIG GET nothing",
     "CONFIG GET maxmemory-policy", "COMMAND FOO", "COMMAND COUNT x",
    "COMMAND INFO nope", "INFO nothing", "MEMORY", "MEMORY FOO", "MEMORY USAGE",
    "MEMORY USAGE nokey", "MEMORY USAGE nokey FOO 1", "MEMORY USAGE nokey SAMPLES 5", "TIME x",
    "RESET x", "FOO", "foo bar",
    "foo a b c d e f g h i j k l m n o p q r s t u v w x y z a b c d e f g h i j k l m", "\0",
    "a\0b c", "F\r\nOO x\r\ny", "QUITX", "~", "~ a",
];

/// More of them: options that are repeated or exclude each other, numbers at their limits, empty
/// and binary arguments, wrong subcommands.
#[rustfmt::skip]
const CORNERS: &[&str] = &[
    "FLUSHALL", "SET o 1", "SET o 2 NX NX", "SET o 2 XX XX", "SET o 2 XX NX",
    "SET o 2 EX 10 EX 20", "TTL o", "SET o 2 PX 10000 EX 20", "SET o 2 KEEPTTL KEEPTTL", "TTL o",
    "SET o 2 KEEPTTL EXAT 4000000000", "SET o 2 EXAT 4000000000 KEEPTTL", "SET o 2 EXAT",
    "SET o 2 PX", "SET o 2 GET XX EX 30", "TTL o", "SET o 3 GET NX", "GET o",
    "SET o 3 XX GET KEEPTTL", "TTL o", "SET o 4 NX EX 0", "SET o 4 XX PX -1",
    "SET o 4 EX 9223372036854775", "SET o 4 EXAT 9223372036854775807",
    "SET o 4 PXAT 9223372036854775808", "SET o 4 EX ~", "SET o ~ GET", "GET o", "SET o nx nx",
    "SET o ex ex 100", "GET o", "TTL o", "SET ~ ~ NX", "GET ~", "DEL ~", "GETEX o EX 10 EX 20",
    "TTL o", "GETEX o PERSIST PERSIST", "TTL o", "GETEX o PX 10000 EXAT 4000000000",
    "GETEX o KEEPTTL", "GETEX o PXAT", "GETEX o PXAT 1", "EXISTS o",
    "GETEX o PX 9223372036854775807", "GETEX absent EX", "SETNX ~ v", "SETNX ~ w", "DEL ~",
    "SETNX a b c", "SETEX k 10 v w", "SETEX k 1.5 v", "SETEX k ~ v", "PSETEX k -1 v",
    "PSETEX k 9223372036854775807 v", "PSETEX k", "SETEX ~ 100 v", "TTL ~", "GET ~", "DEL ~",
    "GETSET k", "GETSET k v w", "GETSET ~ v", "GETSET ~ w", "GETDEL ~", "GETDEL a b",
    "SET s abcdef", "GETRANGE s 1 3", "GETRANGE s -3 -2", "GETRANGE s -2 -3", "GETRANGE s 5 5",
    "GETRANGE s 6 6", "GETRANGE s -6 0", "GETRANGE s -7 -7", "GETRANGE s 0 -7", "GETRANGE s 0 -6",
    "GETRANGE s 2 -9223372036854775808", "GETRANGE s 9223372036854775807 9223372036854775807",
    "GETRANGE s -1 9223372036854775807", "GETRANGE s 1.0 2", "GETRANGE s 0 ~", "GETRANGE s ~ 0",
    "GETRANGE s 0 1 2", "GETRANGE ~ 0 -1", "GETRANGE absent -1 -5", "GETRANGE absent x 1",
    "STRLEN ~", "STRLEN s s", "APPEND s ~", "STRLEN s", "APPEND s a b", "APPEND absent2 ~",
    "EXISTS absent2", "TYPE absent2", "DEL absent2", "SET i 9223372036854775806", "INCR i",
    "INCR i", "DECRBY i 9223372036854775807", "GET i", "DECRBY i -9223372036854775807",
    "INCRBY i -9223372036854775807", "INCRBY i 0", "INCRBY i -1", "DECRBY i 9223372036854775807",
    "DECR i", "DECR i", "GET i", "INCRBY i ~", "INCRBY i 1e3", "INCRBY i 0x10", "INCRBY i --1",
    "INCRBY i 1 2", "DECRBY i", "DECRBY i x", "DECRBY i 9223372036854775808", "DECR", "DECR i 1",
    "INCR ~", "GET ~", "DEL ~", "SET i 00", "INCR i", "SET i -01", "DECR i", "SET i 0x1", "INCR i",
    "SET i 1_", "INCRBY i 2", "SET i 12345678901234567890", "INCR i", "SET i -9223372036854775809",
    "DECR i", "SET i -", "INCR i", "MSET a 1 a", "MSET ~ 1 b ~", "MGET ~ b", "MGET ~ ~ absent b",
    "DEL ~ ~ b", "MSET p 1 q 2", "MSET p 3 EX 10", "MGET p q", "TTL p", "EXPIRE p 100", "MSET p 4",
    "TTL p", "DEL p p q absent", "EXISTS ~ ~", "TOUCH ~", "TOUCH absent absent", "UNLINK absent",
    "UNLINK ~", "TYPE ~", "PTTL", "TTL", "TTL a b", "PTTL a b", "EXPIRETIME", "PEXPIRETIME a b",
    "SET t v", "EXPIRE t 100 nx xx", "EXPIRE t 100 xx gt lt", "EXPIRE t 100 NX NX", "TTL t",
    "EXPIRE t 150 GT GT", "EXPIRE t 200 gt xx", "TTL t", "EXPIRE t 50 LT XX", "TTL t",
    "EXPIRE t ~", "EXPIRE t 1.5", "EXPIRE t 10 ~", "EXPIRE t x FOO", "EXPIRE t 100 FOO BAR",
    "EXPIRE ~ 100", "PEXPIRE absent -1", "PEXPIRE t 200000 NX", "PEXPIRE t 200000 XX", "TTL t",
    "PEXPIRE t 9223372036854775808", "PEXPIRE t -9223372036854775808 NX", "TTL t",
    "EXPIREAT t 4000000000 NX", "EXPIREAT t 4000000000 XX", "EXPIRETIME t",
    "EXPIREAT t 4000000000 GT", "EXPIREAT t 4000000000 LT", "EXPIREAT t -1 GT",
    "EXPIREAT t 9223372036854775807", "PEXPIREAT t 4000000000001 GT", "PEXPIRETIME t",
    "PEXPIREAT t x", "PEXPIREAT t", "PEXPIREAT t 1 LT", "EXISTS t", "EXPIREAT absent 1",
    "PEXPIREAT absent x", "SET t v", "PERSIST t", "PERSIST a b", "EXPIRE t 0 NX", "EXISTS t",
    "SET t v EX 100", "EXPIRE t 0 GT", "EXPIRE t 0 NX", "EXPIRE t 0 XX LT", "EXISTS t", "FLUSHALL",
    "SET key:1 a", "KEYS key:?", "KEYS key:[0-9]", "KEYS key:[^0-9]", "KEYS key:[1",
    "KEYS key:\\1", "KEYS KEY:*", "KEYS *y:*1", "KEYS ~", "KEYS *\\", "KEYS k**1",
    "KEYS key:[2-0]", "KEYS [a-", "SCAN 0 MATCH key:[0-1] COUNT 10", "SCAN 0 COUNT 10 COUNT 20",
    "SCAN 0 TYPE STRING", "SCAN 0 TYPE nothing", "SCAN 0 TYPE", "SCAN 0 MATCH",
    "SCAN 0 COUNT 9223372036854775807", "SCAN 0 COUNT 9223372036854775808", "SCAN ~", "SCAN 1x",
    "SCAN 18446744073709551616", "SCAN 0 COUNT 1.5", "FLUSHALL FOO", "FLUSHALL SYNC ASYNC",
    "FLUSHALL async", "FLUSHDB async x", "RANDOMKEY", "DBSIZE", "PING ~", "PING a b c",
    "ECHO a\r\nb", "SELECT ~", "SELECT 0 0", "SELECT 2147483648", "SELECT -2147483649",
    "SELECT 1.0", "AUTH ~", "AUTH default ~", "HELLO ~", "HELLO 2.0", "HELLO 2 SETNAME a AUTH",
    "HELLO 2 SETNAME", "HELLO 99 FOO", "HELLO 9223372036854775807", "CLIENT ID ID",
    "CLIENT SETNAME a!b~c", "CLIENT GETNAME", "CLIENT SETNAME \u{80}", "CLIENT getname",
    "client setname ~", "CLIENT LIST ID", "CLIENT LIST TYPE", "CLIENT LIST TYPE replica",
    "CLIENT LIST TYPE slave", "CLIENT LIST TYPE pubsub", "CLIENT LIST ID 1 x", "CLIENT INFO x",
    "CLIENT ~", "CONFIG GET", "CONFIG GET ~", "CONFIG get SAVE", "CONFIG GET timeout",
    "CONFIG GET save nothing", "CONFIG ~", "COMMAND LIST x", "COMMAND INFO ~",
    "COMMAND INFO nope nada", "COMMAND DOCS nope", "COMMAND DOCS ~", "COMMAND ~",
    "INFO nothing nada", "TIME 1 2", "MEMORY USAGE nokey SAMPLES", "MEMORY USAGE nokey SAMPLES x",
    "MEMORY USAGE nokey SAMPLES -1", "MEMORY USAGE nokey SAMPLES 0", "MEMORY ~",
    "MEMORY USAGE a b c d", "GETT", "get\0", "SETX a b", "\u{ff} a", "' b",
];

const REDIS_PY: &str = include_str!("redis_py.py");
const IOREDIS: &str = include_str!("ioredis.js");

#[on(any, rdma_in_soak)]
fn programs_of_redis_work() {
    let (_server, gateway) = RespServer::with_server(&["--threads", "2"]);
    let program = |name: &str, arguments: &[&str]| {
        let output = Command::new(name).args(["-p", gateway.port()]).args(arguments).output();
        output.ok().map(|output| CommandOutput::new(output).succeeded())
    };
    let Some(set) = program("redis-cli", &["set", "greeting", "hello"]) else {
        return left_out("without redis", "it runs redis-cli and redis-benchmark");
    };
    assert_eq!(set.text(), "OK\n");
    let get = program("redis-cli", &["-3", "get", "greeting"]).unwrap();
    assert_eq!(get.text(), "hello\n");
    for depth in ["1", "16"] {
        let arguments =
            ["-t", "get,set,incr,mset,ping", "-n", "5000", "-c", "10", "-q", "-P", depth];
        let output = program("redis-benchmark", &arguments).unwrap();
        assert!(output.text().contains("GET: ") && !output.text().contains("rror"));
    }
}

#[on(any, rdma_in_soak)]
fn the_crate_redis_works() {
    let (_server, gateway) = RespServer::with_server(&[]);
    for protocol in ["resp2", "resp3"] {
        let url = format!("redis://{}/?protocol={protocol}", gateway.address);
        let mut redis = redis::Client::open(url).unwrap().get_connection().unwrap();
        let () = redis::cmd("FLUSHDB").query(&mut redis).unwrap();
        let one: i64 = redis::cmd("INCR").arg("n").query(&mut redis).unwrap();
        assert_eq!(one, 1);
        let set: bool = redis::cmd("SETNX").arg("n").arg("2").query(&mut redis).unwrap();
        assert!(!set);
        let values: (Option<String>, Option<String>) = redis::pipe()
            .cmd("SET")
            .arg("a")
            .arg("1")
            .ignore()
            .cmd("GET")
            .arg("a")
            .cmd("GET")
            .arg("none")
            .query(&mut redis)
            .unwrap();
        assert_eq!(values, (Some("1".into()), None));
        let bytes: Vec<u8> = (0..=255).collect();
        let () = redis::cmd("SET").arg(&bytes).arg(&bytes).query(&mut redis).unwrap();
        let found: Vec<Option<Vec<u8>>> =
            redis::cmd("MGET").arg(&bytes).arg("none").query(&mut redis).unwrap();
        assert_eq!(found, [Some(bytes), None]);
        let wrong: redis::RedisResult<i64> =
            redis::cmd("INCRBY").arg("n").arg("x").query(&mut redis);
        assert!(wrong.unwrap_err().to_string().contains("not an integer"));
        let mut keys: Vec<String> = redis::cmd("KEYS").arg("?").query(&mut redis).unwrap();
        keys.sort();
        assert_eq!(keys, ["a", "n"]);
    }
}

/// Runs a program with a library for redis: an interpreter, its flag for a text, and the text.
/// Leaves the test out if `probe` fails.
fn run_library(interpreter: &PathBuf, flag: &str, probe: &str, program: &str, name: &str) {
    let has_library = Command::new(interpreter).args([flag, probe]).output();
    if !has_library.is_ok_and(|output| output.status.success()) {
        return left_out(&format!("without {name}"), "it runs a program that uses it");
    }
    let (_server, gateway) = RespServer::with_server(&["--threads", "2"]);
    let mut command = Command::new(interpreter);
    let output = command.args([flag, program, gateway.port()]).output().unwrap();
    let output = CommandOutput::new(output).succeeded();
    assert!(output.text().starts_with(name), "{}", output.text());
    println!("{}", output.text());
}

#[on(any, rdma_in_soak)]
fn redis_py_works() {
    // client/python/needs.sh makes this environment for the tests of the Python client.
    let gateway = binary("kv-resp");
    let target = gateway.parent().and_then(|profile| profile.parent()).unwrap();
    let own = target.join("python-venv/bin/python");
    let python = if own.exists() { own } else { "python3".into() };
    run_library(&python, "-c", "import redis.asyncio", REDIS_PY, "redis-py");
}

#[on(any, rdma_in_soak)]
fn ioredis_works() {
    // NODE_PATH names the folder that has it.
    run_library(&"node".into(), "-e", "require(\"ioredis\")", IOREDIS, "ioredis");
}
