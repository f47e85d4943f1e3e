//! The fabric of shared memory: the client's own CPU executes the verbs on mapped memory.

use std::sync::Arc;
use std::time::Duration;

use zerocopy::IntoBytes;

use crate::clock::Clock;
use crate::lane_state::{NO_VERB, SleepingLanes};
use crate::lent::sum_after;
use crate::memory::{
    Buffers, ChainMemory, Executor, Lease, PREFETCH_BYTES_MAX, PutChain, Region, part_mut,
    words_mut,
};
use crate::{
    Buffer, CHAIN_VERBS_MAX, ChainError, Completion, Counters, Fabric, LaneId, Lent, Nanos,
    RegionIndex, Timing, Verb, Wakeup, interrupt,
};

/// RTT_min of `docs/protocol.md`. Before another client can claim the same slot, a claim executes
/// two locked instructions, a fence, a copy of 256 bytes and at least three reads of the clock, all
/// in order. These are some 140 cycles, which take longer than this on any processor.
pub const ROUND_TRIP_MIN_NS: Nanos = 20;
/// L of `docs/protocol.md`: a chain that is executed later than this after its post is refused.
pub const LATENESS_MAX_NS: Nanos = 50_000_000;
/// The bytes that one doorbell executes before completions are polled. Also the posted bytes above
/// which there is no room. With larger limits, chains could wait for longer than GRACE.
const RING_BYTES_MAX: u64 = 4 << 20;
/// Limit on the bytes that are prefetched of a block of so many bytes or more, which is written
/// later: a compare-and-swap waits for all stores before it.
const PREFETCH_LONG_BYTES: u32 = 4096;
/// A lane that waits for longer than this sleeps, so that other threads get the processor.
const SPIN_NS_MAX: Nanos = 50_000;

/// Executes chains at the next doorbell.
///
/// It checks the clock and the lease before each WRITE, also of a four-byte mark (invariant I13),
/// and before each atomic verb, because the process may have been stopped at any time before. One
/// gap remains: a stop between this check and the instruction, or the few kilobytes of a WRITE,
/// that follows it.
pub struct ShmFabric {
    /// One for each region.
    executors: Vec<Executor>,
    clock: Clock,
    lanes: Box<[Lane]>,
    /// The chains that were posted, in this order: first those that were polled, then the other
    /// executed ones, then the rest. A vector takes fewer instructions than a queue.
    posted: Vec<PostedChain>,
    /// The number of polled chains in `posted`.
    polled: usize,
    /// The number of executed chains in `posted`, polled ones included.
    executed: usize,
    /// The bytes of the chains in `posted` that are not executed yet.
    posted_bytes: u64,
    waiting: SleepingLanes,
    wakeup: Option<Arc<Wakeup>>,
    doorbells: u64,
}

/// A chain between its post and its poll. The doorbell goes through these one after the other, and
/// needs nothing else of a chain of one READ but the lane's buffer.
struct PostedChain {
    lane: LaneId,
    region: RegionIndex,
    kind: PostedKind,
    payload_bytes: u64,
    /// Set by the doorbell.
    result: Result<u64, ChainError>,
}

enum PostedKind {
    /// A single READ.
    Read { remote: u64, into: Buffer, bytes: u32 },
    /// The chain in the lane.
    Lane,
}

struct Lane {
    region: RegionIndex,
    chain: [Verb; CHAIN_VERBS_MAX],
    verbs: usize,
    deadline: Nanos,
    buffers: Buffers,
    parts: Parts,
    counters: Counters,
}

/// What a lane's chains with parts have beside its buffers.
#[derive(Default)]
struct Parts {
    lent: Lent,
    /// By the verbs of the last chain.
    sums: [u32; CHAIN_VERBS_MAX],
    split: Split,
}

/// The lent memory of a `WriteSplit` that was posted.
#[derive(Clone, Copy, Default)]
enum Split {
    #[default]
    None,
    /// It is to be written.
    Posted,
    /// It was written, with this sum, or could not be.
    Done(Result<u32, ChainError>),
}

impl Lane {
    /// Notes a chain, for [`Fabric::part_sum`].
    #[inline]
    fn begin(&mut self, region: RegionIndex, chain: &[Verb]) {
        self.chain[..chain.len()].copy_from_slice(chain);
        self.region = region;
        self.parts.begin(chain);
    }
}

impl Parts {
    /// Notes the `WriteSplit` of a chain, if it has one.
    #[inline]
    fn begin(&mut self, chain: &[Verb]) {
        if let Some(Verb::WriteSplit { .. }) = chain.first() {
            self.split = if self.lent.suits(chain) { Split::Posted } else { Split::None };
        }
    }

    /// Has `write` write the lent memory of a `WriteSplit`, once.
    fn end_split(
        &mut self,
        write: impl FnOnce(&[u8]) -> Result<u32, ChainError>,
    ) -> Result<u32, ChainError> {
        let result = match self.split {
            Split::Done(result) => return result,
            Split::Posted => write(self.lent.content()),
            // The memory was taken back.
            Split::None => Err(ChainError::Fenced),
        };
        self.split = Split::Done(result);
        result
    }
}

/// The memory of a lane's chain with parts, if it has any.
struct LaneMemory<'l> {
    buffers: &'l mut Buffers,
    parts: &'l mut Parts,
}

impl ChainMemory for LaneMemory<'_> {
    #[inline(always)]
    fn target(&mut self, into: Buffer, bytes: u32) -> &mut [u64] {
        self.buffers.target(into, bytes)
    }

    #[inline(always)]
    fn source(&mut self, from: Buffer, bytes: u32) -> &[u64] {
        self.buffers.source(from, bytes)
    }

    fn target_part(&mut self, into: Buffer, at: u32, bytes: u32) -> &mut [u8] {
        match into {
            Buffer::Lent => self.parts.lent.part_mut(at, bytes),
            own => part_mut(self.buffers, own, at, bytes),
        }
    }

    fn source_part(&mut self, from: Buffer, at: u32, bytes: u32) -> &[u8] {
        match from {
            Buffer::Lent => self.parts.lent.part(at, bytes),
            own => part_mut(self.buffers, own, at, bytes),
        }
    }

    fn note_sum(&mut self, verb: usize, sum: u32) {
        self.parts.sums[verb] = sum;
    }

    fn end_split(
        &mut self,
        write: impl FnOnce(&[u8]) -> Result<u32, ChainError>,
    ) -> Result<(), ChainError> {
        self.parts.end_split(write).map(drop)
    }
}

impl ShmFabric {
    /// A fabric with `lanes` lanes, for one region. The server's own fabric has no lease, and is
    /// never fenced.
    pub fn new(region: Arc<Region>, lease: Option<Lease>, lanes: u16) -> Self {
        let lane = || Lane {
            region: RegionIndex::FIRST,
            chain: [NO_VERB; CHAIN_VERBS_MAX],
            verbs: 0,
            deadline: 0,
            buffers: Default::default(),
            parts: Parts::default(),
            counters: Counters::default(),
        };
        let (lane_count, clock) = (usize::from(lanes), Clock::new());
        Self {
            executors: vec![Executor::with_clock(region, lease, clock.clone())],
            clock,
            lanes: (0..lanes).map(|_| lane()).collect(),
            posted: Vec::with_capacity(lane_count),
            posted_bytes: 0,
            polled: 0,
            executed: 0,
            waiting: SleepingLanes::with_capacity(lane_count),
            wakeup: None,
            doorbells: 0,
        }
    }

    /// Adds a region, in a mapping of its own. With `replaces` it takes the place of that region,
    /// whose mapping is dropped. Chains that were posted for the former region and are not executed
    /// yet fail with [`ChainError::Fenced`].
    pub fn add_region(
        &mut self,
        region: Arc<Region>,
        lease: Option<Lease>,
        replaces: Option<RegionIndex>,
    ) -> RegionIndex {
        let executor = Executor::with_clock(region, lease, self.clock.clone());
        let Some(replaced) = replaces else {
            self.executors.push(executor);
            return RegionIndex(self.executors.len() as u16 - 1);
        };
        self.executors[replaced.index()] = executor;
        for at in self.executed..self.posted.len() {
            let posted = &mut self.posted[at];
            if posted.region == replaced {
                posted.result = Err(ChainError::Fenced);
                self.posted_bytes -= posted.payload_bytes;
                // It becomes the last of the executed chains.
                self.posted[self.executed..=at].rotate_right(1);
                self.executed += 1;
            }
        }
        replaced
    }

    /// Forgets the chains whose completions were polled. Returns the completion of a wait, if one
    /// is due.
    #[inline(never)]
    fn end_polling(&mut self) -> Option<Completion> {
        if self.polled > 0 {
            self.posted.drain(..self.polled);
            (self.polled, self.executed) = (0, 0);
        }
        self.waiting.due(|| self.clock.now())
    }
}

impl Fabric for ShmFabric {
    fn timing(&self, _: RegionIndex) -> Timing {
        Timing { round_trip_min_ns: ROUND_TRIP_MIN_NS, lateness_max_ns: LATENESS_MAX_NS }
    }

    #[inline]
    fn now(&self) -> Nanos {
        self.clock.now()
    }

    #[inline]
    fn prefetch(&self, region: RegionIndex, remote: u64, bytes: u32) {
        let Executor { region, .. } = &self.executors[region.index()];
        if bytes as usize == size_of::<u64>() {
            return region.prefetch_word_to_change(remote);
        }
        let long =
            if bytes < PREFETCH_LONG_BYTES { PREFETCH_BYTES_MAX } else { PREFETCH_LONG_BYTES };
        region.prefetch_to_change(remote, bytes.min(long));
    }

    #[inline]
    fn post(&mut self, lane_id: LaneId, region: RegionIndex, chain: &[Verb], deadline: Nanos) {
        let lane = &mut self.lanes[usize::from(lane_id.0)];
        lane.verbs = chain.len();
        lane.deadline = deadline;
        let executor = &self.executors[region.index()];
        let payload_bytes = if let Some(put) = PutChain::of(chain) {
            let [verbs @ .., _] = &mut lane.chain;
            verbs.copy_from_slice(put.verbs);
            executor.prefetch_put(&put);
            lane.counters.count_put(put.bytes)
        } else {
            lane.begin(region, chain);
            executor.prefetch_chain(chain);
            lane.counters.count(chain)
        };
        self.posted_bytes += payload_bytes;
        let (lane, kind, result) = (lane_id, PostedKind::Lane, Ok(0));
        self.posted.push(PostedChain { lane, region, kind, payload_bytes, result });
    }

    /// As `post`, without loops: most chains of most programs are these.
    #[inline]
    fn post_read(
        &mut self,
        lane: LaneId,
        region: RegionIndex,
        remote: u64,
        into: Buffer,
        bytes: u32,
    ) {
        self.lanes[usize::from(lane.0)].counters.count_only_read(bytes);
        let executor = &self.executors[region.index()];
        executor.region.prefetch(remote, bytes.min(PREFETCH_BYTES_MAX));
        let payload_bytes = bytes.into();
        self.posted_bytes += payload_bytes;
        let (kind, result) = (PostedKind::Read { remote, into, bytes }, Ok(0));
        self.posted.push(PostedChain { lane, region, kind, payload_bytes, result });
    }

    /// Only posted chains count: the doorbell executes them, so none remains in flight.
    #[inline]
    fn has_room(&self, _: RegionIndex, _: u64) -> bool {
        self.posted_bytes < RING_BYTES_MAX
    }

    fn wait(&mut self, lane: LaneId, until: Nanos) {
        self.waiting.add(lane, until);
    }

    #[inline]
    fn ring(&mut self) {
        if self.posted.len() == self.executed {
            return;
        }
        self.doorbells += 1;
        let mut left = RING_BYTES_MAX;
        while left > 0
            && let Some(posted) = self.posted.get_mut(self.executed)
        {
            self.posted_bytes -= posted.payload_bytes;
            left = left.saturating_sub(posted.payload_bytes);
            let executor = &self.executors[posted.region.index()];
            let Lane { chain, verbs, buffers, parts, deadline, .. } =
                &mut self.lanes[usize::from(posted.lane.0)];
            posted.result = match posted.kind {
                PostedKind::Read { remote, into, bytes } => {
                    executor.read(buffers, remote, into, bytes).map(|()| 0)
                }
                PostedKind::Lane => match PutChain::of(&chain[..*verbs]) {
                    Some(put) => executor.put(buffers, &put, *deadline),
                    None => {
                        let mut memory = LaneMemory { buffers, parts };
                        executor.execute(&mut memory, &chain[..*verbs], *deadline)
                    }
                },
            };
            self.executed += 1;
        }
    }

    #[inline(always)]
    fn poll(&mut self) -> Option<Completion> {
        if self.polled < self.executed
            && let Some(&PostedChain { lane, result, .. }) = self.posted.get(self.polled)
        {
            self.polled += 1;
            return Some(Completion { lane, result });
        }
        self.end_polling()
    }

    fn relax(&mut self) {
        let left = self.waiting.first().map_or(0, |until| until.saturating_sub(self.now()));
        if left > SPIN_NS_MAX {
            let left = Duration::from_nanos(left);
            match &self.wakeup {
                Some(wakeup) => wakeup.sleep(Some(left)),
                None => interrupt::sleep(left),
            }
        } else {
            std::hint::spin_loop();
        }
    }

    fn set_wakeup(&mut self, wakeup: Arc<Wakeup>) {
        self.wakeup = Some(wakeup);
    }

    #[inline]
    fn buffer(&self, lane: LaneId, buffer: Buffer) -> &[u8] {
        self.lanes[usize::from(lane.0)].buffers[buffer as usize].as_bytes()
    }

    #[inline]
    fn buffer_mut(&mut self, lane: LaneId, buffer: Buffer) -> &mut [u8] {
        self.lanes[usize::from(lane.0)].buffers[buffer as usize].as_mut_bytes()
    }

    #[inline]
    fn reserve(&mut self, lane: LaneId, buffer: Buffer, bytes: usize) -> bool {
        words_mut(&mut self.lanes[usize::from(lane.0)].buffers[buffer as usize], bytes as u32);
        true
    }

    /// As `post`, `ring` and `poll`, but without their queues.
    #[inline]
    fn run(
        &mut self,
        lane: LaneId,
        region: RegionIndex,
        chain: &[Verb],
        deadline: Nanos,
    ) -> Result<u64, ChainError> {
        self.doorbells += 1;
        let executor = &self.executors[region.index()];
        let lane = &mut self.lanes[usize::from(lane.0)];
        if let Some(put) = PutChain::of(chain) {
            lane.counters.count_put(put.bytes);
            // The caller has prefetched its memory, if it knew the location early enough.
            return executor.put(&mut lane.buffers, &put, deadline);
        }
        lane.counters.count(chain);
        if !matches!(chain, [Verb::Read { .. }]) {
            // Without it each verb would wait for its own memory: a swap waits for earlier writes.
            executor.prefetch_chain(chain);
        }
        lane.begin(region, chain);
        let Lane { buffers, parts, .. } = lane;
        let mut memory = LaneMemory { buffers, parts };
        executor.execute(&mut memory, chain, deadline)
    }

    /// As `run`, without a loop over verbs.
    // Without `always` the compiler makes a call of it, in every GET.
    #[inline(always)]
    fn run_read(
        &mut self,
        lane: LaneId,
        region: RegionIndex,
        remote: u64,
        into: Buffer,
        bytes: u32,
    ) -> Result<(), ChainError> {
        self.doorbells += 1;
        let executor = &self.executors[region.index()];
        let lane = &mut self.lanes[usize::from(lane.0)];
        lane.counters.count_only_read(bytes);
        executor.read(&mut lane.buffers, remote, into, bytes)
    }

    /// A doorbell executes chains to their end, so none has memory after it.
    fn lend(&mut self, lane: LaneId, memory: Lent) -> bool {
        let Lane { chain, parts, .. } = &mut self.lanes[usize::from(lane.0)];
        (parts.lent, parts.split) = (memory, Split::None);
        if !matches!(chain[0], Verb::ReadSplit { .. }) {
            // Its sums are those of other memory.
            *chain = [NO_VERB; CHAIN_VERBS_MAX];
        }
        true
    }

    fn part_sum(
        &mut self,
        lane: LaneId,
        verb: usize,
        part: (Buffer, u32, u32),
        before: u32,
    ) -> u32 {
        let Lane { region, chain, deadline, parts, .. } = &mut self.lanes[usize::from(lane.0)];
        let executor = &self.executors[region.index()];
        let (buffer, at, bytes) = part;
        if buffer != Buffer::Lent {
            return parts.sums[verb];
        }
        match chain[verb] {
            Verb::ReadSplit { remote, head_bytes, .. } if parts.lent.is_target() => {
                let target = parts.lent.part_mut(at, bytes);
                let from = remote + u64::from(head_bytes + at);
                let accepted = executor.check_lease();
                let read =
                    accepted.and_then(|()| executor.region.read_summed(from, target, before));
                // If the server has fenced the client, the sum is that of other bytes.
                read.unwrap_or_else(|_| sum_after(before, target))
            }
            Verb::ReadPart { into: Buffer::Lent, at: start, .. }
            | Verb::WritePart { from: Buffer::Lent, at: start, .. }
                if start == at && before == 0 =>
            {
                parts.sums[verb]
            }
            Verb::WriteSplit { remote, head_bytes, .. } if !matches!(parts.split, Split::None) => {
                let write = |lent: &[u8]| {
                    executor.write_rest((remote, head_bytes), lent, *deadline, before)
                };
                // The chain fails for the reason that keeps the bytes from being written.
                parts.end_split(write).unwrap_or_default()
            }
            // An interceptor may hold the chain back.
            _ => sum_after(before, parts.lent.part(at, bytes)),
        }
    }

    fn counters(&self) -> Counters {
        Counters::sum(self.doorbells, self.lanes.iter().map(|lane| &lane.counters))
    }

    #[inline]
    fn lane_counters(&self, lane: LaneId) -> &Counters {
        &self.lanes[usize::from(lane.0)].counters
    }
}

#[cfg(test)]
mod tests;
