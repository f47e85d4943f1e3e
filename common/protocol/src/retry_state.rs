//! The limits on an operation that is tried again, because other operations changed its slots or
//! its READs took too long.

use farside_fabric::wait_timer::WaitTimer;

/// The maximum number of bytes that the retries READ, all together. A value that does not arrive
/// within GRACE will usually not arrive the next time either. With values of 512 KiB,
/// `ATTEMPTS_MAX` attempts READ about as much.
const RETRIED_BYTES_MAX: u64 = 64 << 20;

/// The attempts and waits of an operation so far.
#[derive(Default)]
pub(super) struct RetryState {
    pub(super) attempts: u32,
    /// The bytes that the lane had READ when the first attempt failed.
    read_bytes: Option<u64>,
    /// The wait for a split that is moving the key.
    pub(super) move_wait: Option<WaitTimer>,
    /// The wait for a split for which the server has no memory yet.
    pub(super) memory_wait: Option<WaitTimer>,
}

impl RetryState {
    /// Whether the retries have READ more than [`RETRIED_BYTES_MAX`]. `read_bytes` is the number of
    /// bytes that the lane has READ so far. The first call notes this number.
    pub(super) fn have_read_too_much(&mut self, read_bytes: u64) -> bool {
        let bytes_at_first = *self.read_bytes.get_or_insert(read_bytes);
        read_bytes.wrapping_sub(bytes_at_first) > RETRIED_BYTES_MAX
    }

    /// The state of the next attempt, which has not waited yet.
    pub(super) fn next(&self) -> Self {
        Self { attempts: self.attempts + 1, read_bytes: self.read_bytes, ..Self::default() }
    }
}
