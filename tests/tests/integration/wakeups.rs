//! Proves that no thread of kv-server wakes for GET, PUT or DELETE, and that the server is not
//! needed for them at all.

use std::time::{Duration, Instant};

use farside_tests::{ServerProcess, device, scaled};
use rustix::process::Signal;

const KEYS: u64 = 1000;
/// How often the server asks its clients' processes, with GRACE as it is there over RDMA.
const ROLL_CALL: Duration = Duration::from_millis(8 * 100);

#[test]
fn the_server_sleeps_through_two_hundred_thousand_operations() {
    // Over RDMA the server looks once a second whether its clients' hosts are there; and, which
    // nothing turns off, every 8 x GRACE whether their processes are.
    let arguments = ["--memory", "256MiB", "--index", "4MiB", "--grace-ms", "10"];
    let server = ServerProcess::start_with_config("probe_ms = 0\n", &arguments);
    let mut session = server.client().session().unwrap();
    for n in 0..KEYS {
        session.put(&n.to_le_bytes(), b"first").unwrap();
    }
    let mut round = |count: u64| {
        for n in 0..count {
            let key = (n % KEYS).to_le_bytes();
            match n % 10 {
                0 => {
                    assert!(session.delete(&key).unwrap());
                    session.put(&key, b"again").unwrap();
                }
                1..4 => session.put(&key, &n.to_le_bytes()).unwrap(),
                _ => assert!(session.get(&key).unwrap().is_some()),
            }
        }
    };
    // Fills the session's own lists: what one round of GRACE consumes.
    round(scaled(200_000));
    // A round that goes faster than all before it takes more blocks within GRACE, and asks for them
    // once; what operations cost, they cost in every round.
    let woke = (0..5).map(|_| {
        let (before, started) = (server.wakeups(), Instant::now());
        round(200_000);
        let periods = started.elapsed().as_nanos() / ROLL_CALL.as_nanos() + 1;
        // To ask, to be answered, and to find that nothing is left to wait for.
        let asking = if device().is_some() { 4 * periods as u64 } else { 0 };
        (server.wakeups() - before).saturating_sub(asking)
    });
    let woke: Vec<u64> = woke.take_while(|woke| *woke > 0).collect();
    assert!(woke.len() < 5, "threads of kv-server woke, in each round: {woke:?}");
}

#[test]
fn a_stopped_server_keeps_serving() {
    let server = ServerProcess::start(&["--memory", "64MiB", "--index", "4MiB"]);
    let mut session = server.client().session().unwrap();
    for n in 0..KEYS {
        session.put(&n.to_le_bytes(), b"before").unwrap();
    }
    server.pause();
    for n in 0..KEYS {
        let key = n.to_le_bytes();
        assert_eq!(*session.get(&key).unwrap().unwrap(), *b"before");
    }
    // As many updates as blocks are at hand without the server: the unlinked ones come back.
    for n in 0..100u64 {
        let key = (n % 10).to_le_bytes();
        session.put(&key, &n.to_le_bytes()).unwrap();
        assert_eq!(session.get(&key).unwrap().unwrap().data, n.to_le_bytes());
    }
    assert!(session.delete(&0u64.to_le_bytes()).unwrap());
    server.signal(Signal::CONT);
}
