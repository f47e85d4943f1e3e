//! The state that all clients of a simulation share: the memory, the clock, and which process
//! accessed which word.

pub(crate) mod depot;

use std::cell::RefCell;
use std::rc::Rc;

use farside_fabric::Nanos;
use farside_layout::{BlockAddress, SlotState, SlotWord};
use farside_protocol::ConnectionCache;
use farside_protocol::held_blocks::HeldBlocks;
use farside_protocol::split::SplitProgress;

use crate::clock::START_NS;
use crate::cluster::{ClusterState, FORMER};
use crate::memory::{Memory, local};
use crate::mutant::Mutant;
use crate::region::SimRegion;
use crate::trace::{Line, describe};
use crate::world::depot::SimDepot;

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
