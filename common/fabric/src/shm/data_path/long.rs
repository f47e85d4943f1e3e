//! Long READs and PUTs, which copy between the region and the caller's memory.

use zerocopy::IntoBytes;

use super::put_chain::PutChain;
use super::{Buffers, ChainMemory, Executor, words_mut};
use crate::clock::Clock;
use crate::long_transfer::PART_BYTES;
use crate::{ChainError, LongRead, LongWrite, Nanos, ReadSink};

impl Executor {
    /// Executes a chain of one long READ.
    pub(super) fn read_long(
        &self,
        memory: &mut impl ChainMemory,
        remote: u64,
        LongRead { into, head_bytes, bytes }: LongRead,
        sink: &mut dyn ReadSink,
    ) -> Result<(), ChainError> {
        self.check_lease()?;
        self.region.prefetch(remote, bytes.min(PART_BYTES as u32));
        let head = memory.target(into, head_bytes);
        self.region.read(remote, head)?;
        let wanted = sink.begin(head.as_bytes()).min(bytes.saturating_sub(head_bytes) as usize);
        self.region.read_parts(remote + u64::from(head_bytes), wanted, sink)
    }

    /// Executes the chain of a long PUT, with the checks of [`Executor::execute`]. The head comes
    /// last: until then the header of the block's former content stays (invariant I9).
    pub(super) fn put_long(
        &self,
        buffers: &mut Buffers,
        put: &PutChain<'_>,
        deadline: Nanos,
        LongWrite { head_bytes, rest, sum }: LongWrite<'_>,
    ) -> Result<u64, ChainError> {
        let lease = self.lease_word()?;
        self.region.prefetch_to_change(put.block, put.bytes.min(PART_BYTES as u32));
        let accepted = || self.check_accepted(lease, Clock::roughly, deadline);
        self.region.write_parts(put.block + u64::from(head_bytes), rest, |part| {
            sum.add(part);
            accepted()
        })?;
        let head = words_mut(&mut buffers[put.from as usize], head_bytes);
        sum.end(head.as_mut_bytes());
        accepted()?;
        self.region.write(put.block, head)?;
        self.mark_and_swap(put, lease, deadline)
    }
}

#[cfg(test)]
mod tests;
