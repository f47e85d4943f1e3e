//! A fabric with two regions in two mappings, and long transfers.

mod long_transfers;

use super::*;
use crate::{AnyFabric, Endpoint, Intercepted, Interceptor};

const LANE: LaneId = LaneId(0);
const LEASE: Lease = Lease { offset: 8, number: 7 };

fn region() -> Arc<Region> {
    let file = tempfile::tempfile().unwrap();
    file.set_len(4096).unwrap();
    let region = Arc::new(Region::map(&file).unwrap());
    region.store(LEASE.offset, LEASE.number).unwrap();
    region
}

fn swap(expected: u64) -> [Verb; 1] {
    [Verb::CompareSwap { remote: 64, expected, desired: expected + 1 }]
}

fn two_regions() -> (Endpoint<ShmFabric>, [Arc<Region>; 2], [RegionIndex; 2]) {
    let regions = [region(), region()];
    let mut fabric = ShmFabric::new(regions[0].clone(), Some(LEASE), 2);
    let second = fabric.add_region(regions[1].clone(), Some(LEASE), None);
    (Endpoint::new(fabric, 2), regions, [RegionIndex::FIRST, second])
}

#[test]
fn one_future_changes_one_region_and_then_another() {
    let (endpoint, regions, [first, second]) = two_regions();
    regions[1].store(64, 5).unwrap();
    let change = async {
        let read = [Verb::Read { remote: 64, into: Buffer::ReadBlock, bytes: 8 }];
        endpoint.chain(LANE, second, &read, Nanos::MAX).await?;
        assert_eq!(endpoint.buffer(LANE, Buffer::ReadBlock)[0], 5);
        let found = endpoint.chain(LANE, first, &swap(0), Nanos::MAX).await?;
        Ok::<_, ChainError>([found, endpoint.chain(LANE, second, &swap(5), Nanos::MAX).await?])
    };
    // First a single future, then lanes that share doorbells.
    assert_eq!(endpoint.drive(change), Ok([0, 5]));
    assert_eq!(regions.each_ref().map(|region| region.load(64).unwrap()), [1, 6]);
    let Counters { round_trips, doorbells, reads, compare_swaps, .. } =
        endpoint.fabric().counters();
    assert_eq!([round_trips, doorbells, reads, compare_swaps], [3, 3, 1, 2]);
    let both = async {
        let chains = [(LANE, first, swap(1)), (LaneId(1), second, swap(6))];
        let [one, other] = chains
            .each_ref()
            .map(|(lane, region, chain)| endpoint.chain(*lane, *region, chain, Nanos::MAX));
        [one.await, other.await]
    };
    assert_eq!(endpoint.drive_lanes(both), [Ok(1), Ok(6)]);
    assert_eq!(endpoint.fabric().counters().doorbells, 4, "one for both");
}

#[test]
fn a_client_that_one_region_fenced_still_reaches_the_other() {
    let (endpoint, regions, [first, second]) = two_regions();
    regions[1].store(LEASE.offset, LEASE.number + 1).unwrap();
    let run =
        |region, chain: [Verb; 1]| endpoint.drive(endpoint.chain(LANE, region, &chain, Nanos::MAX));
    assert_eq!(run(second, swap(0)), Err(ChainError::Fenced));
    assert_eq!(run(first, swap(0)), Ok(0));
    assert_eq!(regions.map(|region| region.load(64).unwrap()), [1, 0]);
    let outside = [Verb::Read { remote: 4096, into: Buffer::Window, bytes: 8 }];
    assert_eq!(run(first, outside), Err(ChainError::Outside { remote: 4096, bytes: 8 }));
}

/// Counts the chains that are posted for each region.
#[derive(Default)]
struct Count([u64; 2]);

impl<F: Fabric + ?Sized> Interceptor<F> for Count {
    fn post(
        &mut self,
        fabric: &mut F,
        lane: LaneId,
        region: RegionIndex,
        chain: &[Verb],
        deadline: Nanos,
    ) {
        self.0[region.index()] += 1;
        fabric.post(lane, region, chain, deadline);
    }
}

/// The fabric's calls are intercepted. Lanes of both regions have chains that are posted and not
/// executed.
#[test]
fn a_new_region_executes_no_chain_of_the_one_that_it_replaces() {
    let regions = [region(), region()];
    let own = ShmFabric::new(regions[0].clone(), Some(LEASE), 4);
    let inner =
        Intercepted { interceptor: Count::default(), fabric: Box::new(AnyFabric::Shm(own)) };
    let mut fabric = AnyFabric::Intercepted(Box::new(inner));
    let add = |fabric: &mut AnyFabric, region: &Arc<Region>, replaces| {
        let Some(AnyFabric::Shm(own)) = fabric.any() else { panic!("it is behind interceptors") };
        own.add_region(region.clone(), Some(LEASE), replaces)
    };
    let (first, second) = (RegionIndex::FIRST, add(&mut fabric, &regions[1], None));
    fabric.post(LANE, first, &swap(0), Nanos::MAX);
    fabric.ring();
    for (lane, region) in [(1, second), (2, first), (3, second)] {
        fabric.post(LaneId(lane), region, &swap(u64::from(lane) / 2), Nanos::MAX);
    }
    let new = region();
    assert_eq!(add(&mut fabric, &new, Some(second)), second);
    assert_eq!(Arc::strong_count(&regions[1]), 1, "the mapping was dropped");
    fabric.ring();
    let completions: Vec<_> = std::iter::from_fn(|| fabric.poll()).collect();
    let fenced = Err(ChainError::Fenced);
    let expected = [(0, Ok(0)), (1, fenced), (3, fenced), (2, Ok(1))];
    assert_eq!(
        completions,
        expected.map(|(lane, result)| Completion { lane: LaneId(lane), result })
    );
    let words = [&regions[0], &regions[1], &new].map(|region| region.load(64).unwrap());
    assert_eq!(words, [2, 0, 0]);
    for lane in 0..4 {
        assert_eq!(
            fabric.run(LaneId(lane), second, &swap(lane.into()), Nanos::MAX),
            Ok(lane.into())
        );
    }
    assert_eq!((new.load(64), regions[1].load(64)), (Ok(4), Ok(0)));
    assert!(fabric.has_room(second, 0), "no payload is counted twice");
}
