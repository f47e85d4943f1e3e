//! The hand of a class, which visits its blocks in turn and so finds those that go.

use std::ops::Range;

use farside_fabric::Nanos;
use farside_layout::{BlockAddress, SizeClass};

/// How many neighbouring blocks are visited together.
pub(super) const RUN: u64 = 8;
/// After so many rounds without an eviction all reads are forgotten. Without new reports, three
/// rounds are enough: two take the reads away, and the third finds blocks without reads.
const ROUNDS_BEFORE_FORGETTING: u64 = 3;
/// After so many rounds without an eviction the hand rests: no key of the class can be evicted.
const ROUNDS_MAX: u64 = 4;
/// In one of so many rounds the hand takes marked blocks for candidates: most of them are free.
/// The hand does not rest before it has made such a round.
const ROUNDS_PER_MARKED: u64 = ROUNDS_MAX;
/// How long the hand rests at least, and for each block that it visited in vain. So a class whose
/// keys cannot be evicted takes no more than about an eighth of the thread's time.
const REST_NS_MIN: Nanos = 50_000_000;
const REST_NS_PER_BLOCK: Nanos = 400;

/// The hand of a class.
///
/// It visits one run of blocks in each span, then another run in each, until it has visited all
/// runs. Runs that follow each other are far apart in their span. The order is the same in each
/// round, so a block is visited once a round, and a new value has about a round to be read. A span
/// that is added or removed changes only when the next few runs are visited.
pub(super) struct Hand {
    /// The number of blocks in a span.
    blocks: u64,
    /// The number of runs in a span.
    runs: u64,
    /// By how many runs a span's next run lies behind the last one. It has no common factor with
    /// `runs`.
    step: u64,
    /// The run that is visited in all spans.
    run: u64,
    /// The number of complete rounds.
    rounds: u64,
    /// The next span, by its index in the depot's list.
    span: usize,
    /// Blocks that were found to go, when there was no time to evict their keys.
    pub(super) found: Vec<BlockAddress>,
    /// How many blocks were visited since the last eviction.
    in_vain: u64,
    rests_until: Nanos,
}

/// What to do after visits in vain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Search {
    GoOn,
    /// Forget the reads of all blocks, then go on.
    Forget,
    /// No key of the class can be evicted now.
    End,
}

impl Hand {
    pub(super) fn new(class: SizeClass) -> Self {
        let blocks = class.blocks_per_span();
        let runs = blocks.div_ceil(RUN);
        // The golden ratio: any runs that follow each other are far apart.
        let step = (runs * 89 / 144).max(1);
        let step = (step..).find(|step| greatest_divisor(*step, runs) == 1).unwrap_or(1);
        let (run, rounds, span, found) = (0, 0, 0, Vec::new());
        Self { blocks, runs, step, run, rounds, span, found, in_vain: 0, rests_until: 0 }
    }

    /// Returns the next run: the first chunk of its span, one of `spans`, and its blocks. `None`
    /// without spans.
    pub(super) fn next_run(&mut self, spans: &[u32]) -> Option<(u32, Range<u64>)> {
        if self.span >= spans.len() {
            self.span = 0;
            self.run = (self.run + self.step) % self.runs;
            self.rounds += u64::from(self.run == 0);
        }
        let chunk = *spans.get(self.span)?;
        self.span += 1;
        let start = self.run * RUN;
        Some((chunk, start..(start + RUN).min(self.blocks)))
    }

    /// Whether the blocks of this round are candidates also if they are marked.
    pub(super) fn takes_marked(&self) -> bool {
        self.rounds % ROUNDS_PER_MARKED == ROUNDS_PER_MARKED - 1
    }

    /// Notes that `visited` blocks were visited, in a class of `blocks`. `now` returns the time.
    pub(super) fn note_visits(
        &mut self,
        visited: u64,
        blocks: u64,
        now: impl FnOnce() -> Nanos,
    ) -> Search {
        let before = self.in_vain;
        self.in_vain += visited;
        let forgets_at = ROUNDS_BEFORE_FORGETTING * blocks;
        if self.in_vain >= ROUNDS_MAX * blocks {
            self.rest(now());
            Search::End
        } else if before < forgets_at && self.in_vain >= forgets_at {
            Search::Forget
        } else {
            Search::GoOn
        }
    }

    /// Notes that a key was evicted.
    pub(super) fn note_evicted(&mut self) {
        self.in_vain = 0;
    }

    fn rest(&mut self, now: Nanos) {
        let rest_ns = REST_NS_MIN.max(self.in_vain * REST_NS_PER_BLOCK);
        (self.rests_until, self.in_vain) = (now.saturating_add(rest_ns), 0);
    }

    /// Whether the hand rests, because no key of the class could be evicted.
    pub(super) fn rests(&self, now: Nanos) -> bool {
        now < self.rests_until
    }
}

fn greatest_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { greatest_divisor(b, a % b) }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_round_visits_each_block_once_in_the_order_of_the_last_round() {
        for class in SizeClass::all() {
            let (mut hand, spans) = (Hand::new(class), [5, 9, 2]);
            let runs = class.blocks_per_span().div_ceil(RUN) * spans.len() as u64;
            let mut round = || (0..runs).map(|_| hand.next_run(&spans).unwrap()).collect();
            let first: Vec<_> = round();
            let runs_of = |(chunk, run): &(u32, Range<u64>)| (*chunk, run.start);
            let distinct: BTreeSet<_> = first.iter().map(runs_of).collect();
            assert_eq!(distinct.len() as u64, runs, "{class:?}");
            assert_eq!(round(), first);
        }
    }

    #[test]
    fn runs_that_follow_each_other_are_far_apart() {
        let mut hand = Hand::new(SizeClass::for_bytes(1024).unwrap());
        let starts: Vec<_> = (0..10).map(|_| hand.next_run(&[1]).unwrap().1.start).collect();
        let nearest = starts.windows(2).map(|pair| pair[0].abs_diff(pair[1])).min();
        assert!(nearest > Some(500), "{starts:?}");
    }

    #[test]
    fn spans_that_come_and_go_keep_the_other_runs_in_turn() {
        let mut hand = Hand::new(SizeClass::for_bytes(1024).unwrap());
        assert_eq!(hand.next_run(&[]), None);
        let mut visited = BTreeSet::new();
        let spans = [&[1, 2, 3][..], &[1, 2], &[1, 2, 4, 5], &[1, 2, 6]];
        for at in 0..4 * 256 {
            let (chunk, run) = hand.next_run(spans[at % spans.len()]).unwrap();
            visited.insert((chunk, run.start));
        }
        let count = |chunk| visited.iter().filter(|(other, _)| *other == chunk).count();
        assert!(count(1) > 200 && count(2) > 200, "{} {}", count(1), count(2));
    }

    #[test]
    fn a_search_in_vain_forgets_and_ends() {
        let (class, blocks) = (SizeClass::for_bytes(1 << 20).unwrap(), 100);
        let mut hand = Hand::new(class);
        let search = |hand: &mut Hand| {
            let results = (0..).map(|_| hand.note_visits(RUN, blocks, || 7));
            let mut steps = Vec::new();
            for result in results {
                steps.push(result);
                if result == Search::End {
                    break;
                }
            }
            steps
        };
        let steps = search(&mut hand);
        assert_eq!(steps.len(), 50);
        assert_eq!(steps.iter().position(|step| *step == Search::Forget), Some(37));
        assert!(hand.rests(7 + REST_NS_MIN - 1) && !hand.rests(7 + REST_NS_MIN));
        assert_eq!(hand.note_visits(RUN, blocks, || 7), Search::GoOn);
        (0..10).for_each(|_| assert_eq!(hand.note_visits(RUN, blocks, || 7), Search::GoOn));
        hand.note_evicted();
        assert_eq!(search(&mut hand).len(), 50);
        assert_eq!(hand.note_visits(0, 0, || 7), Search::End);
    }
}
