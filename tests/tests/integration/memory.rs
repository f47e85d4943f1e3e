//! Proves that all blocks of killed clients are freed, and no others, while other clients continue.
//! After a collection each block is free, linked, or with a living client.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use farside::Client;
use farside_tests::{
    ServerProcess, StopOnDrop, TEST_TIMEOUT, Worker, blocks_with_clients, fill, scaled,
    wait_for_all_blocks, wait_until,
};

/// Waits until at least `count` clients are connected.
fn wait_for_clients(observer: &Client, count: u64) {
    wait_until("the clients connect", TEST_TIMEOUT, || {
        observer.admin().statistics().unwrap().clients >= count
    });
}

/// The number of clients of a worker.
const CLIENTS: u64 = 2;
/// The number of sessions of a worker.
const SESSIONS: u64 = 2;

/// Starts a process that runs operations until it is killed.
fn worker(server: &ServerProcess, number: u64) -> Worker {
    let folder = server.folder().join("histories");
    std::fs::create_dir_all(&folder).unwrap();
    let first = number * SESSIONS;
    let mut arguments = vec![folder.display().to_string()];
    arguments.extend([first.to_string(), SESSIONS.to_string(), "endless".to_owned()]);
    Worker::start(env!("CARGO_BIN_EXE_history-worker"), server, number, arguments)
}

#[on(each, rdma_in_soak)]
fn blocks_of_killed_clients_are_freed_without_a_request() {
    let server = ServerProcess::start("--memory 256MiB --index 2MiB --grace-ms 20");
    let observer = server.client();
    const WORKERS: u64 = 4;
    let workers: Vec<Worker> = (0..WORKERS).map(|number| worker(&server, number)).collect();
    wait_for_clients(&observer, CLIENTS * WORKERS + 1);
    std::thread::sleep(Duration::from_millis(300));
    workers.into_iter().for_each(Worker::kill);
    wait_for_all_blocks(&observer);
    let statistics = observer.admin().statistics().unwrap();
    assert_eq!(statistics.clients_lost, CLIENTS * WORKERS);
    assert!(statistics.blocks_collected > WORKERS, "{statistics:?}");
    server.assert_verifies();
}

#[on(each)]
fn collections_harm_no_living_client_and_miss_no_dead_one() {
    let server = ServerProcess::start("--memory 512MiB --index 2MiB --grace-ms 20");
    let observer = server.client();
    const LIVING: usize = 3;
    let mut workers: Vec<Worker> = (0..LIVING as u64 + 1).map(|n| worker(&server, n)).collect();
    let mut started = workers.len() as u64;
    let kills = scaled(20).max(10);
    for _ in 0..kills {
        wait_for_clients(&observer, CLIENTS * (LIVING as u64 + 1) + 1);
        // A worker is killed at some moment of the collection, and another one starts.
        let victim = workers.swap_remove(LIVING);
        std::thread::scope(|scope| {
            let collecting = scope.spawn(|| observer.admin().collect().unwrap());
            victim.kill();
            workers.push(worker(&server, started));
            started += 1;
            collecting.join().unwrap();
        });
    }
    workers.into_iter().for_each(Worker::kill);
    let statistics = observer.admin().collect().unwrap();
    assert_eq!(blocks_with_clients(&observer), 0, "{statistics:?}");
    assert!(statistics.collections > kills);
    // Some workers were killed before they connected.
    let lost = statistics.clients_lost;
    assert!((kills / 2..=CLIENTS * started).contains(&lost), "{statistics:?}");
    server.assert_verifies();
}

#[on(each, rdma_in_soak)]
fn a_collection_takes_no_block_from_an_idle_session() {
    let server = ServerProcess::start("--memory 32MiB --grace-ms 5");
    let client = server.client();
    let mut idle = client.session().unwrap();
    for n in 0..1000u64 {
        idle.put(n.to_le_bytes(), [1; 100]).unwrap();
        idle.delete(n.to_le_bytes()).unwrap();
    }
    let observer = server.client();
    // In this collection the client reported its blocks, so the blocks it requested have arrived.
    observer.admin().collect().unwrap();
    let held = blocks_with_clients(&observer);
    assert!(held > 0);
    // The server asks the client's control thread which blocks it holds. The session need not wake.
    let after = observer.admin().collect().unwrap();
    assert_eq!(after.blocks_collected, 0);
    assert_eq!(blocks_with_clients(&observer), held);
    fill(&mut idle, 0..1000, |_| [2; 100]);
    drop((idle, client));
    wait_for_all_blocks(&observer);
}

/// Over RDMA the server fences a stopped process by destroying its queue pairs, its only access to
/// the region.
#[on(each)]
fn a_client_that_does_not_answer_is_fenced_and_others_continue() {
    let server = ServerProcess::start("--memory 64MiB --grace-ms 20");
    let mut stopped = worker(&server, 0);
    let observer = server.client();
    wait_until("the worker has blocks", TEST_TIMEOUT, || blocks_with_clients(&observer) != 0);
    stopped.stop();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let stop_guard = StopOnDrop(&stop);
        let working = scope.spawn(|| {
            let mut session = observer.session().unwrap();
            let mut count = 0u64;
            while !stop.load(Ordering::Relaxed) {
                // Not a key that the worker uses.
                let key = [b"observed ", &(count % 100).to_le_bytes()[..]].concat();
                session.put(&key, count.to_le_bytes()).unwrap();
                count += 1;
            }
            count
        });
        let statistics = observer.admin().collect().unwrap();
        assert_eq!((statistics.clients_lost, statistics.clients), (CLIENTS, 1));
        drop(stop_guard);
        assert!(working.join().unwrap() > 0);
    });
    // The resumed worker finds its clients fenced, so they reconnect and continue.
    stopped.resume();
    wait_until("the worker reconnects", TEST_TIMEOUT, || {
        stopped.check();
        observer.admin().statistics().unwrap().clients > CLIENTS
    });
    stopped.kill();
    observer.admin().collect().unwrap();
    assert_eq!(blocks_with_clients(&observer), 0);
    server.assert_verifies();
}
