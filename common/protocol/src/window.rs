//! Reading the window: everywhere a key can be, in one READ.

use farside_fabric::{Buffer, Fabric, Nanos, Verb};
use farside_layout::{
    BLOCK_BYTES_MAX, LayoutError, ROW_BYTES, SLOTS_PER_ROW, Slot, SlotState, SlotWord,
    SubtableState, WINDOW_BYTES, WINDOW_SLOTS, Window, side_of, slot_offset,
};

use super::{ATTEMPTS_MAX, ExaminedBlock, Operation, ProtocolResult, ProvenSlot, is_moving};
use crate::directory::Subtable;

/// How often an operation READs a window that is not its key's, and the directory, before it calls
/// the row damaged.
const WINDOW_READS_MAX: u32 = 16;
/// How often an operation looks again for an exact hint of a word whose block is damaged, before it
/// says so.
const DAMAGE_ATTEMPTS_MAX: u32 = 16;
const _: () = assert!(BLOCK_BYTES_MAX <= u32::MAX as u64);

/// A window as one READ brought it. The reader says where it is to stand: it is large, and
/// would be copied on the way back from each function.
pub(super) struct ObservedWindow {
    /// Where it is in the region.
    pub(super) base: u64,
    /// How many leading bits of the hash the keys of its subtable share.
    pub(super) local_depth: u8,
    /// When its READ was posted.
    pub(super) posted: Nanos,
    /// How long it took.
    took: Nanos,
    /// The READ was short enough for its hints to be exact (invariant I7).
    pub(super) hints_exact: bool,
    pub(super) slots: [Slot; WINDOW_SLOTS],
    /// A bit for each slot whose word has the key's fingerprint.
    matching: u16,
    pub(super) standing: SubtableState,
}
const _: () = assert!(WINDOW_SLOTS <= u16::BITS as usize);

/// Where a window has the key.
pub(super) enum KeyLookup {
    Here(ProvenSlot),
    Absent,
    /// A split is moving an entry with the key's fingerprint.
    Moving,
    /// It took too long to find out: look again.
    Stale,
}

/// Where else the key may be, when it is not in a window.
pub(super) enum ForwardWindow {
    /// Nowhere.
    Nowhere,
    /// In the one seen now, to which a split took it. READ after the other, so that nothing that
    /// moved is missed (invariant I14).
    Window,
    /// Cannot be told: start over.
    Unknown,
}

impl ObservedWindow {
    /// No window yet.
    pub(super) fn nothing() -> Self {
        Self {
            base: 0,
            local_depth: 0,
            posted: 0,
            took: 0,
            hints_exact: false,
            slots: [Slot::new(SlotWord::default(), 0); WINDOW_SLOTS],
            matching: 0,
            standing: SubtableState::Elsewhere,
        }
    }

    /// The byte offset of a slot from the start of the window.
    pub(super) fn in_window(at: usize) -> u64 {
        slot_offset(at)
    }

    /// The byte offset of a slot in the region.
    pub(super) fn slot(&self, at: usize) -> u64 {
        self.base + Self::in_window(at)
    }

    /// Whether a split can have this word here. If not it is damaged, and will stay.
    fn fits_split(&self, word: SlotWord) -> bool {
        match word.state() {
            SlotState::Frozen => matches!(self.standing, SubtableState::Splitting(_)),
            SlotState::Copy => self.standing == SubtableState::Filling,
            _ => false,
        }
    }

    /// The slot as a target, by this READ.
    pub(super) fn target(&self, at: usize) -> ProvenSlot {
        ProvenSlot::unread(self.slot(at), self.slots[at].word(), self.posted)
    }

    /// Slots whose word has the key's fingerprint and one of these states.
    pub(super) fn matching(
        &self,
        states: &'static [SlotState],
    ) -> impl Iterator<Item = (usize, Slot)> + '_ {
        let mut left = self.matching;
        let next = move || {
            let at = (left != 0).then(|| left.trailing_zeros() as usize)?;
            left &= left - 1;
            Some((at, self.slots[at]))
        };
        std::iter::from_fn(next).filter(|(_, slot)| states.contains(&slot.word().state()))
    }
}

impl<F: Fabric> Operation<'_, F> {
    /// READs the key's window: one round trip, more when the directory had to be READ anew.
    pub(super) async fn read_window(&self, seen: &mut ObservedWindow) -> ProtocolResult<()> {
        let (mut elsewhere, mut stale) = (0, 0);
        while elsewhere < WINDOW_READS_MAX {
            let (base, local_depth) = self.region.directory().window(self.hash);
            self.read_window_at((base, local_depth), seen).await?;
            match seen.standing {
                // Believed only on the way from the old one: this directory is older than both.
                SubtableState::Elsewhere | SubtableState::Filling => {
                    elsewhere += 1;
                    self.handle().reload_entry(self.lane, self.hash.directory()).await?;
                }
                // A lane that waits for its turn in a deep pipeline of large values is often late.
                SubtableState::Whole | SubtableState::Splitting(_)
                    if seen.took > self.region.constants.patience_ns =>
                {
                    stale += 1;
                    if stale == ATTEMPTS_MAX {
                        return Err(self.contended());
                    }
                }
                SubtableState::Whole | SubtableState::Splitting(_) => {
                    self.region.confirm_directory(self.hash, (base, local_depth));
                    return Ok(());
                }
            }
        }
        Err(LayoutError::Row { offset: self.window() }.into())
    }

    /// READs the window there, whose subtable has to go by this many bits. One round trip.
    pub(super) async fn read_window_at(
        &self,
        there: (u64, u8),
        seen: &mut ObservedWindow,
    ) -> ProtocolResult<()> {
        let posted = self.now();
        self.handle().read(self.lane, &[self.window_verb(there.0)]).await?;
        self.see(there, posted, seen)
    }

    /// Where a key may be that is not in this window. One round trip during a split, none else.
    pub(super) async fn read_forward_window(
        &self,
        seen: &mut ObservedWindow,
    ) -> ProtocolResult<ForwardWindow> {
        let SubtableState::Splitting(forward) = seen.standing else {
            return Ok(ForwardWindow::Nowhere);
        };
        let directory_hash = self.hash.directory();
        let offset = forward[side_of(directory_hash, seen.local_depth)];
        self.region.geometry.check_subtable(offset)?;
        // No deeper and no shallower: it may have been split since, and be another's now.
        let local_depth = seen.local_depth + 1;
        let base = offset + self.hash.window_offset();
        self.read_window_at((base, local_depth), seen).await?;
        if seen.took > self.region.constants.patience_ns {
            return Ok(ForwardWindow::Unknown);
        }
        match seen.standing {
            SubtableState::Elsewhere => {
                self.handle().reload_entry(self.lane, directory_hash).await?;
                Ok(ForwardWindow::Unknown)
            }
            SubtableState::Filling => Ok(ForwardWindow::Window),
            SubtableState::Whole | SubtableState::Splitting(_) => {
                self.region.update_directory(directory_hash, Subtable { offset, local_depth })?;
                self.region.confirm_directory(self.hash, (base, local_depth));
                Ok(ForwardWindow::Window)
            }
        }
    }

    /// Where the key is, by the last window that was READ for it: one round trip, one more for each
    /// split under way.
    pub(super) async fn locate(
        &self,
        seen: &mut ObservedWindow,
        damaged: &mut u32,
    ) -> ProtocolResult<KeyLookup> {
        self.read_window(seen).await?;
        self.locate_from(seen, damaged).await
    }

    /// [`Operation::locate`] when the first window is at hand.
    pub(super) async fn locate_from(
        &self,
        seen: &mut ObservedWindow,
        damaged: &mut u32,
    ) -> ProtocolResult<KeyLookup> {
        for _ in 0..WINDOW_READS_MAX {
            let own = self.find_own(seen, damaged).await?;
            if !matches!(own, KeyLookup::Absent) {
                return Ok(own);
            }
            match self.read_forward_window(seen).await? {
                ForwardWindow::Nowhere => return Ok(KeyLookup::Absent),
                ForwardWindow::Window => {}
                ForwardWindow::Unknown => break,
            }
        }
        Ok(KeyLookup::Stale)
    }

    pub(super) fn window_verb(&self, base: u64) -> Verb {
        Verb::Read { remote: base, into: Buffer::Window, bytes: WINDOW_BYTES as u32 }
    }

    /// Decodes the window buffer after a READ from `base` that was posted at `posted`. The subtable
    /// must have this local depth.
    pub(super) fn see(
        &self,
        (base, local_depth): (u64, u8),
        posted: Nanos,
        seen: &mut ObservedWindow,
    ) -> ProtocolResult<()> {
        let took = self.now().saturating_sub(posted);
        let fabric = self.engine.endpoint.fabric();
        let buffer = fabric.buffer(self.lane, Buffer::Window);
        let window = Window::decode(&buffer[..WINDOW_BYTES as usize])?;
        let (rows, _) = seen.slots.as_chunks_mut();
        rows.iter_mut().zip(&window.rows).for_each(|(slots, row)| *slots = row.slots);
        let (fingerprint, mut matching, mut any_moved) = (self.hash.fingerprint(), 0, false);
        for (at, slot) in seen.slots.iter().enumerate() {
            matching |= u16::from(slot.word().fingerprint() == fingerprint) << at;
            any_moved |= slot.word().state() == SlotState::Moved;
        }
        (seen.base, seen.local_depth, seen.posted, seen.took) = (base, local_depth, posted, took);
        seen.hints_exact = took <= self.region.constants.exact_hint_read_ns_max;
        seen.matching = matching;
        let headers = window.rows.iter().map(|row| &row.header);
        let directory_hash = self.hash.directory();
        seen.standing = SubtableState::of(headers, directory_hash, local_depth, any_moved);
        Ok(())
    }

    /// Whether no incarnation number can have recurred since a READ posted then (invariant I7).
    pub(super) fn is_hint_exact(&self, posted: Nanos) -> bool {
        self.now().saturating_sub(posted) <= self.region.constants.exact_hint_read_ns_max
    }

    /// A slot for the key: an EMPTY one of this kind, in the row with more of them. Of two as full
    /// one of the even row: a subtable takes 2 % more keys that way before a window is full.
    pub(super) fn choose_slot(
        &self,
        seen: &ObservedWindow,
        kind: impl Fn(&Slot) -> bool,
    ) -> Option<usize> {
        let suits = |at: &usize| {
            let slot = &seen.slots[*at];
            slot.word().state() == SlotState::Empty && kind(slot)
        };
        let home = (0..SLOTS_PER_ROW).filter(suits).count();
        let next = (SLOTS_PER_ROW..seen.slots.len()).filter(suits).count();
        let is_home_even = (self.hash.window_offset() / ROW_BYTES).is_multiple_of(2);
        let goes_home = home > next || home == next && is_home_even;
        let (skip, among) = if goes_home { (0, home) } else { (home, next) };
        let chosen = skip + self.engine.random_below(among as u64) as usize;
        (0..seen.slots.len()).filter(suits).nth(chosen)
    }

    /// Whether the slot's hint is the one this key has in the slot's incarnation.
    #[inline]
    pub(super) fn hint_matches(&self, slot: Slot) -> bool {
        slot.hint() == self.hash.hint(slot.word().incarnation())
    }

    /// Where the window has the key. No round trip; one if a hint could not be trusted.
    ///
    /// A hint that does not match is another key's, however long the READ took: if this key's
    /// incarnation of the slot had begun or ended between the READs of word and hint, the key was
    /// absent at that moment, which lies in this operation (docs/decisions/0002). A hint that does
    /// match is exact only within T_hint, because incarnation numbers recur.
    ///
    /// An exact hint says whose word it is whatever its block holds (invariants I6, I7), so a PUT
    /// or DELETE replaces a damaged block: that mends the key. Without one only the block could
    /// tell, and a damaged one cannot: that is worth some more looks, counted in `damaged`.
    pub(super) async fn find_own(
        &self,
        seen: &ObservedWindow,
        damaged: &mut u32,
    ) -> ProtocolResult<KeyLookup> {
        let states = &[SlotState::Live, SlotState::Frozen, SlotState::Copy];
        for (at, slot) in seen.matching(states) {
            let word = slot.word();
            if is_moving(word) {
                return Ok(if seen.fits_split(word) {
                    KeyLookup::Moving
                } else {
                    KeyLookup::Stale
                });
            }
            if !self.hint_matches(slot) {
                continue;
            }
            if seen.hints_exact {
                return Ok(KeyLookup::Here(seen.target(at)));
            }
            match self.read_and_examine(word, seen.posted).await? {
                BlockRead::Examined(ExaminedBlock::Ours(found, header)) => {
                    return Ok(KeyLookup::Here(seen.target(at).read(&found, header)));
                }
                BlockRead::Examined(ExaminedBlock::Other) => {}
                BlockRead::Examined(ExaminedBlock::Damaged(error)) => {
                    *damaged += 1;
                    if *damaged == DAMAGE_ATTEMPTS_MAX {
                        return Err(error.into());
                    }
                    return Ok(KeyLookup::Stale);
                }
                BlockRead::Stale => return Ok(KeyLookup::Stale),
            }
        }
        Ok(KeyLookup::Absent)
    }

    /// The word that a compare-and-swap posted at `seen_at` found instead of the target's, if it is
    /// still the key's: others replaced its value. One round trip, for only the block can tell
    /// (invariant I22). A damaged incarnation must not be kept: then the hint has to say whose it
    /// is.
    pub(super) async fn adopt_replacement(
        &self,
        target: &ProvenSlot,
        word: SlotWord,
        seen_at: Nanos,
    ) -> ProtocolResult<Option<ProvenSlot>> {
        let leads_on = word.state() == SlotState::Live
            && word.fingerprint() == self.hash.fingerprint()
            && word.incarnation() == target.word.incarnation()
            && word.block().is_ok_and(|block| self.region.geometry.check_block(block).is_ok());
        if !leads_on {
            return Ok(None);
        }
        Ok(match self.read_and_examine(word, seen_at).await? {
            BlockRead::Examined(ExaminedBlock::Ours(found, header)) => {
                Some(ProvenSlot::unread(target.slot, word, seen_at).read(&found, header))
            }
            BlockRead::Examined(ExaminedBlock::Other | ExaminedBlock::Damaged(_))
            | BlockRead::Stale => None,
        })
    }

    /// READs and examines the block of a word that a READ or compare-and-swap posted at `seen_at`
    /// brought. One round trip.
    pub(super) async fn read_and_examine(
        &self,
        word: SlotWord,
        seen_at: Nanos,
    ) -> ProtocolResult<BlockRead> {
        let block = word.block()?;
        // A lane that had to wait for its turn need not READ what it could not believe.
        if !self.is_fresh(seen_at) {
            return Ok(BlockRead::Stale);
        }
        self.read_block(block).await?;
        if !self.is_fresh(seen_at) {
            return Ok(BlockRead::Stale);
        }
        Ok(BlockRead::Examined(self.examine(block, block.class.block_bytes())))
    }
}

/// What came of reading a block.
pub(super) enum BlockRead {
    Examined(ExaminedBlock),
    /// Over GRACE since the word was seen: whatever was read proves nothing.
    Stale,
}
