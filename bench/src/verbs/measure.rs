//! The rate of a verb, or of a PUT's chain, over any fabric, and of the raw verbs of a whole value.
//! If the value has extents, these are READs or WRITEs of as many bytes, in parts of the same
//! lengths, and in short chains as a client's.
//!
//! The chains follow each other, as those of one GET or PUT do. Each has a lane of its own, and
//! each part a buffer. So the memory on the client's side is as long as the value, too.

use std::time::{Duration, Instant};

use farside_fabric::{Buffer, ChainError, Fabric, LaneId, Nanos, RegionIndex, Verb};
use farside_layout::{BLOCK_HEADER_BYTES, ExtentShape, SizeClass, extent_data_offset};
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use crate::Result;
use crate::recorder::latency_histogram;
use crate::records::KEY_BYTES;

/// A verb or chain to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub enum RawVerb {
    Read,
    Write,
    CompareSwap,
    /// A cached PUT's chain: a WRITE, one of 4 bytes, a compare-and-swap; three targets in turn.
    Update,
}

/// How to measure.
#[derive(Clone, Copy)]
pub struct Plan<'a> {
    /// Byte offsets that may be read and overwritten. After each there is room for `bytes`.
    pub targets: &'a [u64],
    /// How many bytes a READ or WRITE transfers, a multiple of 8.
    pub bytes: u32,
    /// How many chains are in flight.
    pub lanes: u16,
    /// How long to measure.
    pub duration: Duration,
    /// Called ten times a second. An error ends the measurement early.
    pub between_polls: &'a dyn Fn() -> Result<()>,
}

/// The measurement of one verb or chain.
#[derive(Clone, Debug)]
pub struct Timed {
    /// The latency of each chain, in nanoseconds.
    pub latencies: Histogram<u64>,
    /// The time from the first chain to the last, in seconds.
    pub seconds: f64,
}

impl Timed {
    /// Chains a second.
    pub fn rate_per_s(&self) -> f64 {
        self.latencies.len() as f64 / self.seconds
    }

    /// The rate and percentiles for a report.
    pub fn rate(&self) -> Rate {
        Rate {
            rate_per_s: self.rate_per_s(),
            p50_ns: self.latencies.value_at_quantile(0.5),
            p99_ns: self.latencies.value_at_quantile(0.99),
        }
    }
}

/// The rate of a verb, and percentiles of its latency.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names are those of the JSON")]
pub struct Rate {
    pub rate_per_s: f64,
    pub p50_ns: u64,
    pub p99_ns: u64,
}

/// The chain that a lane has in flight: its first target, and when it was posted.
#[derive(Clone, Copy)]
struct ChainInFlight {
    target: usize,
    posted: Nanos,
}

/// The region of the targets: this measures on one region only.
const REGION: RegionIndex = RegionIndex::FIRST;
/// The time between two calls of [`Plan::between_polls`].
const BETWEEN_POLLS_NS: Nanos = 100_000_000;
/// The distance from one target to the next: too long for a prefetcher, and coprime to most numbers
/// of targets.
pub(super) const STRIDE: usize = 7919;

/// Keeps all lanes busy with one verb, or chain, on one target after another. A latency runs from
/// the clock's reading before the doorbell to the reading after the completion. Completions of one
/// poll share a reading.
pub fn measure<F: Fabric>(fabric: &mut F, verb: RawVerb, plan: &Plan<'_>) -> Result<Timed> {
    let lanes = usize::from(plan.lanes);
    let mut run = Run {
        words: vec![0; plan.targets.len()],
        in_flight: vec![ChainInFlight { target: 0, posted: 0 }; lanes],
        next: 0,
        verb,
        plan,
    };
    let mut latencies = latency_histogram();
    let mut free: Vec<LaneId> = (0..plan.lanes).map(LaneId).collect();
    for lane in &free {
        fabric.reserve(*lane, Buffer::NewBlock, plan.bytes as usize);
        fabric.reserve(*lane, Buffer::ReadBlock, plan.bytes as usize);
    }
    let (started, begun) = (Instant::now(), fabric.now());
    let (mut now, mut call_at) = (begun, begun + BETWEEN_POLLS_NS);
    let end = begun + plan.duration.as_nanos() as Nanos;
    while now < end {
        for lane in free.drain(..) {
            run.post(fabric, lane, now);
        }
        fabric.ring();
        while free.is_empty() {
            while let Some(completion) = fabric.poll() {
                let lane = completion.lane;
                match completion.result {
                    Ok(found) => {
                        run.note_word(lane, found);
                        free.push(lane);
                    }
                    // The system did not run this thread in time. Another chain replaces the late
                    // one.
                    Err(ChainError::Late) => {
                        run.post(fabric, lane, fabric.now());
                        fabric.ring();
                    }
                    Err(error) => return Err(error.into()),
                }
            }
            if free.is_empty() {
                fabric.relax();
            }
        }
        now = fabric.now();
        for lane in &free {
            latencies
                .saturating_record(now.saturating_sub(run.in_flight[usize::from(lane.0)].posted));
        }
        if now >= call_at {
            (plan.between_polls)()?;
            call_at = now + BETWEEN_POLLS_NS;
        }
    }
    let seconds = started.elapsed().as_secs_f64();
    finish(fabric, lanes - free.len())?;
    Ok(Timed { latencies, seconds })
}

/// Waits until no chain is in flight.
fn finish<F: Fabric>(fabric: &mut F, mut in_flight: usize) -> Result<()> {
    while in_flight > 0 {
        match fabric.poll() {
            Some(completion) => match completion.result {
                Ok(_) | Err(ChainError::Late) => in_flight -= 1,
                Err(error) => return Err(error.into()),
            },
            None => {
                // Chains that had no room so far may have some now.
                fabric.ring();
                fabric.relax();
            }
        }
    }
    Ok(())
}

struct Run<'a> {
    /// The expected first word of each target.
    words: Vec<u64>,
    in_flight: Vec<ChainInFlight>,
    next: usize,
    verb: RawVerb,
    plan: &'a Plan<'a>,
}

impl Run<'_> {
    #[inline]
    fn post<F: Fabric>(&mut self, fabric: &mut F, lane: LaneId, now: Nanos) {
        let bytes = self.plan.bytes;
        let (target, remote) = self.advance();
        let read = Verb::Read { remote, into: Buffer::ReadBlock, bytes };
        let write = Verb::Write { remote, from: Buffer::NewBlock, bytes };
        let (target, chain): (_, &[Verb]) = match self.verb {
            RawVerb::Read => (target, &[read]),
            RawVerb::Write => (target, &[write]),
            RawVerb::CompareSwap => (target, &[self.swap(target)]),
            RawVerb::Update => {
                let mark = Verb::WriteU32 { remote: self.advance().1, value: 1 };
                let (target, _) = self.advance();
                (target, &[write, mark, self.swap(target)])
            }
        };
        self.in_flight[usize::from(lane.0)] = ChainInFlight { target, posted: now };
        let deadline = now + fabric.timing(REGION).lateness_max_ns;
        fabric.post(lane, REGION, chain, deadline);
    }

    /// Returns the number of the next target and its address.
    #[inline]
    fn advance(&mut self) -> (usize, u64) {
        self.next = (self.next + STRIDE) % self.plan.targets.len();
        (self.next, self.plan.targets[self.next])
    }

    #[inline]
    fn swap(&self, target: usize) -> Verb {
        let (remote, expected) = (self.plan.targets[target], self.words[target]);
        Verb::CompareSwap { remote, expected, desired: expected.wrapping_add(1) }
    }

    /// Stores the present first word of the target. If a compare-and-swap found another word than
    /// expected, that word is still there.
    #[inline]
    fn note_word(&mut self, lane: LaneId, found: u64) {
        if matches!(self.verb, RawVerb::CompareSwap | RawVerb::Update) {
            let word = &mut self.words[self.in_flight[usize::from(lane.0)].target];
            *word = if found == *word { found.wrapping_add(1) } else { found };
        }
    }
}

/// How many parts are READ in a chain: one for each buffer of a lane. A GET READs one more.
const READS_PER_CHAIN: usize = 3;
/// How many parts are WRITten in a chain, as by a PUT.
const WRITES_PER_CHAIN: usize = 2;
/// The buffers of the parts of a chain.
const BUFFERS: [Buffer; READS_PER_CHAIN] = [Buffer::NewBlock, Buffer::ReadBlock, Buffer::Window];
/// Limit on the attempts of a chain that the system did not run in time.
const LATE_ATTEMPTS_MAX: u32 = 100;
/// A place in a chain that no verb has yet.
const NO_VERB: Verb = Verb::Read { remote: 0, into: Buffer::Window, bytes: 0 };

/// The blocks that hold the content of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ValueBlocks {
    /// The length of the value, in bytes: a multiple of 8.
    pub(super) value_bytes: u64,
    /// Their class: that of extents, if the value has any.
    pub(super) class: SizeClass,
    /// How many they are.
    pub(super) count: usize,
    /// How many bytes of the value each of them holds, except for the last.
    part_bytes: u64,
}

impl ValueBlocks {
    /// The blocks of a value of this length, which is a multiple of 8; `None` if it is too long.
    pub(super) fn of(value_bytes: u64) -> Option<Self> {
        let shape = ExtentShape::OF_REGIONS;
        let in_slot = shape.class_in_slot(KEY_BYTES, value_bytes as usize)?;
        let (class, count, part_bytes) = match in_slot.is_head() {
            false => (in_slot, 1, value_bytes),
            true => {
                let count = shape.count(KEY_BYTES, value_bytes);
                (SizeClass::EXTENT, count, shape.part_bytes(KEY_BYTES))
            }
        };
        Some(Self { value_bytes, class, count, part_bytes })
    }

    /// Whether the value has extents.
    pub(super) fn are_extents(self) -> bool {
        self.class == SizeClass::EXTENT
    }

    /// The number of lanes that its chains need.
    pub(super) fn lanes(self) -> u16 {
        self.count.div_ceil(WRITES_PER_CHAIN) as u16
    }

    /// The memory of the blocks, in bytes.
    pub(super) fn bytes(self) -> u64 {
        self.count as u64 * self.class.block_bytes()
    }

    /// Where the verbs access a block, in bytes after its header: where the client does, in an
    /// extent.
    pub(super) fn offset(self) -> u64 {
        match self.are_extents() {
            false => 0,
            true => extent_data_offset(KEY_BYTES) - BLOCK_HEADER_BYTES,
        }
    }

    /// The length of the part with this number, in bytes.
    fn part(self, number: usize) -> u32 {
        (self.value_bytes - number as u64 * self.part_bytes).min(self.part_bytes) as u32
    }

    /// READs or WRITEs whole values, one after the other. Returns values a second. Each has
    /// [`ValueBlocks::count`] of the targets, which are offsets of memory that may be overwritten.
    pub(super) fn measure<F: Fabric>(
        self,
        fabric: &mut F,
        verb: RawVerb,
        targets: &[u64],
        time: Duration,
    ) -> Result<f64> {
        let (started, mut done, mut next) = (Instant::now(), 0, 0);
        let values = targets.len() / self.count;
        loop {
            next = (next + STRIDE) % values;
            self.transfer(fabric, verb, &targets[next * self.count..][..self.count])?;
            done += 1;
            let elapsed = started.elapsed();
            if elapsed >= time {
                return Ok(f64::from(done) / elapsed.as_secs_f64());
            }
        }
    }

    /// READs or WRITEs all parts of a value.
    fn transfer<F: Fabric>(self, fabric: &mut F, verb: RawVerb, targets: &[u64]) -> Result<()> {
        let is_read = verb == RawVerb::Read;
        let per_chain = if is_read { READS_PER_CHAIN } else { WRITES_PER_CHAIN };
        for (number, targets) in targets.chunks(per_chain).enumerate() {
            let lane = LaneId(number as u16);
            let mut chain = [NO_VERB; READS_PER_CHAIN];
            for (at, remote) in targets.iter().copied().enumerate() {
                let (bytes, buffer) = (self.part(number * per_chain + at), BUFFERS[at]);
                fabric.reserve(lane, buffer, bytes as usize);
                chain[at] = match is_read {
                    true => Verb::Read { remote, into: buffer, bytes },
                    false => Verb::Write { remote, from: buffer, bytes },
                };
            }
            run(fabric, lane, &chain[..targets.len()])?;
        }
        Ok(())
    }
}

/// Executes a chain, again if it was late.
fn run<F: Fabric>(fabric: &mut F, lane: LaneId, chain: &[Verb]) -> Result<()> {
    let mut attempts = 1;
    loop {
        let deadline = fabric.now() + fabric.timing(REGION).lateness_max_ns;
        match fabric.run(lane, REGION, chain, deadline) {
            Ok(_) => return Ok(()),
            Err(ChainError::Late) if attempts < LATE_ATTEMPTS_MAX => attempts += 1,
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use farside_fabric::memory::Region;
    use farside_fabric::shm::ShmFabric;
    use farside_fabric::{Intercepted, Interceptor};
    use farside_layout::{BLOCK_BYTES_MAX, VALUE_BYTES_LIMIT, block_bytes};

    use super::*;

    /// Makes every third chain come too late.
    struct OftenLate(u32);

    impl Interceptor<ShmFabric> for OftenLate {
        fn post(
            &mut self,
            fabric: &mut ShmFabric,
            lane: LaneId,
            region: RegionIndex,
            chain: &[Verb],
            deadline: Nanos,
        ) {
            self.0 += 1;
            fabric.post(lane, region, chain, if self.0.is_multiple_of(3) { 0 } else { deadline });
        }
    }

    #[test]
    fn a_late_chain_does_not_end_the_measurement() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 16).unwrap();
        let region = Arc::new(Region::map(&file).unwrap());
        let fabric = Box::new(ShmFabric::new(region, None, 4));
        let mut fabric = Intercepted { interceptor: OftenLate(0), fabric };
        let duration = Duration::from_millis(5);
        let plan =
            Plan { targets: &[256, 512], bytes: 64, lanes: 4, duration, between_polls: &|| Ok(()) };
        for verb in [RawVerb::CompareSwap, RawVerb::Update] {
            assert!(measure(&mut fabric, verb, &plan).unwrap().rate().rate_per_s > 0.0);
        }
        assert!(fabric.interceptor.0 > 3);
    }

    #[test]
    fn every_verb_has_a_rate_and_stays_in_its_targets() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 16).unwrap();
        let region = Arc::new(Region::map(&file).unwrap());
        let mut fabric = ShmFabric::new(region.clone(), None, 4);
        let targets: Vec<u64> = (1..64).map(|n| n * 256).collect();
        let duration = Duration::from_millis(5);
        let plan =
            Plan { targets: &targets, bytes: 64, lanes: 4, duration, between_polls: &|| Ok(()) };
        // The compare-and-swap comes last: the others overwrite the words that it counts up.
        for verb in [RawVerb::Read, RawVerb::Write, RawVerb::Update, RawVerb::CompareSwap] {
            let rate = measure(&mut fabric, verb, &plan).unwrap().rate();
            assert!(rate.rate_per_s > 0.0 && rate.p50_ns <= rate.p99_ns, "{verb:?} {rate:?}");
        }
        let swapped: Vec<u64> = targets.iter().map(|at| region.load(*at).unwrap()).collect();
        assert!(swapped.iter().all(|word| *word > 1), "{swapped:?}");
        assert!((0..256).step_by(8).all(|at| region.load(at).unwrap() == 0));
    }

    #[test]
    fn the_parts_of_a_value_have_its_bytes() {
        let short = BLOCK_BYTES_MAX - block_bytes(KEY_BYTES, 0);
        for value_bytes in [8, 1 << 20, short, short + 8, 64 << 20, VALUE_BYTES_LIMIT] {
            let blocks = ValueBlocks::of(value_bytes).unwrap();
            assert_eq!(blocks.are_extents(), value_bytes > short);
            let parts = (0..blocks.count).map(|number| blocks.part(number));
            assert_eq!(parts.clone().map(u64::from).sum::<u64>(), value_bytes);
            let start = BLOCK_HEADER_BYTES + blocks.offset();
            let room = (blocks.class.block_bytes() - start) as u32;
            assert!(parts.clone().all(|part| 0 < part && part <= room && part.is_multiple_of(8)));
        }
        assert_eq!(ValueBlocks::of(VALUE_BYTES_LIMIT + 8), None);
    }

    #[test]
    fn each_part_is_written_to_its_target_and_read_from_it() {
        let blocks = ValueBlocks::of(5 << 20).unwrap();
        assert_eq!(blocks.count, 6);
        let file = tempfile::tempfile().unwrap();
        file.set_len(8 << 20).unwrap();
        let region = Arc::new(Region::map(&file).unwrap());
        let mut fabric = ShmFabric::new(region.clone(), None, blocks.lanes());
        let targets: Vec<u64> = (1..7).map(|n| n << 20).collect();
        for lane in 0..blocks.lanes() {
            for buffer in &BUFFERS[..WRITES_PER_CHAIN] {
                fabric.reserve(LaneId(lane), *buffer, 1 << 20);
                fabric.buffer_mut(LaneId(lane), *buffer).fill(lane as u8 + 1);
            }
        }
        blocks.transfer(&mut fabric, RawVerb::Write, &targets).unwrap();
        for (number, target) in targets.iter().enumerate() {
            let last = target + u64::from(blocks.part(number)) - 8;
            let expected = 0x0101_0101_0101_0101 * (number as u64 / 2 + 1);
            for (at, expected) in [(*target, expected), (last, expected), (last + 8, 0)] {
                assert_eq!(region.load(at).unwrap(), expected, "part {number} at {at}");
            }
        }
        blocks.transfer(&mut fabric, RawVerb::Read, &targets).unwrap();
        for (number, expected) in [1u8, 1, 2, 2, 3, 3].into_iter().enumerate() {
            let lane = LaneId((number / READS_PER_CHAIN) as u16);
            let buffer = fabric.buffer(lane, BUFFERS[number % READS_PER_CHAIN]);
            assert_eq!(buffer[0], expected, "part {number}");
        }
        assert!(
            blocks.measure(&mut fabric, RawVerb::Read, &targets, Duration::ZERO).unwrap() > 0.0
        );
    }
}
