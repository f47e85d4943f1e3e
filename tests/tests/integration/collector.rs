//! Proves that what killed clients held comes back, exactly, while others go on at full speed: that
//! after a collection each block is free, linked, or with a client that lives.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use farside::{Client, ServerStatistics};
use farside_bench::verbs::Attached;
use farside_config::ClientConfig;
use farside_control::HELD_PER_MESSAGE_MAX;
use farside_layout::SizeClass;
use farside_tests::ledger::Ledger;
use farside_tests::{PATIENCE, ServerProcess, StopOnDrop, Worker, device, scaled, wait_until};

use crate::chaos;

/// Blocks that are neither with the server nor linked, when nobody is at work.
fn blocks_missing(client: &Client, statistics: &ServerStatistics) -> i64 {
    let linked = client.session().unwrap().scan().unwrap().count() as i64;
    let all: u64 = statistics.classes.iter().map(|class| class.blocks).sum();
    let free: u64 = statistics.classes.iter().map(|class| class.blocks_free).sum();
    all as i64 - free as i64 - linked
}

/// Waits until all blocks that are not linked are with the server.
fn wait_for_all(observer: &Client) {
    wait_until("all blocks are back", PATIENCE, || {
        blocks_missing(observer, &observer.statistics().unwrap()) == 0
    });
}

/// Waits until so many clients are connected.
fn wait_for_clients(observer: &Client, count: u64) {
    wait_until("the clients connect", PATIENCE, || observer.statistics().unwrap().clients >= count);
}

/// A client that is at work until it is killed.
fn worker(server: &ServerProcess, number: u64) -> Worker {
    chaos::worker(server, 3600, number)
}

#[test]
fn what_killed_clients_held_comes_back_by_itself() {
    let server =
        ServerProcess::start(&["--memory", "256MiB", "--index", "2MiB", "--grace-ms", "20"]);
    Ledger::create(&server.folder().join("ledger"));
    let observer = server.client();
    const WORKERS: u64 = 4;
    let workers: Vec<Worker> = (0..WORKERS).map(|number| worker(&server, number)).collect();
    wait_for_clients(&observer, WORKERS + 1);
    std::thread::sleep(Duration::from_millis(300));
    workers.into_iter().for_each(Worker::kill);
    wait_for_all(&observer);
    let statistics = observer.statistics().unwrap();
    assert_eq!(statistics.clients_lost, WORKERS);
    assert!(statistics.blocks_collected > WORKERS, "{statistics:?}");
    server.assert_verifies();
}

#[test]
fn collections_harm_nobody_who_lives_and_miss_nobody_who_died() {
    let server =
        ServerProcess::start(&["--memory", "512MiB", "--index", "2MiB", "--grace-ms", "20"]);
    Ledger::create(&server.folder().join("ledger"));
    let observer = server.client();
    const LIVING: usize = 3;
    let mut workers: Vec<Worker> = (0..LIVING as u64 + 1).map(|n| worker(&server, n)).collect();
    let mut started = workers.len() as u64;
    let kills = scaled(20).max(10);
    for _ in 0..kills {
        wait_for_clients(&observer, LIVING as u64 + 2);
        // One dies at any moment of a collection, and another comes.
        let victim = workers.swap_remove(LIVING);
        std::thread::scope(|scope| {
            let collecting = scope.spawn(|| observer.collect().unwrap());
            victim.kill();
            workers.push(worker(&server, started));
            started += 1;
            collecting.join().unwrap();
        });
    }
    workers.into_iter().for_each(Worker::kill);
    let statistics = observer.collect().unwrap();
    assert_eq!(blocks_missing(&observer, &statistics), 0, "{statistics:?}");
    assert!(statistics.collections > kills);
    // Some were killed before they connected.
    assert!((kills / 2..=started).contains(&statistics.clients_lost), "{statistics:?}");
    server.assert_verifies();
}

#[test]
fn what_a_benchmark_of_verbs_holds_is_left_to_it() {
    let server = ServerProcess::start(&["--memory", "64MiB", "--grace-ms", "5"]);
    let observer = server.client();
    let config = ClientConfig { server: Some(server.address()), ..ClientConfig::default() };
    let mut attached = Attached::connect(&config).unwrap();
    // More than fit in a message.
    const BLOCKS: usize = HELD_PER_MESSAGE_MAX + 1;
    attached.take_blocks(SizeClass::for_bytes(64).unwrap(), BLOCKS).unwrap();
    let after = std::thread::scope(|scope| {
        let collecting = scope.spawn(|| observer.collect().unwrap());
        while !collecting.is_finished() {
            attached.answer_all().unwrap();
            std::thread::sleep(Duration::from_millis(1));
        }
        collecting.join().unwrap()
    });
    assert_eq!((after.blocks_collected, after.clients_lost), (0, 0));
    assert_eq!(blocks_missing(&observer, &after), BLOCKS as i64);
    attached.give_back().unwrap();
    wait_for_all(&observer);
}

#[test]
fn what_an_idle_session_holds_is_left_to_it() {
    let server = ServerProcess::start(&["--memory", "32MiB", "--grace-ms", "5"]);
    let client = server.client();
    let mut idle = client.session().unwrap();
    for n in 0..1000u64 {
        idle.put(&n.to_le_bytes(), &[1; 100]).unwrap();
        idle.delete(&n.to_le_bytes()).unwrap();
    }
    let observer = server.client();
    // Behind this, what its client asked for has come: it said what it holds.
    let held = blocks_missing(&observer, &observer.collect().unwrap());
    assert!(held > 0);
    // The session is not asked; its client is.
    let after = observer.collect().unwrap();
    assert_eq!(after.blocks_collected, 0);
    assert_eq!(blocks_missing(&observer, &after), held);
    for n in 0..1000u64 {
        idle.put(&n.to_le_bytes(), &[2; 100]).unwrap();
    }
    drop((idle, client));
    wait_for_all(&observer);
}

/// Over RDMA nothing stands between a stopped process and its memory but its queue pairs; they go.
#[test]
fn a_client_that_does_not_answer_is_fenced_and_others_go_on() {
    let server = ServerProcess::start(&["--memory", "64MiB", "--grace-ms", "20"]);
    Ledger::create(&server.folder().join("ledger"));
    let mut stopped = worker(&server, 0);
    let observer = server.client();
    wait_until("it has blocks", PATIENCE, || {
        blocks_missing(&observer, &observer.statistics().unwrap()) != 0
    });
    stopped.stop();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let stopping = StopOnDrop(&stop);
        let working = scope.spawn(|| {
            let mut session = observer.session().unwrap();
            let mut count = 0u64;
            while !stop.load(Ordering::Relaxed) {
                // None of the worker's keys: it knows what these can hold.
                let key = [b"observed ", &(count % 100).to_le_bytes()[..]].concat();
                session.put(&key, &count.to_le_bytes()).unwrap();
                count += 1;
            }
            count
        });
        let started = Instant::now();
        let statistics = observer.collect().unwrap();
        assert!(started.elapsed() < Duration::from_secs(if device().is_some() { 60 } else { 20 }));
        assert_eq!((statistics.clients_lost, statistics.clients), (1, 1));
        drop(stopping);
        assert!(working.join().unwrap() > scaled(1000));
    });
    // It comes back and finds itself fenced: it connects anew and goes on.
    stopped.go_on();
    wait_until("it connects anew", PATIENCE, || {
        stopped.check();
        observer.statistics().unwrap().clients >= 2
    });
    stopped.kill();
    let statistics = observer.collect().unwrap();
    assert_eq!(blocks_missing(&observer, &statistics), 0, "{statistics:?}");
    server.assert_verifies();
}
