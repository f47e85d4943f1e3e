//! The state that all clients of a simulation share: the memory, the clock, the server's depot,
//! which process accessed which word, and the readable trace of an execution.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;

use farside_fabric::{ChainError, Nanos};
use farside_layout::{
    BlockAddress, BlockRef, CHUNK_BYTES, ChunkEntry, ChunkUse, DirectoryEntry, FreeBlock,
    HeaderWord, RowHeader, SizeClass, SlotState, SlotWord,
};
use farside_protocol::ConnectionCache;
use farside_protocol::held_blocks::HeldBlocks;
use farside_protocol::split::SplitProgress;
use farside_server::depot::{Depot, DepotOptions, RegionAccess};

use crate::cluster::{ClusterState, FORMER};
use crate::memory::{Memory, START_NS, local, mix};
use crate::mutant::Mutant;
use crate::region::{GRACE_MS, SimRegion, hash, keys};

/// A slot whose key the server removed: a tombstone until `ready_at`.
#[derive(Clone, Copy, Debug, Hash)]
pub(crate) struct Tomb {
    pub(crate) slot: u64,
    pub(crate) word: SlotWord,
    pub(crate) ready_at: Nanos,
}

pub(crate) struct World {
    pub(crate) region: Rc<SimRegion>,
    pub(crate) memory: Memory,
    pub(crate) now: Nanos,
    /// The shortest time that a chain takes.
    pub(crate) round_trip_ns: Nanos,
    /// Words at whose accesses the scheduler can switch processes. A word becomes one when a
    /// process writes it after another process accessed it.
    is_preemptible: Vec<bool>,
    /// The processes that accessed each word so far, one bit for each process.
    accessed_by: Vec<u16>,
    /// Words that became preemptible in this execution. The search has to start over with them.
    pub(crate) newly_preemptible: Vec<usize>,
    /// Every word is accessed in a step of its own, and states are not compared.
    pub(crate) word_by_word: bool,
    /// Whether the scenario has begun. Accesses before do not count.
    pub(crate) began: bool,
    pub(crate) trace: Option<Vec<Line>>,
    /// The result of the split once it has ended.
    pub(crate) split: Option<SplitProgress>,
    /// Clients that the server has fenced, and whose slots it has not cleared yet.
    pub(crate) fenced: Vec<u16>,
    /// Whether the place of a subtable rests for GRACE before its reuse.
    pub(crate) places_rest: bool,
    /// The tombstones that the server has not cleared yet.
    pub(crate) tombs: Vec<Tomb>,
    /// The cluster, if a shard changes its region.
    pub(crate) cluster: Option<ClusterState>,
    /// The server's depot, if there is one.
    pub(crate) depot: Option<Rc<RefCell<SimDepot>>>,
    /// An extent that a session unlinked with its head, and did not hold.
    pub(crate) unheld_extent: Option<BlockAddress>,
    /// Mutants that broke their rule in this execution.
    pub(crate) fired: Vec<Mutant>,
    /// The location cache of the clients that share one.
    pub(crate) locations: Rc<ConnectionCache>,
}

impl World {
    pub(crate) fn new(
        region: Rc<SimRegion>,
        memory: Memory,
        is_preemptible: Vec<bool>,
        word_by_word: bool,
        round_trip_ns: Nanos,
    ) -> Self {
        let words = memory.len();
        Self {
            region,
            memory,
            now: START_NS,
            round_trip_ns,
            is_preemptible,
            accessed_by: vec![0; words],
            newly_preemptible: Vec::new(),
            word_by_word,
            began: false,
            trace: None,
            split: None,
            fenced: Vec::new(),
            places_rest: true,
            tombs: Vec::new(),
            cluster: None,
            depot: None,
            unheld_extent: None,
            fired: Vec::new(),
            locations: Rc::default(),
        }
    }

    /// Returns the range of these words that covers all preemptible ones: its start and length.
    pub(crate) fn noticeable(&self, index: usize, words: usize) -> (usize, usize) {
        let is_preemptible = &self.is_preemptible[index..index + words];
        let first = is_preemptible.iter().position(|is| *is).unwrap_or(0);
        let end = is_preemptible.iter().rposition(|is| *is).map_or(0, |last| last + 1);
        (first, end.saturating_sub(first))
    }

    /// Divides words into groups that are accessed in one step, each a mask from `index` on.
    /// Returns the mask of the words that are not preemptible. A block has three groups: the
    /// header's first word, the rest of the header with the key, and the value.
    pub(crate) fn units(&self, index: usize, words: usize, units: &mut Vec<u64>) -> u64 {
        let mut unnoticed = 0;
        let (mut rest, mut value) = (0, 0);
        for word in 0..words {
            let at = index + word;
            if !self.is_preemptible[at] {
                unnoticed |= 1 << word;
                continue;
            }
            match self.region.block_at(local(self.memory.offset(at)).1) {
                _ if self.word_by_word => units.push(1 << word),
                Some((_, 1..=4)) => rest |= 1 << word,
                Some((_, 5..)) => value |= 1 << word,
                _ => units.push(1 << word),
            }
        }
        units.extend([rest, value].into_iter().filter(|unit| *unit != 0));
        units.sort_unstable();
        unnoticed
    }

    /// Records an access. `changes`: a write of another value than the present one.
    fn record_access(&mut self, process: usize, index: usize, changes: bool) {
        if !self.began {
            return;
        }
        let own = 1 << process;
        if changes && self.accessed_by[index] & !own != 0 && !self.is_preemptible[index] {
            self.newly_preemptible.push(index);
        }
        self.accessed_by[index] |= own;
    }

    pub(crate) fn note_read(&mut self, process: usize, index: usize) {
        self.record_access(process, index, false);
        if self.trace.is_some() && self.is_preemptible[index] {
            let [name, value] = self.describe(index, self.memory.load(index));
            self.note(process, || format!("READ  {name} = {value}"));
        }
    }

    pub(crate) fn write(&mut self, process: usize, index: usize, value: u64) {
        let old = self.memory.load(index);
        self.record_access(process, index, value != old);
        if self.trace.is_some() && (self.is_preemptible[index] || value != old) {
            let change = self.describe_change(index, (old, value));
            self.note(process, || format!("WRITE {change}"));
        }
        self.store(index, value);
    }

    /// Stores a word on behalf of a verb.
    fn store(&mut self, index: usize, value: u64) {
        if let Some(cluster) = &mut self.cluster
            && cluster.is_reassigned()
            && local(self.memory.offset(index)).0 == FORMER
        {
            cluster.is_former_changed |= self.memory.load(index) != value;
        }
        self.memory.store(index, value);
    }

    pub(crate) fn swap(&mut self, process: usize, index: usize, (expected, desired): (u64, u64)) {
        let found = self.memory.load(index);
        self.record_access(process, index, found == expected);
        if self.trace.is_some() {
            let change = self.describe_change(index, (found, desired));
            let failed = if found == expected { "" } else { ", failed" };
            self.note(process, || format!("CAS   {change}{failed}"));
        }
        if found == expected {
            self.store(index, desired);
        }
    }

    /// Checks a compare-and-swap of these words that succeeds. If it unlinks a head, its session
    /// has to hold the extents by now (invariant I27).
    pub(crate) fn check_held(&mut self, words: [SlotWord; 2], held_blocks: &HeldBlocks) {
        let [old, new] = words.map(|word| {
            let is_linked = matches!(word.state(), SlotState::Live | SlotState::Frozen);
            word.block().ok().filter(|block| is_linked && block.class.is_head())
        });
        let Some(head) = old.filter(|head| new.is_none_or(|new| new.address != head.address))
        else {
            return;
        };
        let held: Vec<_> = held_blocks.lists().addresses().collect();
        let extents = self.region.extents_of(&self.memory, head);
        self.unheld_extent = extents.into_iter().find(|extent| !held.contains(extent));
    }

    /// Returns the name of a word, and what this value of it means.
    fn describe(&self, index: usize, value: u64) -> [String; 2] {
        let (region, offset) = local(self.memory.offset(index));
        let [name, value] = describe(&self.region, offset, value);
        let name = match (&self.cluster, region.0) {
            (Some(_), region) => format!("{name} of region {region}"),
            (None, _) => name,
        };
        [name, value]
    }

    fn describe_change(&self, index: usize, (old, new): (u64, u64)) -> String {
        let ([name, old], [_, new]) = (self.describe(index, old), self.describe(index, new));
        format!("{name} = {old} := {new}")
    }

    /// Records that a mutant broke its rule.
    pub(crate) fn note_fired(&mut self, mutant: Mutant) {
        if !self.fired.contains(&mutant) {
            self.fired.push(mutant);
        }
    }

    /// Adds a line about an event that no client causes.
    pub(crate) fn note_event(&mut self, text: impl FnOnce() -> String) {
        let now = self.now;
        if let Some(trace) = &mut self.trace {
            trace.push(Line { now, process: None, text: text() });
        }
    }

    /// Adds a line to the trace, if there is one.
    pub(crate) fn note(&mut self, process: usize, text: impl FnOnce() -> String) {
        let now = self.now;
        if let Some(trace) = &mut self.trace
            && self.began
        {
            trace.push(Line { now, process: Some(process), text: text() });
        }
    }
}

/// The process number of the server's processor.
const SERVER: usize = 15;
const GRACE_NS: Nanos = GRACE_MS as Nanos * 1_000_000;

pub(crate) struct SimDepot {
    depot: Depot,
    /// The chunk table, which no client reads.
    entries: RefCell<HashMap<u32, ChunkEntry>>,
    mutant: Option<Mutant>,
    /// The offsets of the depot's chunk.
    chunk: Range<u64>,
    /// A hash of all requests, answers and returned blocks.
    pub(crate) state: u64,
}

/// The server's access to the chunk table and to block headers.
struct WorldMemory<'w> {
    entries: &'w RefCell<HashMap<u32, ChunkEntry>>,
    world: &'w RefCell<World>,
    mutant: Option<Mutant>,
}

impl RegionAccess for WorldMemory<'_> {
    fn entry(&self, chunk: u32) -> Result<ChunkEntry, ChainError> {
        let entry = self.entries.borrow().get(&chunk).copied();
        Ok(entry.unwrap_or(ChunkEntry::new(ChunkUse::Free)))
    }

    fn set_entry(&self, chunk: u32, entry: ChunkEntry) -> Result<(), ChainError> {
        self.entries.borrow_mut().insert(chunk, entry);
        Ok(())
    }

    fn header(&self, block: BlockRef) -> Result<HeaderWord, ChainError> {
        let world = &mut *self.world.borrow_mut();
        let Ok(index) = world.memory.index(block.offset(), 8) else {
            return Ok(HeaderWord::from_bits(0));
        };
        world.note_read(SERVER, index);
        Ok(HeaderWord::from_bits(world.memory.load(index)))
    }

    fn set_header(&self, block: BlockRef, header: HeaderWord) -> Result<(), ChainError> {
        let world = &mut *self.world.borrow_mut();
        let Ok(index) = world.memory.index(block.offset(), 8) else { return Ok(()) };
        if self.mutant == Some(Mutant::HeadersNotWritten) {
            world.note_fired(Mutant::HeadersNotWritten);
        } else {
            world.write(SERVER, index, header.bits());
        }
        Ok(())
    }

    fn clear(&self, _: u32) -> Result<(), ChainError> {
        Ok(())
    }
}

impl SimDepot {
    /// Returns a depot with all blocks of the last chunk except key 0's.
    pub(crate) fn new(region: &SimRegion, mutant: Option<Mutant>, now: Nanos) -> Self {
        let uses = [ChunkUse::Subtables, ChunkUse::Subtables, ChunkUse::Blocks(region.class)];
        let mut options = DepotOptions::new(GRACE_NS, 0);
        if mutant == Some(Mutant::ChunkRestsForGrace) {
            options.chunk_rest = GRACE_NS;
        }
        let mut depot = Depot::new(region.geometry, &uses, options, now);
        depot.note_linked(region.first_block(), now).expect("a block of the depot's");
        let entries =
            (0..).zip(uses).map(|(chunk, chunk_use)| (chunk, ChunkEntry::new(chunk_use))).collect();
        let start = region.first_block().address.claimed_offset() - region.class.block_bytes();
        let entries = RefCell::new(entries);
        Self { depot, entries, mutant, chunk: start..start + CHUNK_BYTES, state: 0 }
    }

    pub(crate) fn take(&mut self, class: SizeClass, world: &RefCell<World>) -> Vec<FreeBlock> {
        let now = world.borrow().now;
        let memory = WorldMemory { entries: &self.entries, world, mutant: self.mutant };
        let blocks = self.depot.take(class, 1, now, &memory).expect("memory does not fail");
        let given = blocks
            .first()
            .map_or(0, |block| u64::from(block.address.0) << 32 | u64::from(block.generation));
        self.state = mix(mix(self.state, u64::from(class.index()) << 56 | now), given);
        if self.mutant == Some(Mutant::ChunkRestsForGrace) && class.index() > 0 && given != 0 {
            world.borrow_mut().note_fired(Mutant::ChunkRestsForGrace);
        }
        blocks
    }

    pub(crate) fn give(
        &mut self,
        (class, rested): (SizeClass, bool),
        mut blocks: Vec<FreeBlock>,
        world: &RefCell<World>,
    ) {
        let now = world.borrow().now;
        // The blocks that clients have at the start are not in the depot's chunk.
        blocks.retain(|block| self.chunk.contains(&block.address.claimed_offset()));
        for block in &blocks {
            self.state = mix(mix(self.state, block.address.0.into()), now << 1 | u64::from(rested));
        }
        let at_once = !rested && !blocks.is_empty() && self.mutant == Some(Mutant::GivenAtOnce);
        if at_once {
            world.borrow_mut().note_fired(Mutant::GivenAtOnce);
        }
        let given = self.depot.give(class, blocks, rested || at_once, now);
        given.expect("blocks that were taken");
    }
}

/// One event of an execution.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Line {
    pub(crate) now: Nanos,
    /// The process that caused it; `None` if the clock jumped.
    pub(crate) process: Option<usize>,
    pub(crate) text: String,
}

/// Returns the name of the word at this offset of the region, and what this value of it means.
fn describe(region: &SimRegion, offset: u64, value: u64) -> [String; 2] {
    let subtable = if region.has_splits() { region.name_of(offset) } else { "" };
    if let Some((_, slot, is_hint)) = region.slot_at(offset) {
        return match is_hint {
            false => [format!("slot {subtable}{slot}"), word(region, value)],
            true => [format!("hint {subtable}{slot}"), hint(value)],
        };
    }
    if let Some((_, row, at)) = region.header_at(offset) {
        let mut words = [0; 2];
        words[at as usize] = value;
        let header: RowHeader = zerocopy::transmute!(words);
        return match (at, header.forward()) {
            (0, _) => [format!("header {subtable}{row}"), prefix(&header)],
            (_, forward) => {
                let forward = forward.map(|to| to.map(|offset| region.name_of(offset)).join(", "));
                [format!("forward {subtable}{row}"), forward.unwrap_or("none".to_owned())]
            }
        };
    }
    if let Some(entry) = region.directory_at(offset) {
        let leads = DirectoryEntry::from_bits(value);
        let (to, bits) = (region.name_of(leads.offset()), leads.local_depth());
        return [format!("directory {entry}"), format!("{to}, {bits} bits")];
    }
    match region.block_at(offset) {
        Some((block, 0)) => {
            let header = HeaderWord::from_bits(value);
            let mark = if header.mark.is_set() { ", superseded" } else { "" };
            [format!("block {block} header"), format!("generation {}{mark}", header.generation)]
        }
        Some((block, word @ (4 | 5))) => {
            let printable = |byte: u8| if byte.is_ascii_graphic() { char::from(byte) } else { '.' };
            let part = if word == 4 { "key" } else { "value" };
            [format!("block {block} {part}"), value.to_le_bytes().map(printable).iter().collect()]
        }
        Some((block, word)) => [format!("block {block} word {word}"), format!("{value:#x}")],
        None => [format!("offset {offset:#x}"), format!("{value:#x}")],
    }
}

fn prefix(header: &RowHeader) -> String {
    if !header.is_valid() {
        return "none".to_owned();
    }
    let (bits, prefix) = (header.local_depth, header.prefix.get());
    let filling = if header.is_filling() { ", filling" } else { "" };
    format!("prefix {prefix:b} of {bits} bits{filling}")
}

fn word(region: &SimRegion, bits: u64) -> String {
    let word = SlotWord::from_bits(bits);
    let incarnation = word.incarnation();
    let conditional = if word.is_conditional() { " cond" } else { "" };
    let block = word.block().ok().and_then(|block| {
        let (number, _) = region.block_at(block.address.claimed_offset())?;
        Some(format!(" block {number}.{}", block.generation_low))
    });
    let state = format!("{:?}", word.state()).to_uppercase();
    match word == word.emptied() {
        true => format!("EMPTY({incarnation})"),
        false => format!("{state}({incarnation}){conditional}{}", block.unwrap_or_default()),
    }
}

fn hint(value: u64) -> String {
    let mut hints = (0..keys().len()).flat_map(|key| (0..64).map(move |number| (key, number)));
    match hints.find(|(key, incarnation)| hash(&keys()[*key]).hint(*incarnation) == value) {
        Some((key, incarnation)) => format!("H(k{key}, {incarnation})"),
        None => format!("{value}"),
    }
}
