//! One session, two servers: a future changes the region of one and then that of the other, with
//! every verb counted. Guards against a lost region that keeps the other from being used.

use farside_control::attach::{Attached, ConnectError};
use farside_fabric::memory::{HugePages, RegionMemory};
use farside_fabric::shm::ShmFabric;
use farside_fabric::{
    AnyFabric, Buffer, ChainError, Counters, Fabric, LaneId, Nanos, RegionIndex, Verb,
};
use farside_protocol::{Engine, Failure, LANE, Lifetime, OpenRegion, Operation};
use farside_tests::engine::{attach, open_region};
use farside_tests::{ServerProcess, TEST_TIMEOUT, device, wait_until};

const LANES: u16 = 2;

/// A session that has opened the regions of two servers.
struct Session {
    regions: [OpenRegion; 2],
    engine: Engine<AnyFabric>,
    servers: [ServerProcess; 2],
}

impl Session {
    fn open() -> Self {
        Self::at([(); 2].map(|()| ServerProcess::start("--memory 32MiB")))
    }

    fn at(servers: [ServerProcess; 2]) -> Self {
        let [first, second] = servers.each_ref().map(|server| attach(&server.address()));
        let mut fabric = first.factory.fabric(LANES).unwrap();
        let index = second.factory.add_to(&mut fabric, None).unwrap();
        let engine = Engine::new(fabric, LANES);
        let open = |index, Attached { welcome, channel, .. }: Attached| {
            open_region(&engine, index, &welcome, channel)
        };
        let regions = [open(RegionIndex::FIRST, first), open(index, second)];
        Self { regions, engine, servers }
    }

    fn drive<T>(&self, future: impl Future<Output = T>) -> (T, Counters) {
        let before = self.engine.counters();
        let output = self.engine.endpoint.drive(future);
        (output, self.engine.counters() - before)
    }

    /// Increments the unused word at the end of one region, and then that of the other. Returns
    /// which of them had the value `seen`. The second is not touched if the first had not.
    async fn raise(&self, [first, then]: [usize; 2], seen: u64) -> Result<[bool; 2], ChainError> {
        let swap = async |region: usize| {
            let region = &self.regions[region];
            let remote = word_of(region);
            let swap = [Verb::CompareSwap { remote, expected: seen, desired: seen + 1 }];
            let deadline = self.engine.endpoint.now() + region.constants.lateness_ns;
            let found = self.engine.endpoint.chain(LANE, region.index, &swap, deadline).await?;
            Ok(found == seen)
        };
        Ok(if swap(first).await? { [true, swap(then).await?] } else { [false; 2] })
    }

    fn word(&self, region: usize) -> Result<u64, ChainError> {
        let region = &self.regions[region];
        let read = [Verb::Read { remote: word_of(region), into: Buffer::ReadBlock, bytes: 8 }];
        let endpoint = &self.engine.endpoint;
        endpoint.drive(endpoint.chain(LANE, region.index, &read, Nanos::MAX))?;
        let buffer = endpoint.buffer(LANE, Buffer::ReadBlock);
        Ok(u64::from_le_bytes(*buffer.first_chunk().unwrap()))
    }

    /// Fences this session at the server of a region.
    fn lose(&mut self, region: usize) {
        let is_over_rdma = device().is_some();
        if is_over_rdma {
            self.servers[region].kill();
            return;
        }
        // Over shared memory a server that is killed fences no session.
        let OpenRegion { index, geometry, client_id, .. } = &self.regions[region];
        let remote = geometry.client_entry(*client_id).unwrap();
        let fence = [Verb::WriteWord { remote, value: 0 }];
        let endpoint = &self.engine.endpoint;
        endpoint.drive(endpoint.chain(LANE, *index, &fence, Nanos::MAX)).unwrap();
    }
}

/// Stores a value for `key` in a region.
async fn put(session: &Session, region: usize, value: &[u8]) -> Result<(), Failure> {
    let handle = session.engine.at(&session.regions[region]);
    Operation::stage(handle, LANE, handle.region.hashed(b"key"), value)
        .put(Lifetime::FOREVER)
        .await
        .map(drop)
}

/// Returns the value of `key` in a region.
async fn get(session: &Session, region: usize) -> Result<Option<Vec<u8>>, Failure> {
    let handle = session.engine.at(&session.regions[region]);
    let found = Operation::stage(handle, LANE, handle.region.hashed(b"key"), b"").get().await?;
    let block = session.engine.endpoint.buffer(LANE, Buffer::ReadBlock);
    Ok(found.map(|found| found.value_in(&block).to_vec()))
}

fn word_of(region: &OpenRegion) -> u64 {
    region.format.region_bytes - 8
}

#[on(each, rdma_in_soak)]
fn one_future_works_on_one_region_and_then_on_another() {
    let session = Session::open();
    let Session { regions, engine, .. } = &session;
    let both = async |one: &[u8], other: &[u8]| {
        put(&session, 0, one).await?;
        put(&session, 1, other).await
    };
    session.drive(both(b"one", b"other")).0.unwrap();
    // The locations are cached: a chain each, `[WRITE][WRITE][CAS]`.
    let (done, counters) = session.drive(both(b"another", b"yet another"));
    done.unwrap();
    let Counters { round_trips, doorbells, reads, writes, compare_swaps, .. } = counters;
    assert_eq!([round_trips, doorbells, reads, writes, compare_swaps], [2, 2, 0, 4, 2]);
    let (found, counters) =
        session.drive(async { [get(&session, 0).await, get(&session, 1).await] });
    assert_eq!(found.map(|found| found.unwrap().unwrap()), [&b"another"[..], b"yet another"]);
    assert_eq!((counters.round_trips, counters.reads), (2, 2));
    let (done, counters) = session.drive(session.raise([0, 1], 0));
    assert_eq!(done, Ok([true; 2]));
    let Counters { round_trips, doorbells, reads, writes, compare_swaps, .. } = counters;
    assert_eq!([round_trips, doorbells, reads, writes, compare_swaps], [2, 2, 0, 0, 2]);
    // The first change had no effect, so the second region is not changed.
    let (done, counters) = session.drive(session.raise([0, 1], 0));
    assert_eq!((done, counters.compare_swaps), (Ok([false; 2]), 1));
    assert_eq!([session.word(0), session.word(1)], [Ok(1), Ok(1)]);
    // One lane at each, at the same time.
    let chains = [(LANE, &regions[0]), (LaneId(1), &regions[1])].map(|(lane, region)| {
        let read = [Verb::Read { remote: word_of(region), into: Buffer::ReadBlock, bytes: 8 }];
        engine.endpoint.chain(lane, region.index, &read, Nanos::MAX)
    });
    let [one, other] = chains;
    let found = engine.endpoint.drive_lanes(async { [one.await, other.await] });
    assert_eq!(found, [Ok(0), Ok(0)]);
    session.servers.iter().for_each(ServerProcess::assert_verifies);
}

#[on(each, rdma_in_soak)]
fn a_region_whose_server_is_lost_leaves_the_other_untouched_and_usable() {
    let mut session = Session::open();
    session.lose(1);
    let (failed, _) = session.drive(session.raise([1, 0], 0));
    let is_lost = match failed {
        Err(ChainError::Fenced) => true,
        // The connection broke with the chain on its way.
        Err(ChainError::Unknown) => device().is_some(),
        _ => false,
    };
    assert!(is_lost, "{failed:?}");
    assert_eq!(session.word(0), Ok(0), "the other was not touched");
    let (failed, _) = session.drive(session.raise([1, 0], 0));
    assert_eq!(failed, Err(ChainError::Fenced));
    // The first change was made, and is not denied.
    let (failed, _) = session.drive(session.raise([0, 1], 0));
    assert_eq!((failed, session.word(0)), (Err(ChainError::Fenced), Ok(1)));
    // The other region can still be used.
    let handle = session.engine.at(&session.regions[0]);
    let operation = Operation::stage(handle, LANE, handle.region.hashed(b"key"), b"value");
    assert!(session.drive(operation.insert(Lifetime::FOREVER)).0.unwrap().applied);
    session.servers[0].assert_verifies();
}

/// A server comes back with its region file. Meanwhile the other region has a chain in flight.
#[on(each, rdma_in_soak)]
fn the_region_of_a_restarted_server_takes_the_place_of_its_former_one() {
    let start = || ServerProcess::start_with_file("--memory 32MiB");
    let mut session = Session::at([start(), start()]);
    for (region, value) in [b"one", b"two"].into_iter().enumerate() {
        session.drive(put(&session, region, value)).0.unwrap();
    }
    session.servers[1].kill();
    session.servers[1].restart();
    let Session { regions: [first, second], engine, servers } = &mut session;
    let read = [Verb::Read { remote: word_of(first), into: Buffer::ReadBlock, bytes: 8 }];
    let in_flight = engine.endpoint.chain(LaneId(1), first.index, &read, Nanos::MAX);
    engine.endpoint.fabric_mut().ring();
    let attached = attach(&servers[1].address());
    let index = {
        let mut fabric = engine.endpoint.fabric_mut();
        attached.factory.add_to(&mut fabric, Some(second.index)).unwrap()
    };
    assert_eq!((index, engine.endpoint.drive_lanes(in_flight)), (second.index, Ok(0)));
    // While no other lane has a chain in flight.
    let opened = open_region(engine, index, &attached.welcome, attached.channel);
    // Dropped, the former region would give blocks to the server that was killed.
    std::mem::forget(std::mem::replace(second, opened));
    let values = session.drive(async { [get(&session, 0).await, get(&session, 1).await] }).0;
    assert_eq!(values.map(Result::unwrap), [Some(b"one".to_vec()), Some(b"two".to_vec())]);
    session.drive(put(&session, 1, b"another")).0.unwrap();
    let (done, _) = session.drive(session.raise([0, 1], 0));
    assert_eq!(done, Ok([true; 2]));
    assert_eq!(session.drive(get(&session, 1)).0.unwrap(), Some(b"another".to_vec()));
    session.servers.iter().for_each(ServerProcess::assert_verifies);
}

#[on(each, rdma_in_soak)]
fn a_session_reaches_its_servers_over_one_fabric() {
    let server = ServerProcess::start("--memory 32MiB");
    // Without its control channel the server would not know this client any more.
    let attached = attach(&server.address());
    let memory = RegionMemory::anonymous(1 << 20, HugePages::Never).unwrap();
    let other = Box::new(ShmFabric::new(memory.region.clone(), None, 1));
    let error = attached.factory.add_to(&mut AnyFabric::Intercepted(other), None).err().unwrap();
    assert!(matches!(error, ConnectError::OtherFabric), "{error}");
    assert!(error.to_string().contains("one fabric"), "{error}");
}

/// A pipeline waits for the completion of a PUT that it has posted. The trust in the server may end
/// just before the post, because another thread ends it.
#[on(each, rdma_in_soak)]
fn a_put_completes_if_the_trust_ends_while_it_is_posted() {
    let session = Session::open();
    let (endpoint, handle) = (&session.engine.endpoint, session.engine.at(&session.regions[0]));
    let hashed = handle.region.hashed(b"key");
    handle.put(Lifetime::FOREVER, hashed, b"one").unwrap();
    let operation = Operation::stage(handle, LANE, hashed, b"two");
    endpoint.tick();
    let put = operation.cached_put(Lifetime::FOREVER).unwrap().expect("its location is cached");
    handle.region.trust.end();
    drop(operation.post_cached_put(&put).unwrap());
    wait_until("the chain completes", TEST_TIMEOUT, || endpoint.try_step(|_| ()));
    let result = endpoint.take_result(LANE).unwrap();
    assert!(operation.complete_cached_put(&put, result).unwrap().is_none());
    let refused = operation.cached_put(Lifetime::FOREVER);
    assert!(matches!(refused, Err(Failure::Lost(_))));
}
