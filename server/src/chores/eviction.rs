//! Eviction: makes room in a full region that is used as a cache.
//!
//! The server evicts ahead of demand. It keeps as many free blocks of each class as clients will
//! take while evicted blocks rest for GRACE. Requests of clients set this amount, and begin the
//! work; the serving thread then does it in steps of [`STEP_NS`], between two turns of messages.
//! Without requests it sleeps.
//!
//! A hand visits the blocks of each class in turn ([`hand`]). Only their headers are read, and
//! [`policy`] decides which of them go, by what clients report that they read . For
//! these the server finds the slot by the key, as a client does. So no eviction walks the index.
//! [`drains`] moves memory between classes.

mod demand;
mod drains;
mod hand;
mod policy;
#[cfg(test)]
mod tests;

use farside_control::BLOCKS_PER_MESSAGE_MAX;
use farside_fabric::{ChainError, Nanos};
use farside_layout::{
    BLOCK_HEADER_BYTES, BlockAddress, BlockHeader, BlockRef, NamedBlock, SizeClass,
};
use farside_protocol::Random;
use zerocopy::{FromBytes, IntoBytes};

use crate::chores::depot::{BlockError, Depot, VisitedBlock};
use crate::chores::expiry::{Reaper, RemovedBlock};
use crate::region::content::{BlockReader, FoundBlock};
use crate::region::index::Index;
use crate::region::own_endpoint::OwnEndpoint;
pub(crate) use demand::ClassEvictions;
use demand::{ClassDemand, EvictionAges};
use drains::{Drains, PLAN_NS};
use hand::{Hand, RUN, Search};
use policy::{Batch, Candidate, Pins, ReadPulls};

/// How long a step evicts. Clients wait meanwhile for the answers to their messages. A session asks
/// for blocks some 200 PUTs before it has none, so an answer should take less time than those.
const STEP_NS: Nanos = 50_000;
/// Limit on the keys of one class that a step evicts before the others have their turn.
const BATCH: usize = 64;
/// Limit on the bytes of the blocks that a batch evicts.
const BATCH_BYTES: u64 = 1 << 20;
/// Once a search has looked at the headers of this many blocks for each eviction that is wanted, it
/// only takes a read away from blocks that were read. So it goes on fast.
const HEADERS_PER_EVICTION: usize = 8;
/// The headers of the blocks of so many runs are prefetched together.
const RUNS_AHEAD_MAX: usize = 4;
/// How many runs are visited before the clock is read again.
const RUNS_PER_LOOK: usize = 16;
/// How many random runs without any candidate end a sample.
const EMPTY_RUNS_MAX: usize = 64;

/// What eviction works with.
pub(crate) struct Tools<'t> {
    pub(crate) index: &'t Index,
    pub(crate) own: &'t OwnEndpoint,
    pub(crate) reaper: &'t mut Reaper,
    pub(crate) depot: &'t mut Depot,
}

/// The result of an attempt to evict the keys of some blocks.
struct Evictions {
    /// How many blocks were looked at.
    tried: usize,
    /// How many of them had a key, which was removed.
    evicted: usize,
}

/// Gives blocks to the depot that were just unlinked.
fn give_unlinked(
    depot: &mut Depot,
    blocks: Vec<RemovedBlock>,
    now: Nanos,
) -> Result<(), BlockError> {
    let mut result = Ok(());
    for blocks in blocks.chunk_by(|one, next| one.class == next.class) {
        let class = blocks[0].class;
        let blocks = blocks.iter().map(|removed| removed.block).collect();
        result = depot.give_found(class, blocks, now).and(result);
    }
    result
}

/// Chooses the keys to remove, and removes them.
pub(crate) struct Evictor {
    reader: BlockReader,
    grace: Nanos,
    /// How old a word may be for a CAS that expects it (invariant I4).
    proof_age_max_ns: Nanos,
    demands: [ClassDemand; SizeClass::COUNT],
    /// The classes that may have too few free blocks.
    low: Vec<SizeClass>,
    /// By the index of the class.
    hands: Vec<Hand>,
    pub(crate) pulls: ReadPulls,
    pins: Pins,
    ages: EvictionAges,
    drains: Drains,
    /// When to look for spans to drain, if there were requests.
    plan_at: Option<Nanos>,
    planned_at: Nanos,
    /// A class whose blocks clients should return, because a span cannot become empty otherwise.
    recall: Option<SizeClass>,
    random: Random,
    /// The number of keys that were removed.
    pub(crate) evicted: u64,
}

impl Evictor {
    /// `times` are GRACE, and how old a word may be for a CAS that expects it.
    pub(crate) fn new(reader: BlockReader, times: (Nanos, Nanos)) -> Self {
        let (grace, proof_age_max_ns) = times;
        Self {
            reader,
            grace,
            proof_age_max_ns,
            demands: [ClassDemand::default(); _],
            low: Vec::new(),
            hands: SizeClass::all().map(Hand::new).collect(),
            pulls: ReadPulls::new(),
            pins: Pins::new(),
            ages: EvictionAges::new(),
            drains: Drains::default(),
            plan_at: None,
            planned_at: 0,
            recall: None,
            random: Random::new(0x9e37_79b9_7f4a_7c15),
            evicted: 0,
        }
    }

    /// Notes a request for `count` blocks, which got `given`.
    pub(crate) fn note_request(
        &mut self,
        class: SizeClass,
        (count, given): (u32, usize),
        depot: &Depot,
        now: Nanos,
    ) {
        let demand = &mut self.demands[usize::from(class.index())];
        let count = u64::from(count).min(BLOCKS_PER_MESSAGE_MAX as u64);
        demand.note(count, given as u64, self.grace, now);
        let is_low = self.missing(class, depot) > 0;
        if is_low && !self.low.contains(&class) {
            self.low.push(class);
        }
        if is_low || depot.chunks_missing() > 0 {
            self.plan_at.get_or_insert(self.planned_at.saturating_add(PLAN_NS));
        }
    }

    /// Returns how many blocks of the class have to be evicted so that enough are free or rest.
    fn missing(&self, class: SizeClass, depot: &Depot) -> u64 {
        let demand = &self.demands[usize::from(class.index())];
        let (available, resting) = depot.blocks_to_give(class);
        let target = demand.target(depot.blocks_lasting(class), self.grace);
        target.saturating_sub(available + resting)
    }

    /// Returns when to call [`Evictor::step`]; `None` without work.
    pub(crate) fn next_step_at(&self) -> Option<Nanos> {
        let low = (!self.low.is_empty()).then_some(0);
        [low, self.plan_at, self.drains.next_at()].into_iter().flatten().min()
    }

    /// Evicts keys for [`STEP_NS`], if there is so much to do. Returns the class whose blocks
    /// clients should return, if there is one.
    pub(crate) fn step(&mut self, tools: &mut Tools<'_>) -> Result<Option<SizeClass>, ChainError> {
        let mut now = tools.own.now();
        let until = now.saturating_add(STEP_NS);
        if self.plan_at.is_some_and(|at| at <= now) {
            (self.plan_at, self.planned_at) = (None, now);
            if self.plan(tools, now)? {
                self.plan_at = Some(now.saturating_add(PLAN_NS));
            }
        }
        while now < until {
            let next = (!self.low.is_empty()).then(|| self.low.remove(0));
            if let Some(class) = next {
                self.make_room(class, tools, until)?;
                if self.missing(class, tools.depot) > 0 && !self.rests(class, tools.own.now()) {
                    self.low.push(class);
                }
            }
            let has_drained = self.drain(tools, now, until)?;
            if next.is_none() && !has_drained {
                break;
            }
            now = tools.own.now();
        }
        Ok(self.recall.take())
    }

    /// Evicts a first few keys of this class for a request that found no blocks. Returns how many
    /// were evicted.
    pub(crate) fn make_room_at_once(
        &mut self,
        class: SizeClass,
        tools: &mut Tools<'_>,
    ) -> Result<usize, ChainError> {
        let until = tools.own.now().saturating_add(STEP_NS);
        self.make_room(class, tools, until)
    }

    /// Whether keys of this class are being evicted, or blocks are being searched whose keys go.
    pub(crate) fn is_searching(&self, class: SizeClass, now: Nanos) -> bool {
        self.low.contains(&class) && !self.rests(class, now)
    }

    /// Whether pinned values are why a request for blocks of the class finds none.
    pub(crate) fn is_full_of_pins(&self, class: SizeClass, depot: &Depot) -> bool {
        // A class without spans gets those of others.
        self.pins.fill(class) || depot.spans(class).is_empty() && self.pins.fill_any()
    }

    /// Returns the evictions of the class since the server started.
    pub(crate) fn evictions(&self, class: SizeClass) -> ClassEvictions {
        self.ages.of(class)
    }

    /// Whether no key of the class could be evicted lately.
    fn rests(&self, class: SizeClass, now: Nanos) -> bool {
        self.hands[usize::from(class.index())].rests(now)
    }

    /// Evicts keys of this class if too few blocks are free: up to [`BATCH`], until `until`.
    /// Returns how many were evicted. Their blocks rest in the depot.
    fn make_room(
        &mut self,
        class: SizeClass,
        tools: &mut Tools<'_>,
        until: Nanos,
    ) -> Result<usize, ChainError> {
        let batch = (BATCH as u64).min(BATCH_BYTES / class.block_bytes()).max(1);
        let wanted = self.missing(class, tools.depot).min(batch) as usize;
        if wanted == 0 || self.rests(class, tools.own.now()) {
            return Ok(0);
        }
        self.evict_first(class, wanted, tools, until)
    }

    /// Evicts up to `wanted` keys of the class that go first, until `until`. Returns how many were
    /// evicted.
    fn evict_first(
        &mut self,
        class: SizeClass,
        wanted: usize,
        tools: &mut Tools<'_>,
        until: Nanos,
    ) -> Result<usize, ChainError> {
        let evictions = self.find(class, wanted, tools, until)?.into_evictions();
        let first = evictions.iter().copied().take(wanted);
        let done = self.evict_each(first, class, tools, until, give_unlinked)?;
        let hand = &mut self.hands[usize::from(class.index())];
        hand.found.extend_from_slice(&evictions[done.tried..]);
        if done.evicted > 0 {
            hand.note_evicted();
            self.pins.note_evicted(class);
        }
        Ok(done.evicted)
    }

    /// Moves the hand of the class until it has found `wanted` blocks that go, or until `until`.
    fn find(
        &mut self,
        class: SizeClass,
        wanted: usize,
        tools: &mut Tools<'_>,
        until: Nanos,
    ) -> Result<Batch, ChainError> {
        let (hand, blocks) = (usize::from(class.index()), tools.depot.blocks_lasting(class));
        let mut batch = Batch::new(wanted, tools.own.wall_ms());
        // The hand does not come by these again in this round.
        for address in std::mem::take(&mut self.hands[hand].found) {
            if let Some(block) = tools.depot.look(address)
                && let Some(candidate) = self.candidate(block, class, true)?
            {
                batch.add(candidate);
            }
        }
        let (mut runs, mut ahead) = (0, Vec::new());
        let runs_ahead = wanted.div_ceil(RUN as usize).min(RUNS_AHEAD_MAX);
        while !batch.is_complete() {
            let mut visited = 0;
            for _ in 0..runs_ahead {
                let run = self.hands[hand].next_run(tools.depot.spans(class));
                let (chunk, run) = run.unwrap_or_default();
                visited += run.end - run.start;
                for index in run {
                    let Some(block) = tools.depot.visit(chunk, index) else { continue };
                    let offset = block.address.claimed_offset();
                    self.reader.region.prefetch(offset, BLOCK_HEADER_BYTES as u32);
                    ahead.push(block);
                }
            }
            let marked = self.hands[hand].takes_marked();
            for block in ahead.drain(..) {
                let looks = block.reads == 0 || batch.candidates() < HEADERS_PER_EVICTION * wanted;
                if looks && let Some(candidate) = self.candidate(block, class, marked)? {
                    batch.add(candidate);
                }
            }
            match self.hands[hand].note_visits(visited, blocks, || tools.own.now()) {
                Search::GoOn => {}
                Search::Forget => tools.depot.forget_reads(class),
                Search::End => {
                    self.pins.note_search_ended(class);
                    break;
                }
            }
            runs += runs_ahead;
            if runs >= RUNS_PER_LOOK && tools.own.now() >= until {
                break;
            }
            runs %= RUNS_PER_LOOK;
        }
        Ok(batch)
    }

    /// Evicts the keys of these blocks, one after the other until `until`. `give` puts the unlinked
    /// blocks into the depot, also if an error ends this.
    fn evict_each(
        &mut self,
        addresses: impl Iterator<Item = BlockAddress>,
        class: SizeClass,
        tools: &mut Tools<'_>,
        until: Nanos,
        give: impl FnOnce(&mut Depot, Vec<RemovedBlock>, Nanos) -> Result<(), BlockError>,
    ) -> Result<Evictions, ChainError> {
        let (mut blocks, mut evicted) = (Vec::new(), 0);
        let result = self.unlink_each(addresses, class, tools, until, (&mut blocks, &mut evicted));
        self.evicted += evicted as u64;
        let lasting = tools.depot.blocks_lasting(class);
        self.pulls.note_evicted(class, evicted, lasting);
        if evicted > 0 {
            self.ages.warn_if_young(class, lasting, tools.own.now());
        }
        if let Err(error) = give(tools.depot, blocks, tools.own.now()) {
            tracing::error!("FS-051 the depot refuses the block of an evicted key: {error}");
        }
        result.map(|tried| Evictions { tried, evicted })
    }

    /// Removes the keys whose blocks are at these addresses, one after the other until `until`,
    /// except for those with pinned values. Adds the blocks to `unlinked`; they have not rested.
    /// Counts the keys in `evicted`. Returns how many addresses were tried.
    ///
    /// With an extent its head goes, and with a head all of its extents.
    ///
    /// The block is read first, then the slot that its key leads to. Both readings and the CAS lie
    /// within the age of a proof (invariant I4), so the generation that was read is the word's. The
    /// memory of all steps is prefetched, because every one of them is a cache miss.
    fn unlink_each(
        &mut self,
        addresses: impl Iterator<Item = BlockAddress>,
        class: SizeClass,
        Tools { index, own, reaper, .. }: &mut Tools<'_>,
        until: Nanos,
        (unlinked, evicted): (&mut Vec<RemovedBlock>, &mut usize),
    ) -> Result<usize, ChainError> {
        let deadline = own.now().saturating_add(self.proof_age_max_ns);
        let (mut keys, mut count) = (Vec::new(), 0);
        for (number, address) in addresses.enumerate() {
            count += 1;
            let Some(block) = self.block_at(address, class) else { continue };
            if let Some(found) = self.reader.read_key_at(block)? {
                index.prefetch_entry(found.hash);
                keys.push((number, block, found));
            }
        }
        for (.., found) in &keys {
            index.prefetch_window(found.hash)?;
        }
        for (number, block, FoundBlock { hash, generation, written_at_ms }) in keys {
            let named = NamedBlock { generation_low: generation as u8, ..*block };
            let linked = match class {
                SizeClass::EXTENT => index.find_head(hash, block.address)?,
                _ => index.find_linked(hash, named)?,
            };
            match linked {
                // Looked at only now: a client may have been writing the block when it was read. A
                // block to which a slot leads is complete.
                Some(_) if self.reader.is_pinned(block)? => self.note_pin(block.address, class),
                Some((slot, word)) => {
                    let Some(block) = index.block_of(slot, word) else { continue };
                    let generation = match class {
                        SizeClass::EXTENT => self.reader.generation_of(block)?,
                        _ => generation,
                    };
                    if !own.unlink_to_tombstone(slot, word, block, deadline)? {
                        continue;
                    }
                    *evicted += 1;
                    self.ages.note(class, own.wall_ms().saturating_sub(written_at_ms));
                    let (slot, block) = ((slot, word), (block, generation));
                    reaper.schedule_tomb_clearing(slot, block, own.now(), unlinked)?;
                }
                None => {}
            }
            if own.now() >= until {
                return Ok(number + 1);
            }
        }
        Ok(count)
    }

    /// Returns up to `count` blocks of the class that may be linked, from random places.
    fn candidates(
        &mut self,
        class: SizeClass,
        count: usize,
        tools: &Tools<'_>,
    ) -> Result<Vec<Candidate>, ChainError> {
        let mut candidates = Vec::with_capacity(count);
        let mut empty_runs = 0;
        while candidates.len() < count && empty_runs < EMPTY_RUNS_MAX {
            let Some(chunk) = self.random_span(class, tools) else { break };
            let before = candidates.len();
            self.add_run(chunk, class, (RUN, count), tools, &mut candidates)?;
            empty_runs += usize::from(candidates.len() == before);
        }
        Ok(candidates)
    }

    /// Returns the first chunk of a span of the class that does not drain.
    fn random_span(&mut self, class: SizeClass, tools: &Tools<'_>) -> Option<u32> {
        let spans = tools.depot.spans(class);
        let at = self.random.below(spans.len() as u64);
        spans.get(at as usize).copied()
    }

    /// Adds a run of neighbouring blocks from a random place of the span, until there are
    /// `count_max` candidates.
    fn add_run(
        &mut self,
        chunk: u32,
        class: SizeClass,
        (length, count_max): (u64, usize),
        tools: &Tools<'_>,
        candidates: &mut Vec<Candidate>,
    ) -> Result<(), ChainError> {
        let from = self.random.below(class.blocks_per_span());
        for (index, address) in tools.depot.blocks_outside(chunk, from, from + length) {
            let reads = tools.depot.reads(chunk, index);
            if candidates.len() < count_max {
                let block = VisitedBlock { address, reads };
                candidates.extend(self.candidate(block, class, false)?);
            }
        }
        Ok(())
    }

    /// Returns what the policy has to know of a block; `None` if it has no key that can be evicted.
    ///
    /// A client holds a marked block, or is about to unlink it. But a client with an old location
    /// also marks a block that is linked to another key by now (invariant I9). With `marked`, these
    /// are candidates, too: whether a slot leads to the block decides.
    fn candidate(
        &mut self,
        block: VisitedBlock,
        class: SizeClass,
        marked: bool,
    ) -> Result<Option<Candidate>, ChainError> {
        let Some(at) = self.block_at(block.address, class) else { return Ok(None) };
        let mut words = [0u64; BLOCK_HEADER_BYTES as usize / 8];
        self.reader.region.read(at.offset(), &mut words)?;
        let Ok(header) = BlockHeader::ref_from_bytes(words.as_bytes()) else { return Ok(None) };
        let is_used = header.written_at_ms() > 0 && (marked || !header.is_marked());
        if is_used && header.is_pinned() && !header.is_marked() {
            self.note_pin(block.address, class);
            return Ok(None);
        }
        Ok(is_used.then(|| Candidate::new(block, header)))
    }

    /// The block of this class at an address, which the depot knows.
    fn block_at(&self, address: BlockAddress, class: SizeClass) -> Option<BlockRef> {
        self.reader.geometry.check_block(NamedBlock { address, class, generation_low: 0 }).ok()
    }

    /// Notes that the value in this block is pinned.
    fn note_pin(&mut self, address: BlockAddress, class: SizeClass) {
        if let Some(chunk) = self.reader.geometry.chunk_of_block(address) {
            self.pins.note(chunk, class);
        }
    }
}
