//! The fabric of the simulator and its lanes. Chains execute word by word, when the scheduler
//! chooses them.

use std::cell::{OnceCell, RefCell};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use farside_fabric::{
    Buffer, ChainError, Completion, Counters, Fabric, LaneId, Nanos, RegionIndex, Timing, Verb,
};
use farside_layout::{BlockHeader, ExtentTable, SizeClass, SlotWord, extent_data_offset};
use farside_protocol::held_blocks::HeldBlocks;
use zerocopy::{FromBytes, IntoBytes};

use crate::cluster::{ClusterState, FORMER, OwnerState};
use crate::memory::{Clock, EXPIRES_AT_MS, START_NS, TIMING, global, local, mix};
use crate::mutant::Mutant;
use crate::mutant_fabric::{MutantFabric, swap_of};
use crate::region::SHAPE;
use crate::world::World;

/// A wait of at most this many nanoseconds takes no time. So executions that differ only in such
/// waits have equal states.
pub(crate) const PAUSE_NS_MAX: Nanos = 1_000_000;

/// The blocks that a session holds, once it has opened its region.
pub(crate) type WatchedBlocks = Rc<OnceCell<Arc<HeldBlocks>>>;

/// One client's connection to the simulated region.
pub(crate) struct SimFabric {
    world: Rc<RefCell<World>>,
    /// The process of the first lane. The other lanes' processes have the next numbers.
    process: usize,
    pub(crate) lanes: Vec<Lane>,
    mutant_fabric: Option<Box<MutantFabric>>,
    held_blocks: WatchedBlocks,
    /// The client's clock.
    pub(crate) clock: Clock,
    /// Whether the connection is lost. If so, chains that are posted now are not executed, and the
    /// session does not learn whether older ones were.
    pub(crate) is_lost: bool,
    /// Whether chains execute when they are posted.
    pub(crate) immediate: bool,
    /// A hash of everything that completed.
    pub(crate) observed: u64,
    /// The only lane whose completion `poll` may return.
    pub(crate) polled_lane: LaneId,
    /// Whether another process could notice this step. If so, unnoticeable writes that follow
    /// belong to the next step, so that the scheduler can let other processes act before them.
    pub(crate) noticed: bool,
}

impl SimFabric {
    pub(crate) fn new(
        world: Rc<RefCell<World>>,
        process: usize,
        lanes: u16,
        mutant_fabric: Option<Box<MutantFabric>>,
        held_blocks: WatchedBlocks,
        pace: u8,
    ) -> Self {
        let clock = Clock::new(pace, world.borrow().now);
        let lanes = (0..lanes).map(|_| Lane::new()).collect();
        Self {
            world,
            process,
            lanes,
            mutant_fabric,
            held_blocks,
            clock,
            is_lost: false,
            immediate: true,
            observed: 0,
            polled_lane: LaneId(0),
            noticed: false,
        }
    }

    /// Whether the client follows this mutant.
    pub(crate) fn follows(&self, mutant: Mutant) -> bool {
        self.mutant_fabric.as_ref().is_some_and(|fabric| fabric.mutant == mutant)
    }

    /// Whether the client follows this mutant. If so, the mutant counts as fired.
    pub(crate) fn has_mutant(&self, mutant: Mutant) -> bool {
        let has = self.follows(mutant);
        if has {
            self.world.borrow_mut().note_fired(mutant);
        }
        has
    }

    /// What the client's clock shows, whatever its mutant reports.
    pub(crate) fn clock_shows(&self) -> Nanos {
        self.clock.shows(self.world.borrow().now)
    }

    pub(crate) fn lane(&self, lane: LaneId) -> &Lane {
        &self.lanes[usize::from(lane.0)]
    }

    /// Accesses one group of words of the current verb, and then all words up to the next access
    /// that another process could notice.
    pub(crate) fn advance(&mut self, lane: LaneId, unit: usize) {
        let state = &mut self.lanes[usize::from(lane.0)];
        let words = state.units.swap_remove(unit);
        // The order of the other groups must not depend on which group was first.
        state.units.sort_unstable();
        self.noticed = !std::mem::take(&mut state.is_unnoticed);
        self.access(lane, words);
        self.access_unnoticed(lane);
    }

    /// Accesses words that no other process can notice, up to the next noticeable one.
    fn access_unnoticed(&mut self, lane: LaneId) {
        let id = usize::from(lane.0);
        while self.lanes[id].phase == Phase::Posted && self.lanes[id].units.is_empty() {
            let state = &mut self.lanes[id];
            let unnoticed = std::mem::take(&mut state.unnoticed);
            let reads = read_target(&state.chain[state.verb_index]).is_some();
            if unnoticed != 0 && self.noticed && state.all_unnoticed && !reads {
                state.units.push(unnoticed);
                state.is_unnoticed = true;
                return;
            }
            if unnoticed != 0 {
                self.access(lane, unnoticed);
                continue;
            }
            self.lanes[id].verb_index += 1;
            if self.lanes[id].verb_index == self.lanes[id].chain.len() {
                let found = self.lanes[id].found;
                self.complete(lane, Ok(found));
            } else {
                self.start_verb(lane);
            }
        }
    }

    /// Divides the words of the current verb into groups that others could notice, and the rest.
    fn start_verb(&mut self, lane: LaneId) {
        let state = &mut self.lanes[usize::from(lane.0)];
        let (remote, bytes) = extent(&state.chain[state.verb_index]);
        state.skipped = 0;
        let index = self.world.borrow().memory.index(global(state.region, remote & !7), bytes);
        let index = match index {
            Ok(index) => index,
            Err(error) => return self.complete(lane, Err(error)),
        };
        let words = (bytes / 8) as usize;
        if self.immediate {
            return self.copy_all(lane, index, 0..words);
        }
        let mut part = 0..words;
        if words > 64 {
            let (skipped, few) = self.world.borrow().noticeable(index, words);
            assert!(few <= 64, "the words of a long READ that change are close to each other");
            part = skipped..skipped + few;
            self.copy_all(lane, index, 0..skipped);
            self.copy_all(lane, index, part.end..words);
        }
        let world = self.world.borrow();
        let state = &mut self.lanes[usize::from(lane.0)];
        state.skipped = part.start;
        state.unnoticed = world.units(index + part.start, part.len(), &mut state.units);
        state.all_unnoticed = state.units.is_empty();
    }

    fn copy_all(&mut self, lane: LaneId, index: usize, words: Range<usize>) {
        let state = &mut self.lanes[usize::from(lane.0)];
        let verb = state.chain[state.verb_index];
        if let Some((into, first)) = read_target(&verb) {
            let world = &mut *self.world.borrow_mut();
            let buffer = &mut state.buffers[into as usize];
            buffer.resize(buffer.len().max(first + words.end), 0);
            let found = world.memory.slice(index + words.start, words.len());
            buffer[first + words.start..first + words.end].copy_from_slice(found);
            if world.began {
                let hash = found.iter().fold(words.start as u64, |hash, word| mix(hash, *word));
                state.progress ^= mix(state.verb_index as u64, hash);
                let process = self.process + usize::from(lane.0);
                words.for_each(|word| world.note_read(process, index + word));
            }
        } else {
            for word in words {
                self.access(lane, 1 << word);
            }
        }
    }

    /// Accesses these words of the current verb.
    fn access(&mut self, lane: LaneId, mut words: u64) {
        let process = self.process + usize::from(lane.0);
        while words != 0 {
            let word = words.trailing_zeros() as usize;
            words &= words - 1;
            let word = self.lanes[usize::from(lane.0)].skipped + word;
            if let Err(error) = self.access_word(lane, process, word) {
                return self.complete(lane, Err(error));
            }
        }
    }

    fn access_word(&mut self, lane: LaneId, process: usize, word: usize) -> Result<(), ChainError> {
        let world = &mut *self.world.borrow_mut();
        let state = &mut self.lanes[usize::from(lane.0)];
        let verb = state.chain[state.verb_index];
        let (remote, bytes) = extent(&verb);
        let index = world.memory.index(global(state.region, remote & !7), bytes)? + word;
        let tag = (state.verb_index as u64) << 32 | word as u64;
        if read_target(&verb).is_none() {
            let mutant = self.mutant_fabric.as_ref().map(|fabric| fabric.mutant);
            // Until now all accesses of the chain were unnoticeable. So they can count as not made
            // yet, and the chain as queued.
            if mutant == Some(Mutant::QueueUncounted)
                && world.now > state.deadline
                && std::mem::take(&mut state.is_queued)
            {
                // The device retries for L from the time at which the chain leaves the queue.
                state.deadline = world.now + TIMING.lateness_max_ns;
                world.note_fired(Mutant::QueueUncounted);
            }
            if world.now > state.deadline {
                return Err(ChainError::Late);
            }
            if mutant == Some(Mutant::BlocksOfTwoOwners) && write_source(&verb).is_some() {
                world.note_fired(Mutant::BlocksOfTwoOwners);
            }
        }
        if read_target(&verb).is_none() && !matches!(verb, Verb::CompareSwap { .. }) {
            // Contract 4: clients change words and hints of slots by compare-and-swap only.
            let written = global(state.region, remote) + word as u64 * 8;
            let written = local(written).1;
            let is_slot =
                world.region.block_at(written).is_none() && world.region.slot_at(written).is_some();
            assert!(self.mutant_fabric.is_some() || !is_slot, "a WRITE of a slot");
        }
        let before = world.memory.load(index);
        let brings = read_target(&verb).is_some() || matches!(verb, Verb::CompareSwap { .. });
        state.progress ^= mix(tag, if brings { before } else { 1 });
        match verb {
            Verb::Read { .. } | Verb::ReadPart { .. } => {
                let (into, first) = read_target(&verb).expect("a READ");
                let (buffer, word) = (&mut state.buffers[into as usize], first + word);
                buffer.resize(buffer.len().max(word + 1), 0);
                buffer[word] = before;
                world.note_read(process, index);
            }
            Verb::Write { .. } | Verb::WritePart { .. } => {
                let (from, start) = write_source(&verb).expect("a WRITE");
                let source = &state.buffers[from as usize].as_bytes()[start..];
                let bytes = source.as_chunks().0.get(word).copied().unwrap_or_default();
                world.write(process, index, u64::from_ne_bytes(bytes));
            }
            Verb::ReadSplit { .. } | Verb::WriteSplit { .. } => panic!("no memory can be lent"),
            Verb::WriteU32 { remote, value } => {
                let shift = (remote & 4) * 8;
                let others = before & !(0xffff_ffff << shift);
                world.write(process, index, others | u64::from(value) << shift);
            }
            Verb::WriteWord { value, .. } => world.write(process, index, value),
            Verb::CompareSwap { expected, desired, .. } => {
                world.now += std::mem::take(&mut state.delay);
                state.found = before;
                if let (true, Some((_, _, expected, desired)), Some(held_blocks)) =
                    (before == expected, swap_of(&[verb]), self.held_blocks.get())
                {
                    world.check_held([expected, desired].map(SlotWord::from_bits), held_blocks);
                }
                world.swap(process, index, (expected, desired));
            }
        }
        Ok(())
    }

    pub(crate) fn complete(&mut self, lane: LaneId, mut result: Result<u64, ChainError>) {
        let process = self.process + usize::from(lane.0);
        let state = &mut self.lanes[usize::from(lane.0)];
        if (self.is_lost || state.is_cut) && result.is_ok() {
            result = Err(state.fate(false));
        }
        if let (Some(fabric), Err(error)) = (&self.mutant_fabric, &mut result) {
            let truth = *error;
            fabric.fail(error);
            if truth != *error {
                self.world.borrow_mut().note_fired(fabric.mutant);
            }
        }
        state.units.clear();
        state.unnoticed = 0;
        state.result = result;
        state.phase = Phase::Complete;
        let world = &mut *self.world.borrow_mut();
        if world.began {
            world.now = world.now.max(state.posted_at + world.round_trip_ns);
        }
        if let (Some(fabric), Ok(found)) = (&mut self.mutant_fabric, &mut state.result) {
            let truth = (state.buffers.clone(), *found);
            fabric.complete(&state.posted_chain, &mut state.buffers, found);
            if world.began && (&truth.0, truth.1) != (&state.buffers, *found) {
                world.note_fired(fabric.mutant);
            }
        }
        let reported = match &state.result {
            Ok(found) => *found,
            Err(error) => {
                world.note(process, || format!("the chain ends: {error}"));
                mix(1, state.verb_index as u64)
            }
        };
        self.observed = mix(mix(self.observed, process as u64), mix(state.progress, reported));
    }

    /// Ends a lane's wait. A wait longer than `PAUSE_NS_MAX` moves the clock.
    pub(crate) fn wake(&mut self, lane: LaneId) {
        let state = &mut self.lanes[usize::from(lane.0)];
        let Phase::Waiting(until) = state.phase else { return };
        let world = &mut *self.world.borrow_mut();
        if until.saturating_sub(world.now) > PAUSE_NS_MAX {
            world.now = until;
        }
        state.phase = Phase::Complete;
        state.result = Ok(0);
        self.observed = mix(mix(self.observed, 2), world.now);
    }

    /// Takes the buffers of another connection's lanes.
    pub(crate) fn take_buffers(&mut self, other: &mut Self) {
        for (lane, other) in self.lanes.iter_mut().zip(&mut other.lanes) {
            std::mem::swap(&mut lane.buffers, &mut other.buffers);
        }
    }

    /// Copies an image that was assembled behind the operation's input over the input.
    fn overwrite_input(&mut self, lane: LaneId, chain: &[Verb]) {
        let from = Buffer::NewBlock;
        let Some(Verb::WritePart { from: Buffer::NewBlock, at, bytes, .. }) = chain.first() else {
            return;
        };
        let at = *at as usize;
        // The image itself stays as it is.
        let bytes = at.min(*bytes as usize);
        self.buffer_mut(lane, from).copy_within(at..at + bytes, 0);
        self.world.borrow_mut().note_fired(Mutant::InputOverwritten);
    }

    /// Makes the session forget that it holds the extents which the lane is about to unlink.
    fn drop_old_extents(&self, lane: LaneId) {
        let Some(held_blocks) = self.held_blocks.get() else { return };
        let count = || held_blocks.lists().addresses().count();
        let before = count();
        held_blocks.drop_old_extents(lane);
        if count() != before {
            self.world.borrow_mut().note_fired(Mutant::OldExtentsUnheld);
        }
    }
}

/// The sum of the part with this number by the head in a buffer, if that part is READ at `remote`.
fn expected_sum(head: &[u8], number: usize, remote: u64) -> Option<u32> {
    let (header, rest) = BlockHeader::ref_from_prefix(head).ok()?;
    let key_bytes = header.key_bytes();
    let table = &rest[key_bytes..][..header.value_bytes() as usize];
    let table = ExtentTable::decode(key_bytes, table, SHAPE).ok()?;
    let extent = table.extents.get(number)?;
    let start = extent.address().claimed_offset() + extent_data_offset(key_bytes);
    (start == remote).then(|| extent.sum())
}

impl Fabric for SimFabric {
    fn timing(&self, _: RegionIndex) -> Timing {
        TIMING
    }

    fn now(&self) -> Nanos {
        let world = &mut *self.world.borrow_mut();
        let now = self.clock.shows(world.now);
        // Mutants take effect only once the scenario begins.
        let Some(fabric) = self.mutant_fabric.as_ref().filter(|_| world.began) else { return now };
        let reported = fabric.now(now);
        if reported != now {
            world.note_fired(fabric.mutant);
        }
        reported
    }

    fn wall_clock_ns(&self) -> u64 {
        let now = self.clock_shows();
        let is_late = now / 1_000_000 >= EXPIRES_AT_MS && self.world.borrow().began;
        if is_late && self.has_mutant(Mutant::ExpiryIgnored) { START_NS } else { now }
    }

    fn post(&mut self, lane: LaneId, region: RegionIndex, chain: &[Verb], deadline: Nanos) {
        if swap_of(chain).is_some() && self.follows(Mutant::OldExtentsUnheld) {
            self.drop_old_extents(lane);
        }
        if self.follows(Mutant::InputOverwritten) {
            self.overwrite_input(lane, chain);
        }
        let state = &mut self.lanes[usize::from(lane.0)];
        state.region = region;
        state.counters.count(chain);
        state.posted_chain.clear();
        state.posted_chain.extend_from_slice(chain);
        state.chain.clear();
        state.chain.extend_from_slice(chain);
        {
            let world = &mut *self.world.borrow_mut();
            state.posted_at = world.now;
            state.posted_times = mix(state.posted_times, world.now);
            // By the world's clock: a mutant may change the client's.
            state.deadline = match self.mutant_fabric.as_ref().map(|fabric| fabric.mutant) {
                Some(mutant) if mutant.has_false_clock() => world.now + TIMING.lateness_max_ns,
                _ => self.clock.when(deadline),
            };
            (state.is_queued, state.progress, state.is_cut) = (true, 0, false);
            if let Some(fabric) = &mut self.mutant_fabric {
                fabric.post(&mut state.chain, &world.memory);
                state.delay = fabric.delay();
                if world.began && (state.delay > 0 || state.chain != state.posted_chain) {
                    world.note_fired(fabric.mutant);
                }
                state.progress = fabric.state();
            }
        }
        (state.verb_index, state.found, state.phase) = (0, 0, Phase::Posted);
        let given_up = |cluster: &ClusterState| cluster.owner == OwnerState::GivenUp;
        let is_gone =
            region == FORMER && self.world.borrow().cluster.as_ref().is_some_and(given_up);
        if self.is_lost || is_gone && !self.immediate {
            // The chain never leaves the device.
            return self.complete(lane, Err(ChainError::Fenced));
        }
        self.start_verb(lane);
        self.access_unnoticed(lane);
    }

    fn wait(&mut self, lane: LaneId, until: Nanos) {
        self.lanes[usize::from(lane.0)].phase = Phase::Waiting(self.clock.when(until));
        if self.immediate {
            self.wake(lane);
        }
    }

    fn ring(&mut self) {}

    fn poll(&mut self) -> Option<Completion> {
        let lane = &mut self.lanes[usize::from(self.polled_lane.0)];
        if lane.phase != Phase::Complete {
            return None;
        }
        lane.phase = Phase::Idle;
        Some(Completion { lane: self.polled_lane, result: lane.result })
    }

    fn relax(&mut self) {}

    fn buffer(&self, lane: LaneId, buffer: Buffer) -> &[u8] {
        self.lane(lane).buffers[buffer as usize].as_bytes()
    }

    fn buffer_mut(&mut self, lane: LaneId, buffer: Buffer) -> &mut [u8] {
        self.lanes[usize::from(lane.0)].buffers[buffer as usize].as_mut_bytes()
    }

    fn reserve(&mut self, lane: LaneId, buffer: Buffer, bytes: usize) -> bool {
        let buffer = &mut self.lanes[usize::from(lane.0)].buffers[buffer as usize];
        buffer.resize(buffer.len().max(bytes.div_ceil(8)), 0);
        true
    }

    /// A mutant that ignores checksums finds every part as its head's table says.
    fn part_sum(
        &mut self,
        lane: LaneId,
        verb: usize,
        part: (Buffer, u32, u32),
        before: u32,
    ) -> u32 {
        assert_eq!(before, 0, "only extents have parts here");
        let (buffer, at, bytes) = part;
        let content = &self.buffer(lane, buffer)[at as usize..][..bytes as usize];
        let mutant = self.mutant_fabric.as_ref().filter(|_| self.world.borrow().began);
        let ignores = mutant.is_some_and(|fabric| fabric.mutant.ignores_checksums());
        match self.lane(lane).posted_chain[verb] {
            Verb::ReadPart { remote, .. } if ignores => {
                let start = SizeClass::FIRST_HEAD.block_bytes() as u32;
                let number = ((at - start) / SHAPE.part_bytes_max as u32) as usize;
                let head = self.buffer(lane, Buffer::ReadBlock);
                expected_sum(head, number, remote).unwrap_or_default()
            }
            _ => crc32fast::hash(content),
        }
    }

    fn counters(&self) -> Counters {
        let mut all = Counters::default();
        self.lanes.iter().for_each(|lane| all += lane.counters);
        all
    }

    fn lane_counters(&self, lane: LaneId) -> &Counters {
        &self.lane(lane).counters
    }
}

/// The state of a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Idle,
    /// A chain is under way.
    Posted,
    /// The lane waits until this time.
    Waiting(Nanos),
    /// The chain or the wait has ended, and `poll` has not returned it yet.
    Complete,
}

/// A lane and its chain.
pub(crate) struct Lane {
    pub(crate) phase: Phase,
    /// The region that the chain accesses.
    pub(crate) region: RegionIndex,
    /// The chain that the session posted, and the chain that is executed. They differ only if a
    /// mutant changed the chain.
    pub(crate) posted_chain: Vec<Verb>,
    pub(crate) chain: Vec<Verb>,
    /// The index of the current verb.
    pub(crate) verb_index: usize,
    /// The groups of the verb's words that are still to be accessed, each in one step. Bit 0 of a
    /// group is word `skipped`.
    pub(crate) units: Vec<u64>,
    /// The number of the verb's first words that were accessed before the groups were made.
    pub(crate) skipped: usize,
    /// Whether `units` has one group only, and no other process can notice its access.
    pub(crate) is_unnoticed: bool,
    /// The words whose access no other process can notice, and whether these are all words.
    pub(crate) unnoticed: u64,
    pub(crate) all_unnoticed: bool,
    pub(crate) posted_at: Nanos,
    /// A hash of the times at which the operation's chains were posted.
    pub(crate) posted_times: u64,
    /// How long the operations take that the chain stands for, before its first compare-and-swap.
    pub(crate) delay: Nanos,
    /// For `QueueUncounted`: the chain may still be in its queue.
    pub(crate) is_queued: bool,
    pub(crate) deadline: Nanos,
    pub(crate) found: u64,
    /// The session gets no completion of the chain, which is executed.
    pub(crate) is_cut: bool,
    pub(crate) result: Result<u64, ChainError>,
    /// A hash of the words that the chain has read so far. It does not depend on the order.
    pub(crate) progress: u64,
    pub(crate) buffers: [Vec<u64>; Buffer::COUNT],
    pub(crate) counters: Counters,
}

impl Lane {
    pub(crate) fn new() -> Self {
        Self {
            phase: Phase::Idle,
            region: RegionIndex::FIRST,
            posted_chain: Vec::with_capacity(4),
            chain: Vec::with_capacity(4),
            verb_index: 0,
            units: Vec::with_capacity(4),
            skipped: 0,
            is_unnoticed: false,
            unnoticed: 0,
            all_unnoticed: false,
            posted_at: 0,
            posted_times: 0,
            delay: 0,
            is_queued: false,
            deadline: 0,
            found: 0,
            is_cut: false,
            result: Ok(0),
            progress: 0,
            buffers: std::array::from_fn(|_| vec![0; 32]),
            counters: Counters::default(),
        }
    }

    /// Whether the lane's chain has a verb that writes.
    pub(crate) fn changes(&self) -> bool {
        self.chain.iter().any(|verb| read_target(verb).is_none())
    }

    /// Returns the error of a chain that was cut off, or whose completion was lost. `fenced`: the
    /// server has fenced the client, so that a chain cut before any atomic verb is known to be
    /// refused.
    pub(crate) fn fate(&self, fenced: bool) -> ChainError {
        let is_atomic = |verb: &Verb| matches!(verb, Verb::CompareSwap { .. });
        let done = self.chain.iter().take(self.verb_index).any(is_atomic);
        if !self.changes() || fenced && !done { ChainError::Fenced } else { ChainError::Unknown }
    }
}

/// Returns the buffer of a READ, and the number of the word there at which it begins.
fn read_target(verb: &Verb) -> Option<(Buffer, usize)> {
    match *verb {
        Verb::Read { into, .. } => Some((into, 0)),
        Verb::ReadPart { into, at, .. } => Some((into, at as usize / 8)),
        _ => None,
    }
}

/// Returns the buffer of a WRITE, and the offset there at which it begins, in bytes.
fn write_source(verb: &Verb) -> Option<(Buffer, usize)> {
    match *verb {
        Verb::Write { from, .. } => Some((from, 0)),
        Verb::WritePart { from, at, .. } => Some((from, at as usize)),
        _ => None,
    }
}

/// Returns the offset that a verb accesses and the number of bytes, in whole words.
pub(crate) fn extent(verb: &Verb) -> (u64, u64) {
    match *verb {
        Verb::Read { remote, bytes, .. }
        | Verb::Write { remote, bytes, .. }
        | Verb::ReadPart { remote, bytes, .. }
        | Verb::WritePart { remote, bytes, .. }
        | Verb::ReadSplit { remote, bytes, .. }
        | Verb::WriteSplit { remote, bytes, .. } => (remote, u64::from(bytes)),
        Verb::WriteU32 { remote, .. }
        | Verb::WriteWord { remote, .. }
        | Verb::CompareSwap { remote, .. } => (remote, 8),
    }
}
