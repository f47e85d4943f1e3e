//! INSERT: two clients that insert one key must not both succeed, nor both give up for ever.
//!
//! First a claim, then another look, then LIVE from that exact word: of two inserters at least one
//! sees the other (invariant I8). A slot is claimed by a PENDING word, or by its hint if it was
//! never used (I21, docs/decisions/0011).

use farside_fabric::{ChainError, Fabric, Nanos, Verb};
use farside_layout::hash::NO_HINT;
use farside_layout::{
    FIRST_INCARNATION, HINT_OFFSET, LayoutError, SLOTS_PER_ROW, Slot, SlotState, SlotWord,
    SubtableState,
};

use super::swing::NewBlock;
use super::window::{BlockRead, KeyLookup, ObservedWindow};
use super::{ExaminedBlock, Operation, ProtocolResult, ProvenSlot, is_moving};
use crate::failure::Failure;

/// What a store requires of the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Condition {
    /// Nothing.
    None,
    /// That it is absent.
    Absent,
    /// That it is there.
    Present,
}

/// How an attempt to insert went.
pub(super) enum Inserted {
    Done,
    /// The key is there, by a READ posted then.
    Present(ProvenSlot, Nanos),
    Again,
    /// The window has no room but where others are in the middle of an INSERT.
    Undecided,
    /// The window has no room.
    Full,
    /// A split is still bringing keys here.
    Filling,
}

/// How an attempt to insert without having looked went.
pub(super) enum BlindInsert {
    Done,
    /// What the look behind the claim showed.
    Looked(KeyLookup),
    /// Nothing came of it.
    Nothing,
}

/// A slot that is ours as long as this is its word: PENDING, or not used if we have its hint.
#[derive(Clone, Copy)]
struct Claim {
    at: usize,
    slot: u64,
    word: SlotWord,
    /// Its hint behind the claim.
    hint: u64,
}

impl Claim {
    fn is_by_hint(&self) -> bool {
        self.word == SlotWord::default()
    }

    /// Another hint, which is the owner's to change, and then another word.
    fn swaps(&self, hint: u64, word: SlotWord) -> [Verb; 2] {
        let Self { slot, word: before, hint: hint_before, .. } = *self;
        let (expected, desired) = (before.bits(), word.bits());
        [
            Verb::CompareSwap { remote: slot + HINT_OFFSET, expected: hint_before, desired: hint },
            Verb::CompareSwap { remote: slot, expected, desired },
        ]
    }
}

/// What became of a claim, and of the look at the window behind it.
enum Claimed {
    /// The slot is ours.
    Ours(Claim),
    /// The slot held something else.
    TakeResult,
    /// Neither has happened.
    Late,
}

impl<F: Fabric> Operation<'_, F> {
    /// Inserts the key, which `first` did not have. Two round trips without company.
    pub(super) async fn insert_block(
        &self,
        first: &ObservedWindow,
        new: &NewBlock,
        condition: Condition,
    ) -> ProtocolResult<Inserted> {
        if first.standing != SubtableState::Whole {
            return Ok(Inserted::Filling);
        }
        let at = self.choose_slot(first, |slot| !slot.is_claimed());
        // What was claimed so far may be for ever.
        let Some(at) = at.or_else(|| self.choose_slot(first, Slot::is_claimed)) else {
            let undecided = |slot: &Slot| {
                matches!(slot.word().state(), SlotState::Pending | SlotState::Aborted)
            };
            if first.slots.iter().any(undecided) {
                return Ok(Inserted::Undecided);
            }
            if first.slots.iter().any(|slot| slot.word().state() == SlotState::Tomb) {
                // EMPTY within GRACE.
                let pause = self.region.constants.grace_ns / TOMB_LOOKS;
                self.engine.endpoint.sleep_until(self.lane, self.now() + pause).await;
                return Ok(Inserted::Again);
            }
            return Ok(Inserted::Full);
        };
        let (window, mut seen) = ((first.base, first.local_depth), ObservedWindow::nothing());
        match self.claim(window, at, first.slots[at], new, &mut seen).await? {
            Claimed::Ours(claim) => {
                let confirmed = self.confirm(first, &seen, claim).await;
                self.publish_or_withdraw(confirmed, claim, seen.posted, new, condition).await
            }
            Claimed::TakeResult | Claimed::Late => Ok(Inserted::Again),
        }
    }

    /// Inserts the key if it is absent, into a slot of its home row, if that was never used: two
    /// round trips then. A look comes with the claim, so nothing is believed that was not seen
    /// (docs/decisions/0007).
    pub(super) async fn insert_blindly(
        &self,
        new: &NewBlock,
        seen: &mut ObservedWindow,
        damaged: &mut u32,
    ) -> ProtocolResult<BlindInsert> {
        let window = self.region.directory().window(self.hash);
        let at = self.engine.random_below(SLOTS_PER_ROW as u64) as usize;
        let unused = Slot::new(SlotWord::default(), 0);
        let claim = match self.claim(window, at, unused, new, seen).await? {
            Claimed::Ours(claim) => claim,
            Claimed::TakeResult
                if seen.standing == SubtableState::Whole && self.is_fresh(seen.posted) =>
            {
                return Ok(BlindInsert::Looked(self.locate_from(seen, damaged).await?));
            }
            Claimed::TakeResult | Claimed::Late => return Ok(BlindInsert::Nothing),
        };
        let confirmed = self.confirm_unseen(seen, claim).await;
        match self
            .publish_or_withdraw(confirmed, claim, seen.posted, new, Condition::Absent)
            .await?
        {
            Inserted::Done => Ok(BlindInsert::Done),
            Inserted::Present(target, _) => Ok(BlindInsert::Looked(KeyLookup::Here(target))),
            _ => Ok(BlindInsert::Nothing),
        }
    }

    /// [`Operation::confirm`] for the first READ of this window. Of a word whose hint is another
    /// key's it takes a second one to tell whether it was LIVE before.
    async fn confirm_unseen(
        &self,
        first: &ObservedWindow,
        claim: Claim,
    ) -> ProtocolResult<ClaimCheck> {
        let mut live = first.matching(&[SlotState::Live]);
        let is_unclear = live.any(|(_, slot)| !self.hint_matches(slot) && !is_by_hint(slot.word()));
        if first.standing == SubtableState::Whole && is_unclear {
            let mut seen = ObservedWindow::nothing();
            self.read_window_at((first.base, first.local_depth), &mut seen).await?;
            return self.confirm(first, &seen, claim).await;
        }
        self.confirm(first, first, claim).await
    }

    /// Step 1: the claim, if the slot in that window, whose subtable has to go by so many bits, is
    /// as it was; and then a look at the window.
    async fn claim(
        &self,
        window: (u64, u8),
        at: usize,
        before: Slot,
        new: &NewBlock,
        seen: &mut ObservedWindow,
    ) -> ProtocolResult<Claimed> {
        let slot = window.0 + ObservedWindow::in_window(at);
        let empty = before.word();
        let (word, (remote, expected, desired)) = if before.is_unused() {
            (empty, (slot + HINT_OFFSET, 0, self.first_hint()))
        } else {
            let pending = empty.pending(self.hash.fingerprint(), new.block);
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
                return Ok(Claimed::Late);
            }
            Err(error) => return Err(self.before_publishing(error)),
        };
        self.see(window, posted, seen)?;
        self.region.record_unused_slots(&seen.slots);
        let claim = Claim { at, slot, word, hint: seen.slots[at].hint() };
        Ok(if found == expected { Claimed::Ours(claim) } else { Claimed::TakeResult })
    }

    /// This key's hint in a slot that was never used.
    fn first_hint(&self) -> u64 {
        self.hash.hint(FIRST_INCARNATION)
    }

    /// Step 4, or the way back.
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
            Ok(ClaimCheck::Disturbed) => Ok(Inserted::Again),
            Err(error) => Err(error),
        };
        self.withdraw(claim).await?;
        inserted
    }

    /// Steps 2 and 3: is the key there after all, and which others are inserting it? Their PENDING
    /// of the same fingerprint are aborted, without asking for their key, and their claims by a
    /// hint.
    async fn confirm(
        &self,
        first: &ObservedWindow,
        seen: &ObservedWindow,
        claim: Claim,
    ) -> ProtocolResult<ClaimCheck> {
        // Once a split has begun, no client inserts here: one that gets past this was PENDING
        // before the split looked at the slot, and is aborted or carried along by it (invariant
        // I16).
        if seen.standing != SubtableState::Whole || !self.is_fresh(first.posted) {
            return Ok(ClaimCheck::Disturbed);
        }
        let states = &[SlotState::Live, SlotState::Frozen, SlotState::Copy];
        for (at, slot) in seen.matching(states) {
            let word = slot.word();
            if is_moving(word) {
                return Ok(ClaimCheck::Disturbed);
            }
            let hint_matches = self.hint_matches(slot);
            // The word was LIVE before this READ began, so its hint was in place when this READ
            // saw it: another key's (docs/decisions/0002). A word that became LIVE since may have
            // been READ after its hint was; where the hint was the claim, its owner saw ours then.
            if !hint_matches && (first.slots[at].word() == word || is_by_hint(word)) {
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
                // A damaged block: the next look has rules for that.
                BlockRead::Examined(ExaminedBlock::Damaged(_)) | BlockRead::Stale => {
                    return Ok(ClaimCheck::Disturbed);
                }
            }
        }
        let pending = seen.matching(&[SlotState::Pending]);
        let pending =
            pending.map(|(at, slot)| (at, slot, slot.word().with_state(SlotState::Aborted)));
        let claimed = seen.slots.iter().enumerate();
        let claimed =
            claimed.filter(|(_, slot)| slot.is_claimed() && slot.hint() == self.first_hint());
        let claimed = claimed.map(|(at, slot)| (at, *slot, SlotWord::unclaimed()));
        for (at, slot, aborted) in pending.chain(claimed).filter(|(at, ..)| *at != claim.at) {
            if !self.abort(seen.slot(at), slot.word(), aborted).await? {
                return Ok(ClaimCheck::Disturbed);
            }
        }
        Ok(ClaimCheck::Alone)
    }

    /// Takes another inserter's chance away; false if it was too late for that.
    async fn abort(&self, slot: u64, word: SlotWord, aborted: SlotWord) -> ProtocolResult<bool> {
        Ok(match self.compare_swap(slot, word, aborted).await? {
            Some(found) => !matches!(
                found.state(),
                SlotState::Live | SlotState::Frozen | SlotState::Copy | SlotState::Moved
            ),
            None => false,
        })
    }

    /// What the slot held; `None` if the chain was late.
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

    /// Step 4: the hint, if it is not there yet, then LIVE. One round trip.
    async fn publish(
        &self,
        claim: Claim,
        new: &NewBlock,
        condition: Condition,
    ) -> ProtocolResult<Inserted> {
        let conditional = condition != Condition::None || new.expires();
        let incarnation = claim.word.incarnation().max(FIRST_INCARNATION);
        let fingerprint = self.hash.fingerprint();
        let live = SlotWord::live_in(incarnation, fingerprint, new.block, conditional);
        let posted = self.now();
        let chain = claim.swaps(self.hash.hint(incarnation), live);
        match self.chain(&chain[usize::from(claim.is_by_hint())..], posted).await {
            Ok(found) if found == claim.word.bits() => {
                self.remember(claim.slot, live, new, posted);
                Ok(Inserted::Done)
            }
            Ok(_) if claim.is_by_hint() => Ok(Inserted::Again),
            Ok(found) => {
                self.clear_aborted(claim, SlotWord::from_bits(found)).await?;
                Ok(Inserted::Again)
            }
            Err(ChainError::Late) => {
                self.withdraw(claim).await?;
                Ok(Inserted::Again)
            }
            Err(error) => Err(self.failed(error)),
        }
    }

    /// Takes the PENDING word back, hint first, so that EMPTY stands beside no stranger's hint
    /// (invariant I6); it may be the own one already, if the first swap of `publish` was not late.
    /// A hint without a word blocks no key, so it stays.
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

    /// Clears the own word that another inserter aborted: only its owner may (invariant I6).
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

    /// What a chain that failed before the key could become visible means: whatever became of it,
    /// the INSERT has not happened. The server empties the PENDING word that it may have left.
    fn before_publishing(&self, error: ChainError) -> Failure {
        match error {
            ChainError::Unknown => Failure::Lost(self.region.index),
            error => self.failed(error),
        }
    }
}

/// Whether the INSERT that made this word LIVE claimed its slot by the hint.
fn is_by_hint(word: SlotWord) -> bool {
    word.incarnation() == FIRST_INCARNATION
}

/// How often a full window with a TOMB is looked at in the GRACE after which that is EMPTY.
const TOMB_LOOKS: Nanos = 16;

/// How often a chain that must not be left out is posted again when it was late.
const LATE_ATTEMPTS_MAX: u32 = 1000;

/// What the look behind the claim showed.
enum ClaimCheck {
    Alone,
    Present(ProvenSlot),
    Disturbed,
}
