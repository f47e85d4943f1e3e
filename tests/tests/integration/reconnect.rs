//! Proves that sessions survive the server: they reconnect when it comes back, say so when it does
//! not, and find what was acknowledged where the region has a file.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use farside::Error;
use farside_tests::{ServerProcess, device, proof};

const KEYS: u64 = 1000;

#[test]
fn a_killed_server_comes_back_with_its_file() {
    let mut server = ServerProcess::start_with_file(&["--memory", "32MiB"]);
    let client = server.client();
    let mut session = client.session().unwrap();
    for round in 0..5 {
        for key in 0..KEYS {
            session.put(&key.to_le_bytes(), &proof::value(key, round, 0, 100)).unwrap();
        }
        if round % 2 == 0 {
            server.kill();
        } else {
            assert_eq!(server.terminate(), Some(0));
        }
        server.restart();
        for key in 0..KEYS {
            let value = session.get(&key.to_le_bytes()).unwrap().unwrap();
            assert_eq!(value.data, proof::value(key, round, 0, 100));
        }
        assert_eq!(client.statistics().unwrap().incarnation, round + 2);
        server.assert_verifies();
    }
}

#[test]
fn a_server_that_stays_away_is_unreachable_within_the_timeout() {
    let mut server = ServerProcess::start(&["--memory", "32MiB"]);
    let timeout = Duration::from_millis(if device().is_some() { 3000 } else { 300 });
    let client = server.client_builder().connect_timeout(timeout).connect().unwrap();
    let mut session = client.session().unwrap();
    session.put(b"key", b"value").unwrap();
    server.kill();
    // The memory is still there until the socket's end is noticed; then nothing is.
    let started = Instant::now();
    let error = loop {
        match session.get(b"key") {
            Ok(value) => assert_eq!(*value.unwrap(), *b"value"),
            Err(error) => break error,
        }
        assert!(started.elapsed() < timeout + Duration::from_secs(5), "the end was not noticed");
    };
    assert!(matches!(error, Error::Unreachable { .. }), "{error}");
    assert!(matches!(session.put(b"key", b"other"), Err(Error::Unreachable { .. })));
    assert!(matches!(client.session(), Err(Error::Unreachable { .. })));
    server.restart();
    // A region without a file went with its server.
    assert_eq!(session.get(b"key").unwrap(), None);
    session.put(b"key", b"new").unwrap();
}

#[test]
fn many_threads_reconnect_together() {
    let mut server = ServerProcess::start_with_file(&["--memory", "32MiB"]);
    let client = server.client();
    let mut session = client.session().unwrap();
    (0..KEYS).for_each(|key| {
        session.put(&key.to_le_bytes(), &proof::value(key, 0, 0, 64)).unwrap();
    });
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..4u64)
            .map(|writer| {
                let client = client.clone();
                scope.spawn(move || {
                    let mut session = client.session().unwrap();
                    let until = Instant::now() + Duration::from_secs(2);
                    let mut count = 0;
                    while Instant::now() < until {
                        count += 1;
                        let key = count * 7 % KEYS;
                        if count % 3 == 0 {
                            let value = proof::value(key, writer, count, 64);
                            // Over RDMA the server may die with a write on its way.
                            match session.put(&key.to_le_bytes(), &value) {
                                Ok(()) | Err(Error::Indeterminate) => {}
                                Err(error) => panic!("{error}"),
                            }
                        }
                        let value = session.get(&key.to_le_bytes()).unwrap().unwrap();
                        assert!(proof::holds(key, &value));
                    }
                })
            })
            .collect();
        for _ in 0..4 {
            std::thread::sleep(Duration::from_millis(300));
            server.kill();
            server.restart();
        }
        workers.into_iter().for_each(|worker| worker.join().unwrap());
    });
    server.assert_verifies();
}

/// A session that fails and asks again must not make those who wait go on waiting.
#[test]
fn sessions_fail_together() {
    const ATTEMPTS_MAX: u64 = 20;
    let mut server = ServerProcess::start(&["--memory", "32MiB"]);
    let timeout = Duration::from_millis(if device().is_some() { 1000 } else { 200 });
    let client = server.client_builder().connect_timeout(timeout).connect().unwrap();
    let mut sessions: Vec<_> = (0..4).map(|_| client.session().unwrap()).collect();
    let failures: Vec<AtomicU64> = sessions.iter().map(|_| AtomicU64::new(0)).collect();
    let all_failed = || failures.iter().all(|count| count.load(Ordering::Relaxed) > 0);
    server.kill();
    std::thread::scope(|scope| {
        for (session, count) in sessions.iter_mut().zip(&failures) {
            scope.spawn(move || {
                while !all_failed() && count.load(Ordering::Relaxed) < ATTEMPTS_MAX {
                    if session.get(b"key").is_err() {
                        count.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    assert!(
        failures.iter().all(|count| count.load(Ordering::Relaxed) < ATTEMPTS_MAX),
        "{failures:?}"
    );
}
