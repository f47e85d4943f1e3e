//! The slot word, which clients change by compare-and-swap: it says where the key's block is. Also
//! T_word: how old a proof of a word may be when a compare-and-swap relies on it. The derivation is
//! in `docs/protocol.md` ("Time").

use std::fmt;

use super::{BLOCK_UNIT, LayoutError, SizeClass};

/// The state of a slot. `docs/protocol.md` lists the transitions, and which client may make each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum SlotState {
    /// No key. The word has the number of the last incarnation, so that the next one gets another;
    /// 0 before the first.
    Empty = 0,
    /// An INSERT owns the slot and has not published its key yet. Readers ignore the slot.
    Pending = 1,
    /// Another INSERT with the same fingerprint, or a split, aborted the owner's INSERT. The owner
    /// clears the slot.
    Aborted = 2,
    /// The slot points to the block that holds its key's value.
    Live = 3,
    /// A split is moving the entry. Clients may read it, but not change it.
    Frozen = 4,
    /// The entry in its new subtable, while the old slot is FROZEN. Clients may read it, but not
    /// change it.
    Copy = 5,
    /// The entry is in another subtable. The row's forward pointer leads there.
    Moved = 6,
    /// The server removed the key: its value expired, or was evicted. GRACE later the slot becomes
    /// EMPTY.
    Tomb = 7,
}

impl SlotState {
    const fn from_bits(bits: u64) -> Self {
        match bits & 7 {
            0 => Self::Empty,
            1 => Self::Pending,
            2 => Self::Aborted,
            3 => Self::Live,
            4 => Self::Frozen,
            5 => Self::Copy,
            6 => Self::Moved,
            _ => Self::Tomb,
        }
    }
}

/// `state 3 | cond 1 | fp 8 | inc 6 | gen_lo 8 | class 6 | block address 32`, high bits first.
///
/// Any 64 bits are a word. The block that it points to is checked where it is used.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct SlotWord(u64);

const ADDRESS_BITS: u32 = 32;
const CLASS_SHIFT: u32 = ADDRESS_BITS;
const GENERATION_SHIFT: u32 = CLASS_SHIFT + 6;
const INCARNATION_SHIFT: u32 = GENERATION_SHIFT + 8;
const FINGERPRINT_SHIFT: u32 = INCARNATION_SHIFT + 6;
const COND_SHIFT: u32 = FINGERPRINT_SHIFT + 8;
const STATE_SHIFT: u32 = COND_SHIFT + 1;
const _: () = assert!(STATE_SHIFT + 3 == 64);

/// The incarnation of a key whose INSERT claimed a slot by its hint. The slot was never used
/// before, and no later incarnation of it has this number (invariant I21).
pub const FIRST_INCARNATION: u8 = 1;
/// The highest number of an incarnation (6 bits). The one after it is `FIRST_INCARNATION + 1`.
pub const INCARNATION_MAX: u8 = (1 << 6) - 1;
/// The number of incarnations after which a number recurs. The first incarnation never recurs.
pub const INCARNATIONS: u64 = (INCARNATION_MAX - FIRST_INCARNATION) as u64;
/// The number of generations of a block that a word distinguishes (8 bits).
pub const WORD_GENERATIONS: u64 = 1 << 8;

impl SlotWord {
    /// The word with exactly these bits.
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// The bits, as stored in the region.
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// The EMPTY word after this incarnation, which is at most [`INCARNATION_MAX`].
    pub const fn empty(incarnation: u8) -> Self {
        Self(((incarnation & INCARNATION_MAX) as u64) << INCARNATION_SHIFT)
    }

    /// The number of the slot's next incarnation, shifted to its bits in a word. Never the first
    /// incarnation: only a claim by the hint has that one.
    const fn next_incarnation(self) -> u64 {
        let next = match self.incarnation() {
            0 | INCARNATION_MAX => FIRST_INCARNATION + 1,
            incarnation => incarnation + 1,
        };
        Self::empty(next).0
    }

    /// A PENDING word for the next incarnation of this EMPTY slot, pointing to `block`.
    pub const fn pending(self, fingerprint: u8, block: NamedBlock) -> Self {
        Self(
            (SlotState::Pending as u64) << STATE_SHIFT
                | (fingerprint as u64) << FINGERPRINT_SHIFT
                | self.next_incarnation()
                | block.bits(),
        )
    }

    /// The word that ends a claim by the hint, in a slot whose word is still 0: EMPTY after the
    /// first incarnation.
    pub const fn after_hint_claim() -> Self {
        Self::empty(FIRST_INCARNATION)
    }

    /// This word with another state, and all other fields unchanged.
    pub const fn with_state(self, state: SlotState) -> Self {
        Self(self.0 & !(7 << STATE_SHIFT) | (state as u64) << STATE_SHIFT)
    }

    /// The LIVE word of a key with this fingerprint in this incarnation of its slot.
    pub const fn live_in(
        incarnation: u8,
        fingerprint: u8,
        block: NamedBlock,
        conditional: bool,
    ) -> Self {
        let fingerprint = (fingerprint as u64) << FINGERPRINT_SHIFT;
        Self(Self::empty(incarnation).0 | fingerprint).live(block, conditional)
    }

    /// The LIVE word that replaces this one. It has another block, but the same incarnation and
    /// fingerprint, and so the same key (invariant I5). `conditional` is set if no PUT may count as
    /// overwritten by this word.
    pub const fn live(self, block: NamedBlock, conditional: bool) -> Self {
        let kept_bits = 0xff << FINGERPRINT_SHIFT | (INCARNATION_MAX as u64) << INCARNATION_SHIFT;
        Self(
            self.0 & kept_bits
                | (SlotState::Live as u64) << STATE_SHIFT
                | (conditional as u64) << COND_SHIFT
                | block.bits(),
        )
    }

    /// The EMPTY word that ends this incarnation.
    pub const fn emptied(self) -> Self {
        Self::empty(self.incarnation())
    }

    /// The MOVED word that replaces this one in a split. It keeps the incarnation, except that 0
    /// becomes the first one: a client that claimed the slot by its hint must not find a word of 0
    /// again (invariant I21).
    pub const fn moved(self) -> Self {
        let is_unused = self.incarnation() == 0;
        let emptied = if is_unused { Self::after_hint_claim() } else { self.emptied() };
        emptied.with_state(SlotState::Moved)
    }

    /// The COPY word that replaces this MOVED word, for an entry whose word in the old subtable is
    /// `entry`. It has the next incarnation of this slot, and the block of `entry`.
    ///
    /// It is conditional, because no PUT may count as overwritten by a split.
    pub const fn copy_of(self, entry: Self) -> Self {
        let kept_bits = !(7 << STATE_SHIFT | (INCARNATION_MAX as u64) << INCARNATION_SHIFT);
        Self(
            entry.0 & kept_bits
                | (SlotState::Copy as u64) << STATE_SHIFT
                | 1 << COND_SHIFT
                | self.next_incarnation(),
        )
    }

    /// The state of the slot.
    pub const fn state(self) -> SlotState {
        SlotState::from_bits(self.0 >> STATE_SHIFT)
    }

    /// Whether a split has moved the entry elsewhere. A MOVED word with a block is a damaged one.
    pub const fn has_moved(self) -> bool {
        let incarnation = (INCARNATION_MAX as u64) << INCARNATION_SHIFT;
        self.0 & !incarnation == (SlotState::Moved as u64) << STATE_SHIFT
    }

    /// Whether no PUT may count as overwritten by this word.
    pub const fn is_conditional(self) -> bool {
        self.0 >> COND_SHIFT & 1 == 1
    }

    /// Eight bits of the key's hash.
    pub const fn fingerprint(self) -> u8 {
        (self.0 >> FINGERPRINT_SHIFT) as u8
    }

    /// Which incarnation of the slot this is; 0 before the first.
    pub const fn incarnation(self) -> u8 {
        (self.0 >> INCARNATION_SHIFT) as u8 & INCARNATION_MAX
    }

    /// The block that the word points to, or an error if the size class does not exist. The word
    /// may be damaged: [`Geometry::block_of`](super::Geometry::block_of) checks it.
    pub const fn block(self) -> Result<NamedBlock, LayoutError> {
        match SizeClass::from_index((self.0 >> CLASS_SHIFT & 63) as u8) {
            Ok(class) => Ok(NamedBlock {
                address: BlockAddress(self.0 as u32),
                class,
                generation_low: (self.0 >> GENERATION_SHIFT) as u8,
            }),
            Err(error) => Err(error),
        }
    }
}

impl fmt::Debug for SlotWord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}(inc {}, fp {:#04x}", self.state(), self.incarnation(), self.fingerprint())?;
        if self.is_conditional() {
            write!(f, ", cond")?;
        }
        match self.block() {
            Ok(block) if block.bits() != 0 => write!(
                f,
                ", block {:#x} gen_lo {} class {})",
                block.address.claimed_offset(),
                block.generation_low,
                block.class.index()
            ),
            Ok(_) => write!(f, ")"),
            Err(_) => write!(f, ", {:#x})", self.0),
        }
    }
}

/// A block's offset from the start of the region, in units of 64 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct BlockAddress(pub u32);

impl BlockAddress {
    /// The address of the block at this byte offset; `None` unless that is a multiple of 64 below
    /// 256 GiB.
    pub const fn from_offset(offset_bytes: u64) -> Option<Self> {
        let units = offset_bytes / BLOCK_UNIT;
        if offset_bytes.is_multiple_of(BLOCK_UNIT) && units <= u32::MAX as u64 {
            Some(Self(units as u32))
        } else {
            None
        }
    }

    /// The byte offset from the start of the region at which a block would begin: for messages and
    /// comparisons. An access to the block needs [`BlockRef::offset`].
    pub const fn claimed_offset(self) -> u64 {
        self.0 as u64 * BLOCK_UNIT
    }
}

/// A block as bytes of the region name it, which may be damaged: it can have any address, and any
/// class. [`Geometry::check_block`](super::Geometry::check_block) makes a [`BlockRef`] of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NamedBlock {
    /// The block's address.
    pub address: BlockAddress,
    /// The size class of the block.
    pub class: SizeClass,
    /// The block's generation modulo [`WORD_GENERATIONS`].
    pub generation_low: u8,
}

impl NamedBlock {
    /// Whether a block of this generation can be the referenced one: the low bits agree.
    pub const fn has_generation(self, generation: u32) -> bool {
        generation as u8 == self.generation_low
    }

    const fn bits(self) -> u64 {
        (self.generation_low as u64) << GENERATION_SHIFT
            | (self.class.index() as u64) << CLASS_SHIFT
            | self.address.0 as u64
    }
}

/// A block that lies where blocks of its class can lie in the region. No other block is accessed,
/// whatever the bytes of the region name: only [`Geometry`](super::Geometry) makes one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockRef(pub(super) NamedBlock);

impl BlockRef {
    /// The block that was checked before its fields were packed somewhere else.
    #[inline]
    pub const fn unpacked(checked_before: NamedBlock) -> Self {
        Self(checked_before)
    }

    /// The byte offset from the start of the region.
    #[inline]
    pub const fn offset(self) -> u64 {
        self.0.address.claimed_offset()
    }
}

impl std::ops::Deref for BlockRef {
    type Target = NamedBlock;

    #[inline]
    fn deref(&self) -> &NamedBlock {
        &self.0
    }
}

/// Nanoseconds.
type Nanos = u64;

/// T_word: the maximum age of a proof on which a compare-and-swap may rely (invariant I4).
///
/// 256 x GRACE after its proof, the same word may belong to another key. Three amounts are
/// subtracted from this interval. An eighth is for clocks that drift. The client's own clock may
/// have stood still for [`clock_lag_max_ns`]. The chain may take effect `lateness_max_ns` after its
/// post.
pub fn proof_age_max_ns(grace_ns: Nanos, lateness_max_ns: Nanos) -> Nanos {
    let age_and_lateness_max = WORD_GENERATIONS * grace_ns / 8 * 7 - clock_lag_max_ns(grace_ns);
    age_and_lateness_max.saturating_sub(lateness_max_ns)
}

/// The maximum lag of a client's clock behind the server's: beyond it, the server has fenced the
/// client. Drift of up to a sixteenth of the time does not count as lag.
///
/// A larger value means fewer clients that are fenced by mistake, and a shorter T_word.
pub const fn clock_lag_max_ns(grace_ns: Nanos) -> Nanos {
    WORD_GENERATIONS * grace_ns / 4
}

/// The shortest GRACE, in milliseconds, with which [`proof_age_max_ns`] is above 160 ms. A shorter
/// one leaves operations no time for a compare-and-swap.
pub fn grace_ms_min(lateness_max_ns: Nanos) -> u64 {
    const MS: Nanos = 1_000_000;
    // Each millisecond of GRACE adds 160 ms to the age and the lateness together.
    let age_and_lateness_per_ms = proof_age_max_ns(MS, 0);
    // One more because the division rounds down, and one more to leave a proof its 160 ms.
    lateness_max_ns / age_and_lateness_per_ms + 2
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn any_block() -> impl Strategy<Value = NamedBlock> {
        (any::<u32>(), 0..SizeClass::COUNT as u8, any::<u8>()).prop_map(|(address, class, low)| {
            NamedBlock {
                address: BlockAddress(address),
                class: SizeClass::from_index(class).unwrap(),
                generation_low: low,
            }
        })
    }

    proptest! {
        #[test]
        fn fields_round_trip(inc in 0u8..64, fp: u8, block in any_block(), cond: bool) {
            let pending = SlotWord::empty(inc).pending(fp, block);
            prop_assert_eq!(pending.state(), SlotState::Pending);
            prop_assert_eq!(pending.incarnation(), if inc == 63 { 2 } else { 2.max(inc + 1) });
            prop_assert_eq!(pending.block().unwrap(), block);
            let live = pending.live(block, cond);
            prop_assert_eq!(live.state(), SlotState::Live);
            prop_assert_eq!(live.is_conditional(), cond);
            prop_assert_eq!(live.fingerprint(), fp);
            prop_assert_eq!(live.incarnation(), pending.incarnation());
            prop_assert_eq!(live.block().unwrap(), block);
            prop_assert_eq!(live.emptied(), SlotWord::empty(pending.incarnation()));
            prop_assert_eq!(live.moved(), live.emptied().with_state(SlotState::Moved));
            prop_assert_ne!(SlotWord::empty(inc).moved().emptied(), SlotWord::default());
            let copy = SlotWord::empty(inc).moved().copy_of(live);
            prop_assert_eq!(copy.state(), SlotState::Copy);
            prop_assert_eq!(copy.incarnation(), pending.incarnation());
            prop_assert!(copy.is_conditional());
            prop_assert_eq!((copy.fingerprint(), copy.block().unwrap()), (fp, block));
        }

        #[test]
        fn all_incarnations_except_the_first_recur(block in any_block()) {
            let next = |word: SlotWord| word.pending(0, block).emptied();
            let mut word = SlotWord::default();
            let numbers: Vec<u8> = (0..2 * INCARNATIONS)
                .map(|_| { word = next(word); word.incarnation() })
                .collect();
            let (first_cycle, second_cycle) = numbers.split_at(INCARNATIONS as usize);
            prop_assert_eq!(first_cycle, (2..=63).collect::<Vec<_>>());
            prop_assert_eq!(second_cycle, first_cycle);
        }

        #[test]
        fn every_word_has_readable_fields(bits: u64) {
            let word = SlotWord::from_bits(bits);
            let _ = (word.state(), word.block(), word.fingerprint(), format!("{word:?}"));
            prop_assert_eq!(word.with_state(word.state()), word);
        }
    }

    const GRACES_MS: [Nanos; 4] = [52, 100, 250, 10_000];
    const LATENESSES_NS: [Nanos; 3] = [50_000_000, 504_000_000, 8_000_000_000];

    /// The worst case: the clock of the client with the proof is a sixteenth slow, and stands still
    /// for as long as it can. The clocks of all clients that reuse the block are a sixteenth fast.
    #[test]
    fn no_word_recurs_while_a_proof_of_it_counts() {
        for grace in GRACES_MS.map(|ms| ms * 1_000_000) {
            for lateness in LATENESSES_NS {
                let age = proof_age_max_ns(grace, lateness);
                let takes_effect = (age + lateness + clock_lag_max_ns(grace)) * 16 / 15;
                let recurs = WORD_GENERATIONS * grace * 16 / 17;
                assert!(age == 0 || takes_effect < recurs, "{grace} {lateness}");
            }
        }
    }

    #[test]
    fn the_shortest_grace_lets_a_proof_count_for_160_ms() {
        for lateness in LATENESSES_NS {
            let min = grace_ms_min(lateness);
            assert!(proof_age_max_ns(min * 1_000_000, lateness) > 160_000_000);
            assert!(proof_age_max_ns((min - 1) * 1_000_000, lateness) <= 160_000_000);
        }
    }
}
