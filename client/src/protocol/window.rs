//! Reading the window: everywhere a key can be, in one READ.

use farside_common::fabric::{Buffer, Fabric, Nanos, Verb};
use farside_common::layout::{
    BLOCK_BYTES_MAX, LayoutError, Slot, SlotState, SlotWord, WINDOW_BYTES, WINDOW_SLOTS, Window,
};

use super::{Examined, Operation, Outcome, Target, is_moving};
use crate::allocator::Depot;

/// How often an operation READs its window, and the directory when that was old, before it calls
/// the row damaged.
const WINDOW_READS_MAX: u32 = 16;
/// How often an operation looks again for an exact hint of a word whose block is damaged, before it
/// says so.
const DAMAGE_ATTEMPTS_MAX: u32 = 16;
const _: () = assert!(BLOCK_BYTES_MAX <= u32::MAX as u64);

/// A window as one READ brought it.
#[derive(Clone, Copy)]
pub(super) struct Seen {
    /// Where it is in the region.
    pub(super) base: u64,
    /// When its READ was posted.
    pub(super) posted: Nanos,
    /// How long it took.
    took: Nanos,
    /// The READ was short enough for its hints to be exact (invariant I7).
    pub(super) hints_exact: bool,
    pub(super) slots: [Slot; WINDOW_SLOTS],
    /// The byte offset of each slot from `base`.
    offsets: [u16; WINDOW_SLOTS],
    /// Both rows belong to the key's subtable.
    pub(super) covers: bool,
}

/// Where a window has the key.
pub(super) enum Own {
    Here(Target),
    Absent,
    /// A split is moving an entry with the key's fingerprint.
    Moving,
    /// It took too long to find out: look again.
    Stale,
}

impl Seen {
    /// The byte offset of a slot in the region.
    pub(super) fn slot(&self, at: usize) -> u64 {
        self.base + u64::from(self.offsets[at])
    }

    /// The slot as a target, by this READ.
    pub(super) fn target(&self, at: usize) -> Target {
        Target::unread(self.slot(at), self.slots[at].word(), self.posted)
    }

    /// Slots whose word has this fingerprint and one of these states.
    pub(super) fn with_fingerprint(
        &self,
        fingerprint: u8,
        states: &'static [SlotState],
    ) -> impl Iterator<Item = (usize, Slot)> + '_ {
        self.slots.iter().copied().enumerate().filter(move |(_, slot)| {
            let word = slot.word();
            word.fingerprint() == fingerprint && states.contains(&word.state())
        })
    }
}

impl<F: Fabric, D: Depot> Operation<'_, F, D> {
    /// READs the key's window: one round trip, more when the directory had to be READ anew.
    pub(super) async fn read_window(&self) -> Outcome<Seen> {
        let mut stale = false;
        for _ in 0..WINDOW_READS_MAX {
            let base = self.engine.directory().window(self.hash);
            let posted = self.now();
            self.read(&[self.window_verb(base)]).await?;
            let seen = self.seen(base, posted)?;
            stale = seen.took > self.engine.constants.patience_ns;
            if !seen.covers {
                self.engine.load_directory(self.lane).await?;
            } else if !stale {
                return Ok(seen);
            }
        }
        if stale {
            return Err(self.contended());
        }
        let offset = self.engine.directory().window(self.hash);
        Err(LayoutError::Row { offset }.into())
    }

    pub(super) fn window_verb(&self, base: u64) -> Verb {
        Verb::Read { remote: base, into: Buffer::Window, bytes: WINDOW_BYTES as u32 }
    }

    /// What the window buffer holds after a READ from `base` posted then.
    pub(super) fn seen(&self, base: u64, posted: Nanos) -> Outcome<Seen> {
        let took = self.now().saturating_sub(posted);
        let fabric = self.engine.endpoint.fabric();
        let buffer = fabric.buffer(self.lane, Buffer::Window);
        let window = Window::decode(&buffer[..WINDOW_BYTES as usize])?;
        let mut seen = Seen {
            base,
            posted,
            took,
            hints_exact: took <= self.engine.constants.hint_ns,
            slots: [Slot::new(SlotWord::default(), 0); WINDOW_SLOTS],
            offsets: [0; WINDOW_SLOTS],
            covers: window.rows.iter().all(|row| row.header.covers(self.hash.directory())),
        };
        for (at, (offset, slot)) in window.slots().enumerate() {
            seen.slots[at] = *slot;
            seen.offsets[at] = offset as u16;
        }
        Ok(seen)
    }

    /// Whether no incarnation number can have recurred since a READ posted then (invariant I7).
    pub(super) fn is_hint_exact(&self, posted: Nanos) -> bool {
        self.now().saturating_sub(posted) <= self.engine.constants.hint_ns
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
    pub(super) async fn find_own(&self, seen: &Seen, damaged: &mut u32) -> Outcome<Own> {
        let states = &[SlotState::Live, SlotState::Frozen, SlotState::Copy];
        for (at, slot) in seen.with_fingerprint(self.hash.fingerprint(), states) {
            let word = slot.word();
            if is_moving(word) {
                return Ok(Own::Moving);
            }
            if !self.hint_matches(slot) {
                continue;
            }
            if seen.hints_exact {
                return Ok(Own::Here(seen.target(at)));
            }
            match self.read_and_examine(word, seen.posted).await? {
                Read::Examined(Examined::Ours(found, header)) => {
                    return Ok(Own::Here(seen.target(at).read(&found, header)));
                }
                Read::Examined(Examined::Other) => {}
                Read::Examined(Examined::Damaged(error)) => {
                    *damaged += 1;
                    if *damaged == DAMAGE_ATTEMPTS_MAX {
                        return Err(error.into());
                    }
                    return Ok(Own::Stale);
                }
                Read::Stale => return Ok(Own::Stale),
            }
        }
        Ok(Own::Absent)
    }

    /// READs and examines the block of a word that a READ posted at `seen_at` brought. One round
    /// trip.
    pub(super) async fn read_and_examine(&self, word: SlotWord, seen_at: Nanos) -> Outcome<Read> {
        let block = word.block()?;
        // A lane that had to wait for its turn need not READ what it could not believe.
        if !self.is_fresh(seen_at) {
            return Ok(Read::Stale);
        }
        self.read_block(block).await?;
        if !self.is_fresh(seen_at) {
            return Ok(Read::Stale);
        }
        Ok(Read::Examined(self.examine(block)))
    }
}

/// What came of reading a block.
pub(super) enum Read {
    Examined(Examined),
    /// Over GRACE since the word was seen: whatever was read proves nothing.
    Stale,
}
