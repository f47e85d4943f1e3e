//! Broken connections: every chain in flight completes soon, with an error that says truly whether
//! the chain may have had an effect. A server that is killed takes two hosts: `tests/vm/two-hosts`.

use std::time::{Duration, Instant};

use farside_fabric::rdma::{Options, ProbeState};
use farside_fabric::{Buffer, ChainError, Fabric, LaneId, Verb};

use crate::harness::{
    REGION, Server, TEST_TIMEOUT, WRITER, fabric_from, far_deadline, increment, next, read,
};

const LANE: LaneId = LaneId(0);
const LANES: u16 = 16;

/// The device refuses a doorbell, here for an unaligned atomic, and so breaks the connection. The
/// fabric must then report room: a lane that waits for room would otherwise wait forever.
#[test]
fn a_refused_doorbell_breaks_the_connection_and_leaves_room() {
    let Some(mut server) = Server::new() else { return };
    let address = server.address();
    let mut fabric = server.while_client(|| fabric_from(address, WRITER, 2, Options::default(), 4));
    let deadline = far_deadline(&fabric);
    for lane in 0..2 {
        let word = Verb::WriteWord { remote: 64, value: 1 };
        fabric.post(LaneId(lane), REGION, &[word, word, increment(64, 0)], deadline);
    }
    fabric.ring();
    for _ in 0..2 {
        assert_eq!(next(&mut fabric).result, Err(ChainError::Unknown));
    }
    assert!(fabric.is_broken(REGION) && fabric.has_room(REGION, 0));
    assert_eq!(fabric.run(LANE, REGION, &[read(0, 8)], deadline), Err(ChainError::Fenced));
}

/// Dropping the server's end is the fence: chains in flight fail, and from then on no verb of the
/// client changes the region.
#[test]
fn dropping_the_servers_end_fences_a_client_with_chains_in_flight() {
    let Some(mut server) = Server::new() else { return };
    for round in 0..10u64 {
        let mut fabric = server.client(LANES);
        let region = server.region.clone();
        let connection = server.connections.pop_first().unwrap().1;
        let fence = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(5 + round));
            drop(connection);
            let at_fence: Vec<u64> =
                (0..u64::from(LANES)).map(|lane| region.load(4096 + lane * 8).unwrap()).collect();
            at_fence
        });
        let mut acknowledged = [0u64; LANES as usize];
        let mut tried = [0u64; LANES as usize];
        let mut in_flight = 0;
        for lane in 0..LANES {
            server.region.store(4096 + u64::from(lane) * 8, 0).unwrap();
            in_flight += post(&mut fabric, lane, &mut tried);
        }
        let mut ended = Vec::new();
        while in_flight > 0 {
            fabric.ring();
            let Some(completion) = fabric.poll() else {
                fabric.relax();
                continue;
            };
            in_flight -= 1;
            let lane = usize::from(completion.lane.0);
            match completion.result {
                Ok(found) => {
                    assert_eq!(found, acknowledged[lane]);
                    acknowledged[lane] += 1;
                    in_flight += post(&mut fabric, lane as u16, &mut tried);
                }
                Err(error) => ended.push((lane, error)),
            }
        }
        let at_fence = fence.join().unwrap();
        assert_eq!(ended.len(), usize::from(LANES));
        std::thread::sleep(Duration::from_millis(20));
        for (lane, error) in ended {
            let is = server.region.load(4096 + lane as u64 * 8).unwrap();
            assert_eq!(is, at_fence[lane], "something took effect after the fence");
            match error {
                // A refused chain certainly had no effect.
                ChainError::Fenced => assert_eq!(is, acknowledged[lane]),
                ChainError::Unknown => assert!((acknowledged[lane]..=tried[lane]).contains(&is)),
                other => panic!("{other}"),
            }
        }
        let deadline = far_deadline(&fabric);
        assert_eq!(fabric.run(LANE, REGION, &[read(0, 8)], deadline), Err(ChainError::Fenced));
        assert!(fabric.now() < deadline, "it does not wait for the deadline");
    }
}

/// Posts a chain that adds one to the lane's word, between a WRITE and a READ. Call it only when
/// all earlier chains of the lane have completed. Returns 1, the number of chains.
fn post(fabric: &mut impl Fabric, lane: u16, tried: &mut [u64]) -> usize {
    let expected = tried[usize::from(lane)];
    tried[usize::from(lane)] += 1;
    let word = u64::from(lane) * 8;
    let chain = [
        Verb::Write { remote: 65_536 + word * 512, from: Buffer::NewBlock, bytes: 1024 },
        increment(4096 + word, expected),
        read(65_536 + word * 512, 1024),
    ];
    let deadline = far_deadline(fabric);
    fabric.post(LaneId(lane), REGION, &chain, deadline);
    1
}

#[test]
fn the_next_chain_of_an_idle_client_that_was_fenced_fails() {
    let Some(mut server) = Server::new() else { return };
    let mut fabric = server.client(1);
    server.connections.clear();
    std::thread::sleep(Duration::from_millis(50));
    let started = Instant::now();
    let deadline = far_deadline(&fabric);
    let result = fabric.run(LANE, REGION, &[increment(64, 0)], deadline);
    assert!(matches!(result, Err(ChainError::Fenced | ChainError::Unknown)), "{result:?}");
    println!("known after {:?}", started.elapsed());
    assert!(fabric.now() < deadline, "it does not wait for the deadline");
    assert_eq!(server.region.load(64), Ok(0));
}

#[test]
fn the_server_notices_a_disconnected_client_and_its_probe_fails() {
    let Some(mut server) = Server::new() else { return };
    let fabric = server.client(1);
    let (id, mut connection) = server.connections.pop_first().unwrap();
    assert_eq!(connection.probe_state().unwrap(), ProbeState::Idle);
    for _ in 0..3 {
        connection.probe().unwrap();
        let started = Instant::now();
        while connection.probe_state().unwrap() == ProbeState::Pending {
            assert!(started.elapsed() < TEST_TIMEOUT);
            wait(&connection);
        }
        assert_eq!(connection.probe_state().unwrap(), ProbeState::Alive);
    }
    drop(fabric);
    server.until(|server| server.disconnected.contains(&id));
    let started = Instant::now();
    // The probe may fail, because the queue pair can be in its error state already.
    let _ = connection.probe();
    while connection.probe_state().unwrap() != ProbeState::Dead {
        assert!(started.elapsed() < TEST_TIMEOUT);
        wait(&connection);
    }
    println!("dead after {:?}", started.elapsed());
}

fn wait(source: &impl std::os::fd::AsFd) {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let timeout = Timespec { tv_sec: 1, tv_nsec: 0 };
    poll(&mut [PollFd::new(source, PollFlags::IN)], Some(&timeout)).unwrap();
}

/// The kernel closes the connections of a killed process, which RDMA-CM reports to its peer.
#[test]
fn the_server_notices_a_killed_client() {
    let Some(mut server) = Server::new() else { return };
    let address = server.address();
    let program = std::env::current_exe().unwrap();
    let mut child = std::process::Command::new(program)
        .args(["--exact", "losses::child_that_holds_a_connection", "--nocapture", "--ignored"])
        .env("FARSIDE_TEST_PEER", address.to_string())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    server.until(|server| !server.connections.is_empty());
    std::thread::sleep(Duration::from_millis(100));
    child.kill().unwrap();
    let killed = Instant::now();
    server.until(|server| !server.disconnected.is_empty());
    println!("noticed after {:?}", killed.elapsed());
    child.wait().unwrap();
}

#[test]
#[ignore = "a part of another test"]
fn child_that_holds_a_connection() {
    let Ok(peer) = std::env::var("FARSIDE_TEST_PEER") else { return };
    let options = Options::default();
    let peer = peer.parse().unwrap();
    let link = farside_fabric::verbs::connect_data(peer, b"W", 1, &options).unwrap();
    std::thread::sleep(TEST_TIMEOUT);
    drop(link);
}

/// A fabric that sleeps for completions uses hardly any processor time, and misses no completion.
#[test]
fn sleeping_for_completions_loses_no_wakeup() {
    const ROUNDS: u64 = 2000;
    let Some(mut server) = Server::new() else { return };
    let options = Options { spin: Duration::ZERO, ..Options::default() };
    let mut fabric = server.client_of(b"W", LANES, options);
    let mut late = 0;
    for round in 0..ROUNDS {
        let deadline = far_deadline(&fabric);
        let started = Instant::now();
        let chain = [increment(64, round), read(0, 256)];
        assert_eq!(fabric.run(LANE, REGION, &chain, deadline), Ok(round));
        late += u64::from(started.elapsed() >= Duration::from_millis(95));
    }
    // A sleep without a wakeup takes 100 ms. A busy machine may be late a few times.
    assert!(late < ROUNDS / 20, "{late} of {ROUNDS} were late");
    // Sleeps until a time, with nothing in flight.
    let processor = || rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    let (before, until) = (processor(), fabric.now() + 400_000_000);
    fabric.wait(LaneId(1), until);
    next(&mut fabric);
    let after = processor();
    let used = (after.tv_sec - before.tv_sec) * 1000 + (after.tv_nsec - before.tv_nsec) / 1_000_000;
    assert!(used < 100, "{used} ms of processor time for sleeping 400 ms");
}
