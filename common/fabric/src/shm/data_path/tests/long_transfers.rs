//! Long transfers of shared memory, beside those by way of the lane's buffer.

use super::*;
use crate::WriteSum;
use crate::long_transfer::PART_BYTES;

const REGION: RegionIndex = RegionIndex::FIRST;
const HEAD_BYTES: u32 = 64;
const SLOT: u64 = 64;
const MARK: u64 = 128;
const BLOCK: u64 = 4096;

/// The calls go to the fabric, but long ones have no way of their own.
struct ByBuffer;

impl Interceptor<ShmFabric> for ByBuffer {}

/// A fabric of shared memory, and one that goes by the lane's buffer.
fn fabrics() -> [(Box<dyn Fabric>, Arc<Region>); 2] {
    let new = || {
        let file = tempfile::tempfile().unwrap();
        file.set_len(64 << 10).unwrap();
        let region = Arc::new(Region::map(&file).unwrap());
        region.store(LEASE.offset, LEASE.number).unwrap();
        (Box::new(ShmFabric::new(region.clone(), Some(LEASE), 1)), region)
    };
    let ((direct, region), (fabric, other)) = (new(), new());
    [(direct, region), (Box::new(Intercepted { interceptor: ByBuffer, fabric }), other)]
}

fn bytes_of(region: &Region, offset: u64, bytes: usize) -> Vec<u8> {
    let words = (0..bytes.div_ceil(8) as u64).map(|at| region.load(offset + at * 8).unwrap());
    words.flat_map(u64::to_ne_bytes).take(bytes).collect()
}

fn content(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| ((at * 31) >> 2) as u8 | 1).collect()
}

/// Wants some bytes, at the odd address 1 of its memory.
struct Sink {
    wanted: usize,
    head: Vec<u8>,
    memory: Vec<u8>,
    filled: usize,
}

impl ReadSink for Sink {
    fn begin(&mut self, head: &[u8]) -> usize {
        self.head = head.to_vec();
        self.memory = vec![0; self.wanted + 1];
        self.wanted
    }

    fn add_summed(&mut self, _sum: u32, _bytes: usize) {
        panic!("the bytes come from the region in this process");
    }

    fn next(&mut self, bytes: usize, fill: &mut dyn FnMut(&mut [u8])) {
        fill(&mut self.memory[1 + self.filled..][..bytes]);
        self.filled += bytes;
    }
}

/// Adds all bytes, and writes the sum to the start of the head.
#[derive(Default)]
struct Sum(u64, usize);

impl WriteSum for Sum {
    fn add(&mut self, part: &[u8]) {
        self.0 += part.iter().map(|byte| u64::from(*byte)).sum::<u64>();
        self.1 += part.len();
    }

    fn end(&mut self, head: &mut [u8]) {
        head[..8].copy_from_slice(&self.0.to_ne_bytes());
    }
}

#[test]
fn a_long_read_delivers_the_head_and_then_what_is_wanted() {
    for (mut fabric, region) in fabrics() {
        let whole = content(10_000);
        region.write_parts(BLOCK, &whole, |_| Ok(())).unwrap();
        for wanted in [0, 1, 7, 8, 63, 64, 65, 2047, 2048, 2049, 4103, 9000] {
            let mut sink = Sink { wanted, head: vec![], memory: vec![], filled: 0 };
            let read = LongRead { into: Buffer::ReadBlock, head_bytes: HEAD_BYTES, bytes: 9096 };
            let before = fabric.counters();
            fabric.run_long_read(LANE, REGION, BLOCK, read, &mut sink).unwrap();
            let Counters { round_trips, doorbells, reads, read_bytes, .. } =
                fabric.counters().since(&before);
            assert_eq!((round_trips, doorbells, reads, read_bytes), (1, 1, 1, 9096));
            let (head, rest) = whole.split_at(HEAD_BYTES as usize);
            assert!(sink.head == head && fabric.buffer(LANE, Buffer::ReadBlock).starts_with(head));
            assert!((sink.filled, &sink.memory[1..]) == (wanted, &rest[..wanted]), "{wanted}");
        }
        // More than the READ has.
        let mut sink = Sink { wanted: 1000, head: vec![], memory: vec![], filled: 0 };
        let read = LongRead { into: Buffer::ReadBlock, head_bytes: HEAD_BYTES, bytes: 128 };
        fabric.run_long_read(LANE, REGION, BLOCK, read, &mut sink).unwrap();
        assert_eq!(sink.filled, 64);
        let mut sink = Sink { wanted: 4096, head: vec![], memory: vec![], filled: 0 };
        let read = LongRead { into: Buffer::ReadBlock, head_bytes: HEAD_BYTES, bytes: 8192 };
        let outside = fabric.run_long_read(LANE, REGION, (64 << 10) - 128, read, &mut sink);
        assert!(matches!(outside, Err(ChainError::Outside { .. })), "{outside:?}");
        region.store(LEASE.offset, 0).unwrap();
        let fenced = fabric.run_long_read(LANE, REGION, BLOCK, read, &mut sink);
        assert_eq!(fenced, Err(ChainError::Fenced));
    }
}

/// Runs the chain of a PUT of a head and this rest.
fn put(
    fabric: &mut dyn Fabric,
    block: u64,
    rest: &[u8],
    deadline: Nanos,
) -> Result<u64, ChainError> {
    fabric.reserve(LANE, Buffer::NewBlock, HEAD_BYTES as usize);
    fabric.buffer_mut(LANE, Buffer::NewBlock)[..HEAD_BYTES as usize].fill(5);
    let bytes = (HEAD_BYTES + rest.len() as u32).next_multiple_of(8);
    let chain = [
        Verb::Write { remote: block, from: Buffer::NewBlock, bytes },
        Verb::WriteU32 { remote: MARK, value: 9 },
        Verb::CompareSwap { remote: SLOT, expected: 0, desired: 1 },
    ];
    let mut sum = Sum::default();
    let write = LongWrite { head_bytes: HEAD_BYTES, rest, sum: &mut sum };
    fabric.run_long_write(LANE, REGION, &chain, deadline, write)
}

#[test]
fn a_long_put_writes_the_rest_and_the_completed_head() {
    for (mut fabric, region) in fabrics() {
        let whole = content(10_001);
        // The source's address is odd.
        for bytes in [1, 7, 8, 63, 64, 65, 2047, 2048, 2049, 4103, 9000] {
            let rest = &whole[1..=bytes];
            let end = BLOCK + u64::from(HEAD_BYTES) + bytes.next_multiple_of(8) as u64;
            (BLOCK..end + 8).step_by(8).for_each(|at| region.store(at, u64::MAX).unwrap());
            [SLOT, MARK].into_iter().for_each(|at| region.store(at, 0).unwrap());
            let before = fabric.counters();
            assert_eq!(put(&mut *fabric, BLOCK, rest, Nanos::MAX), Ok(0));
            let Counters { round_trips, doorbells, writes, compare_swaps, written_bytes, .. } =
                fabric.counters().since(&before);
            let paid = (round_trips, doorbells, writes, compare_swaps);
            assert_eq!((paid, written_bytes), ((1, 1, 2, 1), end - BLOCK + 12));
            let sum = rest.iter().map(|byte| u64::from(*byte)).sum::<u64>();
            assert_eq!(region.load(BLOCK).unwrap(), sum, "{bytes}");
            let head = bytes_of(&region, BLOCK + 8, HEAD_BYTES as usize - 8);
            assert!(head.iter().all(|byte| *byte == 5), "{bytes}");
            let mut padded = rest.to_vec();
            padded.resize(bytes.next_multiple_of(8), 0);
            assert!(bytes_of(&region, BLOCK + 64, padded.len()) == padded, "{bytes}");
            assert_eq!(region.load(end).unwrap(), u64::MAX, "nothing behind it is written");
            assert_eq!([SLOT, MARK].map(|at| region.load(at).unwrap()), [1, 9]);
        }
    }
}

#[test]
fn a_long_put_that_is_late_fenced_or_outside_changes_neither_head_nor_slot() {
    for (mut fabric, region) in fabrics() {
        let rest = content(9000);
        assert_eq!(put(&mut *fabric, BLOCK, &rest, 0), Err(ChainError::Late));
        let outside = put(&mut *fabric, (64 << 10) - 4096, &rest, Nanos::MAX);
        assert!(matches!(outside, Err(ChainError::Outside { .. })), "{outside:?}");
        region.store(LEASE.offset, 0).unwrap();
        assert_eq!(put(&mut *fabric, BLOCK, &rest, Nanos::MAX), Err(ChainError::Fenced));
        let words = [BLOCK, BLOCK + 64, MARK, SLOT, (64 << 10) - 4096, (64 << 10) - 4096 + 64];
        assert_eq!(words.map(|at| region.load(at).unwrap()), [0; 6]);
    }
}

/// A client that is fenced in the middle of a PUT writes at most the part that it has begun.
#[test]
fn a_fence_stops_a_long_put_between_two_parts() {
    let [(_, region), _] = fabrics();
    let executor = Executor::new(region.clone(), Some(LEASE));
    let (rest, fence_at) = (content(9000), 2 * PART_BYTES);
    /// Fences the client once so many bytes were added.
    struct Fence<'r>(&'r Region, usize);
    impl WriteSum for Fence<'_> {
        fn add(&mut self, part: &[u8]) {
            self.1 = self.1.saturating_sub(part.len());
            if self.1 == 0 {
                self.0.store(LEASE.offset, 0).unwrap();
            }
        }

        fn end(&mut self, _: &mut [u8]) {
            panic!("the head is not completed");
        }
    }
    let chain = [
        Verb::Write { remote: BLOCK, from: Buffer::NewBlock, bytes: 9064 },
        Verb::WriteU32 { remote: MARK, value: 9 },
        Verb::CompareSwap { remote: SLOT, expected: 0, desired: 1 },
    ];
    let put = PutChain::of(&chain).unwrap();
    let mut sum = Fence(&region, fence_at);
    let write = LongWrite { head_bytes: HEAD_BYTES, rest: &rest, sum: &mut sum };
    let done = executor.put_long(&mut Buffers::default(), &put, Nanos::MAX, write);
    assert_eq!(done, Err(ChainError::Fenced));
    let written = bytes_of(&region, BLOCK + 64, rest.len());
    let (first, others) = written.split_at(PART_BYTES);
    assert!(first == &rest[..PART_BYTES] && others.iter().all(|byte| *byte == 0));
    assert_eq!([BLOCK, MARK, SLOT].map(|at| region.load(at).unwrap()), [0; 3]);
}
