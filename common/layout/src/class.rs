//! Size classes: the block sizes that a chunk can be carved into.
//!
//! Those of values are the multiples of 64 bytes up to 512, then four classes per doubling up to 4
//! MiB. So at most a fifth of a block above 512 bytes is padding. A value that needs more is a list
//! of extents, whose blocks and heads have classes of their own: see [`ExtentTable`].
//!
//! [`ExtentTable`]: crate::ExtentTable

use super::LayoutError;

/// The size of a chunk, in bytes. All memory of a chunk has the same [`ChunkUse`](crate::ChunkUse).
pub const CHUNK_BYTES: u64 = 2 << 20;
/// The unit of block addresses and the smallest block, in bytes.
pub const BLOCK_UNIT: u64 = 64;
/// The largest block of a value that has no extents, in bytes.
pub const BLOCK_BYTES_MAX: u64 = 4 << 20;

const LINEAR_CLASSES: u8 = 8;
const LINEAR_BYTES_MAX: u64 = BLOCK_UNIT * LINEAR_CLASSES as u64;
const CLASSES_PER_DOUBLING: u8 = 4;
/// The number of classes for blocks of values without extents. Heads and extents have the next
/// ones.
const VALUE_CLASSES: u8 = 60;
/// The sizes of heads and, last, of extents, in bytes.
const LARGE_BYTES: [u64; SizeClass::COUNT - VALUE_CLASSES as usize] =
    [4 << 10, 16 << 10, 128 << 10, 1 << 20];

/// The sizes of blocks, by class.
const BLOCK_BYTES: [u32; SizeClass::COUNT] = {
    let mut all = [0; SizeClass::COUNT];
    let mut index = 0;
    while index < SizeClass::COUNT as u8 {
        all[index as usize] = if index < LINEAR_CLASSES {
            BLOCK_UNIT as u32 * (index as u32 + 1)
        } else if index >= VALUE_CLASSES {
            LARGE_BYTES[(index - VALUE_CLASSES) as usize] as u32
        } else {
            let above = index - LINEAR_CLASSES;
            let base = (LINEAR_BYTES_MAX as u32) << (above / CLASSES_PER_DOUBLING);
            base + base / 4 * (above % CLASSES_PER_DOUBLING + 1) as u32
        };
        index += 1;
    }
    all
};

/// The size of blocks of the next smaller class with the same content, by class. Larger than any
/// block for the class of extents, because no key fits there.
const SMALLER_BLOCK_BYTES: [u32; SizeClass::COUNT] = {
    let mut all = [0; SizeClass::COUNT];
    let mut index = 1;
    while index < SizeClass::COUNT {
        all[index] = BLOCK_BYTES[index - 1];
        index += 1;
    }
    all[SizeClass::FIRST_HEAD.0 as usize] = 0;
    all[SizeClass::EXTENT.0 as usize] = u32::MAX;
    all
};

/// The base 2 logarithm of the unit of padding, by class: a quarter of the difference between a
/// block of this class and one of the next smaller class. Heads and extents have no padding.
const PADDING_UNIT_LOG2: [u8; SizeClass::COUNT] = {
    let mut all = [u64::BITS as u8 - 1; SizeClass::COUNT];
    let mut index = 0;
    while index < VALUE_CLASSES as usize {
        all[index] = ((BLOCK_BYTES[index] - SMALLER_BLOCK_BYTES[index]) / 4).ilog2() as u8;
        index += 1;
    }
    all
};

/// 2^32 divided by the size of blocks in units, rounded up, by class. The product with a number of
/// units in a chunk is less than this, modulo 2^32, if the size divides that number: a division
/// would take longer than the rest of the check. A test compares all of them.
const RECIPROCALS: [u64; SizeClass::COUNT] = {
    let mut all = [0; SizeClass::COUNT];
    let mut index = 0;
    while index < SizeClass::COUNT {
        let units = BLOCK_BYTES[index] as u64 / BLOCK_UNIT;
        all[index] = (1u64 << u32::BITS).div_ceil(units);
        index += 1;
    }
    all
};

/// Where the last block of a span can start, by class: in units behind the span's start.
const LAST_STARTS: [u64; SizeClass::COUNT] = {
    let mut all = [0; SizeClass::COUNT];
    let mut index = 0;
    while index < SizeClass::COUNT {
        let bytes = BLOCK_BYTES[index] as u64;
        all[index] = (bytes.next_multiple_of(CHUNK_BYTES) - bytes) / BLOCK_UNIT;
        index += 1;
    }
    all
};

/// A size class: a valid index into the list of block sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SizeClass(u8);

impl SizeClass {
    /// The number of classes: as many as the bits of a word distinguish.
    pub const COUNT: usize = 64;
    /// The largest class of values without extents.
    pub const LARGEST_OF_VALUES: Self = Self(VALUE_CLASSES - 1);
    /// The class of the shortest heads. The others follow it, and then that of extents.
    pub const FIRST_HEAD: Self = Self(VALUE_CLASSES);
    /// The class of extents.
    pub const EXTENT: Self = Self(Self::COUNT as u8 - 1);
    /// The largest [`SizeClass::padding`]: a block with more fits a smaller class.
    pub const PADDING_MAX: u8 = 3;

    /// The class with this index, or an error if no class has it.
    pub const fn from_index(index: u8) -> Result<Self, LayoutError> {
        if (index as usize) < Self::COUNT {
            Ok(Self(index))
        } else {
            Err(LayoutError::SizeClass { index })
        }
    }

    /// The smallest class whose blocks hold `bytes`; `None` above [`BLOCK_BYTES_MAX`].
    pub const fn for_bytes(bytes: u64) -> Option<Self> {
        if bytes > BLOCK_BYTES_MAX {
            return None;
        }
        if bytes <= LINEAR_BYTES_MAX {
            let units = bytes.div_ceil(BLOCK_UNIT);
            return Some(Self(if units == 0 { 0 } else { units as u8 - 1 }));
        }
        // `bytes` lies in (2^doubling, 2^(doubling + 1)]; each quarter of that range is a class.
        let doubling = (bytes - 1).ilog2();
        let quarter = 1u64 << (doubling - 2);
        let step = (bytes - (1 << doubling)).div_ceil(quarter) as u8;
        let doublings = (doubling - LINEAR_BYTES_MAX.ilog2()) as u8;
        Some(Self(LINEAR_CLASSES + doublings * CLASSES_PER_DOUBLING + step - 1))
    }

    /// The class of the head of a value with extents, for a head of this many bytes; `None` if none
    /// is so long.
    pub const fn for_head(bytes: u64) -> Option<Self> {
        let mut class = Self(VALUE_CLASSES);
        while class.is_head() {
            if bytes <= class.block_bytes() {
                return Some(class);
            }
            class = Self(class.0 + 1);
        }
        None
    }

    /// All classes: those of values without extents, smallest first, those of heads, and that of
    /// extents.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..Self::COUNT as u8).map(Self)
    }

    /// The classes of values without extents, smallest first.
    pub fn of_values() -> impl Iterator<Item = Self> {
        (0..VALUE_CLASSES).map(Self)
    }

    /// The classes of heads, smallest first.
    pub fn of_heads() -> impl Iterator<Item = Self> {
        (VALUE_CLASSES..Self::EXTENT.0).map(Self)
    }

    /// Whether a block of this class is the head of a value with extents.
    #[inline]
    pub const fn is_head(self) -> bool {
        VALUE_CLASSES <= self.0 && self.0 < Self::EXTENT.0
    }

    /// What blocks of this class hold: `value` for keys with their values, `head` for keys with the
    /// lists of their values' extents, `extent` for parts of values. Two classes of the same length
    /// hold different contents.
    pub const fn content(self) -> &'static str {
        match self {
            Self::EXTENT => "extent",
            _ if self.is_head() => "head",
            _ => "value",
        }
    }

    /// Whether this is the smallest class whose blocks hold `bytes`, among those of values or among
    /// those of heads. The class of extents never is.
    #[inline]
    pub(crate) const fn is_smallest_for(self, bytes: u64) -> bool {
        let smaller = SMALLER_BLOCK_BYTES[self.0 as usize % Self::COUNT] as u64;
        smaller < bytes && bytes <= self.block_bytes()
    }

    /// The index of this class, below [`SizeClass::COUNT`].
    pub const fn index(self) -> u8 {
        self.0
    }

    /// The size of this class's blocks, in bytes.
    #[inline]
    pub const fn block_bytes(self) -> u64 {
        BLOCK_BYTES[self.0 as usize % Self::COUNT] as u64
    }

    /// How many padding units a block of this class has at its end if it holds `bytes`: 0 to
    /// [`SizeClass::PADDING_MAX`], and 0 for a head, which is READ whole.
    /// [`SizeClass::unpadded_bytes`] takes this number.
    pub const fn padding(self, bytes: u64) -> u8 {
        let unit_log2 = PADDING_UNIT_LOG2[self.0 as usize % Self::COUNT];
        let units = self.block_bytes().saturating_sub(bytes) >> unit_log2;
        if units > Self::PADDING_MAX as u64 { Self::PADDING_MAX } else { units as u8 }
    }

    /// The length of this class's blocks without this many padding units, in bytes: a multiple of
    /// 16.
    pub const fn unpadded_bytes(self, padding: u8) -> u64 {
        let unit_log2 = PADDING_UNIT_LOG2[self.0 as usize % Self::COUNT];
        self.block_bytes() - (((padding & Self::PADDING_MAX) as u64) << unit_log2)
    }

    /// Whether a block of this class can start this many bytes behind the start of a chunk: at a
    /// multiple of its length, and with its end in the span.
    #[inline]
    pub(crate) const fn has_start(self, in_chunk: u64) -> bool {
        let index = self.0 as usize % Self::COUNT;
        let (reciprocal, units) = (RECIPROCALS[index], in_chunk % CHUNK_BYTES / BLOCK_UNIT);
        units <= LAST_STARTS[index] && ((units * reciprocal) & 0xffff_ffff) < reciprocal
    }

    /// The number of consecutive chunks in a span of this class: 1, or 2 for blocks above 2 MiB.
    pub const fn chunks_per_span(self) -> u64 {
        self.block_bytes().div_ceil(CHUNK_BYTES)
    }

    /// The number of blocks in a span of this class.
    pub const fn blocks_per_span(self) -> u64 {
        self.chunks_per_span() * CHUNK_BYTES / self.block_bytes()
    }
}

const _: () = {
    assert!(SizeClass(VALUE_CLASSES - 1).block_bytes() == BLOCK_BYTES_MAX);
    let mut index = 0;
    while index < VALUE_CLASSES {
        let class = SizeClass(index);
        assert!(class.block_bytes().is_multiple_of(BLOCK_UNIT));
        match SizeClass::for_bytes(class.block_bytes()) {
            Some(same) => assert!(same.0 == index),
            None => panic!("every block size of a class belongs to that class"),
        }
        index += 1;
    }
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block_bytes;

    #[test]
    fn every_size_gets_the_tightest_class() {
        let mut below = 0;
        for class in SizeClass::of_values() {
            for bytes in [below + 1, class.block_bytes() - 1, class.block_bytes()] {
                assert_eq!(SizeClass::for_bytes(bytes), Some(class), "{bytes} bytes");
                let Some(value_bytes) = bytes.checked_sub(block_bytes(8, 0)) else { continue };
                let fitting = SizeClass::of_values().filter(|it| it.fits(8, value_bytes as usize));
                assert_eq!(fitting.collect::<Vec<_>>(), [class], "{bytes} bytes");
            }
            below = class.block_bytes();
        }
        assert_eq!(SizeClass::for_bytes(BLOCK_BYTES_MAX + 1), None);
        assert_eq!(SizeClass::for_bytes(0), Some(SizeClass(0)));
    }

    #[test]
    fn blocks_start_at_multiples_of_their_length() {
        for class in SizeClass::all() {
            for in_chunk in (0..CHUNK_BYTES).step_by(BLOCK_UNIT as usize) {
                let bytes = class.block_bytes();
                let ends_in_span = in_chunk + bytes <= class.chunks_per_span() * CHUNK_BYTES;
                let can_start = in_chunk.is_multiple_of(bytes) && ends_in_span;
                assert_eq!(class.has_start(in_chunk), can_start, "{class:?} at {in_chunk:#x}");
            }
        }
    }

    #[test]
    fn padding_is_at_most_a_fifth_above_the_linear_classes() {
        for bytes in [513, 641, 1025, 70_000, (1 << 20) + 1, (2 << 20) + 1] {
            let block = SizeClass::for_bytes(bytes).unwrap().block_bytes();
            assert!((block - bytes) * 5 <= block, "{bytes} in {block}");
        }
    }

    #[test]
    fn a_block_without_its_padding_still_holds_its_bytes() {
        let mut below = 0;
        for class in SizeClass::of_values() {
            let block = class.block_bytes();
            let unit = (block - below) / 4;
            for bytes in (1..=4).flat_map(|n| [below + (n - 1) * unit + 1, below + n * unit]) {
                let unpadded = class.unpadded_bytes(class.padding(bytes));
                assert_eq!(unpadded, below + (bytes - below).next_multiple_of(unit), "{bytes}");
                assert!(unpadded.is_multiple_of(16));
            }
            assert_eq!(class.padding(0), SizeClass::PADDING_MAX);
            below = block;
        }
    }

    #[test]
    fn an_index_without_a_class_is_refused() {
        assert!(SizeClass::from_index(63).is_ok());
        assert!(matches!(SizeClass::from_index(64), Err(LayoutError::SizeClass { index: 64 })));
    }
}
