//! How long an operation goes on that others disturb, or whose READs come too late.

use farside_fabric::waiting::WaitTimer;

/// How much it READs in all attempts but the first, in bytes: a value that does not arrive within
/// GRACE will not do so the next time either. As much as all attempts take for 512 KiB.
const RETRIED_BYTES_MAX: u64 = 64 << 20;

/// What an operation that does not get on has been through.
#[derive(Default)]
pub(super) struct RetryState {
    pub(super) attempts: u32,
    /// What its lane had READ when it was first disturbed, in bytes.
    read_bytes: Option<u64>,
    /// While a split has its key in its hands.
    pub(super) moving: Option<WaitTimer>,
    /// While the server has no room for the split it needs, but expects some.
    pub(super) later: Option<WaitTimer>,
}

impl RetryState {
    /// Whether attempts have READ too much, when the lane has READ so many bytes in all. The first
    /// call takes note of where that stood.
    pub(super) fn have_read_too_much(&mut self, read_bytes: u64) -> bool {
        let at_first = *self.read_bytes.get_or_insert(read_bytes);
        read_bytes.wrapping_sub(at_first) > RETRIED_BYTES_MAX
    }

    /// One more attempt, which has not waited yet.
    pub(super) fn next(&self) -> Self {
        Self { attempts: self.attempts + 1, read_bytes: self.read_bytes, ..Self::default() }
    }
}
