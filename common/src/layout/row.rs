//! Rows, slots and subtables: the index.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, little_endian as le};

use super::{LayoutError, SlotWord};

/// Slots in a row.
pub const SLOTS_PER_ROW: usize = 7;
/// Rows in a subtable.
pub const ROWS_PER_SUBTABLE: usize = 64;
/// Rows that are some key's home: the last row only takes what does not fit in the one before it.
pub const HOME_ROWS: usize = ROWS_PER_SUBTABLE - 1;
/// A row, in bytes.
pub const ROW_BYTES: u64 = size_of::<Row>() as u64;
/// A subtable, in bytes.
pub const SUBTABLE_BYTES: u64 = ROW_BYTES * ROWS_PER_SUBTABLE as u64;
/// Everywhere a key can be: its home row and the one behind it. One READ.
pub const WINDOW_BYTES: u64 = ROW_BYTES * WINDOW_ROWS as u64;
/// Slots of a window.
pub const WINDOW_SLOTS: usize = SLOTS_PER_ROW * WINDOW_ROWS;
const WINDOW_ROWS: usize = 2;

/// What says that a row belongs to a subtable in use; zeroed memory does not.
const ROW_MAGIC: u16 = 0x4652;

/// Tells clients with an old directory that they look in the wrong place.
///
/// Written by the server before the subtable is published; never by clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RowHeader {
    /// The leading bits of the hashes of all keys in this subtable, right-aligned.
    pub prefix: le::U32,
    /// How many leading bits that are.
    pub local_depth: u8,
    pub(super) reserved: u8,
    pub(super) magic: le::U16,
    /// Where the keys went when a split emptied this subtable: the byte offset of the first of the
    /// two new ones; 0 before.
    pub forward: le::U64,
}
const _: () = assert!(size_of::<RowHeader>() == 16);

impl RowHeader {
    /// The header of a row in a subtable for hashes that start with these `local_depth` bits.
    pub fn new(prefix: u32, local_depth: u8) -> Self {
        Self {
            prefix: prefix.into(),
            local_depth,
            reserved: 0,
            magic: ROW_MAGIC.into(),
            forward: 0.into(),
        }
    }

    /// Whether the row is in use and a key with this directory hash belongs into its subtable.
    pub fn covers(&self, directory_hash: u32) -> bool {
        self.is_valid() && prefix_of(directory_hash, self.local_depth) == self.prefix.get()
    }

    /// Whether these bytes are a row's header at all.
    pub fn is_valid(&self) -> bool {
        self.magic.get() == ROW_MAGIC && self.local_depth <= 32 && self.reserved == 0
    }
}

/// The leading `depth` bits of a directory hash, right-aligned.
pub const fn prefix_of(directory_hash: u32, depth: u8) -> u32 {
    match depth {
        0 => 0,
        1..=32 => directory_hash >> (32 - depth as u32),
        _ => u32::MAX,
    }
}

/// One place for one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Slot {
    pub(super) word: le::U64,
    /// The keyed hash of (key, incarnation), or 0. Written only by the owner of the slot's PENDING
    /// or COPY word (invariant I6), so that LIVE words always stand beside their key's hint.
    pub(super) hint: le::U64,
}
const _: () = assert!(size_of::<Slot>() == 16);

/// Where the hint stands behind its slot's start, in bytes.
pub const HINT_OFFSET: u64 = std::mem::offset_of!(Slot, hint) as u64;

impl Slot {
    /// A slot with this word and hint.
    pub fn new(word: SlotWord, hint: u64) -> Self {
        Self { word: word.bits().into(), hint: hint.into() }
    }

    /// The word, changed only by compare-and-swap.
    pub fn word(&self) -> SlotWord {
        SlotWord::from_bits(self.word.get())
    }

    /// The hint, changed only by WRITE.
    pub fn hint(&self) -> u64 {
        self.hint.get()
    }
}

/// A header and seven slots: two cache lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Row {
    /// Which keys belong here.
    pub header: RowHeader,
    /// The places.
    pub slots: [Slot; SLOTS_PER_ROW],
}
const _: () = assert!(size_of::<Row>() == 128);

/// The byte offset, from the start of its row, of a slot.
const fn slot_in_row(slot: usize) -> u64 {
    (size_of::<RowHeader>() + slot * size_of::<Slot>()) as u64
}

/// Two neighbouring rows, as one READ brings them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Window {
    /// The home row and the row behind it.
    pub rows: [Row; WINDOW_ROWS],
}
const _: () = assert!(size_of::<Window>() as u64 == WINDOW_BYTES);

impl Window {
    /// The window in these bytes, which must be exactly [`WINDOW_BYTES`] long.
    pub fn decode(bytes: &[u8]) -> Result<&Self, LayoutError> {
        Self::ref_from_bytes(bytes)
            .map_err(|_| LayoutError::Truncated { what: "window", bytes: bytes.len() as u64 })
    }

    /// All slots of the window with their byte offset from the window's start.
    pub fn slots(&self) -> impl Iterator<Item = (u64, &Slot)> {
        self.rows.iter().enumerate().flat_map(|(row, content)| {
            let start = row as u64 * ROW_BYTES;
            content.slots.iter().enumerate().map(move |(n, slot)| (start + slot_in_row(n), slot))
        })
    }
}

/// The byte offset of a slot from the start of its subtable.
pub const fn slot_in_subtable(row: usize, slot: usize) -> u64 {
    row as u64 * ROW_BYTES + slot_in_row(slot)
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
    fn slots_of_a_window_stand_where_a_subtable_says() {
        let window = Window::read_from_bytes(&[0; WINDOW_BYTES as usize]).unwrap();
        let offsets: Vec<u64> = window.slots().map(|(offset, _)| offset).collect();
        assert_eq!(offsets.len(), WINDOW_SLOTS);
        assert_eq!(offsets[0], slot_in_subtable(0, 0));
        assert_eq!(offsets[7], slot_in_subtable(1, 0));
        assert_eq!(offsets[13], slot_in_subtable(1, 6));
    }
}
