//! An entry of the location cache, packed into 16 bytes.

use farside_fabric::Nanos;
use farside_layout::hash::KeyHash;
use farside_layout::{
    BlockAddress, BlockRef, INCARNATION_MAX, LayoutError, NamedBlock, SizeClass, SlotWord,
    WINDOW_BYTES,
};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, transmute};

use super::proof_time_base::ProofTimeBase;
use super::{FIRST_SETS, FIRST_SETS_BITS};

/// The location of a key's value at the time `proved_at`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Location {
    /// The slot's byte offset from the start of the key's window.
    pub in_window: u16,
    /// The slot's word.
    pub word: SlotWord,
    /// The generation of the block the word points to.
    pub generation: u32,
    /// The block was linked although its mark was set: a writer died before its compare-and-swap,
    /// or a late mark hit the block. Only the slot can tell whether the block is still linked.
    pub has_stale_mark: bool,
    /// The block's value has an expiry.
    pub expires: bool,
    /// The padding units at the block's end, which a READ can omit: see [`SizeClass::padding`].
    pub padding: u8,
    /// When the latest READ or compare-and-swap that proved the location was posted.
    pub proved_at: Nanos,
}

/// The block that replaced the one at the cached location, as the mark of the replaced block names
/// it. This is a guess: the slot decides.
#[derive(Clone, Copy)]
pub struct Successor {
    /// The slot's byte offset from the start of the key's window.
    pub(crate) in_window: u16,
    pub(crate) address: BlockAddress,
    /// The class of the replaced block, and usually of the block that replaced it.
    pub(crate) class: SizeClass,
}

/// A [`Location`] in 16 bytes. It omits what follows from the key's hash and the other fields: the
/// fingerprint, the low bits of the generation, and the state, which is always LIVE.
#[derive(Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct PackedLocation {
    /// The block's address; 0 in an empty entry, because the region starts with its superblock.
    address: u32,
    generation: u32,
    /// The [`Field`]s, from [`SLOT`] in the lowest bits to [`TAG`] in the highest ones.
    rest: u64,
}
const _: () = assert!(size_of::<PackedLocation>() == 16);

/// A field of [`PackedLocation::rest`].
#[derive(Clone, Copy)]
struct Field {
    shift: u32,
    bits: u32,
}

impl Field {
    /// The field of this width above another one.
    const fn above(below: Self, bits: u32) -> Self {
        Self { shift: below.shift + below.bits, bits }
    }

    const fn max(self) -> u64 {
        (1 << self.bits) - 1
    }

    /// The field's value in `rest`.
    #[inline]
    const fn get(self, rest: u64) -> u64 {
        rest >> self.shift & self.max()
    }

    /// The value, shifted to the field's bits.
    #[inline]
    const fn with(self, value: u64) -> u64 {
        (value & self.max()) << self.shift
    }
}

/// The slot's offset from the start of the window, in units of [`SLOT_UNIT`].
const SLOT: Field = Field { shift: 0, bits: 4 };
const INCARNATION: Field = Field::above(SLOT, 6);
const CLASS: Field = Field::above(INCARNATION, 6);
const CONDITIONAL: Field = Field::above(CLASS, 1);
const STALE_MARK: Field = Field::above(CONDITIONAL, 1);
const EXPIRES: Field = Field::above(STALE_MARK, 1);
const PADDING: Field = Field::above(EXPIRES, 2);
/// The stamp of the latest proof: see [`ProofTimeBase`].
const PROVED: Field = Field::above(PADDING, ProofTimeBase::STAMP_BITS);
/// A thread is about to replace the entry.
const LOCKED: Field = Field::above(PROVED, 1);
/// Bits of the key's hash: see [`PackedLocation::tag`].
const TAG: Field = Field::above(LOCKED, 33);
const _: () = assert!(TAG.shift + TAG.bits == 64);
const _: () = assert!(INCARNATION.max() == INCARNATION_MAX as u64);
const _: () = assert!(SizeClass::COUNT as u64 <= CLASS.max() + 1);
/// The lowest number of a class of heads.
const FIRST_HEAD: u64 = SizeClass::FIRST_HEAD.index() as u64;
const _: () = assert!(SizeClass::PADDING_MAX as u64 == PADDING.max());
/// The size of a slot, in bytes. Its offset in a window is a multiple of this.
const SLOT_UNIT: u16 = 16;
const _: () = assert!(WINDOW_BYTES == (SLOT.max() + 1) * SLOT_UNIT as u64);

/// The low bits of the tag are this many of the lowest bits of [`KeyHash::row_bits`].
const ROW_HASH_BITS: u32 = TAG.bits - IDENTITY_BITS;
/// The high bits of the tag are this many of the highest bits of [`KeyHash::identity`].
const IDENTITY_BITS: u32 = 24;

/// The bits of the hash that choose the key's set. The number of sets in use decides how many of
/// the low bits count. Those above [`FIRST_SETS_BITS`] are in the entry's tag as well, so an entry
/// can move to another set without its key.
#[inline]
pub(super) fn set_bits(hash: KeyHash) -> usize {
    (hash.identity() >> (u64::BITS - IDENTITY_BITS - FIRST_SETS_BITS)) as usize
}

impl PackedLocation {
    /// Packs the location of a LIVE word, without the time of its proof.
    ///
    /// # Errors
    /// [`LayoutError`] if the word points to no block.
    #[inline]
    pub(super) fn new(hash: KeyHash, location: &Location) -> Result<Self, LayoutError> {
        let Location { in_window, word, generation, has_stale_mark, expires, padding, .. } =
            *location;
        let NamedBlock { address, class, .. } = word.block()?;
        let rest = TAG.with(Self::tag(hash))
            | PADDING.with(padding.into())
            | EXPIRES.with(expires.into())
            | STALE_MARK.with(has_stale_mark.into())
            | CONDITIONAL.with(word.is_conditional().into())
            | CLASS.with(class.index().into())
            | INCARNATION.with(word.incarnation().into())
            | SLOT.with((in_window / SLOT_UNIT).into());
        Ok(Self { address: address.0, generation, rest })
    }

    /// This location after its slot's word was replaced, for the same key, by a word that leads to
    /// this block. The block's mark is clear. Without the time of the proof.
    #[inline]
    pub(crate) fn replaced_by(
        self,
        (block, generation): (BlockRef, u32),
        (expires, padding): (bool, u8),
    ) -> Self {
        let kept_bits =
            TAG.with(TAG.max()) | INCARNATION.with(INCARNATION.max()) | SLOT.with(SLOT.max());
        let rest = self.rest & kept_bits
            | PADDING.with(padding.into())
            | EXPIRES.with(expires.into())
            // A value that expires has a conditional word (invariant I19), and a PUT's has no other
            // reason.
            | CONDITIONAL.with(expires.into())
            | CLASS.with(block.class.index().into());
        Self { address: block.address.0, generation, rest }
    }

    /// The block. It was checked: a location is cached once its block was READ or WRITten.
    ///
    /// # Errors
    /// Never: a packed location has a valid size class.
    #[inline]
    pub(crate) fn block(self) -> Result<BlockRef, LayoutError> {
        Ok(BlockRef::unpacked(NamedBlock {
            address: BlockAddress(self.address),
            class: SizeClass::from_index(CLASS.get(self.rest) as u8)?,
            generation_low: self.generation as u8,
        }))
    }

    /// Whether the block is the head of a value with extents.
    #[inline]
    pub(crate) fn is_head(self) -> bool {
        // No word leads to a block of the last class, which is that of extents.
        CLASS.get(self.rest) >= FIRST_HEAD
    }

    /// The generation of the block.
    #[inline]
    pub(crate) fn generation(self) -> u32 {
        self.generation
    }

    /// The byte offset of the slot from the start of the key's window.
    #[inline]
    pub(crate) fn in_window(self) -> u16 {
        SLOT.get(self.rest) as u16 * SLOT_UNIT
    }

    /// See [`Location::has_stale_mark`].
    #[inline]
    pub(crate) fn has_stale_mark(self) -> bool {
        STALE_MARK.get(self.rest) == 1
    }

    /// See [`Location::expires`].
    #[inline]
    pub(crate) fn expires(self) -> bool {
        EXPIRES.get(self.rest) == 1
    }

    /// See [`Location::padding`].
    #[inline]
    pub(crate) fn padding(self) -> u8 {
        PADDING.get(self.rest) as u8
    }

    /// The word of the slot. The hash is that of the key.
    ///
    /// # Errors
    /// Never: a packed location has a valid size class.
    #[inline]
    pub(crate) fn word(self, hash: KeyHash) -> Result<SlotWord, LayoutError> {
        let incarnation = INCARNATION.get(self.rest) as u8;
        let conditional = CONDITIONAL.get(self.rest) == 1;
        Ok(SlotWord::live_in(incarnation, hash.fingerprint(), *self.block()?, conditional))
    }

    /// Unpacks the location, which was proved at this time. The hash is that of its key.
    ///
    /// # Errors
    /// Never: a packed location has a valid size class.
    #[inline]
    pub(crate) fn location(self, hash: KeyHash, proved_at: Nanos) -> Result<Location, LayoutError> {
        Ok(Location {
            in_window: self.in_window(),
            word: self.word(hash)?,
            generation: self.generation,
            has_stale_mark: self.has_stale_mark(),
            expires: self.expires(),
            padding: self.padding(),
            proved_at,
        })
    }

    /// The bits of the hash by which an entry recognizes its key. Other bits choose the first sets,
    /// the window and the fingerprint. A cached PUT or DELETE compares no key, so it relies
    /// on this tag: docs/decisions/0006.
    #[inline]
    pub(super) fn tag(hash: KeyHash) -> u64 {
        let identity = hash.identity() >> (u64::BITS - IDENTITY_BITS);
        identity << ROW_HASH_BITS | u64::from(hash.row_bits()) & ((1 << ROW_HASH_BITS) - 1)
    }

    /// [`set_bits`] of the key whose entry is in this set, as far as the entry's tag has the bits.
    pub(super) fn set_bits(&self, set: usize) -> usize {
        let known = (TAG.get(self.rest) >> ROW_HASH_BITS) as usize;
        known << FIRST_SETS_BITS | set & (FIRST_SETS - 1)
    }

    #[inline]
    pub(super) fn is_of(&self, hash: KeyHash) -> bool {
        TAG.get(self.rest) == Self::tag(hash) && !self.is_empty()
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.address == 0
    }

    /// The stamp of the latest proof: see [`ProofTimeBase`].
    #[inline]
    pub(super) fn stamp(&self) -> u64 {
        PROVED.get(self.rest)
    }

    /// This entry with another stamp.
    #[inline]
    pub(super) fn stamped(self, stamp: u64) -> Self {
        let rest = self.rest & !PROVED.with(PROVED.max()) | PROVED.with(stamp);
        Self { rest, ..self }
    }

    /// Whether the other entry has the same location, whenever each was proved.
    #[inline]
    pub(super) fn is_at(self, other: Self) -> bool {
        let unlocked = |entry: Self| entry.stamped(0).rest & !LOCKED.with(1);
        (self.address, self.generation, unlocked(self))
            == (other.address, other.generation, unlocked(other))
    }

    /// Whether a thread is about to replace the entry.
    #[inline]
    pub(super) fn is_locked(&self) -> bool {
        LOCKED.get(self.rest) == 1
    }

    /// This entry, locked: other threads leave it alone.
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
