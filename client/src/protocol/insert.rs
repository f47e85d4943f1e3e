//! INSERT: two clients that insert one key must not both succeed, nor both give up for ever.
//!
//! PENDING first, then look again, then LIVE from that exact word: of two inserters at least one
//! sees the other (invariant I8).

use farside_common::fabric::{ChainError, Fabric, Nanos, Verb};
use farside_common::layout::{
    HINT_OFFSET, LayoutError, ROW_BYTES, SLOTS_PER_ROW, Slot, SlotState, SlotWord, slot_in_subtable,
};

use super::put::Condition;
use super::swing::NewBlock;
use super::window::{Own, Read, Seen, Standing};
use super::{Examined, Operation, Outcome, Target, is_moving};
use crate::allocator::Depot;
use crate::engine::Failure;

/// How an attempt to insert went.
pub(super) enum Inserted {
    Done,
    /// The key is there, by a READ posted then.
    Present(Target, Nanos),
    Again,
    /// The window has no room but where others are in the middle of an INSERT.
    Undecided,
    /// The window has no room.
    Full,
    /// A split is still bringing keys here.
    Filling,
}

/// How an attempt to insert without having looked went.
#[allow(clippy::large_enum_variant, reason = "it lives for a moment; a box would allocate")]
pub(super) enum Unseen {
    Done,
    /// What the look behind the claim showed.
    Looked(Own, Seen),
    /// Nothing came of it.
    Nothing,
}

/// A slot with our PENDING word in it.
#[derive(Clone, Copy)]
struct Claim {
    at: usize,
    slot: u64,
    pending: SlotWord,
}

/// What became of a claim.
#[allow(clippy::large_enum_variant, reason = "it lives for a moment; a box would allocate")]
enum Claimed {
    /// The slot is ours, and this is the window since.
    Ours(Claim, Seen),
    /// The slot held something else.
    Taken(Seen),
    Late,
}

impl<F: Fabric, D: Depot> Operation<'_, F, D> {
    /// Inserts the key, which `first` did not have. Two round trips without company.
    pub(super) async fn insert_block(
        &self,
        first: &Seen,
        new: &NewBlock,
        condition: Condition,
    ) -> Outcome<Inserted> {
        if first.standing != Standing::Whole {
            return Ok(Inserted::Filling);
        }
        let Some(at) = self.choose_slot(first) else {
            let undecided = |slot: &Slot| {
                matches!(slot.word().state(), SlotState::Pending | SlotState::Aborted)
            };
            if first.slots.iter().any(undecided) {
                return Ok(Inserted::Undecided);
            }
            if first.slots.iter().any(|slot| slot.word().state() == SlotState::Tomb) {
                // EMPTY within GRACE.
                let pause = self.engine.constants.grace_ns / TOMB_LOOKS;
                self.engine.endpoint.sleep_until(self.lane, self.now() + pause).await;
                return Ok(Inserted::Again);
            }
            return Ok(Inserted::Full);
        };
        let empty = first.slots[at].word();
        match self.claim((first.base, first.local_depth), at, empty, new).await? {
            Claimed::Ours(claim, seen) => {
                let confirmed = self.confirm(first, &seen, claim).await;
                self.conclude(confirmed, claim, seen.posted, new, condition).await
            }
            Claimed::Taken(_) | Claimed::Late => Ok(Inserted::Again),
        }
    }

    /// Inserts the key if it is absent, into a slot of its home row, if that was never used: two
    /// round trips then. A look comes with the claim, so nothing is believed that was not seen
    /// (docs/decisions/0007).
    pub(super) async fn insert_unseen(&self, new: &NewBlock, damaged: &mut u32) -> Outcome<Unseen> {
        let window = self.engine.directory().window(self.hash);
        let at = self.engine.random_below(SLOTS_PER_ROW as u64) as usize;
        let (claim, first) = match self.claim(window, at, SlotWord::default(), new).await? {
            Claimed::Ours(claim, seen) => (claim, seen),
            Claimed::Taken(seen)
                if seen.standing == Standing::Whole && self.is_fresh(seen.posted) =>
            {
                let (own, seen) = self.locate_from(seen, damaged).await?;
                return Ok(Unseen::Looked(own, seen));
            }
            Claimed::Taken(_) | Claimed::Late => return Ok(Unseen::Nothing),
        };
        let confirmed = self.confirm_unseen(&first, claim).await;
        match self.conclude(confirmed, claim, first.posted, new, Condition::Absent).await? {
            Inserted::Done => Ok(Unseen::Done),
            Inserted::Present(target, _) => Ok(Unseen::Looked(Own::Here(target), first)),
            _ => Ok(Unseen::Nothing),
        }
    }

    /// [`Operation::confirm`] for the first READ of this window. Of a word whose hint is another
    /// key's it takes a second one to tell whether it was LIVE before.
    async fn confirm_unseen(&self, first: &Seen, claim: Claim) -> Outcome<Confirmed> {
        let live = &[SlotState::Live];
        let is_others = |(_, slot): (usize, Slot)| !self.hint_matches(slot);
        if first.standing == Standing::Whole
            && first.with_fingerprint(self.hash.fingerprint(), live).any(is_others)
        {
            let seen = self.read_window_at(first.base, first.local_depth).await?;
            return self.confirm(first, &seen, claim).await;
        }
        self.confirm(first, first, claim).await
    }

    /// Step 1: PENDING, if the slot in that window, whose subtable has to go by so many bits, holds
    /// this word; and then a look at the window.
    async fn claim(
        &self,
        (base, local_depth): (u64, u8),
        at: usize,
        empty: SlotWord,
        new: &NewBlock,
    ) -> Outcome<Claimed> {
        let slot = base + slot_in_subtable(at / SLOTS_PER_ROW, at % SLOTS_PER_ROW);
        let pending = empty.pending(self.hash.fingerprint(), new.block);
        let posted = self.now();
        let (expected, desired) = (empty.bits(), pending.bits());
        let cas = Verb::CompareSwap { remote: slot, expected, desired };
        let chain = [new.write(), cas, self.window_verb(base)];
        let verbs = if new.written.replace(true) { &chain[1..] } else { &chain[..] };
        let found = match self.chain(verbs, posted).await {
            Ok(found) => found,
            Err(ChainError::Late) => {
                new.written.set(false);
                return Ok(Claimed::Late);
            }
            Err(error) => return Err(before_publishing(error)),
        };
        let seen = self.seen(base, posted, local_depth)?;
        self.engine.note_room(&seen.slots);
        let is_ours = found == empty.bits();
        let claim = is_ours.then_some(Claim { at, slot, pending });
        Ok(claim.map_or(Claimed::Taken(seen), |claim| Claimed::Ours(claim, seen)))
    }

    /// Step 4, or the way back.
    async fn conclude(
        &self,
        confirmed: Outcome<Confirmed>,
        claim: Claim,
        posted: Nanos,
        new: &NewBlock,
        condition: Condition,
    ) -> Outcome<Inserted> {
        let inserted = match confirmed {
            Ok(Confirmed::Alone) => return self.publish(claim, new, condition).await,
            Ok(Confirmed::Present(target)) => Ok(Inserted::Present(target, posted)),
            Ok(Confirmed::Disturbed) => Ok(Inserted::Again),
            Err(error) => Err(error),
        };
        self.withdraw(claim).await?;
        inserted
    }

    /// An EMPTY slot of the emptier row. Of two as full one of the even row: a subtable takes 2 %
    /// more keys that way before a window is full.
    fn choose_slot(&self, seen: &Seen) -> Option<usize> {
        let empty = |at: &usize| seen.slots[*at].word().state() == SlotState::Empty;
        let home = (0..SLOTS_PER_ROW).filter(empty).count();
        let next = (SLOTS_PER_ROW..seen.slots.len()).filter(empty).count();
        let is_home_even = (self.hash.window_offset() / ROW_BYTES).is_multiple_of(2);
        let goes_home = home > next || home == next && is_home_even;
        let (skip, among) = if goes_home { (0, home) } else { (home, next) };
        let chosen = skip + self.engine.random_below(among as u64) as usize;
        (0..seen.slots.len()).filter(empty).nth(chosen)
    }

    /// Steps 2 and 3: is the key there after all, and who else is inserting it? Others' PENDING of
    /// the same fingerprint are aborted, without asking for their key.
    async fn confirm(&self, first: &Seen, seen: &Seen, claim: Claim) -> Outcome<Confirmed> {
        // Once a split has begun, nobody inserts here: whoever gets past this was PENDING before
        // the split looked at the slot, and is aborted or carried along by it (invariant I16).
        if seen.standing != Standing::Whole || !self.is_fresh(first.posted) {
            return Ok(Confirmed::Disturbed);
        }
        let fingerprint = self.hash.fingerprint();
        let states = &[SlotState::Live, SlotState::Frozen, SlotState::Copy];
        for (at, slot) in seen.with_fingerprint(fingerprint, states) {
            let word = slot.word();
            if is_moving(word) {
                return Ok(Confirmed::Disturbed);
            }
            let hint_matches = self.hint_matches(slot);
            // The word was LIVE before this READ began, so its hint was in place when this READ
            // saw it: another key's (docs/decisions/0002). A word that became LIVE since may have
            // been READ after its hint was.
            if !hint_matches && first.slots[at].word() == word {
                continue;
            }
            if hint_matches && seen.hints_exact {
                return Ok(Confirmed::Present(seen.target(at)));
            }
            match self.read_and_examine(word, seen.posted).await? {
                Read::Examined(Examined::Ours(found, header)) => {
                    return Ok(Confirmed::Present(seen.target(at).read(&found, header)));
                }
                Read::Examined(Examined::Other) => {}
                // A damaged block: whoever looks again has rules for that.
                Read::Examined(Examined::Damaged(_)) | Read::Stale => {
                    return Ok(Confirmed::Disturbed);
                }
            }
        }
        for (at, slot) in seen.with_fingerprint(fingerprint, &[SlotState::Pending]) {
            if at != claim.at && !self.abort(seen.slot(at), slot.word()).await? {
                return Ok(Confirmed::Disturbed);
            }
        }
        Ok(Confirmed::Alone)
    }

    /// Takes another inserter's chance away; false if it was too late for that.
    async fn abort(&self, slot: u64, pending: SlotWord) -> Outcome<bool> {
        let aborted = pending.with_state(SlotState::Aborted);
        Ok(match self.compare_swap(slot, pending, aborted).await? {
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
    ) -> Outcome<Option<SlotWord>> {
        let (expected, desired) = (expected.bits(), desired.bits());
        let cas = Verb::CompareSwap { remote: slot, expected, desired };
        match self.chain(&[cas], self.now()).await {
            Ok(found) => Ok(Some(SlotWord::from_bits(found))),
            Err(ChainError::Late) => Ok(None),
            Err(error) => Err(before_publishing(error)),
        }
    }

    /// Step 4: the hint, then LIVE. One round trip.
    async fn publish(
        &self,
        claim: Claim,
        new: &NewBlock,
        condition: Condition,
    ) -> Outcome<Inserted> {
        let live = claim.pending.live(new.block, condition != Condition::None || new.expires());
        let hint = self.hash.hint(claim.pending.incarnation());
        let posted = self.now();
        let chain = [
            Verb::WriteWord { remote: claim.slot + HINT_OFFSET, value: hint },
            Verb::CompareSwap {
                remote: claim.slot,
                expected: claim.pending.bits(),
                desired: live.bits(),
            },
        ];
        match self.chain(&chain, posted).await {
            Ok(found) if found == claim.pending.bits() => {
                self.remember(claim.slot, live, new, posted);
                Ok(Inserted::Done)
            }
            Ok(found) => {
                self.clear_aborted(claim, SlotWord::from_bits(found)).await?;
                Ok(Inserted::Again)
            }
            Err(ChainError::Late) => {
                self.withdraw(claim).await?;
                Ok(Inserted::Again)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Takes the PENDING word back, hint first, so that EMPTY stands beside no stranger's hint
    /// (invariant I6).
    async fn withdraw(&self, claim: Claim) -> Outcome<()> {
        let chain = [
            Verb::WriteWord { remote: claim.slot + HINT_OFFSET, value: 0 },
            Verb::CompareSwap {
                remote: claim.slot,
                expected: claim.pending.bits(),
                desired: claim.pending.emptied().bits(),
            },
        ];
        for _ in 0..LATE_ATTEMPTS_MAX {
            match self.chain(&chain, self.now()).await {
                Ok(found) if found == claim.pending.bits() => return Ok(()),
                Ok(found) => return self.clear_aborted(claim, SlotWord::from_bits(found)).await,
                Err(ChainError::Late) => {}
                Err(error) => return Err(before_publishing(error)),
            }
        }
        Err(Failure::Disconnected)
    }

    /// Clears the own word that another inserter aborted: only its owner may (invariant I6).
    async fn clear_aborted(&self, claim: Claim, found: SlotWord) -> Outcome<()> {
        let aborted = claim.pending.with_state(SlotState::Aborted);
        if found != aborted {
            // Nobody else changes a PENDING word in another way.
            return Err(LayoutError::Field { field: "slot word", value: found.bits() }.into());
        }
        for _ in 0..LATE_ATTEMPTS_MAX {
            let cleared = self.compare_swap(claim.slot, aborted, aborted.emptied()).await?;
            if cleared.is_some() {
                return Ok(());
            }
        }
        Err(Failure::Disconnected)
    }
}

/// What a chain that failed before the key could become visible means: whatever became of it, the
/// INSERT has not happened. The server empties the PENDING word that it may have left.
fn before_publishing(error: ChainError) -> Failure {
    match error {
        ChainError::Unknown => Failure::Disconnected,
        error => error.into(),
    }
}

/// How often a full window with a TOMB is looked at in the GRACE after which that is EMPTY.
const TOMB_LOOKS: Nanos = 16;

/// How often a chain that must not be left out is posted again when it was late.
const LATE_ATTEMPTS_MAX: u32 = 1000;

/// What the look behind the claim showed.
enum Confirmed {
    Alone,
    Present(Target),
    Disturbed,
}
