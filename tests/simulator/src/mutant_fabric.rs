//! Makes a mutant of production code, which has no switch for it. A layer between a session and the
//! simulated fabric changes chains and answers, so that one rule is broken. A checker that does not
//! catch the mutants is worth nothing.

mod splits;

use std::cell::Cell;
use std::collections::HashMap;

use farside_fabric::{Buffer, ChainError, Nanos, Trust, Verb};
use farside_layout::hash::NO_HINT;
use farside_layout::{
    BLOCK_HEADER_BYTES, Block, BlockAddress, BlockHeader, BlockStamp, FIRST_INCARNATION,
    HINT_OFFSET, HeaderWord, INCARNATION_MAX, INCARNATIONS, NamedBlock, Slot, SlotState, SlotWord,
    WINDOW_BYTES, WORD_GENERATIONS, class_for, seal,
};
use farside_protocol::OpenRegion;
use zerocopy::{FromBytes, IntoBytes};

use crate::memory::{Memory, TIMING};
use crate::mutant::Mutant;
use crate::mutant_fabric::splits::{MutantSplitState, nothing};
use crate::region::{GRACE_MS, hash, keys};

/// The length of a block of the smallest class.
const BLOCK_WORDS: usize = 8;

/// The scratch buffers of a lane.
pub(crate) type Buffers = [Vec<u64>; Buffer::COUNT];

/// Changes the chains of one session and their answers, as its mutant demands.
pub(crate) struct MutantFabric {
    pub(crate) mutant: Mutant,
    /// How far the clock is ahead, or the time at which it stopped.
    clock: Cell<Nanos>,
    /// The first generation seen of each block, by its offset.
    generations: HashMap<u64, u32>,
    /// The word that a slot holds, and the word that the client was shown, by the slot's offset.
    pub(crate) words: HashMap<u64, (u64, u64)>,
    /// The first window that was READ.
    window: Option<Vec<u64>>,
    /// The first word that a READ of one word brought.
    word: Option<u64>,
    /// The first whole block that was READ.
    block: Option<[u64; BLOCK_WORDS]>,
    /// The word that the posted compare-and-swap reports instead of the one that it finds.
    pub(crate) reported: Option<u64>,
    /// The last compare-and-swap failed because it found another LIVE word.
    lost: bool,
    /// How long the operations take that the posted chain stands for.
    pub(crate) delay: Nanos,
    pub(crate) split: MutantSplitState,
}

impl MutantFabric {
    /// If the mutant stops the clock, it stops at `now`.
    pub(crate) fn new(mutant: Mutant, now: Nanos) -> Self {
        let stopped = matches!(mutant, Mutant::StoppedClock | Mutant::StoppedClockOnly);
        Self {
            mutant,
            clock: Cell::new(if stopped { now } else { 0 }),
            generations: HashMap::new(),
            words: HashMap::new(),
            window: None,
            word: None,
            block: None,
            reported: None,
            lost: false,
            delay: 0,
            split: MutantSplitState::default(),
        }
    }
}

fn state(bits: u64) -> SlotState {
    SlotWord::from_bits(bits).state()
}

/// Returns the compare-and-swap of a slot's word: its index in the chain, the slot, the expected
/// and the desired word.
pub(crate) fn swap_of(chain: &[Verb]) -> Option<(usize, u64, u64, u64)> {
    swaps_of(chain).find(|(_, slot, ..)| slot.is_multiple_of(size_of::<Slot>() as u64))
}

/// Returns the compare-and-swaps of words and hints, as [`swap_of`] returns them.
fn swaps_of(chain: &[Verb]) -> impl Iterator<Item = (usize, u64, u64, u64)> {
    chain.iter().enumerate().filter_map(|(at, verb)| match *verb {
        Verb::CompareSwap { remote, expected, desired } => Some((at, remote, expected, desired)),
        _ => None,
    })
}

/// Whether this chain is an INSERT's claim, followed by a READ of the window.
pub(crate) fn is_claim(chain: &[Verb]) -> bool {
    swaps_of(chain).next().is_some() && chain.iter().any(is_window)
}

/// Whether this compare-and-swap replaces a word in state `from` by one in state `to`.
pub(crate) fn swaps(expected: u64, desired: u64, from: SlotState, to: SlotState) -> bool {
    (state(expected), state(desired)) == (from, to)
}

pub(crate) fn is_window(verb: &Verb) -> bool {
    matches!(*verb, Verb::Read { bytes, .. } if u64::from(bytes) == WINDOW_BYTES)
}

/// Returns the indices of the slots' words in a window.
pub(crate) fn window_words() -> impl Iterator<Item = usize> {
    (0..2usize).flat_map(|row| (0..7usize).map(move |slot| row * 16 + 2 + slot * 2))
}

impl MutantFabric {
    /// Returns what the client's clock shows. `now` is the right time.
    pub(crate) fn now(&self, now: Nanos) -> Nanos {
        match self.mutant {
            Mutant::FastClock => {
                let ahead = self.clock.get() + u64::from(GRACE_MS) * 1_000_000;
                self.clock.set(ahead);
                now + ahead
            }
            Mutant::StoppedClock | Mutant::StoppedClockOnly => self.clock.get(),
            _ => now,
        }
    }

    /// Returns a hash of the remembered words that the answers to the client do not show.
    pub(crate) fn state(&self) -> u64 {
        self.split.state()
    }

    /// Returns how long the operations take that the posted chain stands for, before the chain.
    pub(crate) fn delay(&mut self) -> Nanos {
        std::mem::take(&mut self.delay)
    }

    /// Changes the error of a failed chain.
    pub(crate) fn fail(&self, error: &mut ChainError) {
        if self.mutant == Mutant::UnknownIsNothing && *error == ChainError::Unknown {
            *error = ChainError::Fenced;
        }
    }

    /// Changes a chain as it is posted.
    pub(crate) fn post(&mut self, chain: &mut Vec<Verb>, memory: &Memory) {
        self.reported = None;
        self.post_marks(chain, memory);
        self.post_split(chain, memory);
        let (word, any) = (swap_of(chain), swaps_of(chain).next());
        if let Some(swap) = word {
            self.post_swap(chain, swap, memory);
        } else if let Some((at, hint, expected, _)) = any {
            self.post_hint(chain, (at, hint - HINT_OFFSET, expected));
        }
    }

    /// Changes what a chain brought.
    pub(crate) fn complete(
        &mut self,
        posted_chain: &[Verb],
        buffers: &mut Buffers,
        found: &mut u64,
    ) {
        if let Some((_, slot, expected, desired)) = swap_of(posted_chain) {
            if let Some(reported) = self.reported.take() {
                *found = reported;
            }
            self.complete_swap((slot, expected, desired), found);
            self.lose_cached((slot, expected, desired), found);
            self.lost = *found != expected && state(*found) == SlotState::Live;
            if self.lost && matches!(self.mutant, Mutant::FoundBelieved(_)) {
                // Shows the slot as if its incarnation number had recurred.
                let number = SlotWord::from_bits(expected).incarnation();
                let reported = with_incarnation(*found, number);
                self.words.insert(slot, (*found, reported));
                *found = reported;
            }
        }
        for verb in posted_chain {
            // A READ of a block. It leaves out the padding if the location is cached.
            if let Verb::Read { remote, into: Buffer::ReadBlock, bytes: 48 | 64 } = *verb {
                self.complete_block(remote, &mut buffers[Buffer::ReadBlock as usize]);
            }
        }
        if let (
            Mutant::SuccessorBelieved,
            [Verb::Read { bytes: 16, .. }, Verb::Read { remote, .. }],
        ) = (self.mutant, posted_chain)
        {
            let slot = leads_to(*remote, &buffers[Buffer::ReadBlock as usize]);
            let reported = [slot.word().bits(), slot.hint()];
            buffers[Buffer::Window as usize][..2].copy_from_slice(&reported);
        }
        self.complete_window(posted_chain, &mut buffers[Buffer::Window as usize]);
        self.complete_split(posted_chain, &mut buffers[Buffer::Window as usize]);
    }
}

impl MutantFabric {
    fn post_marks(&mut self, chain: &mut Vec<Verb>, memory: &Memory) {
        let Some(mark) = chain.iter().position(|verb| matches!(verb, Verb::WriteU32 { .. })) else {
            return;
        };
        match (self.mutant, chain[mark]) {
            (Mutant::MarkAfterSwap, _) => chain.swap(mark, mark + 1),
            (Mutant::NoMark, _) => drop(chain.remove(mark)),
            (Mutant::MarkOfEightBytes, Verb::WriteU32 { remote, .. }) => {
                chain[mark] = Verb::WriteWord { remote, value: memory.word_at_offset(remote) | 1 };
            }
            _ => {}
        }
    }

    fn post_swap(
        &mut self,
        chain: &mut Vec<Verb>,
        (at, slot, expected, desired): (usize, u64, u64, u64),
        memory: &Memory,
    ) {
        use SlotState::{Aborted, Empty, Live, Moved, Pending, Tomb};
        let is = |from, to| swaps(expected, desired, from, to);
        let swap = |expected, desired| Verb::CompareSwap { remote: slot, expected, desired };
        match self.mutant {
            Mutant::SwapInTwo => {
                let found = memory.word_at_offset(slot);
                self.reported = Some(found);
                if found == expected {
                    chain[at] = Verb::WriteWord { remote: slot, value: desired };
                } else {
                    chain.remove(at);
                }
            }
            Mutant::AbortsToEmpty if is(Pending, Aborted) => {
                chain[at] = swap(expected, SlotWord::from_bits(desired).emptied().bits());
            }
            Mutant::AbortsToEmpty if is(Aborted, Empty) => {
                self.reported = Some(expected);
                chain[at] = nothing(slot);
            }
            Mutant::TakesAborted | Mutant::SameIncarnation | Mutant::FoundBelieved(_) => {
                if let Some((real, reported)) = self.words.get(&slot)
                    && *reported == expected
                {
                    chain[at] = swap(*real, desired);
                }
            }
            Mutant::ReplacedRemoved if is(Live, Tomb) => {
                let found = memory.word_at_offset(slot);
                let tomb = SlotWord::from_bits(found).with_state(Tomb);
                if state(found) == Live && found != expected {
                    self.words.insert(slot, (found, expected));
                    chain[at] = swap(found, tomb.bits());
                }
            }
            Mutant::HintAfterClear if is(Pending, Empty) || is(Aborted, Empty) => {
                self.reported = Some(memory.word_at_offset(slot));
                chain.reverse();
            }
            Mutant::IncarnationsInNoTime if is(Live, Empty) => {
                chain[at] = swap(expected, later(desired, INCARNATIONS - 1));
            }
            Mutant::ReusedPlaceLooksUnused if is(Empty, Moved) && expected == 0 => {
                chain[at] = swap(expected, SlotWord::default().with_state(Moved).bits());
            }
            _ => self.post_insert(chain, (at, slot, expected, desired)),
        }
    }

    fn complete_swap(&mut self, (slot, expected, desired): (u64, u64, u64), found: &mut u64) {
        use SlotState::{Aborted, Empty, Live, Pending, Tomb};
        let is = |from, to| swaps(expected, desired, from, to);
        let (wanted, met) = (SlotWord::from_bits(expected), SlotWord::from_bits(*found));
        let same_incarnation = wanted.incarnation() == met.incarnation();
        let aborted = wanted.with_state(Aborted).bits();
        match self.mutant {
            Mutant::NoClaim(_) if is(Pending, Live) => {
                let (real, _) = self.words[&slot];
                *found = if *found == real { expected } else { aborted };
            }
            Mutant::GoesOnAfterLive
                if (is(Pending, Aborted) || is(Empty, Empty)) && met.state() == Live =>
            {
                *found = expected;
            }
            Mutant::AbortsToEmpty
                if (is(Pending, Live) || is(Pending, Empty)) && *found != expected =>
            {
                *found = aborted;
            }
            Mutant::TakesAborted
            | Mutant::SameIncarnation
            | Mutant::FoundBelieved(_)
            | Mutant::ReplacedRemoved => {
                if let Some((real, reported)) = self.words.remove(&slot)
                    && *found == real
                {
                    *found = reported;
                }
            }
            Mutant::FirstIncarnationTwice(_)
                if self.words.contains_key(&slot) && met.incarnation() == 1 =>
            {
                *found = with_incarnation(*found, wanted.incarnation());
            }
            Mutant::AbsorbedByConditional if met.state() == Live && met != wanted => {
                *found &= !(1 << 60);
            }
            // As if a PUT had replaced the value by one in the same block.
            Mutant::AbsorbedByTomb if is(Live, Live) && met.state() == Tomb => {
                let block = wanted.block().ok();
                let next = |block: NamedBlock| NamedBlock {
                    generation_low: block.generation_low.wrapping_add(1),
                    ..block
                };
                *found = block.map_or(*found, |block| wanted.live(next(block), false).bits());
            }
            Mutant::DeleteAbsorbed
                if is(Live, Empty) && met.state() == Live && same_incarnation =>
            {
                *found = expected;
            }
            _ => {}
        }
    }

    fn complete_block(&mut self, remote: u64, block: &mut [u64]) {
        let header = HeaderWord::from_bits(block[0]);
        match self.mutant {
            Mutant::MarkIgnored => block[0] &= !0xffff_ffff,
            Mutant::GenerationIgnored => {
                let generation = *self.generations.entry(remote).or_insert(header.generation);
                block[0] = block[0] & 0xffff_ffff | u64::from(generation) << 32;
                reseal(remote, block);
            }
            Mutant::FirstBlockKept if is_whole(remote, block) => {
                let first = self.block.get_or_insert(std::array::from_fn(|at| block[at]));
                block[1..BLOCK_WORDS].copy_from_slice(&first[1..]);
                reseal(remote, block);
            }
            mutant if mutant.ignores_checksums() => reseal(remote, block),
            Mutant::FoundBelieved(key) if std::mem::take(&mut self.lost) => {
                block.as_mut_bytes()[BLOCK_HEADER_BYTES as usize..][..keys()[key].len()]
                    .copy_from_slice(&keys()[key]);
                reseal(remote, block);
            }
            _ => {}
        }
    }

    fn complete_window(&mut self, posted_chain: &[Verb], window: &mut [u64]) {
        let Some(Verb::Read { remote, .. }) = posted_chain.iter().find(|verb| is_window(verb))
        else {
            if let (Mutant::StaleMarkBelieved, 2, Verb::Read { bytes: 8, .. }) =
                (self.mutant, posted_chain.len(), posted_chain[0])
            {
                window[0] = *self.word.get_or_insert(window[0]);
            }
            return;
        };
        let claims = is_claim(posted_chain);
        self.show_another(*remote, window);
        match self.mutant {
            Mutant::AbsorbedByOldWindow if !claims => {
                let first = self.window.get_or_insert_with(|| window[..32].to_vec());
                window[..32].copy_from_slice(first);
            }
            Mutant::EveryMismatchBelieved(key) if claims => {
                let hash = hash(&keys()[key]);
                for at in window_words() {
                    let word = SlotWord::from_bits(window[at]);
                    let matches = window[at + 1] == hash.hint(word.incarnation());
                    if word.state() == SlotState::Live && !matches {
                        window[at] = SlotWord::empty(0).bits();
                    }
                }
            }
            Mutant::TakesAborted | Mutant::SameIncarnation => {
                for at in window_words() {
                    let real = SlotWord::from_bits(window[at]);
                    let reported = match (self.mutant, real.state()) {
                        (Mutant::TakesAborted, SlotState::Aborted) => real.emptied(),
                        (Mutant::SameIncarnation, SlotState::Empty) => SlotWord::empty(0),
                        _ => continue,
                    };
                    self.words.insert(remote + at as u64 * 8, (real.bits(), reported.bits()));
                    window[at] = reported.bits();
                }
            }
            _ => {}
        }
    }
}

/// Returns a slot of the first key that leads to this block.
fn leads_to(remote: u64, block: &[u64]) -> Slot {
    let generation_low = HeaderWord::from_bits(block[0]).generation as u8;
    let address = BlockAddress::from_offset(remote);
    let class = class_for(keys()[0].len(), 2);
    let (Some(address), Some(class)) = (address, class) else {
        return Slot::new(SlotWord::default(), 0);
    };
    let (block, hash) = (NamedBlock { address, class, generation_low }, hash(&keys()[0]));
    Slot::new(SlotWord::live_in(0, hash.fingerprint(), block, false), hash.hint(0))
}

/// Whether the checksum of a block is right.
fn is_whole(remote: u64, block: &[u64]) -> bool {
    let bytes = &block.as_bytes()[..BLOCK_WORDS * size_of::<u64>()];
    BlockAddress::from_offset(remote).is_some_and(|address| Block::decode(bytes, address).is_ok())
}

/// Corrects the checksum of a block, so that the client accepts its content.
fn reseal(remote: u64, block: &mut [u64]) {
    let Some(address) = BlockAddress::from_offset(remote) else { return };
    let Ok((header, _)) = BlockHeader::read_from_prefix(block.as_bytes()) else { return };
    let superseded = block[0] & 0xffff_ffff;
    let stamp = BlockStamp {
        address,
        generation: header.generation(),
        writer: header.writer(),
        written_at_ms: header.written_at_ms(),
        expires_at_ms: header.expires_at_ms(),
        is_pinned: header.is_pinned(),
    };
    let (key_bytes, value_bytes) = (header.key_bytes() as u16, header.value_bytes());
    // Content with impossible lengths is no block, and stays invalid.
    if seal(block.as_mut_bytes(), key_bytes, value_bytes, stamp).is_ok() {
        block[0] |= superseded;
    }
}

/// Returns the EMPTY word that follows `word` after this number of incarnations.
pub(crate) fn later(word: u64, incarnations: u64) -> u64 {
    let block = SlotWord::default().block().expect("there is a class 0");
    let next = |word: SlotWord, _| word.pending(0, block).emptied();
    (0..incarnations).fold(SlotWord::from_bits(word), next).bits()
}

/// Returns the word with another incarnation number.
fn with_incarnation(word: u64, incarnation: u8) -> u64 {
    word & !SlotWord::empty(INCARNATION_MAX).bits() | SlotWord::empty(incarnation).bits()
}

impl MutantFabric {
    /// Changes a chain that claims this slot by its hint.
    fn post_hint(&mut self, chain: &mut Vec<Verb>, (at, slot, expected): (usize, u64, u64)) {
        match self.mutant {
            Mutant::NoClaim(_) => {
                self.words.insert(slot, (0, 0));
                self.reported = Some(expected);
                chain.remove(at);
            }
            Mutant::LooksTooEarly => chain.swap(at, at + 1),
            _ => {}
        }
    }

    /// Changes a chain with an INSERT's compare-and-swap of a word.
    fn post_insert(
        &mut self,
        chain: &mut Vec<Verb>,
        (at, slot, expected, desired): (usize, u64, u64, u64),
    ) {
        use SlotState::{Aborted, Empty, Live, Pending};
        let is = |from, to| swaps(expected, desired, from, to);
        let swap = |expected, desired| Verb::CompareSwap { remote: slot, expected, desired };
        match self.mutant {
            Mutant::NoClaim(_) if is(Empty, Pending) => {
                self.words.insert(slot, (expected, desired));
                self.reported = Some(expected);
                chain.remove(at);
            }
            Mutant::NoClaim(key) if is(Empty, Live) => {
                let value = hash(&keys()[key]).hint(FIRST_INCARNATION);
                chain.insert(at, Verb::WriteWord { remote: slot + HINT_OFFSET, value });
            }
            Mutant::NoClaim(_) if is(Pending, Live) => {
                let (real, _) = self.words[&slot];
                chain[at] = swap(real, desired);
            }
            Mutant::NoClaim(_) if is(Pending, Empty) || is(Aborted, Empty) => {
                self.reported = Some(expected);
                chain.clear();
                // A chain needs a verb.
                chain.push(Verb::Read { remote: slot, into: Buffer::Window, bytes: 8 });
            }
            Mutant::LooksTooEarly if is(Empty, Pending) => chain.swap(at, at + 1),
            Mutant::NoneAborted if is(Pending, Aborted) || is(Empty, Empty) => {
                self.reported = Some(expected);
                chain[at] = nothing(slot);
            }
            Mutant::HintBeforePending(key) if is(Empty, Pending) => {
                let incarnation = SlotWord::from_bits(desired).incarnation();
                let value = hash(&keys()[key]).hint(incarnation);
                chain.insert(at, Verb::WriteWord { remote: slot + HINT_OFFSET, value });
            }
            Mutant::WithdrawKeepsHint | Mutant::WithdrawOften if is(Pending, Empty) => {
                chain[at] = swap(expected, later(desired, INCARNATIONS - 2));
                self.delay = (INCARNATIONS - 2) * TIMING.round_trip_min_ns;
                if self.mutant == Mutant::WithdrawKeepsHint {
                    chain.remove(at - 1);
                }
            }
            Mutant::FirstIncarnationTwice(_) if is(Empty, Pending) && expected == 0 => {
                self.words.insert(slot, (0, 0));
                chain[at] = swap(expected, with_incarnation(desired, FIRST_INCARNATION));
            }
            Mutant::FirstIncarnationTwice(key) if self.words.contains_key(&slot) => {
                let first = |word| with_incarnation(word, FIRST_INCARNATION);
                chain[at] = swap(first(expected), first(desired));
                if let [Verb::CompareSwap { desired, .. }, _] = &mut chain[..]
                    && *desired != NO_HINT
                {
                    *desired = hash(&keys()[key]).hint(FIRST_INCARNATION);
                }
            }
            _ => {}
        }
    }
}

impl Mutant {
    /// Changes the constants of a session. Returns whether they differ now.
    pub(crate) fn change_constants(self, region: &mut OpenRegion) -> bool {
        if self == Self::TrustIgnored {
            region.trust = Trust::forever();
        }
        let constants = &mut region.constants;
        let grace = constants.grace_ns;
        let (constant, value) = match self {
            Self::PatienceWithoutEnd => (&mut constants.patience_ns, Nanos::MAX),
            Self::PatienceWithoutMargin => (&mut constants.patience_ns, grace),
            Self::ProofWithoutMargin => {
                (&mut constants.proof_age_ns_max, WORD_GENERATIONS * grace - TIMING.lateness_max_ns)
            }
            _ => return false,
        };
        std::mem::replace(constant, value) != value
    }
}

impl MutantFabric {
    /// If the slot no longer holds the cached word, shows the found word as EMPTY, so that the
    /// operation READs the window.
    fn lose_cached(&mut self, (slot, expected, desired): (u64, u64, u64), found: &mut u64) {
        let lost = swaps(expected, desired, SlotState::Live, SlotState::Live) && *found != expected;
        if matches!(self.mutant, Mutant::AbsorbedUnread(_)) && lost && self.words.is_empty() {
            self.words.insert(slot, (*found, expected));
            *found = SlotWord::from_bits(*found).emptied().bits();
        }
    }

    /// Shows the word in this window with another incarnation number. A word of the same
    /// incarnation would count as a later value anyway.
    fn show_another(&mut self, remote: u64, window: &mut [u64]) {
        let Mutant::AbsorbedUnread(key) = self.mutant else { return };
        for at in window_words() {
            let word = SlotWord::from_bits(window[at]);
            if word.state() == SlotState::Live
                && self.words.get(&(remote + at as u64 * 8)).is_some_and(|(real, _)| *real != 0)
            {
                let other = word.incarnation() ^ 1;
                window[at] = with_incarnation(window[at], other);
                window[at + 1] = hash(&keys()[key]).hint(other);
                // Only the first READ shows it.
                self.words.insert(remote + at as u64 * 8, (0, 0));
            }
        }
    }
}
