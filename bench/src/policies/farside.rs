//! What Farside's server can do. It sees no hits, only the clients' [reports](super::reports). It
//! evicts in batches ahead of demand. For that a hand visits runs of neighbouring blocks. A new
//! object takes the block that has been free for longest, as in the server. What the server knows
//! of a block beyond the key takes a byte or two of its own memory.
//!
//! Time is counted in bytes inserted. A server knows it from the number of its evictions.

use std::collections::VecDeque;

use super::lrfu::Lrfu;
use super::reports::{Clients, Report, Reporting};
use super::{Costs, Policy, Request, mix};

/// How the server chooses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Rule {
    /// Evicts a block whose counter is 0. Each report adds one, up to a limit, and each visit of
    /// the hand takes one away. State: one bit, or two for limits up to 3.
    Sieve {
        /// The limit.
        most: u8,
    },
    /// The hand's version of S3-FIFO. State: four bits, and ghosts of evicted keys.
    S3Fifo,
    /// Of [`VISITS`] blocks evicts the one that was written or reported longest ago. State: a byte.
    Lru,
    /// Of [`VISITS`] blocks evicts the one with the least decayed frequency. State: [`Lrfu`].
    Lrfu {
        /// In this many times the capacity, in bytes inserted, a request's weight falls to 1/e.
        memory: f64,
    },
}

/// How many blocks the rules that compare blocks visit for each eviction.
const VISITS: u64 = 8;
/// A batch is this part of the capacity.
const BATCHES: u64 = 128;
/// Limit on the objects of a batch.
const BATCH_OBJECTS_MAX: u64 = 1024;
/// The number of blocks in a run.
const RUN_BLOCKS: usize = 8;
/// The steps of a byte of time are this part of the capacity.
const STEPS: u64 = 16;
/// The small queue's share of the capacity in [`Rule::S3Fifo`].
const SMALL_SHARE: f64 = 0.1;
/// Limit on the counter of a block in [`Rule::S3Fifo`].
const HITS_MAX: u8 = 3;
/// A block without a key.
const FREE: u32 = u32::MAX;

/// A key, and what the server knows of it.
#[derive(Clone, Copy, Default)]
struct Entry {
    bytes: u32,
    generation: u32,
    block: u32,
    written_at: u64,
    is_stored: bool,
    /// Whether the hand has visited the block.
    is_known: bool,
    is_main: bool,
    hits: u8,
    /// When the last report came; 0 for never.
    seen_at: u64,
    /// When the key was last evicted from the small queue; 0 for never.
    ghost_at: u64,
}

/// The blocks, the hand and the clients.
pub(crate) struct Farside {
    rule: Rule,
    capacity: u64,
    batch: u64,
    used: u64,
    main: u64,
    /// Bytes inserted.
    inserted: u64,
    requests: u64,
    entries: Vec<Entry>,
    /// The key of each block.
    blocks: Vec<u32>,
    /// The free blocks, those that became free first in front.
    free: VecDeque<u32>,
    hand: Hand,
    lrfu: Lrfu,
    clients: Clients,
    /// Reports that arrive while the next batch is evicted.
    pulled: Vec<Report>,
    costs: Costs,
}

/// Visits the runs of blocks in a pseudo-random order, the same in each round.
#[derive(Default)]
struct Hand {
    order: Vec<u32>,
    /// The number of runs visited in this round.
    visited: usize,
}

impl Hand {
    /// The next run of so many.
    fn next(&mut self, runs: usize) -> usize {
        if self.order.len() != runs {
            self.order = (0..runs as u32).collect();
            self.order.sort_unstable_by_key(|run| mix(*run));
            self.visited = 0;
        }
        let run = self.order[self.visited];
        self.visited = (self.visited + 1) % runs;
        run as usize
    }
}

impl Farside {
    /// `objects` is how many objects fit, about, and `data` the number of keys without those that
    /// only a scan requests.
    pub(crate) fn new(
        rule: Rule,
        reporting: Reporting,
        (keys, data): (u32, u64),
        (capacity, objects): (u64, usize),
    ) -> Self {
        let object = capacity / objects.max(1) as u64;
        let memory = if let Rule::Lrfu { memory } = rule { memory } else { 1.0 };
        Self {
            rule,
            capacity,
            batch: (capacity / BATCHES).min(BATCH_OBJECTS_MAX * object).max(1),
            used: 0,
            main: 0,
            inserted: 0,
            requests: 0,
            entries: vec![Entry::default(); keys as usize],
            blocks: Vec::new(),
            free: VecDeque::new(),
            hand: Hand::default(),
            lrfu: Lrfu::new(objects, memory * capacity as f64),
            clients: Clients::new(reporting, keys, data),
            pulled: Vec::new(),
            costs: Costs::default(),
        }
    }

    /// Notes the reports of the last pull, and pulls again.
    fn note_reports(&mut self) {
        let most = if let Rule::Sieve { most } = self.rule { most } else { HITS_MAX };
        let next = self.clients.pull();
        for Report { key, generation, hits } in std::mem::replace(&mut self.pulled, next) {
            if matches!(self.rule, Rule::Lrfu { .. }) {
                self.lrfu.add(key, hits as f64, self.inserted);
            }
            let entry = &mut self.entries[key as usize];
            if entry.is_stored && entry.generation == generation {
                entry.seen_at = self.inserted;
                entry.hits = (entry.hits + 1).min(most);
            }
        }
    }

    fn runs(&self) -> usize {
        self.blocks.len().div_ceil(RUN_BLOCKS)
    }

    /// Moves the hand to the next run. Returns its keys.
    fn advance(&mut self) -> Vec<u32> {
        let first = self.hand.next(self.runs()) * RUN_BLOCKS;
        let blocks = self.blocks.iter().skip(first).take(RUN_BLOCKS);
        let keys: Vec<u32> = blocks.copied().filter(|key| *key != FREE).collect();
        self.costs.visits += keys.len() as u64;
        keys
    }

    fn evict(&mut self, key: u32) {
        let entry = &mut self.entries[key as usize];
        entry.is_stored = false;
        let (bytes, written_at, block) = (u64::from(entry.bytes), entry.written_at, entry.block);
        if std::mem::take(&mut entry.is_main) {
            self.main -= bytes;
        }
        self.used -= bytes;
        if matches!(self.rule, Rule::Lrfu { .. }) {
            self.lrfu.add(key, 1.0, written_at);
        }
        self.blocks[block as usize] = FREE;
        self.free.push_back(block);
        self.costs.evictions += 1;
    }

    /// Evicts a batch at least, and as much as this object needs.
    fn make_room(&mut self, bytes: u64) {
        self.note_reports();
        let most = self.capacity.saturating_sub(self.batch.max(bytes));
        match self.rule {
            Rule::Lru | Rule::Lrfu { .. } => self.evict_lowest(most),
            Rule::Sieve { .. } | Rule::S3Fifo => self.evict_unmarked(most),
        }
    }

    /// Visits blocks, and evicts those with the lowest scores.
    fn evict_lowest(&mut self, most: u64) {
        while self.used > most {
            let wanted = (self.used - most) * VISITS;
            let (mut candidates, mut bytes) = (Vec::new(), 0);
            for _ in 0..self.runs() {
                for key in self.advance() {
                    bytes += u64::from(self.entries[key as usize].bytes);
                    candidates.push((self.score(key), key));
                }
                if bytes >= wanted {
                    break;
                }
            }
            candidates.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
            for (_, key) in candidates {
                if self.used <= most {
                    break;
                }
                if self.entries[key as usize].is_stored {
                    self.evict(key);
                }
            }
        }
    }

    fn score(&self, key: u32) -> f64 {
        let entry = &self.entries[key as usize];
        match self.rule {
            Rule::Lrfu { .. } => self.lrfu.score(key, entry.written_at, self.inserted),
            _ => {
                let step = (self.capacity / STEPS).max(1);
                let seen_at = entry.seen_at / step * step;
                entry.written_at.max(seen_at) as f64
            }
        }
    }

    /// Visits one block after another, and evicts those that the rule does not spare. From the
    /// second round on S3-FIFO spares fewer, so that it ends.
    fn evict_unmarked(&mut self, most: u64) {
        for run in 0.. {
            let round = run / self.runs();
            for key in self.advance() {
                let is_spared = match self.rule {
                    Rule::S3Fifo => self.spares(key, round),
                    _ => {
                        let entry = &mut self.entries[key as usize];
                        let hits = entry.hits;
                        entry.hits = hits.saturating_sub(1);
                        hits > 0
                    }
                };
                if !is_spared {
                    self.evict(key);
                }
            }
            if self.used <= most {
                break;
            }
        }
    }

    /// Whether the hand's version of S3-FIFO spares the key.
    fn spares(&mut self, key: u32, round: usize) -> bool {
        let small = self.capacity as f64 * SMALL_SHARE;
        let is_small_full = (self.used - self.main) as f64 > small;
        let entry = &mut self.entries[key as usize];
        if !std::mem::replace(&mut entry.is_known, true) {
            let ghosts = (self.capacity as f64 - small) as u64;
            let is_ghost = entry.ghost_at != 0 && entry.ghost_at + ghosts >= self.inserted;
            if is_ghost {
                entry.is_main = true;
                self.main += u64::from(entry.bytes);
            }
        }
        if entry.is_main {
            let is_spared = entry.hits > 0 || (is_small_full && round == 0);
            // While the small queue is too long, the main one does not move.
            if !(is_small_full && round == 0) {
                entry.hits = entry.hits.saturating_sub(1);
            }
            return is_spared;
        }
        if entry.hits > 0 {
            entry.hits = 0;
            entry.is_main = true;
            self.main += u64::from(entry.bytes);
            return true;
        }
        let is_young = (entry.written_at as f64) + small > self.inserted as f64;
        if round == 0 && (is_young || !is_small_full) {
            return true;
        }
        entry.ghost_at = self.inserted;
        false
    }
}

impl Policy for Farside {
    fn request(&mut self, Request { key, bytes }: Request) -> bool {
        self.requests += 1;
        let Entry { is_stored, generation, .. } = self.entries[key as usize];
        if is_stored {
            self.clients.hit(key, generation, self.requests);
            return true;
        }
        if u64::from(bytes) > self.capacity {
            return false;
        }
        if self.used + u64::from(bytes) > self.capacity {
            self.make_room(bytes.into());
        }
        self.inserted += u64::from(bytes);
        self.used += u64::from(bytes);
        let block = self.free.pop_front().unwrap_or_else(|| {
            self.blocks.push(FREE);
            self.blocks.len() as u32 - 1
        });
        self.blocks[block as usize] = key;
        let entry = &mut self.entries[key as usize];
        *entry = Entry {
            bytes,
            generation: generation.wrapping_add(1),
            block,
            written_at: self.inserted,
            is_stored: true,
            ghost_at: entry.ghost_at,
            ..Default::default()
        };
        self.clients.insert(key);
        false
    }

    fn costs(&self) -> Option<Costs> {
        let Clients { reports, pulls, .. } = self.clients;
        Some(Costs { reports, pulls, ..self.costs })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policies::Kind;
    use crate::policies::reports::Rate;
    use crate::policies::traces::{Extent, Workload};

    /// The sum over all stored keys is what the server believes, and the blocks hold just these.
    #[test]
    fn the_cache_stays_within_its_capacity() {
        let trace = Workload::Sizes.trace(Extent { keys: 500, requests: 20_000, seed: 6 });
        for kind in Kind::all() {
            let Kind::Farside(rule, reporting) = kind else { continue };
            for capacity in [64, 400, 3000] {
                let objects = (capacity as usize / 18).max(1);
                let keys = (trace.keys, trace.data.0);
                let mut cache = Farside::new(rule, reporting, keys, (capacity, objects));
                for request in &trace.requests {
                    cache.request(*request);
                    assert!(cache.used <= capacity, "{}: {}", kind.name(), cache.used);
                }
                let stored = |entry: &&Entry| entry.is_stored;
                let bytes = |entry: &Entry| u64::from(entry.bytes);
                let used: u64 = cache.entries.iter().filter(stored).map(bytes).sum();
                let main = |entry: &&Entry| entry.is_main && entry.is_stored;
                let main: u64 = cache.entries.iter().filter(main).map(bytes).sum();
                assert_eq!((cache.used, cache.main), (used, main), "{}", kind.name());
                for (block, key) in cache.blocks.iter().enumerate() {
                    let Some(entry) = cache.entries.get(*key as usize) else { continue };
                    assert!(entry.is_stored && entry.block as usize == block, "{}", kind.name());
                }
                let stored = cache.entries.iter().filter(stored).count();
                assert_eq!(stored + cache.free.len(), cache.blocks.len(), "{}", kind.name());
            }
        }
    }

    #[test]
    fn the_hand_visits_each_run_once_a_round() {
        let mut hand = Hand::default();
        let mut round = || -> Vec<usize> { (0..50).map(|_| hand.next(50)).collect() };
        let (first, second) = (round(), round());
        assert_eq!(first, second);
        assert!(!first.is_sorted());
        let mut sorted = first;
        sorted.sort_unstable();
        assert_eq!(sorted, Vec::from_iter(0..50));
    }

    /// A popular key stays while new keys come, with every rule, if its hits are reported. Without
    /// reports it goes.
    #[test]
    fn a_popular_key_stays_only_if_its_hits_are_reported() {
        let (sieve, lrfu) = (Rule::Sieve { most: 1 }, Rule::Lrfu { memory: 4.0 });
        for rule in [sieve, Rule::S3Fifo, Rule::Lru, lrfu] {
            for (every, expected) in [(1, true), (u64::MAX, false)] {
                let reporting = Reporting { clients: 4, rate: Rate::OneOf(every) };
                let keys = (100_000, 100_000);
                let mut cache = Farside::new(rule, reporting, keys, (1000, 1000));
                let mut hits = 0;
                for key in 1..100_000 {
                    hits += u32::from(cache.request(Request { key: 0, bytes: 1 }));
                    cache.request(Request { key, bytes: 1 });
                }
                // Without reports it misses at least once for each few thousand new keys.
                assert_eq!(hits > 99_980, expected, "{rule:?} {every}: {hits}");
            }
        }
    }
}
