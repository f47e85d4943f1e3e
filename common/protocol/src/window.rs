//! The READ of a window, which has all slots where a key can be, and the search for the key in it.

use farside_fabric::{Buffer, Fabric, Nanos, Verb};
use farside_layout::{
    BLOCK_BYTES_MAX, BLOCK_HEADER_BYTES, LayoutError, ROW_BYTES, SLOTS_PER_ROW, Slot, SlotState,
    SlotWord, SubtableState, WINDOW_BYTES, WINDOW_SLOTS, Window, side_of, slot_offset,
};

use super::{
    ATTEMPTS_MAX, ExaminedBlock, Operation, ProtocolResult, ProvenSlot, is_moving, read_block,
};
use crate::directory::Subtable;

/// Limit on the READs of windows that are not the key's, each followed by a READ of the directory.
/// Then the row counts as damaged.
const WINDOW_READS_MAX: u32 = 16;
/// Limit on the READs of a window whose hints are not exact and whose block is damaged. Then the
/// operation reports the damage.
const DAMAGE_ATTEMPTS_MAX: u32 = 16;
const _: () = assert!(BLOCK_BYTES_MAX <= u32::MAX as u64);
/// The states of a word that leads to an entry of its key.
pub(super) const ENTRY_STATES: [SlotState; 3] =
    [SlotState::Live, SlotState::Frozen, SlotState::Copy];

/// A window as one READ returned it. The caller provides its memory, because a window is large, and
/// each function would copy it to return it.
pub(super) struct ObservedWindow {
    /// The byte offset of the window in the region.
    pub(super) base: u64,
    /// The number of leading hash bits that the keys of its subtable share.
    pub(super) local_depth: u8,
    /// When its READ was posted.
    pub(super) posted: Nanos,
    /// The duration of its READ.
    read_ns: Nanos,
    /// Whether the READ was short enough for its hints to be exact (invariant I7).
    pub(super) hints_exact: bool,
    pub(super) slots: [Slot; WINDOW_SLOTS],
    /// A bit for each slot whose word has the key's fingerprint.
    matching: u16,
    pub(super) subtable_state: SubtableState,
}
const _: () = assert!(WINDOW_SLOTS <= u16::BITS as usize);

/// The result of a lookup of the key in a window.
pub(super) enum KeyLookup {
    Present(ProvenSlot),
    Absent,
    /// A split is moving an entry with the key's fingerprint.
    Moving,
    /// The lookup decided nothing, because the READs took too long or saw damage or an unfinished
    /// split. READ the window again.
    Retry,
}

/// The window to which a split moves a key that is not in its old window.
pub(super) enum ForwardWindow {
    /// There is no split: the key is absent.
    NoSplit,
    /// The window was READ after the old one, so that no moving entry is missed (invariant I14).
    Window,
    /// The READ decides nothing: start with the old window again.
    Unknown,
}

impl ObservedWindow {
    /// The memory for a window that has not been READ.
    pub(super) fn unread() -> Self {
        Self {
            base: 0,
            local_depth: 0,
            posted: 0,
            read_ns: 0,
            hints_exact: false,
            slots: [Slot::new(SlotWord::default(), 0); WINDOW_SLOTS],
            matching: 0,
            subtable_state: SubtableState::Elsewhere,
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

    /// Whether a split can have set this word here. If not, the word is damaged, and no split will
    /// change it.
    fn fits_split(&self, word: SlotWord) -> bool {
        match word.state() {
            SlotState::Frozen => matches!(self.subtable_state, SubtableState::Splitting(_)),
            SlotState::Copy => self.subtable_state == SubtableState::Filling,
            _ => false,
        }
    }

    /// The slot, as proved by this READ.
    pub(super) fn target(&self, at: usize) -> ProvenSlot {
        ProvenSlot::unread(self.slot(at), self.slots[at].word(), self.posted)
    }

    /// Slots whose word has the key's fingerprint and one of these states.
    pub(super) fn matching(
        &self,
        states: &'static [SlotState],
    ) -> impl Iterator<Item = (usize, Slot)> + '_ {
        let mut remaining = self.matching;
        let next = move || {
            let at = (remaining != 0).then(|| remaining.trailing_zeros() as usize)?;
            remaining &= remaining - 1;
            Some((at, self.slots[at]))
        };
        std::iter::from_fn(next).filter(|(_, slot)| states.contains(&slot.word().state()))
    }
}

impl<F: Fabric> Operation<'_, F> {
    /// READs the key's window. One round trip, and more if the directory has to be READ again.
    pub(super) async fn read_window(&self, seen: &mut ObservedWindow) -> ProtocolResult<()> {
        let (mut elsewhere, mut slow) = (0, 0);
        while elsewhere < WINDOW_READS_MAX {
            let (base, local_depth) = self.region.directory().window(self.hash);
            self.read_window_at((base, local_depth), seen).await?;
            match seen.subtable_state {
                // A subtable that is being filled counts only after a READ of the old one. This
                // copy of the directory is older than both.
                SubtableState::Elsewhere | SubtableState::Filling => {
                    elsewhere += 1;
                    self.handle().reload_entry(self.lane, self.hash.directory()).await?;
                }
                // In a deep pipeline of large values a lane often waits too long for its turn.
                SubtableState::Whole | SubtableState::Splitting(_)
                    if seen.read_ns > self.region.constants.patience_ns =>
                {
                    slow += 1;
                    if slow == ATTEMPTS_MAX {
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

    /// READs the window at this byte offset, whose subtable must have this local depth. One round
    /// trip.
    pub(super) async fn read_window_at(
        &self,
        window: (u64, u8),
        seen: &mut ObservedWindow,
    ) -> ProtocolResult<()> {
        let posted = self.now();
        self.handle().read(self.lane, &[self.window_verb(window.0)]).await?;
        self.decode_window(window, posted, seen)
    }

    /// READs the window to which a split moves a key that is not in this one. One round trip during
    /// a split, none otherwise.
    pub(super) async fn read_forward_window(
        &self,
        seen: &mut ObservedWindow,
    ) -> ProtocolResult<ForwardWindow> {
        let SubtableState::Splitting(forward) = seen.subtable_state else {
            return Ok(ForwardWindow::NoSplit);
        };
        let directory_hash = self.hash.directory();
        let offset = forward[side_of(directory_hash, seen.local_depth)];
        self.region.geometry.check_subtable(offset)?;
        // Exactly one level deeper: meanwhile the subtable may have been split again, and its
        // memory reused (invariant I17).
        let local_depth = seen.local_depth + 1;
        let base = offset + self.hash.window_offset();
        self.read_window_at((base, local_depth), seen).await?;
        if seen.read_ns > self.region.constants.patience_ns {
            return Ok(ForwardWindow::Unknown);
        }
        match seen.subtable_state {
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

    /// READs the key's window and looks the key up. One round trip, and one more for each split
    /// under way.
    pub(super) async fn locate(
        &self,
        seen: &mut ObservedWindow,
        damaged: &mut u32,
    ) -> ProtocolResult<KeyLookup> {
        self.read_window(seen).await?;
        self.locate_from(seen, damaged).await
    }

    /// [`Operation::locate`] if the first window has been READ.
    pub(super) async fn locate_from(
        &self,
        seen: &mut ObservedWindow,
        damaged: &mut u32,
    ) -> ProtocolResult<KeyLookup> {
        for _ in 0..WINDOW_READS_MAX {
            let lookup = self.find_own(seen, damaged).await?;
            if !matches!(lookup, KeyLookup::Absent) {
                return Ok(lookup);
            }
            match self.read_forward_window(seen).await? {
                ForwardWindow::NoSplit => return Ok(KeyLookup::Absent),
                ForwardWindow::Window => {}
                ForwardWindow::Unknown => break,
            }
        }
        Ok(KeyLookup::Retry)
    }

    /// The READ of the window at this byte offset.
    pub(super) fn window_verb(&self, base: u64) -> Verb {
        Verb::Read { remote: base, into: Buffer::Window, bytes: WINDOW_BYTES as u32 }
    }

    /// Decodes the content of [`Buffer::Window`] after a READ of this window that was posted at
    /// `posted`. The subtable must have this local depth.
    pub(super) fn decode_window(
        &self,
        (base, local_depth): (u64, u8),
        posted: Nanos,
        seen: &mut ObservedWindow,
    ) -> ProtocolResult<()> {
        let read_ns = self.now().saturating_sub(posted);
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
        (seen.base, seen.local_depth, seen.posted, seen.read_ns) =
            (base, local_depth, posted, read_ns);
        seen.hints_exact = read_ns <= self.region.constants.exact_hint_read_ns_max;
        seen.matching = matching;
        let headers = window.rows.iter().map(|row| &row.header);
        let directory_hash = self.hash.directory();
        seen.subtable_state = SubtableState::of(headers, directory_hash, local_depth, any_moved);
        Ok(())
    }

    /// Whether no incarnation number can have recurred since a READ posted at this time (invariant
    /// I7).
    pub(super) fn is_hint_exact(&self, posted: Nanos) -> bool {
        self.now().saturating_sub(posted) <= self.region.constants.exact_hint_read_ns_max
    }

    /// Chooses a slot for the key: an EMPTY one of this kind, in the row with more of them. If both
    /// rows have as many, one in the even row: so a subtable takes 2 % more keys before a window is
    /// full.
    pub(super) fn choose_slot(
        &self,
        seen: &ObservedWindow,
        kind: impl Fn(&Slot) -> bool,
    ) -> Option<usize> {
        let suits = |at: &usize| {
            let slot = &seen.slots[*at];
            slot.word().state() == SlotState::Empty && kind(slot)
        };
        let in_home = (0..SLOTS_PER_ROW).filter(suits).count();
        let in_next = (SLOTS_PER_ROW..seen.slots.len()).filter(suits).count();
        let is_home_even = (self.hash.window_offset() / ROW_BYTES).is_multiple_of(2);
        let goes_home = in_home > in_next || in_home == in_next && is_home_even;
        let (skipped, candidates) = if goes_home { (0, in_home) } else { (in_home, in_next) };
        let chosen = skipped + self.engine.random.below(candidates as u64) as usize;
        (0..seen.slots.len()).filter(suits).nth(chosen)
    }

    /// Whether the slot's hint is that of this key in the slot's incarnation.
    #[inline]
    pub(super) fn hint_matches(&self, slot: Slot) -> bool {
        slot.hint() == self.hash.hint(slot.word().incarnation())
    }

    /// Looks the key up in the window. One round trip if a matching hint is not exact, none
    /// otherwise.
    ///
    /// A hint that does not match is another key's, however long the READ took. This key's
    /// incarnation of the slot may have begun or ended between the moments at which the READ saw
    /// word and hint. Then the key was absent at a moment of this operation (invariant I12).
    /// A matching hint is exact only within T_hint, because incarnation numbers recur.
    ///
    /// An exact hint proves that the word is the key's, whatever its block holds (invariants I6,
    /// I7). So a PUT or DELETE replaces a damaged block, which mends the key. If the hint is not
    /// exact, only the block can decide. If that is damaged, more attempts follow, which `damaged`
    /// counts.
    pub(super) async fn find_own(
        &self,
        seen: &ObservedWindow,
        damaged: &mut u32,
    ) -> ProtocolResult<KeyLookup> {
        for (at, slot) in seen.matching(&ENTRY_STATES) {
            let word = slot.word();
            // Only the splitter changes the entry now (invariant I15).
            if is_moving(word) {
                return Ok(if seen.fits_split(word) {
                    KeyLookup::Moving
                } else {
                    KeyLookup::Retry
                });
            }
            if !self.hint_matches(slot) {
                continue;
            }
            if seen.hints_exact {
                return Ok(KeyLookup::Present(seen.target(at)));
            }
            if let Some(target) = self.read_own_header(seen.target(at)).await? {
                return Ok(KeyLookup::Present(target));
            }
            match self.read_and_examine(word, seen.posted).await? {
                BlockRead::Examined(ExaminedBlock::Ours(found, header)) => {
                    return Ok(KeyLookup::Present(seen.target(at).read(&found, header)));
                }
                BlockRead::Examined(ExaminedBlock::Other) => {}
                BlockRead::Examined(ExaminedBlock::Damaged(error)) => {
                    *damaged += 1;
                    if *damaged == DAMAGE_ATTEMPTS_MAX {
                        return Err(error.into());
                    }
                    return Ok(KeyLookup::Retry);
                }
                BlockRead::Stale => return Ok(KeyLookup::Retry),
            }
        }
        Ok(KeyLookup::Absent)
    }

    /// Returns the target with the word that a compare-and-swap posted at `seen_at` found instead,
    /// if that is the key's: another session replaced the value. One round trip, because only the
    /// block can decide (invariant I22). `None` for another incarnation, which may be damaged:
    /// there only the hint can decide.
    pub(super) async fn adopt_replacement(
        &self,
        target: &ProvenSlot,
        word: SlotWord,
        seen_at: Nanos,
    ) -> ProtocolResult<Option<ProvenSlot>> {
        let leads_on = word.state() == SlotState::Live
            && word.fingerprint() == self.hash.fingerprint()
            && word.incarnation() == target.word.incarnation()
            && self.region.geometry.block_of(word).is_ok();
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

    /// READs header and key of the block of a word that was READ in this operation. Returns the
    /// target with what they tell, if the key is this operation's. So the word is the key's, and
    /// its value, which may be long, need not be READ. One round trip.
    async fn read_own_header(&self, target: ProvenSlot) -> ProtocolResult<Option<ProvenSlot>> {
        let block = self.region.geometry.block_of(target.word)?;
        if !self.is_fresh(target.proved_at) {
            return Ok(None);
        }
        let key_end = (BLOCK_HEADER_BYTES as usize + self.key_bytes).next_multiple_of(8);
        let bytes = block.class.block_bytes().min(key_end as u64);
        self.handle().read(self.lane, &[read_block(block, bytes)]).await?;
        let own = self.read_header(*block).filter(|_| self.is_fresh(target.proved_at));
        Ok(own.map(|(generation, expires_at_ms)| ProvenSlot {
            generation: Some(generation),
            expires_at_ms: Some(expires_at_ms),
            ..target
        }))
    }

    /// READs and examines the block of a word that a READ or compare-and-swap posted at `seen_at`
    /// returned. One round trip.
    pub(super) async fn read_and_examine(
        &self,
        word: SlotWord,
        seen_at: Nanos,
    ) -> ProtocolResult<BlockRead> {
        let block = self.region.geometry.block_of(word)?;
        // If the lane waited too long for its turn, the block would prove nothing: do not READ it.
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

/// The result of the READ of a block.
pub(super) enum BlockRead {
    Examined(ExaminedBlock),
    /// More than patience (7/8 GRACE) has passed since the word was seen, so the block proves
    /// nothing.
    Stale,
}
