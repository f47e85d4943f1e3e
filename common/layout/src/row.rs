//! Rows, slots and subtables: the index.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, little_endian as le};

use super::{LayoutError, SlotWord};
use crate::hash::{KeyHash, prefix_of};

/// Slots in a row.
pub const SLOTS_PER_ROW: usize = 7;
/// Rows in a subtable.
pub const ROWS_PER_SUBTABLE: usize = 64;
/// Rows that can be a key's home. The last row only has keys whose home is the row before it.
pub const HOME_ROWS: usize = ROWS_PER_SUBTABLE - 1;
/// Slots in a subtable.
pub const SLOTS_PER_SUBTABLE: usize = SLOTS_PER_ROW * ROWS_PER_SUBTABLE;
/// The size of a row, in bytes.
pub const ROW_BYTES: u64 = size_of::<Row>() as u64;
/// The size of a subtable, in bytes.
pub const SUBTABLE_BYTES: u64 = ROW_BYTES * ROWS_PER_SUBTABLE as u64;
/// The size of a window, in bytes: a key's home row and the next one. The key can be in no other
/// row.
pub const WINDOW_BYTES: u64 = ROW_BYTES * WINDOW_ROWS as u64;
/// Slots in a window.
pub const WINDOW_SLOTS: usize = SLOTS_PER_ROW * WINDOW_ROWS;
const WINDOW_ROWS: usize = 2;

/// Marks a row that belongs to a subtable in use. Zeroed memory is no such row.
const ROW_MAGIC: u16 = 0x4652;

/// The header of a row: which subtable the row belongs to. It tells a client with an old directory
/// copy that it read the wrong subtable.
///
/// Only the server writes it, each of its two 8-byte words whole: `docs/protocol.md` ("Splits").
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RowHeader {
    /// The leading bits of the hashes of all keys in this subtable, right-aligned.
    pub prefix: le::U32,
    /// The number of bits in `prefix`.
    pub local_depth: u8,
    /// 1 while a split still moves keys into this subtable. Then no client inserts into it. Only a
    /// client that followed the old subtable's `forward` may rely on a READ of it.
    pub(super) filling: u8,
    pub(super) magic: le::U16,
    /// The two subtables to which a split moves the keys of this one: for keys whose next bit is 0,
    /// and is 1. In units of 8 KiB from the region's start; both are 0 until a split begins.
    pub(super) forward: [le::U32; 2],
}
const _: () = assert!(size_of::<RowHeader>() == 16);

/// The offset of the forward pointers from the start of their row, in bytes.
pub const FORWARD_OFFSET: u64 = std::mem::offset_of!(RowHeader, forward) as u64;

impl RowHeader {
    /// The header of a row in a subtable of hashes that start with these `local_depth` bits.
    pub fn new(prefix: u32, local_depth: u8) -> Self {
        Self {
            prefix: prefix.into(),
            local_depth,
            filling: 0,
            magic: ROW_MAGIC.into(),
            forward: [0.into(); 2],
        }
    }

    /// This header while a split fills the subtable.
    pub fn filling(self) -> Self {
        Self { filling: 1, ..self }
    }

    /// Whether a split still fills the subtable.
    pub fn is_filling(&self) -> bool {
        self.filling != 0
    }

    /// This header with forward pointers to the subtables at these byte offsets.
    pub fn with_forward(self, subtables: [u64; 2]) -> Self {
        Self { forward: subtables.map(|offset| ((offset / SUBTABLE_BYTES) as u32).into()), ..self }
    }

    /// The byte offsets of the two subtables that the keys go to, if a split has begun.
    pub fn forward(&self) -> Option<[u64; 2]> {
        let subtables = self.forward.map(|number| u64::from(number.get()) * SUBTABLE_BYTES);
        (subtables != [0, 0]).then_some(subtables)
    }

    /// The two words of the header, as stored in the region.
    pub fn words(&self) -> [u64; 2] {
        zerocopy::transmute!(*self)
    }

    /// Whether the row is in use and keys with this directory hash belong in its subtable.
    pub fn covers(&self, directory_hash: u32) -> bool {
        self.is_valid() && prefix_of(directory_hash, self.local_depth) == self.prefix.get()
    }

    /// Whether the row belongs to the subtable of this local depth for keys with this directory
    /// hash. A prefix and local depth name one subtable forever (invariant I17).
    pub fn is_of(&self, directory_hash: u32, local_depth: u8) -> bool {
        self.local_depth == local_depth && self.covers(directory_hash)
    }

    /// Whether these bytes are the header of a row in use.
    pub fn is_valid(&self) -> bool {
        self.magic.get() == ROW_MAGIC && self.local_depth <= 32 && self.filling <= 1
    }
}

/// The state of a subtable for a reader that looks for a key, by the headers of its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SubtableState {
    /// The subtable is the key's: a key that is not in it is absent.
    Whole,
    /// The subtable is the key's, and a split is moving its keys to these two.
    Splitting([u64; 2]),
    /// A split is moving keys into the subtable. A key that is neither here nor was in the old one
    /// is absent, and no key can be inserted.
    Filling,
    /// The subtable is not the key's, or not any more, or it changed during the READ.
    Elsewhere,
}

impl SubtableState {
    /// The state by these headers, for a key with this directory hash and a subtable that must have
    /// this local depth. `has_moved` is whether a word of the rows is MOVED.
    pub fn of<'r>(
        headers: impl IntoIterator<Item = &'r RowHeader>,
        directory_hash: u32,
        local_depth: u8,
        has_moved: bool,
    ) -> Self {
        let (mut forward, mut is_filling) = (None, false);
        for header in headers {
            // A split sets the forward pointers in one row after the other.
            let row_forward = header.forward().or(forward);
            let changed = forward.is_some() && forward != row_forward;
            if changed || !header.is_of(directory_hash, local_depth) {
                return Self::Elsewhere;
            }
            (forward, is_filling) = (row_forward, is_filling | header.is_filling());
        }
        match forward {
            // During the READ a split filled the subtable, and another one began to move its keys.
            Some(_) if is_filling => Self::Elsewhere,
            Some(forward) => Self::Splitting(forward),
            None if is_filling => Self::Filling,
            // The split began after the headers were READ and before the words were.
            None if has_moved => Self::Elsewhere,
            None => Self::Whole,
        }
    }
}

impl KeyHash {
    /// The byte offset of the key's window from the start of its subtable.
    #[inline]
    pub const fn window_offset(self) -> u64 {
        let row = (self.row_bits() as u64 * HOME_ROWS as u64) >> 32;
        row * ROW_BYTES
    }
}

/// Returns which of two subtables the key belongs to after a split of one with this depth.
pub const fn side_of(directory_hash: u32, local_depth: u8) -> usize {
    (prefix_of(directory_hash, local_depth + 1) & 1) as usize
}

/// One slot of the index, for one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Slot {
    pub(super) word: le::U64,
    /// The keyed hash of (key, incarnation), 0 in a slot that was never used, or
    /// [`NO_HINT`](crate::hash::NO_HINT). A LIVE word is always beside the hint of its key. For
    /// this, only the owner of the slot's PENDING, ABORTED or COPY word swaps the hint, or the
    /// server once the owner is fenced (invariant I6). Any INSERT may swap a hint of 0, which
    /// claims the slot (I21).
    pub(super) hint: le::U64,
}
const _: () = assert!(size_of::<Slot>() == 16);

/// The offset of the hint from the start of its slot, in bytes.
pub const HINT_OFFSET: u64 = std::mem::offset_of!(Slot, hint) as u64;

impl Slot {
    /// A slot with this word and hint.
    pub fn new(word: SlotWord, hint: u64) -> Self {
        Self { word: word.bits().into(), hint: hint.into() }
    }

    /// The word. Only a compare-and-swap changes it.
    pub fn word(&self) -> SlotWord {
        SlotWord::from_bits(self.word.get())
    }

    /// The hint.
    pub fn hint(&self) -> u64 {
        self.hint.get()
    }

    /// Whether word and hint are those of the key with this hash.
    pub fn is_of(&self, hash: KeyHash) -> bool {
        let word = self.word();
        word.fingerprint() == hash.fingerprint() && self.hint() == hash.hint(word.incarnation())
    }

    /// Whether the slot was never used and nothing claims it.
    pub fn is_unused(&self) -> bool {
        self.word() == SlotWord::default() && self.hint() == 0
    }

    /// Whether the slot was never used and its hint claims it for an INSERT.
    pub fn is_claimed_by_hint(&self) -> bool {
        self.word() == SlotWord::default() && self.hint() != 0
    }
}

/// A header and seven slots: two cache lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Row {
    /// The subtable that the row belongs to.
    pub header: RowHeader,
    /// The row's slots.
    pub slots: [Slot; SLOTS_PER_ROW],
}
const _: () = assert!(size_of::<Row>() == 128);

/// The byte offset of a slot from the start of its row.
const fn slot_in_row(slot: usize) -> u64 {
    (size_of::<RowHeader>() + slot * size_of::<Slot>()) as u64
}

/// Two neighbouring rows, read by one READ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Window {
    /// The home row and the next one.
    pub rows: [Row; WINDOW_ROWS],
}
const _: () = assert!(size_of::<Window>() as u64 == WINDOW_BYTES);

impl Window {
    /// The window in these bytes, of which there must be exactly [`WINDOW_BYTES`].
    pub fn decode(bytes: &[u8]) -> Result<&Self, LayoutError> {
        Self::ref_from_bytes(bytes)
            .map_err(|_| LayoutError::Truncated { what: "window", bytes: bytes.len() as u64 })
    }
}

/// The byte offset of a slot from the start of its subtable.
pub const fn slot_in_subtable(row: usize, slot: usize) -> u64 {
    row as u64 * ROW_BYTES + slot_in_row(slot)
}

/// The byte offset of the slot with this number, counted over all rows, from the start of its
/// subtable.
pub const fn slot_offset(number: usize) -> u64 {
    slot_in_subtable(number / SLOTS_PER_ROW, number % SLOTS_PER_ROW)
}

/// The result of a request to split a subtable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum SplitOutcome {
    /// The subtable was split, or has room by now: read the window again.
    Done = 0,
    /// There is no memory for another subtable now, but there may be soon: ask again.
    Later = 1,
    /// The subtable cannot be split: no memory is left, or one of its entries is damaged.
    Impossible = 2,
}

impl SplitOutcome {
    /// The outcome with this number, if there is one.
    pub const fn from_bits(bits: u8) -> Option<Self> {
        match bits {
            0 => Some(Self::Done),
            1 => Some(Self::Later),
            2 => Some(Self::Impossible),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeroed_memory_is_no_row() {
        let header = RowHeader::read_from_bytes(&[0; 16]).unwrap();
        assert!(!header.is_valid());
        assert!(!header.covers(0));
    }

    #[test]
    fn a_row_covers_exactly_its_prefix() {
        let header = RowHeader::new(0b101, 3);
        assert!(header.covers(0b101 << 29));
        assert!(header.covers(0b101 << 29 | 1));
        assert!(!header.covers(0b100 << 29));
        assert!(RowHeader::new(0, 0).covers(u32::MAX));
    }

    #[test]
    fn row_headers_show_the_state_of_their_subtable() {
        let (whole, split) = (RowHeader::new(0b10, 2), [SUBTABLE_BYTES, 2 * SUBTABLE_BYTES]);
        let (leads, hash) = (whole.with_forward(split), 0b101 << 29);
        let elsewhere = whole.with_forward([SUBTABLE_BYTES, 3 * SUBTABLE_BYTES]);
        let state =
            |headers: [RowHeader; 2], has_moved| SubtableState::of(&headers, hash, 2, has_moved);
        for (headers, has_moved, expected) in [
            ([whole, whole], false, SubtableState::Whole),
            ([whole, whole], true, SubtableState::Elsewhere),
            ([leads, whole], true, SubtableState::Splitting(split)),
            ([whole, leads], false, SubtableState::Splitting(split)),
            ([leads, leads], false, SubtableState::Splitting(split)),
            ([leads, elsewhere], false, SubtableState::Elsewhere),
            ([whole.filling(), whole], true, SubtableState::Filling),
            ([whole.filling(), leads], true, SubtableState::Elsewhere),
            ([whole, RowHeader::new(0b11, 2)], false, SubtableState::Elsewhere),
            ([RowHeader::new(0b1, 1), whole], false, SubtableState::Elsewhere),
            ([RowHeader::new(0b101, 3); 2], false, SubtableState::Elsewhere),
        ] {
            assert_eq!(state(headers, has_moved), expected, "{headers:?}");
        }
    }

    #[test]
    fn forwards_round_trip_and_leave_the_rest_alone() {
        let header = RowHeader::new(0b10, 2);
        assert_eq!(header.forward(), None);
        let split = header.with_forward([3 * SUBTABLE_BYTES, (1 << 38) - SUBTABLE_BYTES]);
        assert_eq!(split.forward(), Some([3 * SUBTABLE_BYTES, (1 << 38) - SUBTABLE_BYTES]));
        assert_eq!(split.words()[0], header.words()[0]);
        assert!(header.filling().is_filling() && !header.is_filling());
        assert!(header.filling().covers(0b10 << 30));
        assert_eq!((side_of(0b100 << 29, 2), side_of(0b101 << 29, 2)), (0, 1));
    }

    #[test]
    fn offsets_of_slots_agree_with_the_structs() {
        // Every word of this window is its own offset.
        let words: Vec<u64> = (0..WINDOW_BYTES).step_by(8).collect();
        let window = Window::decode(words.as_bytes()).unwrap();
        for index in 0..WINDOW_SLOTS {
            let (row, slot) = (index / SLOTS_PER_ROW, index % SLOTS_PER_ROW);
            let offset = slot_in_subtable(row, slot);
            let slot = window.rows[row].slots[slot];
            assert_eq!((slot.word().bits(), slot.hint()), (offset, offset + HINT_OFFSET));
        }
    }
}
