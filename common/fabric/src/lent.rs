//! Memory that a caller lends to a fabric for the length of one call.

use crate::Verb;

/// The length of the parts in which memory is copied and summed, a multiple of 8: so short that a
/// part that was copied is still in the first cache when it is summed.
pub(crate) const PART_BYTES: usize = 4096;

/// The CRC-32 of bytes that have the CRC-32 `before`, followed by these.
pub(crate) fn sum_after(before: u32, bytes: &[u8]) -> u32 {
    let mut sum = crc32fast::Hasher::new_with_initial(before);
    sum.update(bytes);
    sum.finalize()
}

/// Copies bytes to as much memory. Returns their CRC-32 as [`sum_after`].
pub(crate) fn copy_summed(before: u32, from: &[u8], to: &mut [u8]) -> u32 {
    let mut sum = crc32fast::Hasher::new_with_initial(before);
    for (part, target) in from.chunks(PART_BYTES).zip(to.chunks_mut(PART_BYTES)) {
        sum.update(part);
        target.copy_from_slice(part);
    }
    sum.finalize()
}

/// Memory of the caller: [`crate::Loan::lend`].
pub enum LentMemory<'m> {
    /// The target of READs.
    Target(&'m mut [u8]),
    /// The source of WRITEs.
    Source(&'m [u8]),
}

/// Where the lent memory is. It may be used until [`crate::Fabric::lend`] takes it back.
pub struct Lent {
    start: *mut u8,
    bytes: usize,
    /// Whether it is the target of READs. Otherwise it must not change.
    is_target: bool,
}

// SAFETY: the caller lends memory that any thread may use: slices of bytes are `Send`.
unsafe impl Send for Lent {}

impl Lent {
    /// No memory.
    pub const NONE: Self = Self { start: std::ptr::null_mut(), bytes: 0, is_target: false };

    /// The caller has [`crate::Fabric::lend`] called with [`Lent::NONE`] before the borrow ends.
    pub(crate) fn of(memory: LentMemory<'_>) -> Self {
        match memory {
            LentMemory::Target(target) => {
                Self { start: target.as_mut_ptr(), bytes: target.len(), is_target: true }
            }
            LentMemory::Source(source) => {
                let start = source.as_ptr().cast_mut();
                Self { start, bytes: source.len(), is_target: false }
            }
        }
    }

    /// The same memory, for another lane. Their chains use different parts of it.
    pub(crate) fn again(&self) -> Self {
        let Self { start, bytes, is_target } = *self;
        Self { start, bytes, is_target }
    }

    /// Whether it is the target of READs.
    pub(crate) fn is_target(&self) -> bool {
        self.is_target
    }

    /// Whether this is the memory that the chain needs: all that a `WriteSplit` has behind its
    /// head.
    pub(crate) fn suits(&self, chain: &[Verb]) -> bool {
        match chain.first() {
            Some(Verb::WriteSplit { head_bytes, bytes, .. }) => {
                self.bytes.next_multiple_of(8) == bytes.saturating_sub(*head_bytes) as usize
            }
            _ => true,
        }
    }

    /// The length, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The content.
    pub(crate) fn content(&self) -> &[u8] {
        if self.start.is_null() {
            return &[];
        }
        // SAFETY: the memory is lent, and does not change while this is borrowed.
        unsafe { std::slice::from_raw_parts(self.start, self.bytes) }
    }

    /// The memory, to be changed; none if it is the source of WRITEs.
    pub(crate) fn content_mut(&mut self) -> &mut [u8] {
        if self.start.is_null() || !self.is_target {
            return &mut [];
        }
        // SAFETY: likewise, and the caller has lent it to be changed.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }
    }

    /// These bytes of the source of WRITEs, or of the target; none if it is shorter.
    pub(crate) fn part(&self, at: u32, bytes: u32) -> &[u8] {
        self.content().get(at as usize..at as usize + bytes as usize).unwrap_or_default()
    }

    /// These bytes of the target of READs; none if it is shorter.
    pub(crate) fn part_mut(&mut self, at: u32, bytes: u32) -> &mut [u8] {
        self.content_mut().get_mut(at as usize..at as usize + bytes as usize).unwrap_or_default()
    }
}

impl Default for Lent {
    fn default() -> Self {
        Self::NONE
    }
}
