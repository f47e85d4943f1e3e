//! Long READs, WRITEs and PUTs, part by part.

use zerocopy::IntoBytes;

use super::put_chain::PutChain;
use super::{Buffers, ChainMemory, Executor, LeaseWord, WRITE_WORDS_MAX, words_mut};
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

    #[cold]
    pub(super) fn write_long(
        &self,
        remote: u64,
        source: &[u64],
        lease: LeaseWord<'_>,
        deadline: Nanos,
    ) -> Result<(), ChainError> {
        // Before the first part, because a verb outside the region is not executed at all.
        self.region.check_range(remote, source.len())?;
        let mut offset = remote;
        for part in source.chunks(WRITE_WORDS_MAX) {
            self.check_accepted(lease, Clock::roughly, deadline)?;
            self.region.write(offset, part)?;
            offset += size_of_val(part) as u64;
        }
        Ok(())
    }

    /// WRITEs bytes with the checks of [`Executor::write`]. Returns their CRC-32.
    pub(super) fn write_summed(
        &self,
        remote: u64,
        source: &[u8],
        lease: LeaseWord<'_>,
        deadline: Nanos,
    ) -> Result<u32, ChainError> {
        let mut sum = crc32fast::Hasher::new();
        self.region.write_parts(remote, source, |part| {
            self.check_accepted(lease, Clock::roughly, deadline)?;
            sum.update(part);
            Ok(())
        })?;
        Ok(sum.finalize())
    }
}

#[cfg(test)]
mod tests;
