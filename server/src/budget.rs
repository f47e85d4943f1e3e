//! How much a step of a chore may read.

/// How many bytes of blocks a step of a chore reads. Reading them takes some milliseconds.
const STEP_BYTES: u64 = 8 << 20;

/// How many subtables and how many bytes of blocks a step may still read.
///
/// The number of subtables does not bound the time of a step, because damaged slots can all lead to
/// the same block of 4 MiB. So bytes of blocks count, too. The last block may exceed the budget.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Budget {
    pub(crate) subtables: usize,
    pub(crate) bytes: u64,
}

impl Budget {
    /// The budget of a walk before there are clients.
    pub(crate) const UNLIMITED: Self = Self::new(usize::MAX, u64::MAX);

    const fn new(subtables: usize, bytes: u64) -> Self {
        Self { subtables, bytes }
    }

    /// The budget of a step of a chore.
    pub(crate) const fn of_step(subtables: usize) -> Self {
        Self::new(subtables, STEP_BYTES)
    }

    /// Subtracts from the budget the bytes of a block that was read.
    pub(crate) fn spend(&mut self, bytes: u64) {
        self.bytes = self.bytes.saturating_sub(bytes);
    }
}
