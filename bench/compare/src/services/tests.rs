use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::thread;

use farside_bench::keys;
use farside_bench::store::{Action, MeasuredStore, Pipelined};

use super::memcached::MemcachedProtocol;
use super::requests::Requests;
use super::*;
use crate::test_operations::TestOperations;

/// Sends these answers to the first client, whatever it asks. Returns the body's result and what
/// the client sent.
fn with_answers<T>(answers: &str, body: impl FnOnce(&Path) -> T) -> (T, String) {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let listener = UnixListener::bind(&socket).unwrap();
    thread::scope(|scope| {
        let server = scope.spawn(|| {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(answers.as_bytes()).unwrap();
            stream.shutdown(std::net::Shutdown::Write).unwrap();
            let mut sent = String::new();
            stream.read_to_string(&mut sent).unwrap();
            sent
        });
        let result = body(&socket);
        (result, server.join().unwrap())
    })
}

fn memcached(socket: &Path) -> Requests<MemcachedProtocol> {
    Requests::new(MemcachedProtocol::connect(socket).unwrap(), 8)
}

#[test]
fn memcached_answers_one_by_one() {
    let key = &keys::encode(7);
    let name = str::from_utf8(key).unwrap();
    let answers = format!("END\r\nSTORED\r\nVALUE {name} 0 5\r\na\r\nbc\r\nEND\r\nNOT_STORED\r\n");
    let ((), sent) = with_answers(&answers, |socket| {
        let mut store = memcached(socket);
        let mut value = b"old".to_vec();
        assert!(!store.get(key, &mut value).unwrap());
        store.change(Action::Put, key, b"a\r\nbc").unwrap();
        assert!(store.get(key, &mut value).unwrap());
        assert_eq!(value, b"a\r\nbc");
        assert!(!store.change(Action::Insert, key, b"").unwrap());
        assert!(store.change(Action::Put, key, b"").is_err(), "the server closed the connection");
    });
    let asked = format!(
        "get {name}\r\nset {name} 0 0 5\r\na\r\nbc\r\nget {name}\r\nadd {name} 0 0 0\r\n\r\n\
         set {name} 0 0 0\r\n\r\n"
    );
    assert_eq!(sent, asked);
}

#[test]
fn memcached_answers_in_flight_come_in_order() {
    let (found, _) = with_answers("STORED\r\nEND\r\nVALUE k 0 1\r\nx\r\nEND\r\n", |socket| {
        let mut store = memcached(socket);
        let mut pipeline = store.pipeline().unwrap();
        let lanes = [
            pipeline.start(Action::Put, &keys::encode(1), b"x"),
            pipeline.start(Action::Get, &keys::encode(2), &[]),
        ]
        .map(std::result::Result::unwrap);
        assert!(pipeline.poll().is_none(), "nothing is sent before a wait");
        let stored = pipeline.wait().unwrap();
        assert_eq!((stored.lane, stored.result.unwrap().applied), (lanes[0], true));
        // This request is sent at the next wait.
        let third = pipeline.start(Action::Get, &keys::encode(1), &[]).unwrap();
        let absent = pipeline.poll().unwrap();
        assert_eq!((absent.lane, absent.result.unwrap().value), (lanes[1], None));
        assert!(pipeline.poll().is_none());
        assert_eq!(pipeline.in_flight(), 1);
        let found = pipeline.wait().unwrap();
        assert_eq!(found.lane, third);
        found.result.unwrap().value.unwrap().to_vec()
    });
    assert_eq!(found, b"x");
}

#[test]
fn an_answer_that_cannot_be_understood_is_an_error() {
    for answer in ["ERROR\r\n", "VALUE k 0 x\r\n", "VALUE k 0 2\r\nabc\r\nEND\r\n", "END", ""] {
        let (result, _) =
            with_answers(answer, |socket| memcached(socket).get(&keys::encode(1), &mut Vec::new()));
        assert!(result.is_err(), "{answer:?}");
    }
}

#[test]
fn a_server_that_cannot_start_says_why() {
    let interrupt = Interrupt::default();
    let arguments = |_: &Path| vec!["nonsense".to_owned()];
    let failed = Daemon::start("/bin/ls".into(), arguments, |_| false, &interrupt);
    let message = failed.err().unwrap().to_string();
    assert!(message.contains("nonsense"), "{message}");
}
