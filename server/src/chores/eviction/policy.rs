//! The policy of a cache: which of the visited blocks go, and when the server asks its clients what
//! they have read. The hand chooses the order of visits (`hand.rs`), and the depot counts reads
//! (`server/src/chores/depot/class_pool.rs`).
//!
//! The policy is SIEVE (NSDI'24) with counts to two. A block that clients have read since the hand
//! came by is spared, and loses one of its reads. A block without reads goes. Values that have
//! expired go before all others.
//!
//! Pinned values are never evicted, so their blocks never become candidates. A span that has one
//! cannot become empty, and a class that has nothing else can give no block.
//!
//! The server asks for reads while it evicts, and once before, when the memory is nearly full: from
//! then on clients note what they read.

use std::collections::HashSet;

use farside_fabric::Nanos;
use farside_layout::{BlockAddress, BlockHeader, SizeClass};

use crate::chores::depot::{Depot, VisitedBlock};

/// If the values of at least this share of the candidates have expired, a batch evicts only those:
/// an eighth.
const EXPIRED_SHARE_DIVISOR: usize = 8;
/// The share of a class's blocks that shows its idle time: the fifth that has been idle for
/// longest.
const IDLE_SHARE_DIVISOR: usize = 5;

/// What becomes of a candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// It goes before all others, because its value has expired.
    Expired,
    /// It goes, because it was not read.
    Unread,
    /// It stays for another round, because it was read.
    Spared,
}

/// A block with a key, and what the policy knows of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    block: VisitedBlock,
    /// When the value was written, by the writer's clock, in milliseconds since 1970.
    written_at_ms: u64,
    /// When the value expires, in milliseconds since 1970; 0 for never.
    expires_at_ms: u64,
}

impl Candidate {
    pub(super) fn new(block: VisitedBlock, header: &BlockHeader) -> Self {
        // A marked block is most likely free, so what it had should not go first.
        let expires_at_ms = if header.is_marked() { 0 } else { header.expires_at_ms() };
        Self { block, written_at_ms: header.written_at_ms(), expires_at_ms }
    }

    /// Decides about the candidate.
    fn fate(&self, wall_ms: u64) -> Fate {
        if self.expires_at_ms != 0 && self.expires_at_ms <= wall_ms {
            Fate::Expired
        } else if self.block.reads == 0 {
            Fate::Unread
        } else {
            Fate::Spared
        }
    }

    /// Returns for how long the candidate has been of no use, as far as the policy knows, in
    /// milliseconds. Memory moves from the class with the highest idle time to others.
    fn idle_ms(&self, wall_ms: u64) -> u64 {
        match self.fate(wall_ms) {
            Fate::Expired | Fate::Unread => wall_ms.saturating_sub(self.written_at_ms),
            Fate::Spared => 0,
        }
    }
}

/// The candidates of one batch of evictions.
pub(super) struct Batch {
    wall_ms: u64,
    /// How many keys should go.
    wanted: usize,
    candidates: usize,
    expired: Vec<BlockAddress>,
    unread: Vec<BlockAddress>,
}

impl Batch {
    /// A batch of `wanted` evictions at this time of the wall clock.
    pub(super) fn new(wanted: usize, wall_ms: u64) -> Self {
        let (expired, unread) = (Vec::new(), Vec::with_capacity(wanted));
        Self { wall_ms, wanted, candidates: 0, expired, unread }
    }

    pub(super) fn add(&mut self, candidate: Candidate) {
        self.candidates += 1;
        match candidate.fate(self.wall_ms) {
            Fate::Expired => self.expired.push(candidate.block.address),
            Fate::Unread => self.unread.push(candidate.block.address),
            Fate::Spared => {}
        }
    }

    /// The number of candidates so far.
    pub(super) fn candidates(&self) -> usize {
        self.candidates
    }

    /// Whether no more candidates are needed.
    pub(super) fn is_complete(&self) -> bool {
        self.expired.len() + self.unread.len() >= self.wanted
    }

    /// Returns the blocks that go, those with expired values first. They may be more than wanted.
    pub(super) fn into_evictions(self) -> Vec<BlockAddress> {
        let only_expired = !self.expired.is_empty()
            && self.expired.len() >= self.candidates.div_ceil(EXPIRED_SHARE_DIVISOR);
        let unread = if only_expired { Vec::new() } else { self.unread };
        self.expired.into_iter().chain(unread).collect()
    }
}

/// Returns for how long a class's keys have been idle, by some of its blocks: the shortest idle
/// time of the fifth that has been idle for longest. `None` if there are no blocks.
pub(super) fn idle_ms(candidates: &[Candidate], wall_ms: u64) -> Option<u64> {
    let count = candidates.len().div_ceil(IDLE_SHARE_DIVISOR);
    let mut idle_ms: Vec<_> =
        candidates.iter().map(|candidate| candidate.idle_ms(wall_ms)).collect();
    idle_ms.sort_unstable_by(|a, b| b.cmp(a));
    idle_ms.get(count.checked_sub(1)?).copied()
}

/// Spans are noted again after this time, because their values may not be pinned any more.
const SPANS_AGE_NS: Nanos = 60_000_000_000;

/// The pinned values that were seen.
pub(super) struct Pins {
    /// The first chunks of spans that had a pinned value.
    spans: HashSet<u32>,
    spans_since: Nanos,
    /// How many pinned values of each class were met since a key of the class was evicted, or its
    /// hand began to search.
    met: [u64; SizeClass::COUNT],
    /// The classes whose hand found pinned values and nothing that could be evicted.
    is_full: [bool; SizeClass::COUNT],
}

impl Pins {
    pub(super) fn new() -> Self {
        Self { spans: HashSet::new(), spans_since: 0, met: [0; _], is_full: [false; _] }
    }

    /// Notes a pinned value in a span of this class.
    pub(super) fn note(&mut self, chunk: u32, class: SizeClass) {
        self.spans.insert(chunk);
        self.met[usize::from(class.index())] += 1;
    }

    /// Notes that a key of the class was evicted.
    pub(super) fn note_evicted(&mut self, class: SizeClass) {
        let class = usize::from(class.index());
        (self.met[class], self.is_full[class]) = (0, false);
    }

    /// Notes that no key of the class can be evicted now.
    pub(super) fn note_search_ended(&mut self, class: SizeClass) {
        let class = usize::from(class.index());
        self.is_full[class] = std::mem::take(&mut self.met[class]) > 0;
    }

    /// Whether pinned values are why no key of the class can be evicted.
    pub(super) fn fill(&self, class: SizeClass) -> bool {
        self.is_full[usize::from(class.index())]
    }

    /// Whether pinned values are why no key of any class can be evicted that was searched.
    pub(super) fn fill_any(&self) -> bool {
        self.is_full.contains(&true)
    }

    /// The number of pinned values that were met in the class.
    pub(super) fn met(&self, class: SizeClass) -> u64 {
        self.met[usize::from(class.index())]
    }

    /// Whether a pinned value was seen in the span.
    pub(super) fn are_in(&self, chunk: u32) -> bool {
        self.spans.contains(&chunk)
    }

    /// Forgets the spans if they were noted long ago.
    pub(super) fn forget_old_spans(&mut self, now: Nanos) {
        if now.saturating_sub(self.spans_since) >= SPANS_AGE_NS {
            self.spans.clear();
            self.spans_since = now;
        }
    }
}

/// The server asks when so large a share of a class was evicted: 1/64. Blocks that were read since
/// the last question look unread meanwhile.
const SHARE_DIVISOR: u64 = 64;
/// The server asks after this time in any case, if it evicted anything since.
const PAUSE_NS_MAX: Nanos = 100_000_000;
/// It asks for the first time when so small a share of the chunks is left: an eighth.
const FIRST_SHARE_DIVISOR: u64 = 8;
/// It asks no sooner than this.
const PAUSE_NS_MIN: Nanos = 10_000_000;
/// The pause is longer if answers take long: so long for each client and for each block that was
/// reported. Then they take about an eighth of the thread's time.
const PAUSE_NS_PER_CLIENT: Nanos = 100_000;
const PAUSE_NS_PER_BLOCK: Nanos = 200;

/// The questions to clients about their reads.
pub(crate) struct ReadPulls {
    /// How many keys of each class were evicted since the last question.
    evicted: [u64; SizeClass::COUNT],
    /// Whether any key was evicted since the last question.
    has_evicted: bool,
    /// Whether [`SHARE_DIVISOR`] demands a question.
    is_urgent: bool,
    asked_at: Option<Nanos>,
    /// How many clients were asked the last time.
    asked: u64,
    /// How many blocks were reported since then.
    reported: u64,
}

impl ReadPulls {
    pub(super) fn new() -> Self {
        Self {
            evicted: [0; _],
            has_evicted: false,
            is_urgent: false,
            asked_at: None,
            asked: 0,
            reported: 0,
        }
    }

    /// Notes that `count` keys of a class were evicted, which has so many blocks.
    pub(super) fn note_evicted(&mut self, class: SizeClass, count: usize, blocks: u64) {
        let evicted = &mut self.evicted[usize::from(class.index())];
        *evicted += count as u64;
        self.has_evicted |= count > 0;
        self.is_urgent |= *evicted * SHARE_DIVISOR >= blocks;
    }

    /// Notes that a client reported so many blocks.
    pub(crate) fn note_reported(&mut self, blocks: usize) {
        self.reported += blocks as u64;
    }

    /// Whether to ask all clients for the first time, because the memory is nearly full.
    pub(crate) fn is_first_due(&self, depot: &Depot) -> bool {
        let chunks = u64::from(depot.chunks());
        self.asked_at.is_none() && depot.chunks_coming() * FIRST_SHARE_DIVISOR <= chunks
    }

    /// Whether to ask all clients now.
    pub(crate) fn is_due(&self, now: Nanos) -> bool {
        let Some(asked_at) = self.asked_at else { return self.has_evicted };
        let pause = if self.is_urgent { PAUSE_NS_MIN } else { PAUSE_NS_MAX };
        let cost = self.asked * PAUSE_NS_PER_CLIENT + self.reported * PAUSE_NS_PER_BLOCK;
        self.has_evicted && now.saturating_sub(asked_at) >= pause.max(cost)
    }

    /// Notes that so many clients are asked now.
    pub(crate) fn note_asked(&mut self, clients: usize, now: Nanos) {
        let (asked_at, asked) = (Some(now), clients as u64);
        *self = Self { asked_at, asked, ..Self::new() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WALL_MS: u64 = 1000;

    fn candidate(address: u32, reads: u8, (written_at_ms, expires_at_ms): (u64, u64)) -> Candidate {
        let block = VisitedBlock { address: BlockAddress(address), reads };
        Candidate { block, written_at_ms, expires_at_ms }
    }

    /// Makes a batch of `expired` blocks with expired values that were read, then of `spared` other
    /// blocks that were read, then of 7 blocks without reads. Returns whether it is complete, and
    /// the addresses of its first `wanted` evictions.
    fn evictions(expired: u32, spared: u32, wanted: usize) -> (bool, Vec<u32>) {
        let mut batch = Batch::new(wanted, WALL_MS);
        (0..expired).for_each(|n| batch.add(candidate(100 + n, 2, (1, WALL_MS))));
        (0..spared).for_each(|n| batch.add(candidate(200 + n, 1, (1, WALL_MS + 1))));
        (0..7).for_each(|n| batch.add(candidate(n, 0, (1, 0))));
        let is_complete = batch.is_complete();
        let first = batch.into_evictions().into_iter().take(wanted);
        (is_complete, first.map(|address| address.0).collect())
    }

    #[test]
    fn blocks_without_reads_go_and_others_are_spared() {
        assert_eq!(evictions(0, 50, 7), (true, (0..7).collect()));
        assert_eq!(evictions(0, 50, 3).1, [0, 1, 2]);
        assert_eq!(evictions(0, 50, 8), (false, (0..7).collect()));
    }

    #[test]
    fn what_has_expired_goes_first_and_alone_if_it_is_an_eighth() {
        assert_eq!(evictions(1, 0, 5).1, [100]);
        assert_eq!(evictions(1, 1, 5).1, [100, 0, 1, 2, 3]);
        assert_eq!(evictions(9, 0, 4).1, [100, 101, 102, 103]);
        assert!(Batch::new(5, WALL_MS).into_evictions().is_empty());
    }

    #[test]
    fn idle_times_are_those_of_the_fifth_that_is_idle_for_longest() {
        let unread = |written_at_ms| candidate(1, 0, (written_at_ms, 0));
        let mut candidates: Vec<_> = [700, 200, 500, 100, 900, 300].map(unread).into();
        assert_eq!(idle_ms(&candidates, WALL_MS), Some(800));
        // The two oldest ones were read since.
        candidates[1].block.reads = 1;
        candidates[3].block.reads = 2;
        assert_eq!(idle_ms(&candidates, WALL_MS), Some(500));
        assert_eq!(idle_ms(&[candidate(1, 1, (1, 0))], WALL_MS), Some(0));
        assert_eq!(idle_ms(&[], WALL_MS), None);
    }

    #[test]
    fn a_class_is_full_of_pinned_values_once_a_search_met_nothing_else() {
        let [class, other] = [64, 128].map(|bytes| SizeClass::for_bytes(bytes).unwrap());
        let mut pins = Pins::new();
        pins.note_search_ended(class);
        assert!(!pins.fill(class) && !pins.fill_any());
        pins.note(7, class);
        assert!(!pins.fill(class) && pins.are_in(7) && !pins.are_in(8));
        pins.note_search_ended(other);
        assert!(!pins.fill_any());
        pins.note_search_ended(class);
        assert!(pins.fill(class) && !pins.fill(other) && pins.fill_any());
        pins.note_evicted(class);
        pins.note_search_ended(class);
        assert!(!pins.fill_any());
        pins.forget_old_spans(SPANS_AGE_NS);
        assert!(!pins.are_in(7));
    }

    const MS: Nanos = 1_000_000;

    fn class() -> SizeClass {
        SizeClass::for_bytes(64).unwrap()
    }

    #[test]
    fn questions_come_with_evictions_and_stop_with_them() {
        let mut pulls = ReadPulls::new();
        assert!(!pulls.is_due(500 * MS));
        pulls.note_evicted(class(), 0, 6400);
        assert!(!pulls.is_due(500 * MS));
        pulls.note_evicted(class(), 1, 6400);
        assert!(pulls.is_due(0));
        pulls.note_asked(1, 500 * MS);
        assert!(!pulls.is_due(9000 * MS));
        pulls.note_evicted(class(), 1, 6400);
        assert!(!pulls.is_due(599 * MS) && pulls.is_due(600 * MS));
        pulls.note_evicted(class(), 99, 6400);
        assert!(!pulls.is_due(509 * MS) && pulls.is_due(510 * MS));
        pulls.note_asked(1, 510 * MS);
        assert!(!pulls.is_due(9000 * MS));
    }

    #[test]
    fn costly_answers_make_questions_rare() {
        let mut pulls = ReadPulls::new();
        pulls.note_asked(1000, 0);
        pulls.note_evicted(class(), 100, 100);
        assert!(!pulls.is_due(99 * MS) && pulls.is_due(100 * MS));
        (0..50).for_each(|_| pulls.note_reported(16_000));
        assert!(!pulls.is_due(259 * MS) && pulls.is_due(260 * MS));
    }
}
