use std::time::Instant;

use farside_fabric::memory::Region;
use farside_fabric::shm::ShmFabric;
use farside_layout::{Format, REGION_BYTES_MIN};
use zerocopy::IntoBytes;

use super::*;

const LANES: u16 = 64;
const FIRST: RegionIndex = RegionIndex::FIRST;
const RATES: Rates = Rates { chains_per_s: 2000, bytes_per_s: 1_000_000, round_trip_ns: 2000 };

type Session = Box<dyn Fabric + Send>;

fn region(bytes: u64) -> Arc<Region> {
    let file = tempfile::tempfile().unwrap();
    file.set_len(bytes).unwrap();
    Arc::new(Region::map(&file).unwrap())
}

/// A session with a device of its own.
fn session() -> (Session, Arc<Region>) {
    let region = region(1 << 16);
    let fabric = Box::new(ShmFabric::new(region.clone(), None, LANES));
    (wrap(Link::default())(fabric, LANES), region)
}

/// Two sessions on a region whose superblock they have READ, and its device.
fn sessions_of_a_cluster() -> (Vec<Session>, Arc<Devices>) {
    let format = Format {
        region_bytes: REGION_BYTES_MIN,
        region_id: [7; 16],
        hash_key: [9; 16],
        grace_ms: 100,
        key_bytes_max: 64,
        value_bytes_max: 1024,
    };
    let superblock = Superblock::new(&format, 0).unwrap();
    let region = region(format.region_bytes);
    let words = superblock.as_bytes().chunks(8);
    let words: Vec<u64> = words.map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect();
    region.write(0, &words).unwrap();
    let ids = [Id([1; 16]), Id(format.region_id)];
    let devices = Arc::new(Devices::new(RATES, format.region_bytes, ids.into_iter()));
    let session = |_| {
        let fabric = Box::new(ShmFabric::new(region.clone(), None, LANES));
        let mut fabric = devices.around()(fabric, LANES);
        let superblock = Verb::Read { remote: 0, into: Buffer::ReadBlock, bytes: 4096 };
        fabric.post(LaneId(0), FIRST, &[superblock], Nanos::MAX);
        fabric.ring();
        next(&mut *fabric);
        fabric
    };
    ((0..2).map(session).collect(), devices)
}

fn next(fabric: &mut dyn Fabric) -> Completion {
    loop {
        if let Some(completion) = fabric.poll() {
            return completion;
        }
        fabric.relax();
    }
}

fn read(bytes: u32) -> Verb {
    Verb::Read { remote: 0, into: Buffer::Window, bytes }
}

#[test]
fn no_completion_is_reported_early_or_out_of_order() {
    let (mut fabric, region) = session();
    for lane in 0..LANES {
        let expected = lane.into();
        let swap = Verb::CompareSwap { remote: 0, expected, desired: expected + 1 };
        fabric.post(LaneId(lane), FIRST, &[swap], Nanos::MAX);
    }
    let posted = fabric.now();
    while fabric.now() < posted + 2 * ROUND_TRIP_NS {}
    let begun = fabric.now();
    fabric.ring();
    assert_eq!(region.load(0).unwrap(), u64::from(LANES), "the doorbell executes the chains");
    for lane in 0..LANES {
        let completion = next(&mut *fabric);
        assert_eq!(completion, Completion { lane: LaneId(lane), result: Ok(lane.into()) });
        let elapsed = fabric.now() - begun;
        let least = ROUND_TRIP_NS + 50 * (u64::from(lane) + 1);
        assert!(elapsed >= least, "{lane} after {elapsed} ns");
    }
    assert_eq!(fabric.poll(), None);
    let Counters { round_trips, compare_swaps, .. } = fabric.counters();
    assert_eq!([round_trips, compare_swaps], [u64::from(LANES); 2]);
}

#[test]
fn a_device_is_shared_by_sessions_and_idle_before_the_start() {
    const CHAINS: u16 = 8;
    let (mut sessions, devices) = sessions_of_a_cluster();
    assert_eq!(devices.chains(), [0, 0]);
    devices.start();
    let started = Instant::now();
    for session in &mut sessions {
        (0..CHAINS).for_each(|lane| session.post(LaneId(lane), FIRST, &[read(64)], Nanos::MAX));
        session.ring();
    }
    for session in &mut sessions {
        (0..CHAINS).for_each(|lane| assert_eq!(next(&mut **session).lane, LaneId(lane)));
    }
    // Sixteen chains of 500 us each.
    assert!(started.elapsed() >= Duration::from_millis(8), "{:?}", started.elapsed());
    assert_eq!(devices.chains(), [0, 16]);
}

#[test]
fn a_chain_takes_as_long_as_its_verbs_or_its_bytes() {
    let swap = Verb::CompareSwap { remote: 0, expected: 0, desired: 0 };
    let of_verbs = |chain: &[Verb]| service_ps(chain, chain.iter().map(verb_ps).sum(), BANDWIDTH);
    assert_eq!(of_verbs(&[read(64)]), READ_PS);
    // At 100 Gb/s a byte takes 80 ps.
    assert_eq!(of_verbs(&[read(4096)]), 4096 * 80);
    assert_eq!(of_verbs(&[read(64), swap]), READ_PS + ATOMIC_PS);
    assert_eq!(service_ps(&[read(4096)], PS_PER_S / 2000, 1_000_000), 4096 * 1_000_000);
}

#[test]
fn grace_is_longer_than_the_longest_queue() {
    let grace_ms = |chains_per_s, in_flight_max| {
        Emulation { rates: Rates::of_chains(chains_per_s), in_flight_max }.grace_ms()
    };
    assert_eq!((grace_ms(2000, 512), grace_ms(1_000_000, 512)), (1024, 100));
    assert_eq!(grace_ms(1, 1 << 20), GRACE_MS_MAX);
}

#[test]
fn a_wait_for_a_time_ends_before_a_later_completion() {
    let (mut sessions, devices) = sessions_of_a_cluster();
    devices.start();
    for session in [&mut *sessions[0], &mut *session().0] {
        session.post(LaneId(0), FIRST, &[read(64)], Nanos::MAX);
        let until = session.now();
        session.wait(LaneId(1), until);
        session.ring();
        assert_eq!(next(session).lane, LaneId(1));
        assert_eq!(next(session).lane, LaneId(0));
    }
}
