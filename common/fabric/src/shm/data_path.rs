//! The fabric of shared memory: the client's own CPU executes the verbs on mapped memory.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use zerocopy::IntoBytes;

use super::Region;
use super::words::{self, order_read_after_swap};
use crate::clock::Clock;
use crate::long_transfer::run_gathered;
use crate::waits::SleepingLanes;
use crate::{
    Buffer, CHAIN_VERBS_MAX, ChainError, Completion, Counters, Fabric, LaneId, Lent, LongRead,
    LongWrite, Nanos, ReadSink, RegionIndex, Timing, Verb, Wakeup, interrupt,
};
use memory::LaneMemory;
pub(crate) use memory::{ChainMemory, part_mut, words_mut};
use put_chain::PutChain;

/// RTT_min of `docs/protocol.md`. Before another client can claim the same slot, a claim executes
/// two locked instructions, a fence, a copy of 256 bytes and at least three reads of the clock, all
/// in order. These are some 140 cycles, which take longer than this on any processor.
pub const ROUND_TRIP_MIN_NS: Nanos = 20;
/// L of `docs/protocol.md`: a chain that is executed later than this after its post is refused.
pub const LATENESS_MAX_NS: Nanos = 50_000_000;
/// The longest part of a WRITE between two checks of lease and clock, in words of 8 bytes.
const WRITE_WORDS_MAX: usize = 512;
/// The bytes that one doorbell executes before completions are polled. Also the posted bytes above
/// which there is no room. With larger limits, chains could wait for longer than GRACE.
const RING_BYTES_MAX: u64 = 4 << 20;
/// Limit on the bytes of one verb that are prefetched.
const PREFETCH_BYTES_MAX: u32 = 256;
/// The same for a block of so many bytes or more, which is written later: a compare-and-swap waits
/// for all stores before it.
const PREFETCH_LONG_BYTES: u32 = 4096;
/// A lane that waits for longer than this sleeps, so that other threads get the processor.
const SPIN_NS_MAX: Nanos = 50_000;

/// The word of the client table that tells whether the server accepts a client: the fence of this
/// fabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    /// The offset of the word, in bytes.
    pub offset: u64,
    /// The value of the word while the client is accepted.
    pub number: u64,
}

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
    lent: Lent,
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
    chain: [Verb; CHAIN_VERBS_MAX],
    verbs: usize,
    deadline: Nanos,
    buffers: Buffers,
    /// By the verbs of the last chain with parts.
    sums: [u32; CHAIN_VERBS_MAX],
    counters: Counters,
}

pub(crate) type Buffers = [Vec<u64>; Buffer::COUNT];

impl ShmFabric {
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

/// Executes the chains for one region, on behalf of one client.
///
/// It has a clock of its own, so that a chain needs only pointers to this and to its lane. Clocks
/// of one process differ by microseconds, and [`LATENESS_MAX_NS`] is much longer.
pub(crate) struct Executor {
    pub(crate) region: Arc<Region>,
    lease: Option<Lease>,
    pub(crate) clock: Clock,
}

/// The word of an executor's lease, and its value while the client is accepted. `None` without a
/// lease.
#[derive(Clone, Copy)]
struct LeaseWord<'r>(Option<(&'r AtomicU64, u64)>);

impl LeaseWord<'_> {
    #[inline]
    fn check(self) -> Result<(), ChainError> {
        match self.0 {
            Some((word, number)) if words::load(word) != number => Err(ChainError::Fenced),
            _ => Ok(()),
        }
    }
}

impl Executor {
    /// An executor with a clock of its own. Without a lease it is never fenced.
    pub(crate) fn new(region: Arc<Region>, lease: Option<Lease>) -> Self {
        Self { region, lease, clock: Clock::new() }
    }

    /// Checks that the client is not fenced.
    ///
    /// # Errors
    /// [`ChainError::Fenced`].
    pub(crate) fn check_lease(&self) -> Result<(), ChainError> {
        self.lease_word()?.check()
    }

    /// The address of a WRITE of this many words, for the system to copy a part to. Checks lease
    /// and deadline, so it has to be called for each part.
    ///
    /// # Errors
    /// [`ChainError`]: the part must not be written.
    pub(crate) fn address_to_write(
        &self,
        remote: u64,
        words: usize,
        deadline: Nanos,
    ) -> Result<*mut u64, ChainError> {
        let address = self.region.address_to_change(remote, words)?;
        self.check_accepted(self.lease_word()?, Clock::roughly, deadline)?;
        Ok(address)
    }

    /// Executes a part of a WRITE.
    ///
    /// # Errors
    /// [`ChainError`], as of a WRITE.
    pub(crate) fn write_words(
        &self,
        remote: u64,
        source: &[u64],
        deadline: Nanos,
    ) -> Result<(), ChainError> {
        self.write(remote, source, self.lease_word()?, deadline)
    }

    /// Finds the word of the lease, once for a chain. Each check loads it.
    #[inline]
    fn lease_word(&self) -> Result<LeaseWord<'_>, ChainError> {
        let Some(lease) = self.lease else { return Ok(LeaseWord(None)) };
        Ok(LeaseWord(Some((self.region.word(lease.offset)?, lease.number))))
    }

    /// Prefetches the memory of all verbs of a chain at once.
    #[inline]
    pub(crate) fn prefetch_chain(&self, chain: &[Verb]) {
        for verb in chain {
            match *verb {
                Verb::Read { remote, bytes, .. } | Verb::ReadPart { remote, bytes, .. } => {
                    self.region.prefetch(remote, bytes.min(PREFETCH_BYTES_MAX));
                }
                Verb::Write { remote, bytes, .. } | Verb::WritePart { remote, bytes, .. } => {
                    self.region.prefetch_to_change(remote, bytes.min(PREFETCH_BYTES_MAX));
                }
                Verb::WriteU32 { remote, .. }
                | Verb::WriteWord { remote, .. }
                | Verb::CompareSwap { remote, .. } => {
                    self.region.prefetch_word_to_change(remote & !7);
                }
            }
        }
    }

    /// Prefetches the memory of a PUT.
    #[inline]
    fn prefetch_put(&self, put: &PutChain<'_>) {
        self.region.prefetch_to_change(put.block, put.bytes.min(PREFETCH_BYTES_MAX));
        self.region.prefetch_word_to_change(put.mark & !7);
        self.region.prefetch_word_to_change(put.slot);
    }

    /// Executes the chain of a PUT, with the checks of [`Executor::execute`].
    #[inline(always)]
    fn put(
        &self,
        memory: &mut impl ChainMemory,
        put: &PutChain<'_>,
        deadline: Nanos,
    ) -> Result<u64, ChainError> {
        let lease = self.lease_word()?;
        self.write(put.block, memory.source(put.from, put.bytes), lease, deadline)?;
        self.mark_and_swap(put, lease, deadline)
    }

    /// Executes the last two verbs of the chain of a PUT.
    #[inline(always)]
    fn mark_and_swap(
        &self,
        put: &PutChain<'_>,
        lease: LeaseWord<'_>,
        deadline: Nanos,
    ) -> Result<u64, ChainError> {
        self.check_accepted(lease, Clock::roughly, deadline)?;
        self.region.store_half(put.mark, put.mark_value)?;
        self.check_accepted(lease, Clock::now, deadline)?;
        self.region.compare_swap(put.slot, put.expected, put.desired)
    }

    /// Executes a chain of one READ.
    #[inline(always)]
    fn read(
        &self,
        memory: &mut impl ChainMemory,
        remote: u64,
        into: Buffer,
        bytes: u32,
    ) -> Result<(), ChainError> {
        self.lease_word()?.check()?;
        self.region.read(remote, memory.target(into, bytes))
    }

    /// Executes a chain. The READs and WRITEs of `memory` are asked for in the chain's order.
    #[inline]
    pub(crate) fn execute(
        &self,
        memory: &mut impl ChainMemory,
        chain: &[Verb],
        deadline: Nanos,
    ) -> Result<u64, ChainError> {
        let (mut found, mut swapped) = (0, false);
        let lease = self.lease_word()?;
        lease.check()?;
        for (number, verb) in chain.iter().enumerate() {
            match *verb {
                Verb::Read { remote, into, bytes } => {
                    if swapped {
                        // By contract 2 this READ returns no word from before the swap.
                        order_read_after_swap::<AtomicU64>();
                    }
                    self.region.read(remote, memory.target(into, bytes))?;
                }
                Verb::Write { remote, from, bytes } => {
                    self.write(remote, memory.source(from, bytes), lease, deadline)?;
                }
                Verb::ReadPart { remote, into, at, bytes } => {
                    lease.check()?;
                    let target = memory.target_part(into, at, bytes);
                    let sum = self.region.read_summed(remote, target)?;
                    memory.note_sum(number, sum);
                }
                Verb::WritePart { remote, from, at, bytes } => {
                    let source = memory.source_part(from, at, bytes);
                    let sum = self.write_summed(remote, source, lease, deadline)?;
                    memory.note_sum(number, sum);
                }
                Verb::WriteU32 { remote, value } => {
                    self.check_accepted(lease, Clock::roughly, deadline)?;
                    self.region.store_half(remote, value)?;
                }
                Verb::WriteWord { remote, value } => {
                    self.check_accepted(lease, Clock::now, deadline)?;
                    self.region.store(remote, value)?;
                }
                Verb::CompareSwap { remote, expected, desired } => {
                    self.check_accepted(lease, Clock::now, deadline)?;
                    found = self.region.compare_swap(remote, expected, desired)?;
                    swapped = true;
                }
            }
        }
        Ok(found)
    }

    /// Checks lease and clock again every few kilobytes, because the memory of a fenced or late
    /// client may have another use.
    #[inline(always)]
    fn write(
        &self,
        remote: u64,
        source: &[u64],
        lease: LeaseWord<'_>,
        deadline: Nanos,
    ) -> Result<(), ChainError> {
        if source.len() <= WRITE_WORDS_MAX {
            self.check_accepted(lease, Clock::roughly, deadline)?;
            return self.region.write(remote, source);
        }
        self.write_long(remote, source, lease, deadline)
    }

    /// Checks the lease and the deadline. For a verb that changes a word of the index, `time` must
    /// be [`Clock::now`]. It reads the clock in order with other accesses, and
    /// [`ROUND_TRIP_MIN_NS`] relies on that. For other verbs a reading accurate to a microsecond is
    /// enough, because [`LATENESS_MAX_NS`] is much longer.
    #[inline]
    fn check_accepted(
        &self,
        lease: LeaseWord<'_>,
        time: impl Fn(&Clock) -> Nanos,
        deadline: Nanos,
    ) -> Result<(), ChainError> {
        lease.check()?;
        if time(&self.clock) > deadline { Err(ChainError::Late) } else { Ok(()) }
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
            lane.chain[..chain.len()].copy_from_slice(chain);
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
            let Lane { chain, verbs, buffers, sums, deadline, .. } =
                &mut self.lanes[usize::from(posted.lane.0)];
            posted.result = match posted.kind {
                PostedKind::Read { remote, into, bytes } => {
                    executor.read(buffers, remote, into, bytes).map(|()| 0)
                }
                PostedKind::Lane => match PutChain::of(&chain[..*verbs]) {
                    Some(put) => executor.put(buffers, &put, *deadline),
                    None => {
                        let mut memory = LaneMemory { buffers, sums, lent: &mut self.lent };
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
        if chain.len() > 1 {
            // Without it each verb would wait for its own memory: a swap waits for earlier writes.
            executor.prefetch_chain(chain);
        }
        let Lane { buffers, sums, .. } = lane;
        let mut memory = LaneMemory { buffers, sums, lent: &mut self.lent };
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

    fn part_sum(&mut self, lane: LaneId, verb: usize, _: (Buffer, u32, u32)) -> u32 {
        self.lanes[usize::from(lane.0)].sums[verb]
    }

    /// A doorbell executes chains to their end, so none has memory after it.
    fn lend(&mut self, memory: Lent) -> bool {
        self.lent = memory;
        true
    }

    /// Copies from the region to the sink.
    fn run_long_read(
        &mut self,
        lane: LaneId,
        region: RegionIndex,
        remote: u64,
        read: LongRead,
        sink: &mut dyn ReadSink,
    ) -> Result<(), ChainError> {
        self.doorbells += 1;
        let executor = &self.executors[region.index()];
        let lane = &mut self.lanes[usize::from(lane.0)];
        lane.counters.count_only_read(read.bytes);
        executor.read_long(&mut lane.buffers, remote, read, sink)
    }

    /// Copies from the source to the region.
    fn run_long_write(
        &mut self,
        lane: LaneId,
        region: RegionIndex,
        chain: &[Verb],
        deadline: Nanos,
        write: LongWrite<'_>,
    ) -> Result<u64, ChainError> {
        let Some(put) = PutChain::of(chain) else {
            return run_gathered(self, lane, region, chain, deadline, write);
        };
        self.doorbells += 1;
        let executor = &self.executors[region.index()];
        let lane = &mut self.lanes[usize::from(lane.0)];
        lane.counters.count_put(put.bytes);
        executor.put_long(&mut lane.buffers, &put, deadline, write)
    }

    fn counters(&self) -> Counters {
        Counters::sum(self.doorbells, self.lanes.iter().map(|lane| &lane.counters))
    }

    #[inline]
    fn lane_counters(&self, lane: LaneId) -> &Counters {
        &self.lanes[usize::from(lane.0)].counters
    }
}

mod long;
mod memory;
mod put_chain;
mod setup;
#[cfg(test)]
mod tests;
