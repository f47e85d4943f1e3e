//! kv-resp answers an error before it changes anything, or says what it has changed.

use farside_tests::ServerProcess;

use super::gateway::{RespServer, request};

#[on(any, rdma_in_soak)]
fn nothing_between_multi_and_exec_is_executed() {
    let server = ServerProcess::start("--memory 64MiB");
    let gateway = RespServer::gateway::<&str>(&server, &[]);
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
