//! INSERT. Two clients that insert one key must not both succeed, nor both fail forever.
//!
//! An inserter claims a slot, READs the window after the claim in the same chain, and then makes
//! exactly this claim LIVE. So of two inserters at least one sees the other (invariant I8). An
//! inserter claims a slot by a PENDING word. If the slot was never used, the inserter claims it by
//! the slot's hint instead, and the word stays 0 (I21, docs/decisions/0011).

use farside_fabric::{ChainError, Fabric, Nanos, Verb};
use farside_layout::hash::NO_HINT;
use farside_layout::{
    FIRST_INCARNATION, HINT_OFFSET, LayoutError, SLOTS_PER_ROW, Slot, SlotState, SlotWord,
    SubtableState, WINDOW_SLOTS,
};

use super::window::{BlockRead, ENTRY_STATES, KeyLookup, ObservedWindow};
use super::{ExaminedBlock, Operation, ProtocolResult, ProvenSlot, is_moving};
use crate::failure::Failure;
use crate::new_block::NewBlock;

/// The condition under which a store takes effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Condition {
    /// Nothing.
    None,
    /// The key is absent.
    Absent,
    /// The key is present.
    Present,
}

/// The result of an attempt to insert.
pub(super) enum Inserted {
    Done,
    /// The key is present, by a READ posted at this time.
    Present(ProvenSlot, Nanos),
    /// Another client disturbed the attempt: read the window again.
    Retry,
    /// The only free slots of the window are those of unfinished INSERTs.
    Undecided,
    /// The window has no room.
    Full,
    /// A split is still moving keys into the subtable.
    Filling,
}

/// The result of an INSERT that claimed a slot before it read the window.
pub(super) enum BlindInsert {
    Done,
    /// The result of a lookup in the window that was READ after the claim.
    LookedUp(KeyLookup),
    /// The claim was in vain, and the window has to be READ again.
    Retry,
}

/// A slot that this operation has claimed. The claim holds while the slot's word is `word`:
/// PENDING, or 0 if the slot was never used and the hint is the claim.
#[derive(Clone, Copy)]
struct Claim {
    at: usize,
    slot: u64,
    word: SlotWord,
    /// The slot's hint after the claim.
    hint: u64,
}

impl Claim {
    /// Whether the hint is the claim. The slot was never used, so its word is still 0.
    fn is_by_hint(&self) -> bool {
        self.word == SlotWord::default()
    }

    /// Swaps the hint, which only the owner may change, and then the word.
    fn swaps(&self, hint: u64, word: SlotWord) -> [Verb; 2] {
        let Self { slot, word: before, hint: hint_before, .. } = *self;
        let (expected, desired) = (before.bits(), word.bits());
        [
            Verb::CompareSwap { remote: slot + HINT_OFFSET, expected: hint_before, desired: hint },
            Verb::CompareSwap { remote: slot, expected, desired },
        ]
    }
}

/// The result of a claim and of the READ of the window after it.
enum ClaimResult {
    /// The slot is this operation's.
    Ours(Claim),
    /// Another operation used or claimed the slot before.
    Occupied,
    /// Neither the claim nor the READ was executed, because they would have been too late.
    Late,
}

impl<F: Fabric> Operation<'_, F> {
    /// Inserts the key, which `first` does not have. Two round trips if no other client disturbs
    /// it.
    pub(super) async fn insert_block(
        &self,
        first: &ObservedWindow,
        new: &NewBlock,
        condition: Condition,
    ) -> ProtocolResult<Inserted> {
        if first.subtable_state != SubtableState::Whole {
            return Ok(Inserted::Filling);
        }
        let at = self.choose_slot(first, |slot| !slot.is_claimed_by_hint());
        // If there is none, take a slot that a hint claims. The INSERT that claimed it may never
        // end, so its claim must block no other key.
        let Some(at) = at.or_else(|| self.choose_slot(first, Slot::is_claimed_by_hint)) else {
            let undecided = |slot: &Slot| {
                matches!(slot.word().state(), SlotState::Pending | SlotState::Aborted)
            };
            if first.slots.iter().any(undecided) {
                return Ok(Inserted::Undecided);
            }
            if tombs(first) >= TOMBS_MIN {
                self.wait_for_tomb().await;
                return Ok(Inserted::Retry);
            }
            return Ok(Inserted::Full);
        };
        let (window, mut seen) = ((first.base, first.local_depth), ObservedWindow::unread());
        match self.claim(window, at, first.slots[at], new, &mut seen).await? {
            ClaimResult::Ours(claim) => {
                let confirmed = self.confirm(first, &seen, claim).await;
                self.publish_or_withdraw(confirmed, claim, seen.posted, new, condition).await
            }
            ClaimResult::Occupied | ClaimResult::Late => Ok(Inserted::Retry),
        }
    }

    /// Pauses for a part of GRACE, within which a TOMB becomes EMPTY.
    pub(super) async fn wait_for_tomb(&self) {
        let pause = self.region.constants.grace_ns / TOMB_READS;
        self.engine.endpoint.sleep_until(self.lane, self.now() + pause).await;
    }

    /// Inserts the key, if it is absent, into a slot of its home row that was probably never used.
    /// Two round trips if so. The chain of the claim also reads the window, so the INSERT relies on
    /// nothing that it did not read (docs/decisions/0007).
    pub(super) async fn insert_blindly(
        &self,
        new: &NewBlock,
        seen: &mut ObservedWindow,
        damaged: &mut u32,
    ) -> ProtocolResult<BlindInsert> {
        let window = self.region.directory().window(self.hash);
        let at = self.engine.random.below(SLOTS_PER_ROW as u64) as usize;
        let unused = Slot::new(SlotWord::default(), 0);
        let claim = match self.claim(window, at, unused, new, seen).await? {
            ClaimResult::Ours(claim) => claim,
            ClaimResult::Occupied
                if seen.subtable_state == SubtableState::Whole && self.is_fresh(seen.posted) =>
            {
                return Ok(BlindInsert::LookedUp(self.locate_from(seen, damaged).await?));
            }
            ClaimResult::Occupied | ClaimResult::Late => return Ok(BlindInsert::Retry),
        };
        let confirmed = self.confirm_unseen(seen, claim).await;
        match self
            .publish_or_withdraw(confirmed, claim, seen.posted, new, Condition::Absent)
            .await?
        {
            Inserted::Done => Ok(BlindInsert::Done),
            Inserted::Present(target, _) => Ok(BlindInsert::LookedUp(KeyLookup::Present(target))),
            _ => Ok(BlindInsert::Retry),
        }
    }

    /// [`Operation::confirm`] for the first READ of this window. If a LIVE word has another key's
    /// hint, a second READ has to show whether the word was LIVE before.
    async fn confirm_unseen(
        &self,
        first: &ObservedWindow,
        claim: Claim,
    ) -> ProtocolResult<ClaimCheck> {
        let mut live = first.matching(&[SlotState::Live]);
        let is_unclear =
            live.any(|(_, slot)| !self.hint_matches(slot) && !was_claimed_by_hint(slot.word()));
        if first.subtable_state == SubtableState::Whole && is_unclear {
            let mut seen = ObservedWindow::unread();
            self.read_window_at((first.base, first.local_depth), &mut seen).await?;
            return self.confirm(first, &seen, claim).await;
        }
        self.confirm(first, first, claim).await
    }

    /// Step 1: claims the slot if it is still as `before`, and READs the window after the claim.
    /// `window` is the window's byte offset and the local depth that its subtable must have.
    async fn claim(
        &self,
        window: (u64, u8),
        at: usize,
        before: Slot,
        new: &NewBlock,
        seen: &mut ObservedWindow,
    ) -> ProtocolResult<ClaimResult> {
        let slot = window.0 + ObservedWindow::in_window(at);
        let empty = before.word();
        let (word, (remote, expected, desired)) = if before.is_unused() {
            (empty, (slot + HINT_OFFSET, 0, self.first_hint()))
        } else {
            let pending = empty.pending(self.hash.fingerprint(), *new.block);
            (pending, (slot, empty.bits(), pending.bits()))
        };
        let posted = self.now();
        let cas = Verb::CompareSwap { remote, expected, desired };
        let chain = [new.write(), cas, self.window_verb(window.0)];
        let verbs = if new.written.replace(true) { &chain[1..] } else { &chain[..] };
        let found = match self.chain(verbs, posted).await {
            Ok(found) => found,
            Err(ChainError::Late) => {
                new.written.set(false);
                return Ok(ClaimResult::Late);
            }
            Err(error) => return Err(self.before_publishing(error)),
        };
        self.decode_window(window, posted, seen)?;
        self.region.record_unused_slots(&seen.slots);
        let claim = Claim { at, slot, word, hint: seen.slots[at].hint() };
        Ok(if found == expected { ClaimResult::Ours(claim) } else { ClaimResult::Occupied })
    }

    /// The key's hint in a slot that was never used.
    fn first_hint(&self) -> u64 {
        self.hash.hint(FIRST_INCARNATION)
    }

    /// Step 4 if the key is absent and no rival is left; otherwise withdraws the claim.
    async fn publish_or_withdraw(
        &self,
        confirmed: ProtocolResult<ClaimCheck>,
        claim: Claim,
        posted: Nanos,
        new: &NewBlock,
        condition: Condition,
    ) -> ProtocolResult<Inserted> {
        let inserted = match confirmed {
            Ok(ClaimCheck::Alone) => return self.publish(claim, new, condition).await,
            Ok(ClaimCheck::Present(target)) => Ok(Inserted::Present(target, posted)),
            Ok(ClaimCheck::Disturbed) => Ok(Inserted::Retry),
            Err(error) => Err(error),
        };
        self.withdraw(claim).await?;
        inserted
    }

    /// Steps 2 and 3: checks whether the key is present, and aborts its rivals. Rivals are claims
    /// by this key's hint, and PENDING words with its fingerprint, even if their key is another
    /// one.
    async fn confirm(
        &self,
        first: &ObservedWindow,
        seen: &ObservedWindow,
        claim: Claim,
    ) -> ProtocolResult<ClaimCheck> {
        // Once a split has begun, no client inserts here. An INSERT that passes this check was
        // PENDING before the split reads the slot. The split aborts it or moves it along (invariant
        // I16).
        if seen.subtable_state != SubtableState::Whole || !self.is_fresh(first.posted) {
            return Ok(ClaimCheck::Disturbed);
        }
        for (at, slot) in seen.matching(&ENTRY_STATES) {
            let word = slot.word();
            if is_moving(word) {
                return Ok(ClaimCheck::Disturbed);
            }
            let hint_matches = self.hint_matches(slot);
            // The word was LIVE before this READ began, so this READ saw its final hint: another
            // key's (docs/decisions/0002). If the word became LIVE meanwhile, the READ may have
            // seen an older hint. If that INSERT claimed by the hint, its claim then came after
            // this one, so its READ saw this claim (invariant I12).
            if !hint_matches && (first.slots[at].word() == word || was_claimed_by_hint(word)) {
                continue;
            }
            if hint_matches && seen.hints_exact {
                return Ok(ClaimCheck::Present(seen.target(at)));
            }
            match self.read_and_examine(word, seen.posted).await? {
                BlockRead::Examined(ExaminedBlock::Ours(found, header)) => {
                    return Ok(ClaimCheck::Present(seen.target(at).read(&found, header)));
                }
                BlockRead::Examined(ExaminedBlock::Other) => {}
                // The next attempt has rules for a damaged block.
                BlockRead::Examined(ExaminedBlock::Damaged(_)) | BlockRead::Stale => {
                    return Ok(ClaimCheck::Disturbed);
                }
            }
        }
        let pending = seen.matching(&[SlotState::Pending]);
        let pending =
            pending.map(|(at, slot)| (at, slot, slot.word().with_state(SlotState::Aborted)));
        let by_hint = seen.slots.iter().enumerate();
        let by_hint = by_hint
            .filter(|(_, slot)| slot.is_claimed_by_hint() && slot.hint() == self.first_hint());
        let by_hint = by_hint.map(|(at, slot)| (at, *slot, SlotWord::after_hint_claim()));
        for (at, slot, aborted) in pending.chain(by_hint).filter(|(at, ..)| *at != claim.at) {
            if !self.abort(seen.slot(at), slot.word(), aborted).await? {
                return Ok(ClaimCheck::Disturbed);
            }
        }
        Ok(ClaimCheck::Alone)
    }

    /// Aborts another INSERT. Returns false if it was too late for that.
    async fn abort(&self, slot: u64, word: SlotWord, aborted: SlotWord) -> ProtocolResult<bool> {
        Ok(match self.compare_swap(slot, word, aborted).await? {
            Some(found) => !matches!(
                found.state(),
                SlotState::Live | SlotState::Frozen | SlotState::Copy | SlotState::Moved
            ),
            None => false,
        })
    }

    /// Swaps a slot's word, and returns the word found; `None` if the chain was late. One round
    /// trip.
    async fn compare_swap(
        &self,
        slot: u64,
        expected: SlotWord,
        desired: SlotWord,
    ) -> ProtocolResult<Option<SlotWord>> {
        let (expected, desired) = (expected.bits(), desired.bits());
        let cas = Verb::CompareSwap { remote: slot, expected, desired };
        match self.chain(&[cas], self.now()).await {
            Ok(found) => Ok(Some(SlotWord::from_bits(found))),
            Err(ChainError::Late) => Ok(None),
            Err(error) => Err(self.before_publishing(error)),
        }
    }

    /// Step 4: sets the hint, unless it was the claim, and then makes the word LIVE. One round
    /// trip.
    async fn publish(
        &self,
        claim: Claim,
        new: &NewBlock,
        condition: Condition,
    ) -> ProtocolResult<Inserted> {
        // The word of a value with a TTL is conditional (invariant I19).
        let conditional = condition != Condition::None || new.expires();
        let incarnation = claim.word.incarnation().max(FIRST_INCARNATION);
        let fingerprint = self.hash.fingerprint();
        let live = SlotWord::live_in(incarnation, fingerprint, *new.block, conditional);
        let posted = self.now();
        let chain = claim.swaps(self.hash.hint(incarnation), live);
        match self.chain(&chain[usize::from(claim.is_by_hint())..], posted).await {
            Ok(found) if found == claim.word.bits() => {
                self.remember(claim.slot, live, new, posted);
                Ok(Inserted::Done)
            }
            Ok(_) if claim.is_by_hint() => Ok(Inserted::Retry),
            Ok(found) => {
                self.clear_aborted(claim, SlotWord::from_bits(found)).await?;
                Ok(Inserted::Retry)
            }
            Err(ChainError::Late) => {
                self.withdraw(claim).await?;
                Ok(Inserted::Retry)
            }
            Err(error) => Err(self.failed(error)),
        }
    }

    /// Withdraws a PENDING word. Clears the hint first, so that no EMPTY word has another key's
    /// hint (invariant I6). The hint may be this key's already, if only the second swap of
    /// `publish` was late. A claim by a hint stays, because a hint without a word blocks no key.
    async fn withdraw(&self, claim: Claim) -> ProtocolResult<()> {
        if claim.is_by_hint() {
            return Ok(());
        }
        let chain = claim.swaps(NO_HINT, claim.word.emptied());
        for _ in 0..LATE_ATTEMPTS_MAX {
            match self.chain(&chain, self.now()).await {
                Ok(found) if found == claim.word.bits() => return Ok(()),
                Ok(found) => return self.clear_aborted(claim, SlotWord::from_bits(found)).await,
                Err(ChainError::Late) => {}
                Err(error) => return Err(self.before_publishing(error)),
            }
        }
        Err(Failure::Lost(self.region.index))
    }

    /// Clears this operation's word after another inserter aborted it. Only the owner may
    /// (invariant I6).
    async fn clear_aborted(&self, claim: Claim, found: SlotWord) -> ProtocolResult<()> {
        let aborted = claim.word.with_state(SlotState::Aborted);
        if found != aborted {
            // No other session changes a PENDING word in another way.
            return Err(LayoutError::Field { field: "slot word", value: found.bits() }.into());
        }
        for _ in 0..LATE_ATTEMPTS_MAX {
            let cleared = self.compare_swap(claim.slot, aborted, aborted.emptied()).await?;
            if cleared.is_some() {
                return Ok(());
            }
        }
        Err(Failure::Lost(self.region.index))
    }

    /// Converts the error of a chain before the key could become visible. Whether or not the chain
    /// was executed, the INSERT was not. The server clears the PENDING word that it may have left.
    fn before_publishing(&self, error: ChainError) -> Failure {
        match error {
            ChainError::Unknown => Failure::Lost(self.region.index),
            error => self.failed(error),
        }
    }
}

/// Whether the INSERT that made this word LIVE had claimed its slot by the hint. Only such an
/// INSERT uses the first incarnation.
fn was_claimed_by_hint(word: SlotWord) -> bool {
    word.incarnation() == FIRST_INCARNATION
}

/// How often an INSERT READs a full window with a TOMB during GRACE. After GRACE the TOMB is EMPTY.
const TOMB_READS: Nanos = 16;
/// An INSERT waits for a TOMB if half of a full window is TOMBs. With fewer it asks for a split: a
/// server that evicts makes a few TOMBs all the time, and each wait takes up to GRACE. Many come
/// from a server that evicts the keys of whole chunks. Once these are EMPTY, the window needs no
/// split.
const TOMBS_MIN: usize = WINDOW_SLOTS / 2;

/// Returns how many words of a window are TOMB.
pub(super) fn tombs(window: &ObservedWindow) -> usize {
    window.slots.iter().filter(|slot| slot.word().state() == SlotState::Tomb).count()
}

/// Limit on the attempts of a chain that was late, but has to be executed.
const LATE_ATTEMPTS_MAX: u32 = 1000;

/// The result of the READ after a claim.
enum ClaimCheck {
    /// The key is absent, and no rival is left.
    Alone,
    Present(ProvenSlot),
    /// The READ decides nothing: withdraw the claim.
    Disturbed,
}
