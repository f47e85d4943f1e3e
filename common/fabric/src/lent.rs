//! Memory that a caller lends to a fabric for the length of one call.

/// Memory of the caller: [`crate::Endpoint::drive_lending`].
pub enum LentMemory<'m> {
    /// The target of READs.
    Target(&'m mut [u8]),
    /// The source of WRITEs.
    Source(&'m [u8]),
}

/// Where the lent memory is. It may be used until [`crate::Fabric::lend`] is called again.
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

/// Memory of the caller in which the first verb of a chain ends ([`crate::Fabric::post_direct`]).
///
/// A READ fills the head of its buffer, then this memory, and then the buffer behind the head. A
/// WRITE consists of the head of its buffer, this memory, and zeros to the end of the last word.
pub struct LentRest {
    /// The length of the head, in bytes: a multiple of 8.
    pub(crate) head_bytes: u32,
    pub(crate) memory: Lent,
}

impl LentRest {
    /// As for [`Lent::of`].
    pub(crate) fn of(head_bytes: u32, memory: LentMemory<'_>) -> Self {
        Self { head_bytes, memory: Lent::of(memory) }
    }
}

impl Default for Lent {
    fn default() -> Self {
        Self::NONE
    }
}
