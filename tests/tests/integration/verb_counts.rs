//! Proves the price list of a session: round trips and verbs at pipeline depth 1, counted by the
//! fabric. Guards against an additional verb. The cost of uncached changes and INSERTs depends on
//! the time; `tests/tests/protocol/price_list.rs` proves it exactly, with the test's own clock. Of
//! the server they cost nothing: none of its threads wakes for GET, PUT or DELETE, and these
//! operations work while it is stopped.

use std::time::{Duration, Instant};

use farside::{Counters, Session};
use farside_tests::{RDMA_GRACE_MS, ServerProcess, device, fill, scaled};
use rustix::process::Signal;

/// Returns the fabric's counts for one call.
fn cost(session: &mut Session, call: impl FnOnce(&mut Session)) -> Counters {
    let before = session.counters();
    call(session);
    session.counters() - before
}

/// Returns the `(round trips, READs, WRITEs, CASs)` of one call.
pub(crate) fn price(
    session: &mut Session,
    call: impl FnOnce(&mut Session),
) -> (u64, u64, u64, u64) {
    let cost = cost(session, call);
    assert_eq!(cost.doorbells, cost.round_trips);
    (cost.round_trips, cost.reads, cost.writes, cost.compare_swaps)
}

/// Returns the price of a call on an existing key without a cached location.
pub(crate) fn uncached(
    session: &mut Session,
    call: impl FnOnce(&mut Session),
) -> (u64, u64, u64, u64) {
    session.clear_cache();
    price(session, call)
}

/// Returns a server with room for all keys from the start: a split costs round trips to the
/// operation that meets it. So does a READ that takes longer than GRACE.
pub(crate) fn server() -> ServerProcess {
    ServerProcess::start("--memory 32MiB --index 4MiB --grace-ms 2000")
}

fn session(server: &ServerProcess) -> Session {
    let client = server.client_builder().operation_counters(true).connect().unwrap();
    client.session().unwrap()
}

const KEYS: u64 = 2000;

fn key(n: u64) -> [u8; 8] {
    n.to_le_bytes()
}

#[on(each, rdma)]
fn a_get_costs_one_round_trip_cached_and_two_uncached() {
    let server = server();
    let session = &mut session(&server);
    fill(session, 0..KEYS, |_| b"value");
    for n in 0..KEYS {
        let get = |session: &mut Session| {
            assert_eq!(*session.get(key(n)).unwrap().unwrap(), *b"value");
        };
        assert_eq!(uncached(session, get), (2, 2, 0, 0), "uncached GET of key {n}");
        assert_eq!(price(session, get), (1, 1, 0, 0), "cached GET of key {n}");
        let absent = |session: &mut Session| {
            assert_eq!(session.get(key(KEYS + n)).unwrap(), None);
        };
        assert_eq!(price(session, absent), (1, 1, 0, 0), "GET of absent key {n}");
    }
}

#[on(each, rdma)]
fn a_cached_put_or_delete_of_an_existing_key_costs_one_round_trip() {
    let server = server();
    let session = &mut session(&server);
    for n in 0..KEYS {
        session.put(key(n), b"value").unwrap();
        let put = |session: &mut Session| session.put(key(n), b"other").unwrap();
        let delete = |session: &mut Session| assert!(session.delete(key(n)).unwrap());
        // WRITE block, WRITE mark, CAS.
        assert_eq!(price(session, put), (1, 0, 2, 1), "cached PUT of key {n}");
        assert_eq!(price(session, delete), (1, 0, 1, 1), "cached DELETE of key {n}");
        let delete = |session: &mut Session| assert!(!session.delete(key(n)).unwrap());
        assert_eq!(price(session, delete), (1, 1, 0, 0), "DELETE of absent key {n}");
    }
}

/// Another client has its own cache.
#[on(each, rdma)]
fn sessions_of_one_client_share_cached_locations() {
    let server = server();
    let client = server.client();
    let [one, other] = &mut [(); 2].map(|()| client.session().unwrap());
    let stranger = &mut session(&server);
    for n in 0..KEYS {
        let put = |session: &mut Session| session.put(key(n), b"value").unwrap();
        let get = |session: &mut Session| {
            assert_eq!(*session.get(key(n)).unwrap().unwrap(), *b"value");
        };
        put(one);
        assert_eq!(price(other, get), (1, 1, 0, 0), "GET of key {n} that another session inserted");
        assert_eq!(price(other, put), (1, 0, 2, 1), "PUT of key {n}");
        assert_eq!(price(one, get), (1, 1, 0, 0), "GET of key {n} that another session replaced");
        assert_eq!(price(one, put), (1, 0, 2, 1), "PUT of key {n} that another session replaced");
        assert_eq!(price(stranger, get), (2, 2, 0, 0), "GET of key {n} by another client");
    }
}

/// Splits create subtables in new memory, whose slots were never used.
#[on(each, rdma)]
fn most_inserts_into_a_growing_index_use_new_slots() {
    let server = ServerProcess::start("--memory 64MiB");
    let session = &mut session(&server);
    let mut inserts = 0;
    for n in 0..10 * KEYS {
        let cost = cost(session, |session| assert!(session.insert(key(n), b"value").unwrap()));
        // In a used slot the hint costs one more compare-and-swap.
        inserts += u64::from((cost.writes, cost.compare_swaps) == (1, 2));
    }
    assert!(server.client().admin().statistics().unwrap().splits > 10);
    assert!(inserts > 5 * KEYS, "{inserts} INSERTs into new slots");
}

#[on(each, rdma)]
fn conditional_operations_cost_what_the_price_list_says() {
    let server = server();
    let session = &mut session(&server);
    let insert = |session: &mut Session| assert!(session.insert(b"key", b"one").unwrap());
    assert!(price(session, insert).0 <= 3);
    let refused = |session: &mut Session| assert!(!session.insert(b"key", b"two").unwrap());
    assert!(price(session, refused).0 <= 3);
    // Only the first refused INSERT pays for the wrong guess that the key is absent.
    let (_, _, writes, compare_swaps) = price(session, refused);
    assert_eq!((writes, compare_swaps), (0, 0));
    let update = |session: &mut Session| assert!(session.update(b"key", b"two").unwrap());
    assert_eq!(price(session, update), (1, 0, 2, 1));
    let exchange = |session: &mut Session| {
        assert!(session.compare_exchange(b"key", Some(b"two"), b"three").unwrap().applied);
    };
    assert_eq!(price(session, exchange), (2, 1, 2, 1));
    let update = |session: &mut Session| assert!(!session.update(b"absent", b"two").unwrap());
    assert_eq!(price(session, update), (1, 1, 0, 0));
}

#[on(each, rdma)]
fn a_batch_rings_one_doorbell() {
    let server = server();
    let session = &mut session(&server);
    fill(session, 0..32, |_| b"value");
    let keys: Vec<[u8; 8]> = (0..32).map(key).collect();
    let cost = cost(session, |session| {
        assert!(session.get_many(&keys).unwrap().iter().all(Option::is_some));
    });
    assert_eq!((cost.doorbells, cost.round_trips, cost.reads), (1, 32, 32));
}

#[on(each, rdma)]
fn pipelined_operations_count_their_own_verbs() {
    let server = server();
    let session = &mut session(&server);
    session.put(b"key", b"value").unwrap();
    let mut pipeline = session.pipeline().unwrap();
    let get = pipeline.get(b"key").unwrap();
    let insert = pipeline.insert(b"new", b"value").unwrap();
    let mut seen = Vec::new();
    while let Some(completed) = pipeline.wait() {
        completed.result.unwrap();
        seen.push((completed.ticket, completed.counters.unwrap().round_trips));
    }
    seen.sort_unstable();
    assert_eq!(seen, [(get, 1), (insert, 3)]);
}

#[on(each, rdma)]
fn a_ticket_has_its_own_lane_and_completions_count_each_verb_once() {
    const DEPTH: u16 = 4;
    let server = server();
    let client =
        server.client_builder().pipeline_depth(DEPTH).operation_counters(true).connect().unwrap();
    let session = &mut client.session().unwrap();
    // No two operations in flight are on one key: they would share a chain.
    let keys = u64::from(DEPTH);
    fill(session, 0..keys, |_| b"value");
    let before = session.counters();
    let mut pipeline = session.pipeline().unwrap();
    let mut tickets = [None; DEPTH as usize];
    let mut sum = Counters::default();
    let mut started = 0;
    for round in 0..100u64 {
        while let Ok(ticket) = match started % 3 {
            0 => pipeline.get(key(started % keys)),
            1 => pipeline.put(key(started % keys), round.to_le_bytes()),
            // An empty key is refused before any verb.
            _ => pipeline.get(b""),
        } {
            assert_eq!(ticket.number(), started);
            assert_eq!(tickets[ticket.lane()].replace(ticket), None, "two tickets have one lane");
            started += 1;
        }
        let completed = pipeline.wait().unwrap();
        assert_eq!(tickets[completed.ticket.lane()].take(), Some(completed.ticket));
        let refused = completed.ticket.number() % 3 == 2;
        assert_eq!(
            (completed.result.is_err(), completed.counters.unwrap().verbs() == 0),
            (refused, refused)
        );
        sum += *completed.counters.unwrap();
    }
    while let Some(completed) = pipeline.wait() {
        sum += *completed.counters.unwrap();
    }
    drop(pipeline);
    let all = session.counters() - before;
    assert_eq!(sum, Counters { doorbells: 0, ..all });
}

const CALLS: u64 = 1000;
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
    fill(&mut session, 0..CALLS, |_| b"first");
    let mut round = |count: u64| {
        for n in 0..count {
            let key = (n % CALLS).to_le_bytes();
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
    fill(&mut session, 0..CALLS, |_| b"before");
    server.pause();
    for n in 0..CALLS {
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
