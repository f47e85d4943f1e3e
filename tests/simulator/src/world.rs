//! The state that all clients of a simulation share: the memory, the clock, and which process
//! accessed which word.

use std::cell::RefCell;
use std::rc::Rc;

use farside_fabric::Nanos;
use farside_protocol::split::SplitProgress;

use super::session::Locations;

use super::depot::SimDepot;
use super::memory::Memory;
use super::mutant::Mutant;
use super::region::SimRegion;
use super::trace::{Line, describe};

pub(super) struct World {
    pub(super) region: Rc<SimRegion>,
    pub(super) memory: Memory,
    pub(super) now: Nanos,
    /// The shortest time that a chain takes.
    pub(super) round_trip_ns: Nanos,
    /// Words at whose accesses the scheduler can switch processes. A word becomes one when a
    /// process writes it after another process accessed it.
    is_preemptible: Vec<bool>,
    /// The processes that accessed each word so far, one bit for each process.
    accessed_by: Vec<u16>,
    /// Words that became preemptible in this execution. The search has to start over with them.
    pub(super) newly_preemptible: Vec<usize>,
    /// Every word is accessed in a step of its own, and states are not compared.
    pub(super) word_by_word: bool,
    /// Whether the scenario has begun. Accesses before do not count.
    pub(super) began: bool,
    pub(super) trace: Option<Vec<Line>>,
    /// The result of the split once it has ended.
    pub(super) split: Option<SplitProgress>,
    /// Clients that the server has fenced, and whose slots it has not cleared yet.
    pub(super) fenced: Vec<u16>,
    /// Whether the place of a subtable rests for GRACE before its reuse.
    pub(super) places_rest: bool,
    /// The server's depot, if there is one.
    pub(super) depot: Option<Rc<RefCell<SimDepot>>>,
    /// Mutants that broke their rule in this execution.
    pub(super) fired: Vec<Mutant>,
    /// The location cache of the clients that share one.
    pub(super) locations: Rc<Locations>,
}

impl World {
    pub(super) fn new(
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
            now: 1_000_000_000,
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
            depot: None,
            fired: Vec::new(),
            locations: Rc::default(),
        }
    }

    /// Returns the range of these words that covers all preemptible ones: its start and length.
    pub(super) fn noticeable(&self, place: usize, words: usize) -> (usize, usize) {
        let is_preemptible = &self.is_preemptible[place..place + words];
        let first =
            is_preemptible.iter().position(|preemptible_words| *preemptible_words).unwrap_or(0);
        let end = is_preemptible
            .iter()
            .rposition(|preemptible_words| *preemptible_words)
            .map_or(0, |last| last + 1);
        (first, end.saturating_sub(first))
    }

    /// Divides words into groups that are accessed in one step, each a mask from `place` on.
    /// Returns the mask of the words that are not preemptible. A block has three groups: the
    /// header's first word, the rest of the header with the key, and the value.
    pub(super) fn units(&self, place: usize, words: usize, units: &mut Vec<u64>) -> u64 {
        let mut unnoticed = 0;
        let (mut rest, mut value) = (0, 0);
        for word in 0..words {
            let at = place + word;
            if !self.is_preemptible[at] {
                unnoticed |= 1 << word;
                continue;
            }
            match self.region.block_at(self.memory.offset(at)) {
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
    fn record_access(&mut self, process: usize, place: usize, changes: bool) {
        if !self.began {
            return;
        }
        let own = 1 << process;
        if changes && self.accessed_by[place] & !own != 0 && !self.is_preemptible[place] {
            self.newly_preemptible.push(place);
        }
        self.accessed_by[place] |= own;
    }

    pub(super) fn note_read(&mut self, process: usize, place: usize) {
        self.record_access(process, place, false);
        if self.trace.is_some() && self.is_preemptible[place] {
            let what = describe(self, place, self.memory.load(place));
            self.note(process, || format!("READ  {what}"));
        }
    }

    pub(super) fn write(&mut self, process: usize, place: usize, value: u64) {
        self.record_access(process, place, value != self.memory.load(place));
        if self.trace.is_some() && (self.is_preemptible[place] || value != self.memory.load(place))
        {
            let old = describe(self, place, self.memory.load(place));
            let new = describe(self, place, value);
            let new = new.split_once(" = ").map_or("", |(_, new)| new);
            self.note(process, || format!("WRITE {old} := {new}"));
        }
        self.memory.store(place, value);
    }

    pub(super) fn swap(&mut self, process: usize, place: usize, (expected, desired): (u64, u64)) {
        let found = self.memory.load(place);
        self.record_access(process, place, found == expected);
        if self.trace.is_some() {
            let old = describe(self, place, found);
            let new = describe(self, place, desired);
            let new = new.split_once(" = ").map_or("", |(_, new)| new);
            self.note(process, || match found == expected {
                true => format!("CAS   {old} := {new}"),
                false => format!("CAS   {old}, failed; desired {new}"),
            });
        }
        if found == expected {
            self.memory.store(place, desired);
        }
    }

    /// Records that a mutant broke its rule.
    pub(super) fn note_fired(&mut self, mutant: Mutant) {
        if !self.fired.contains(&mutant) {
            self.fired.push(mutant);
        }
    }

    /// Adds a line to the trace, if there is one.
    pub(super) fn note(&mut self, process: usize, text: impl FnOnce() -> String) {
        let now = self.now;
        if let Some(trace) = &mut self.trace
            && self.began
        {
            trace.push(Line { now, process: Some(process), text: text() });
        }
    }
}
