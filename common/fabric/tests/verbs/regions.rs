//! One session's fabric to the regions of two servers. Guards against a completion queue, or a
//! sleep, for each region, and against one server's loss ending the way to the other.

use std::time::Duration;

use farside_fabric::rdma::Options;
use farside_fabric::verbs::VerbsFabric;
use farside_fabric::{
    Buffer, ChainError, Counters, Endpoint, Fabric, LaneId, RegionIndex, Trust, Verb,
};

use crate::harness::{
    REGION, Server, TEST_TIMEOUT, WRITER, far_deadline, increment, read, remote_of,
};

const LANE: LaneId = LaneId(0);

fn swap(expected: u64) -> [Verb; 1] {
    [increment(64, expected)]
}

/// Makes the server's region one more of the fabric's.
fn add(server: &mut Server, fabric: &mut VerbsFabric) -> RegionIndex {
    add_with(server, fabric, None, Trust::forever())
}

/// As [`add`], in the place of another region, or for as long as the server is trusted.
fn add_with(
    server: &mut Server,
    fabric: &mut VerbsFabric,
    replaces: Option<RegionIndex>,
    trust: Trust,
) -> RegionIndex {
    let address = server.address();
    server.while_client(|| {
        let link = fabric.connect_data(address, WRITER, &Options::default()).unwrap();
        let remote = remote_of(link.reply(), 0);
        fabric.add_region(link.with_trust(trust), remote, replaces).unwrap()
    })
}

/// Waits until these lanes have completed.
fn complete<const LANES: usize>(fabric: &mut VerbsFabric) -> [Result<u64, ChainError>; LANES] {
    let (mut results, started) = ([None; LANES], std::time::Instant::now());
    while results.contains(&None) {
        assert!(started.elapsed() < TEST_TIMEOUT, "it takes too long");
        fabric.ring();
        match fabric.poll() {
            Some(completion) => results[usize::from(completion.lane.0)] = Some(completion.result),
            None => fabric.relax(),
        }
    }
    results.map(Option::unwrap)
}

/// How many channels for completions, and for a device's own events, this process has open.
fn completion_channels() -> usize {
    let files = std::fs::read_dir("/proc/self/fd").unwrap();
    let targets = files.filter_map(|file| std::fs::read_link(file.unwrap().path()).ok());
    targets.filter(|target| target.to_string_lossy().contains("infinibandevent")).count()
}

#[test]
fn one_future_changes_one_region_and_then_another() {
    let (Some(mut first), Some(mut second)) = (Server::new(), Server::new()) else { return };
    // The fabric sleeps at once.
    let options = Options { spin: Duration::ZERO, ..Options::default() };
    let mut fabric = first.client_of(WRITER, 2, options);
    let region = add(&mut second, &mut fabric);
    assert_eq!(region, RegionIndex(1));
    let deadline = far_deadline(&fabric);
    let endpoint = Endpoint::new(fabric, 2);
    for round in 0..50 {
        let before = endpoint.fabric().counters();
        let change = async {
            endpoint.chain(LANE, region, &[read(64, 8)], deadline).await?;
            assert_eq!(u64::from(endpoint.buffer(LANE, Buffer::ReadBlock)[0]), round);
            let found = endpoint.chain(LANE, REGION, &swap(round), deadline).await?;
            Ok::<_, ChainError>([
                found,
                endpoint.chain(LANE, region, &swap(round), deadline).await?,
            ])
        };
        assert_eq!(endpoint.drive(change), Ok([round; 2]));
        let counters = endpoint.fabric().counters() - before;
        let Counters { round_trips, doorbells, reads, compare_swaps, writes, .. } = counters;
        assert_eq!([round_trips, doorbells, reads, compare_swaps, writes], [3, 3, 1, 2, 0]);
    }
    assert_eq!([first.region.load(64), second.region.load(64)], [Ok(50), Ok(50)]);
    let both = async {
        let [one, other] = [(LANE, REGION), (LaneId(1), region)]
            .map(|(lane, region)| endpoint.chain(lane, region, &swap(50), deadline));
        [one.await, other.await]
    };
    assert_eq!(endpoint.drive_lanes(both), [Ok(50), Ok(50)]);
}

/// What a session opens for a region more is a queue pair, and no queue for its completions.
#[test]
fn regions_share_a_completion_queue() {
    let (Some(mut first), Some(mut second)) = (Server::new(), Server::new()) else { return };
    let mut fabric = first.client(1);
    let before = completion_channels();
    add(&mut second, &mut fabric);
    let added = completion_channels() - before;
    let other = first.client(1);
    // Each has one at the accepting end.
    assert_eq!([added, completion_channels() - before - added], [1, 2], "a region, a fabric");
    drop((fabric, other));
}

#[test]
fn a_region_that_is_lost_fails_its_own_chains_only() {
    let (Some(mut first), Some(mut second)) = (Server::new(), Server::new()) else { return };
    let mut fabric = first.client(2);
    let region = add(&mut second, &mut fabric);
    let deadline = far_deadline(&fabric);
    assert_eq!(fabric.run(LANE, region, &swap(0), deadline), Ok(0));
    second.connections.clear();
    // Both regions have chains: the lost region must not delay the chains of the other region.
    fabric.post(LANE, region, &swap(1), deadline);
    fabric.post(LaneId(1), REGION, &swap(0), deadline);
    let [lost, other] = complete(&mut fabric);
    assert!(matches!(lost, Err(ChainError::Fenced | ChainError::Unknown)), "{lost:?}");
    assert_eq!(other, Ok(0));
    assert!(fabric.is_broken(region) && !fabric.is_broken(REGION));
    for round in 1..20 {
        assert_eq!(fabric.run(LANE, region, &swap(1), deadline), Err(ChainError::Fenced));
        assert_eq!(fabric.run(LANE, REGION, &swap(round), deadline), Ok(round));
    }
    assert_eq!([first.region.load(64), second.region.load(64)], [Ok(20), Ok(1)]);
    // Another connection to the same server is another region.
    let third = add(&mut second, &mut fabric);
    assert_eq!(fabric.run(LANE, third, &swap(1), deadline), Ok(1));
}

/// Both regions are replaced in turn, while the other one has a chain in flight. The first region's
/// identifier belongs to the queues of the whole session.
#[test]
fn a_region_is_replaced_while_chains_are_in_flight() {
    let servers = [(); 3].map(|()| Server::new());
    let [Some(mut first), Some(mut second), Some(mut new)] = servers else { return };
    // The fabric sleeps at once.
    let options = Options { spin: Duration::ZERO, ..Options::default() };
    let mut fabric = first.client_of(WRITER, 3, options);
    let region = add(&mut second, &mut fabric);
    let deadline = far_deadline(&fabric);
    for (replaced, other, former) in [(region, REGION, &mut second), (REGION, region, &mut first)] {
        let long = [read(4096, 1 << 20)];
        fabric.post(LANE, other, &long, deadline);
        fabric.post(LaneId(1), replaced, &long, deadline);
        fabric.ring();
        fabric.post(LaneId(2), replaced, &swap(0), deadline);
        assert_eq!(add_with(&mut new, &mut fabric, Some(replaced), Trust::forever()), replaced);
        let [kept, in_flight, posted] = complete(&mut fabric);
        assert_eq!((kept, posted), (Ok(0), Err(ChainError::Fenced)));
        // It may have ended in time.
        assert!(matches!(in_flight, Ok(0) | Err(ChainError::Fenced)), "{in_flight:?}");
        assert!(!fabric.is_broken(replaced) && fabric.has_room(replaced, 0));
        former.until(|former| former.disconnected.len() == 1);
        assert_eq!(former.region.load(64), Ok(0));
    }
    for (round, region) in (0..20).flat_map(|round| [(round, REGION), (round, region)]) {
        let found = if region == REGION { 2 * round } else { 2 * round + 1 };
        assert_eq!(fabric.run(LANE, region, &swap(found), deadline), Ok(found));
    }
    assert_eq!(new.region.load(64), Ok(40));
    // No event of a former connection ends this sleep.
    let processor = || rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    let (before, until) = (processor(), fabric.now() + 400_000_000);
    fabric.wait(LANE, until);
    assert_eq!(complete(&mut fabric), [Ok(0)]);
    let after = processor();
    let used = (after.tv_sec - before.tv_sec) * 1000 + (after.tv_nsec - before.tv_nsec) / 1_000_000;
    assert!(used < 100, "{used} ms of processor time for sleeping 400 ms");
}

#[test]
fn a_disconnected_region_fails_its_own_chains_only() {
    let (Some(mut first), Some(mut second)) = (Server::new(), Server::new()) else { return };
    let mut fabric = first.client(2);
    let region = add(&mut second, &mut fabric);
    let deadline = far_deadline(&fabric);
    fabric.post(LANE, region, &[read(4096, 1 << 20)], deadline);
    fabric.post(LaneId(1), REGION, &swap(0), deadline);
    fabric.ring();
    Fabric::disconnect(&mut fabric, region);
    let [ended, other] = complete(&mut fabric);
    assert!(matches!(ended, Ok(0) | Err(ChainError::Fenced)), "{ended:?}");
    assert_eq!(other, Ok(0));
    assert_eq!(fabric.run(LANE, region, &swap(0), deadline), Err(ChainError::Fenced));
    assert_eq!(fabric.run(LANE, REGION, &swap(1), deadline), Ok(1));
    second.until(|second| second.disconnected.len() == 1);
    assert_eq!(second.region.load(64), Ok(0));
}

/// The server does not acknowledge a READ, which the device repeats for 68 s.
#[test]
fn the_end_of_a_trust_breaks_a_connection_with_chains_in_flight() {
    let (Some(mut first), Some(mut second)) = (Server::new(), Server::new()) else { return };
    // A fabric that sleeps would notice that the peer disconnects.
    let options = Options { spin: TEST_TIMEOUT, ack_timeout: 21, ..Options::default() };
    let mut fabric = first.client_of(WRITER, 1, options);
    let trust = Trust::until(fabric.now() + TEST_TIMEOUT.as_nanos() as u64);
    let region = add_with(&mut second, &mut fabric, None, trust.clone());
    let deadline = far_deadline(&fabric);
    assert_eq!(fabric.run(LANE, region, &[read(0, 8)], deadline), Ok(0));
    second.connections.clear();
    let ending = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(200));
        trust.end();
        std::time::Instant::now()
    });
    assert_eq!(fabric.run(LANE, region, &[read(0, 8)], deadline), Err(ChainError::Fenced));
    let now = std::time::Instant::now();
    let took = now.checked_duration_since(ending.join().unwrap());
    assert!(took.is_some_and(|took| took < TEST_TIMEOUT / 2), "{took:?}");
    assert!(fabric.is_broken(region));
    assert_eq!(fabric.run(LANE, REGION, &swap(0), deadline), Ok(0));
}
