//! Chains of shared memory that end in memory of the caller.

use super::*;
use crate::lent::PART_BYTES;
use crate::{Endpoint, LentMemory};

const REGION: RegionIndex = RegionIndex::FIRST;
const HEAD_BYTES: u32 = 64;
const SLOT: u64 = 64;
const MARK: u64 = 128;
const BLOCK: u64 = 4096;

fn endpoint() -> (Endpoint<ShmFabric>, Arc<Region>) {
    let file = tempfile::tempfile().unwrap();
    file.set_len(64 << 10).unwrap();
    let region = Arc::new(Region::map(&file).unwrap());
    region.store(LEASE.offset, LEASE.number).unwrap();
    (Endpoint::new(ShmFabric::new(region.clone(), Some(LEASE), 1), 1), region)
}

fn bytes_of(region: &Region, offset: u64, bytes: usize) -> Vec<u8> {
    let words = (0..bytes.div_ceil(8) as u64).map(|at| region.load(offset + at * 8).unwrap());
    words.flat_map(u64::to_ne_bytes).take(bytes).collect()
}

fn content(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| ((at * 31) >> 2) as u8 | 1).collect()
}

/// READs a head of this length, and what is wanted behind it. The memory is lent before the READ is
/// posted, or after it was run alone. Returns the result, the sum, and the memory.
fn get(
    endpoint: &Endpoint<ShmFabric>,
    (remote, bytes): (u64, u32),
    wanted: usize,
    is_late: bool,
) -> (Result<u64, ChainError>, u32, Vec<u8>) {
    let read = Verb::ReadSplit { remote, into: Buffer::ReadBlock, head_bytes: HEAD_BYTES, bytes };
    // At an odd address.
    let mut memory = vec![0; wanted + 1];
    let target = &mut memory[1..];
    let (result, sum) = endpoint.lending(|loan| {
        let mut target = Some(LentMemory::Target(target));
        if !is_late && let Some(target) = target.take() {
            assert!(loan.lend(LANE, target));
        }
        let post = || drop(endpoint.chain(LANE, REGION, &[read], Nanos::MAX));
        if is_late {
            endpoint.alone(post);
        } else {
            post();
            endpoint.wait_for(LANE);
        }
        let result = endpoint.take_result(LANE).unwrap();
        if let Some(target) = target.take() {
            assert!(loan.lend(LANE, target));
        }
        let part = (Buffer::Lent, 0, wanted as u32);
        (result, endpoint.fabric_mut().part_sum(LANE, 0, part, 0))
    });
    (result, sum, memory.split_off(1))
}

#[test]
fn a_split_read_brings_the_head_and_then_what_is_wanted() {
    let (endpoint, region) = endpoint();
    let whole = content(10_000);
    region.write_parts(BLOCK, &whole, |_| Ok(())).unwrap();
    let (head, rest) = whole.split_at(HEAD_BYTES as usize);
    for wanted in [0, 1, 7, 8, 63, 64, 65, 2047, 2048, 2049, 4103, 9000] {
        for is_late in [false, true] {
            let before = endpoint.fabric().counters();
            let (result, sum, memory) = get(&endpoint, (BLOCK, 9096), wanted, is_late);
            let Counters { round_trips, doorbells, reads, read_bytes, .. } =
                endpoint.fabric().counters().since(&before);
            assert_eq!((round_trips, doorbells, reads, read_bytes), (1, 1, 1, 9096));
            assert!(endpoint.buffer(LANE, Buffer::ReadBlock).starts_with(head));
            assert!(memory == rest[..wanted], "{wanted}");
            assert_eq!((result, sum), (Ok(0), crc32fast::hash(&rest[..wanted])));
        }
    }
    let (outside, ..) = get(&endpoint, ((64 << 10) - 128, 8192), 4096, false);
    assert!(matches!(outside, Err(ChainError::Outside { .. })), "{outside:?}");
    region.store(LEASE.offset, 0).unwrap();
    assert_eq!(get(&endpoint, (BLOCK, 9096), 64, false).0, Err(ChainError::Fenced));
}

/// The client is fenced after the head has arrived. The sum is never that of other bytes.
#[test]
fn the_rest_of_a_split_read_is_not_read_after_a_fence() {
    let (endpoint, region) = endpoint();
    let whole = content(10_000);
    region.write_parts(BLOCK, &whole, |_| Ok(())).unwrap();
    let read = Verb::ReadSplit {
        remote: BLOCK,
        into: Buffer::ReadBlock,
        head_bytes: HEAD_BYTES,
        bytes: 9096,
    };
    let mut memory = vec![3; 4096];
    let sum = endpoint.lending(|loan| {
        assert!(loan.lend(LANE, LentMemory::Target(&mut memory)));
        drop(endpoint.chain(LANE, REGION, &[read], Nanos::MAX));
        endpoint.wait_for(LANE);
        region.store(LEASE.offset, 0).unwrap();
        endpoint.fabric_mut().part_sum(LANE, 0, (Buffer::Lent, 0, 4096), 0)
    });
    assert_eq!((sum, memory), (crc32fast::hash(&[3; 4096]), vec![3; 4096]));
}

/// Runs the chain of a PUT of a head and this rest, whose sum goes to the head before the doorbell
/// or is not asked for.
fn put(
    endpoint: &Endpoint<ShmFabric>,
    block: u64,
    rest: &[u8],
    deadline: Nanos,
    sums: bool,
) -> Result<u64, ChainError> {
    let (from, head_bytes) = (Buffer::NewBlock, HEAD_BYTES);
    {
        let mut fabric = endpoint.fabric_mut();
        fabric.reserve(LANE, from, HEAD_BYTES as usize);
        fabric.buffer_mut(LANE, from)[..HEAD_BYTES as usize].fill(5);
    }
    let bytes = (HEAD_BYTES + rest.len() as u32).next_multiple_of(8);
    let chain = [
        Verb::WriteSplit { remote: block, from, head_bytes, bytes },
        Verb::WriteU32 { remote: MARK, value: 9 },
        Verb::CompareSwap { remote: SLOT, expected: 0, desired: 1 },
    ];
    endpoint.lending(|loan| {
        assert!(loan.lend(LANE, LentMemory::Source(rest)));
        drop(endpoint.chain(LANE, REGION, &chain, deadline));
        if sums {
            let mut fabric = endpoint.fabric_mut();
            let sum = fabric.part_sum(LANE, 0, (Buffer::Lent, 0, rest.len() as u32), 0);
            fabric.buffer_mut(LANE, from)[..4].copy_from_slice(&sum.to_ne_bytes());
        }
        endpoint.wait_for(LANE);
        endpoint.take_result(LANE).unwrap()
    })
}

#[test]
fn a_split_write_writes_the_rest_and_the_completed_head() {
    let (endpoint, region) = endpoint();
    let whole = content(10_001);
    // The source's address is odd.
    for bytes in [1, 7, 8, 63, 64, 65, 2047, 2048, 2049, 4103, 9000] {
        for sums in [false, true] {
            let rest = &whole[1..=bytes];
            let end = BLOCK + u64::from(HEAD_BYTES) + bytes.next_multiple_of(8) as u64;
            (BLOCK..end + 8).step_by(8).for_each(|at| region.store(at, u64::MAX).unwrap());
            [SLOT, MARK].into_iter().for_each(|at| region.store(at, 0).unwrap());
            let before = endpoint.fabric().counters();
            assert_eq!(put(&endpoint, BLOCK, rest, Nanos::MAX, sums), Ok(0));
            let Counters { round_trips, doorbells, writes, compare_swaps, written_bytes, .. } =
                endpoint.fabric().counters().since(&before);
            let paid = (round_trips, doorbells, writes, compare_swaps);
            assert_eq!((paid, written_bytes), ((1, 1, 2, 1), end - BLOCK + 12));
            let head = bytes_of(&region, BLOCK, HEAD_BYTES as usize);
            let sum = if sums { crc32fast::hash(rest).to_ne_bytes() } else { [5; 4] };
            assert_eq!(head[..4], sum, "{bytes}");
            assert!(head[4..].iter().all(|byte| *byte == 5), "{bytes}");
            let mut padded = rest.to_vec();
            padded.resize(bytes.next_multiple_of(8), 0);
            assert!(bytes_of(&region, BLOCK + 64, padded.len()) == padded, "{bytes}");
            assert_eq!(region.load(end).unwrap(), u64::MAX, "nothing behind it is written");
            assert_eq!([SLOT, MARK].map(|at| region.load(at).unwrap()), [1, 9]);
        }
    }
}

#[test]
fn a_split_write_that_is_late_fenced_or_outside_changes_neither_head_nor_slot() {
    for sums in [false, true] {
        let (endpoint, region) = endpoint();
        let rest = content(9000);
        assert_eq!(put(&endpoint, BLOCK, &rest, 0, sums), Err(ChainError::Late));
        let outside = put(&endpoint, (64 << 10) - 4096, &rest, Nanos::MAX, sums);
        assert!(matches!(outside, Err(ChainError::Outside { .. })), "{outside:?}");
        region.store(LEASE.offset, 0).unwrap();
        assert_eq!(put(&endpoint, BLOCK, &rest, Nanos::MAX, sums), Err(ChainError::Fenced));
        let words = [BLOCK, BLOCK + 64, MARK, SLOT, (64 << 10) - 4096, (64 << 10) - 4096 + 64];
        assert_eq!(words.map(|at| region.load(at).unwrap()), [0; 6]);
    }
}

/// A client that is fenced in the middle of a WRITE writes at most the part that it has begun.
#[test]
fn a_fence_stops_a_long_write_between_two_parts() {
    let (_, region) = endpoint();
    let executor = Executor::new(region.clone(), Some(LEASE));
    let (rest, mut parts) = (content(9000), 0);
    let written = region.write_parts(BLOCK, &rest, |_| {
        parts += 1;
        if parts == 2 {
            region.store(LEASE.offset, 0).unwrap();
        }
        executor.check_lease()
    });
    assert_eq!((written, parts), (Err(ChainError::Fenced), 2));
    let written = bytes_of(&region, BLOCK, rest.len());
    let (first, others) = written.split_at(PART_BYTES);
    assert!(first == &rest[..PART_BYTES] && others.iter().all(|byte| *byte == 0));
}
