//! Proves that no thread of kv-server wakes for GET, PUT or DELETE, and that these operations work
//! while the server is stopped.

use std::time::{Duration, Instant};

use farside_tests::{RDMA_GRACE_MS, ServerProcess, device, fill, scaled};
use rustix::process::Signal;

const KEYS: u64 = 1000;
/// The interval at which the server asks its clients' processes over RDMA.
const ROLL_CALL: Duration = Duration::from_millis(8 * RDMA_GRACE_MS);

// Not over TCP: the server executes the verbs.
#[on(shm, rdma)]
fn the_server_sleeps_during_two_hundred_thousand_operations() {
    // Over RDMA the server probes its clients' hosts once a second, which this config turns off. It
    // always asks their processes every 8 x GRACE.
    // Metrics wake nothing either while no one reads them.
    let arguments = "--memory 256MiB --index 4MiB --grace-ms 10 --metrics 127.0.0.1:0";
    let server = ServerProcess::start_with_config("probe_ms = 0\n", arguments);
    // Nor does it wake after it was asked what is hot, and which clients there are.
    let client = server.client();
    client.admin().hot_keys(Duration::from_millis(1), 1).unwrap();
    client.admin().clients().unwrap();
    let mut session = client.session().unwrap();
    fill(&mut session, 0..KEYS, |_| b"first");
    let mut round = |count: u64| {
        for n in 0..count {
            let key = (n % KEYS).to_le_bytes();
            match n % 10 {
                0 => {
                    assert!(session.delete(key).unwrap());
                    session.put(key, b"again").unwrap();
                }
                1..4 => session.put(key, n.to_le_bytes()).unwrap(),
                _ => assert!(session.get(key).unwrap().is_some()),
            }
        }
    };
    // Fills the session's lists with the blocks that it consumes within one GRACE.
    round(scaled(200_000));
    // A round that is faster than all before it takes more blocks within GRACE, and requests them
    // once. A wakeup that operations cause happens in every round.
    assert_sleeps_in_a_round(&server, || round(200_000));
}

/// The server of a full cache asks clients what they have read, but only while it evicts.
// Not over TCP: the server executes the verbs.
#[on(shm, rdma_in_soak)]
fn the_server_of_a_full_cache_sleeps_while_clients_read() {
    let arguments = "--memory 16MiB --grace-ms 10 --evict";
    let server = ServerProcess::start_with_config("probe_ms = 0\n", arguments);
    let client = server.client();
    let mut session = client.session().unwrap();
    fill(&mut session, 0..30_000, |_| [1; 1000]);
    let statistics = client.admin().statistics().unwrap();
    assert!(statistics.keys_evicted > 0, "{statistics:?}");
    let round = || {
        let started = Instant::now();
        // As long as it takes until cached locations are reported again, and a bit more.
        while started.elapsed() < Duration::from_millis(700) {
            (0..30_000u64).for_each(|n| drop(session.get(n.to_le_bytes()).unwrap()));
        }
    };
    // In the first rounds it may still evict.
    assert_sleeps_in_a_round(&server, round);
}

/// Asserts that in one of five rounds no thread of the server wakes, except to ask clients.
fn assert_sleeps_in_a_round(server: &ServerProcess, mut round: impl FnMut()) {
    let woke = (0..5).map(|_| {
        let (before, started) = (server.wakeups(), Instant::now());
        round();
        let periods = started.elapsed().as_nanos() / ROLL_CALL.as_nanos() + 1;
        // The server wakes to ask, to read answers, and to find that it waits for no more.
        let asking = if device().is_some() { 4 * periods as u64 } else { 0 };
        // The count is lower than before if a thread has ended.
        server.wakeups().checked_sub(before).map_or(u64::MAX, |woke| woke.saturating_sub(asking))
    });
    let woke: Vec<u64> = woke.take_while(|woke| *woke > 0).collect();
    assert!(woke.len() < 5, "threads of kv-server woke, in each round: {woke:?}");
}

// Not over TCP: the server executes the verbs.
#[on(shm, rdma_in_soak)]
fn sessions_keep_working_while_the_server_is_stopped() {
    let server = ServerProcess::start("--memory 64MiB --index 4MiB");
    let mut session = server.session();
    fill(&mut session, 0..KEYS, |_| b"before");
    server.pause();
    for n in 0..KEYS {
        let key = n.to_le_bytes();
        assert_eq!(*session.get(key).unwrap().unwrap(), *b"before");
    }
    // More updates than the session has blocks: the unlinked blocks are reused without the server.
    for n in 0..100u64 {
        let key = (n % 10).to_le_bytes();
        session.put(key, n.to_le_bytes()).unwrap();
        assert_eq!(session.get(key).unwrap().unwrap().data, n.to_le_bytes());
    }
    assert!(session.delete(0u64.to_le_bytes()).unwrap());
    server.signal(Signal::CONT);
}
