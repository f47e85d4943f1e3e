//! Answers that no etcd gives: damaged, hostile, or from another server. Each is an error, within
//! the deadline, and never a panic.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use farside_cluster::{RecordStore, StoreError, StoreOptions, open};

use crate::etcd::problems;
use crate::server;

type Answer = dyn Fn(&str, &mut TcpStream) + Send + Sync;

/// An HTTP server in threads of this process, which ends with it.
struct FalseGateway {
    port: u16,
    is_over: Arc<AtomicBool>,
}

impl FalseGateway {
    /// Answers each request by a function of its path.
    fn start(answer: impl Fn(&str, &mut TcpStream) + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let is_over = Arc::new(AtomicBool::new(false));
        let answer: Arc<Answer> = Arc::new(answer);
        thread::spawn({
            let is_over = Arc::clone(&is_over);
            move || {
                for stream in listener.incoming() {
                    if is_over.load(Ordering::Relaxed) {
                        return;
                    }
                    let answer = Arc::clone(&answer);
                    thread::spawn(move || serve(stream?, &*answer));
                }
            }
        });
        Self { port, is_over }
    }

    /// Answers every request with this body.
    fn with_body(body: &'static [u8]) -> Self {
        Self::start(move |_, stream| reply(stream, 200, body))
    }

    fn store(&self) -> Arc<dyn RecordStore> {
        open(&format!("etcd://{}/test", self.host()), &StoreOptions::default()).unwrap()
    }

    fn host(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }
}

impl Drop for FalseGateway {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

/// Reads one request, and answers it.
fn serve(mut stream: TcpStream, answer: &Answer) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let (mut path, mut length) = (String::new(), 0);
    let mut line = String::new();
    while reader.read_line(&mut line)? > 2 {
        if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
        if path.is_empty() {
            path = line.split(' ').nth(1).unwrap().to_owned();
        }
        line.clear();
    }
    reader.read_exact(&mut vec![0; length])?;
    answer(&path, &mut stream);
    Ok(())
}

fn reply(stream: &mut TcpStream, status: u16, body: &[u8]) {
    let head = format!(
        "HTTP/1.1 {status} X\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    // The client may have closed the connection.
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
}

/// Makes every call. Returns the errors, of which there must be one for each.
fn use_all(store: &dyn RecordStore) -> Vec<StoreError> {
    let changes = [("a".to_owned(), Some(b"1".to_vec()))];
    let _ = problems(store);
    vec![
        store.read().expect_err("a read succeeds"),
        store.commit(&[], &changes).expect_err("a commit succeeds"),
        store.wait_for_change(1, Duration::from_secs(3)).expect_err("a wait succeeds"),
        store.announce(&server(1)).err().expect("an announcement succeeds"),
    ]
}

#[test]
fn damaged_answers_are_errors() {
    let damaged: [&[u8]; 14] = [
        b"",
        b"{",
        b"null",
        b"[]",
        b"{}",
        b"\xff\xfe",
        br#""header""#,
        br#"{"header":{"revision":"5"},"kvs":[{"key":"L2"#,
        br#"{"header":null}"#,
        br#"{"header":{"revision":"-5"}}"#,
        br#"{"header":{"revision":"99999999999999999999"}}"#,
        br#"{"header":{"revision":[5]},"result":{"created":3}}"#,
        br#"{"result":{"canceled":true,"cancel_reason":"no"}}"#,
        br#"{"error":{"grpc_code":3,"message":"no"}}"#,
    ];
    for body in damaged {
        let gateway = FalseGateway::with_body(body);
        for error in use_all(&*gateway.store()) {
            // A stream that ends before its first message is that of a member which ends.
            let is_failure = matches!(error, StoreError::Failed { .. })
                || matches!(error, StoreError::Unreachable { .. }) && body.is_empty();
            assert!(is_failure, "{error} for {}", String::from_utf8_lossy(body));
        }
    }
}

#[test]
fn damaged_keys_and_values_are_errors() {
    // A key that is no base64, one of another prefix, one that is no text, and a value.
    let foreign = ["%%%", "L290aGVyL2E=", "/w==", "L2ZhcnNpZGUvdGVzdC9h\",\"value\":\"=A=="];
    for key in foreign {
        let gateway = FalseGateway::start(move |_, stream| {
            let body = format!(r#"{{"header":{{"revision":"5"}},"kvs":[{{"key":"{key}"}}]}}"#);
            reply(stream, 200, body.as_bytes());
        });
        let error = gateway.store().read().unwrap_err();
        assert!(matches!(error, StoreError::Failed { .. }), "{error}");
    }
    // Pages that never end.
    let gateway = FalseGateway::with_body(
        br#"{"header":{"revision":"5"},"kvs":[{"key":"L2ZhcnNpZGUvdGVzdC9h"}],"more":true}"#,
    );
    assert!(gateway.store().read().unwrap_err().to_string().contains("too many records"));
}

#[test]
fn a_huge_answer_is_refused() {
    let sent = Arc::new(AtomicUsize::new(0));
    let gateway = FalseGateway::start({
        let sent = Arc::clone(&sent);
        move |_, stream| {
            let head =
                "HTTP/1.1 200 OK\r\nContent-Length: 999999999999\r\n\r\n{\"header\":{\"x\":\"";
            let mut result = stream.write_all(head.as_bytes());
            while result.is_ok() {
                result = stream.write_all(&[b'x'; 65536]);
                sent.fetch_add(65536, Ordering::Relaxed);
            }
        }
    });
    let errors = use_all(&*gateway.store());
    for error in errors {
        assert!(error.to_string().contains("too long"), "{error}");
    }
}

#[test]
fn other_http_servers_are_named() {
    for (status, body) in [(404, "404 page not found"), (301, ""), (500, "<html>"), (503, "")] {
        let gateway = FalseGateway::start(move |_, stream| reply(stream, status, body.as_bytes()));
        for error in use_all(&*gateway.store()) {
            assert!(error.to_string().contains(&status.to_string()), "{error}");
            assert!(error.to_string().contains("does not answer like etcd"), "{error}");
        }
    }
    let gateway = FalseGateway::start(|_, stream| drop(stream.write_all(b"220 smtp ready\r\n")));
    for error in use_all(&*gateway.store()) {
        assert!(matches!(error, StoreError::Failed { .. }), "{error}");
    }
}

#[test]
fn a_connection_that_breaks_off_leaves_a_commit_unknown() {
    let requests = Arc::new(Mutex::new(Vec::new()));
    let gateway = FalseGateway::start({
        let requests = Arc::clone(&requests);
        move |path, stream| {
            requests.lock().unwrap().push(path.to_owned());
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{\"header\"");
        }
    });
    let store = gateway.store();
    let changes = [("a".to_owned(), Some(b"1".to_vec()))];
    let error = store.commit(&[], &changes).unwrap_err();
    assert!(matches!(error, StoreError::Unreachable { .. }), "{error}");
    // It was not sent again: it may have been done.
    assert_eq!(*requests.lock().unwrap(), ["/v3/kv/txn"]);
    // A read is, until its deadline.
    assert!(matches!(store.read(), Err(StoreError::Unreachable { .. })));
    assert!(requests.lock().unwrap().len() > 2);
}

#[test]
fn refusals_that_changed_nothing_are_sent_again() {
    let refused = Arc::new(AtomicUsize::new(0));
    let gateway = FalseGateway::start({
        let refused = Arc::clone(&refused);
        move |_, stream| match refused.fetch_add(1, Ordering::Relaxed) {
            0 => reply(stream, 500, br#"{"error":"x","message":"raft proposal dropped","code":2}"#),
            1 => reply(stream, 503, br#"{"code":14,"message":"etcdserver: no leader"}"#),
            2 => reply(stream, 429, br#"{"code":8,"message":"etcdserver: too many requests"}"#),
            _ => reply(stream, 200, br#"{"header":{"revision":"5"},"succeeded":true}"#),
        }
    });
    gateway.store().commit(&[], &[("a".to_owned(), None)]).unwrap();
    assert_eq!(refused.load(Ordering::Relaxed), 4);
    // The outcome of this one is unknown.
    let gateway = FalseGateway::start(|_, stream| {
        reply(stream, 503, br#"{"code":14,"message":"etcdserver: request timed out"}"#);
    });
    let error = gateway.store().commit(&[], &[("a".to_owned(), None)]).unwrap_err();
    assert!(matches!(error, StoreError::Unreachable { .. }), "{error}");
}

#[test]
fn a_member_that_does_not_listen_or_answers_damaged_is_passed_over() {
    let good = FalseGateway::with_body(br#"{"header":{"revision":"5"},"succeeded":true}"#);
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let bad = FalseGateway::with_body(b"{");
    let open_at = |hosts: &[String]| {
        open(&format!("etcd://{}/test", hosts.join(",")), &StoreOptions::default()).unwrap()
    };
    // Nothing was sent, so even a commit goes on to the next.
    let store = open_at(&[closed.to_string(), good.host()]);
    store.commit(&[], &[("a".to_owned(), None)]).unwrap();
    let store = open_at(&[bad.host(), good.host()]);
    assert!(store.read().is_err());
    assert_eq!(store.read().unwrap().revision, 5);
}

#[test]
fn alarms_and_versions_are_reported() {
    let with = |version: &'static str, alarm: &'static str| {
        FalseGateway::start(move |path, stream| {
            let head = r#"{"header":{"member_id":"7","revision":"5"}"#;
            let body = match path {
                "/v3/maintenance/status" => {
                    format!(r#"{head},"version":"{version}","leader":"7"}}"#)
                }
                "/v3/maintenance/alarm" => {
                    format!(r#"{head},"alarms":[{{"memberID":"7","alarm":"{alarm}"}}]}}"#)
                }
                _ => format!("{head}}}"),
            };
            reply(stream, 200, body.as_bytes());
        })
    };
    let cases = [
        ("3.4.0", "CORRUPT", "corrupt"),
        ("3.6.1", "NOSPACE", "compact"),
        ("3.5.21", "NEW", "\"NEW\""),
    ];
    for (version, alarm, expected) in cases {
        let found = problems(&*with(version, alarm).store());
        assert!(matches!(&found[..], [one] if one.contains(expected)), "{found:?}");
    }
    for version in ["3.3.27", "3.7.0", "4.0.0", "3", "", "x"] {
        let found = problems(&*with(version, "NOSPACE").store());
        assert!(found[0].contains("use etcd 3.4, 3.5 or 3.6"), "{found:?}");
    }
}
