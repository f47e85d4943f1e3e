//! What the location cache keeps of a key, in 16 bytes.

use farside_fabric::Nanos;
use farside_layout::hash::KeyHash;
use farside_layout::{
    BlockAddress, BlockRef, INCARNATION_MAX, LayoutError, SizeClass, SlotWord, WINDOW_BYTES,
};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, transmute};

use super::proofs::ProofTimeBase;
use super::{FIRST_SETS, FIRST_SETS_BITS};

/// Where a key's value is, as of `proved_at`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Location {
    /// The slot's byte offset from the start of the key's window.
    pub in_window: u16,
    /// The word it held.
    pub word: SlotWord,
    /// The generation of the block the word points to.
    pub generation: u32,
    /// The block was linked although its `superseded` was set: its writer died, or a late mark hit
    /// it. Only the slot can tell whether it still is.
    pub has_stale_mark: bool,
    /// The block's value ends some day.
    pub expires: bool,
    /// How much of the block's end there is no need to READ: see [`SizeClass::padding`].
    pub padding: u8,
    /// When the last READ or compare-and-swap that proved it was posted.
    pub proved_at: Nanos,
}

/// A [`Location`] in 16 bytes, by leaving out what the key's hash and the other fields say: the
/// fingerprint, the low bits of the generation, and the state, for only LIVE words are remembered.
/// Where the window is, the directory says.
#[derive(Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct PackedLocation {
    /// Of the block; 0 is nowhere, for the region starts with its superblock.
    address: u32,
    generation: u32,
    /// The key's tag, and below it, from [`PROVED`] on, what is left of the location.
    rest: u64,
}
const _: () = assert!(size_of::<PackedLocation>() == 16);

/// Some bits of [`PackedLocation::rest`].
#[derive(Clone, Copy)]
pub(super) struct Field {
    shift: u32,
    bits: u32,
}

impl Field {
    const fn above(below: Self, bits: u32) -> Self {
        Self { shift: below.shift + below.bits, bits }
    }

    pub(super) const fn max(self) -> u64 {
        (1 << self.bits) - 1
    }

    #[inline]
    const fn of(self, rest: u64) -> u64 {
        rest >> self.shift & self.max()
    }

    #[inline]
    const fn with(self, value: u64) -> u64 {
        (value & self.max()) << self.shift
    }
}

/// In units of [`SLOT_UNIT`] from the start of the window.
const SLOT: Field = Field { shift: 0, bits: 4 };
const INCARNATION: Field = Field::above(SLOT, 6);
const CLASS: Field = Field::above(INCARNATION, 6);
const CONDITIONAL: Field = Field::above(CLASS, 1);
const POISONED: Field = Field::above(CONDITIONAL, 1);
const EXPIRES: Field = Field::above(POISONED, 1);
const PADDING: Field = Field::above(EXPIRES, 2);
/// See [`ProofTimeBase`].
pub(super) const PROVED: Field = Field::above(PADDING, 9);
/// A thread is about to replace the entry.
const LOCKED: Field = Field::above(PROVED, 1);
const TAG: Field = Field::above(LOCKED, 33);
const _: () = assert!(TAG.shift + TAG.bits == 64);
const _: () = assert!(INCARNATION.max() == INCARNATION_MAX as u64);
const _: () = assert!(SizeClass::COUNT as u64 <= CLASS.max() + 1);
const _: () = assert!(SizeClass::PADDING_MAX as u64 == PADDING.max());
/// Slots start at multiples of it, in bytes.
const SLOT_UNIT: u16 = 16;
const _: () = assert!(WINDOW_BYTES == (SLOT.max() + 1) * SLOT_UNIT as u64);

/// The number of low bits of the tag, which are the lowest ones of [`KeyHash::row_bits`].
const PLACE_BITS: u32 = TAG.bits - IDENTITY_BITS;
/// The number of high bits of the tag, which are the highest ones of [`KeyHash::identity`].
const IDENTITY_BITS: u32 = 24;

/// The bits of the hash that the set goes by, low ones first. What the entry knows comes last, so
/// that sets can be shared out.
#[inline]
pub(super) fn spread(hash: KeyHash) -> usize {
    (hash.identity() >> (u64::BITS - IDENTITY_BITS - FIRST_SETS_BITS)) as usize
}

impl PackedLocation {
    /// What there is to keep of a LIVE word's location, except when it was proved.
    ///
    /// # Errors
    /// [`LayoutError`] if the word leads to no block.
    #[inline]
    pub(super) fn new(hash: KeyHash, location: &Location) -> Result<Self, LayoutError> {
        let Location { in_window, word, generation, has_stale_mark, expires, padding, .. } =
            *location;
        let BlockRef { address, class, .. } = word.block()?;
        let rest = TAG.with(Self::tag(hash))
            | PADDING.with(padding.into())
            | EXPIRES.with(expires.into())
            | POISONED.with(has_stale_mark.into())
            | CONDITIONAL.with(word.is_conditional().into())
            | CLASS.with(class.index().into())
            | INCARNATION.with(word.incarnation().into())
            | SLOT.with((in_window / SLOT_UNIT).into());
        Ok(Self { address: address.0, generation, rest })
    }

    /// The location, of the key with this hash, that was kept.
    ///
    /// # Errors
    /// None: what was kept has a size class.
    #[inline]
    pub(super) fn location(
        self,
        hash: KeyHash,
        proofs: ProofTimeBase,
    ) -> Result<Location, LayoutError> {
        let Self { address, generation, rest } = self;
        let block = BlockRef {
            address: BlockAddress(address),
            class: SizeClass::from_index(CLASS.of(rest) as u8)?,
            generation_low: generation as u8,
        };
        let incarnation = INCARNATION.of(rest) as u8;
        let conditional = CONDITIONAL.of(rest) == 1;
        Ok(Location {
            in_window: SLOT.of(rest) as u16 * SLOT_UNIT,
            word: SlotWord::live_in(incarnation, hash.fingerprint(), block, conditional),
            generation,
            has_stale_mark: POISONED.of(rest) == 1,
            expires: EXPIRES.of(rest) == 1,
            padding: PADDING.of(rest) as u8,
            proved_at: proofs.at(PROVED.of(rest)),
        })
    }

    /// Bits of the hash that neither the first sets nor the window nor the fingerprint go by. A
    /// cached PUT or DELETE does not look at the key again: see docs/decisions/0006.
    #[inline]
    pub(super) fn tag(hash: KeyHash) -> u64 {
        let identity = hash.identity() >> (u64::BITS - IDENTITY_BITS);
        identity << PLACE_BITS | u64::from(hash.row_bits()) & ((1 << PLACE_BITS) - 1)
    }

    /// As [`spread`], of the key whose entry stands in this set.
    pub(super) fn spread(&self, set: usize) -> usize {
        let known = (TAG.of(self.rest) >> PLACE_BITS) as usize;
        known << FIRST_SETS_BITS | set & (FIRST_SETS - 1)
    }

    #[inline]
    pub(super) fn is_of(&self, hash: KeyHash) -> bool {
        TAG.of(self.rest) == Self::tag(hash) && !self.is_empty()
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.address == 0
    }

    /// When it was proved last: see [`ProofTimeBase`].
    #[inline]
    pub(super) fn stamp(&self) -> u64 {
        PROVED.of(self.rest)
    }

    /// The same, proved as the stamp says.
    #[inline]
    pub(super) fn stamped(self, stamp: u64) -> Self {
        let rest = self.rest & !PROVED.with(PROVED.max()) | PROVED.with(stamp);
        Self { rest, ..self }
    }

    /// Whether a thread is about to replace it.
    #[inline]
    pub(super) fn is_locked(&self) -> bool {
        LOCKED.of(self.rest) == 1
    }

    /// The same, for others to leave alone.
    #[inline]
    pub(super) fn locked(self) -> Self {
        Self { rest: self.rest | LOCKED.with(1), ..self }
    }

    #[inline]
    pub(super) fn from_bits(bits: u128) -> Self {
        transmute!(bits)
    }

    #[inline]
    pub(super) fn bits(self) -> u128 {
        transmute!(self)
    }
}
