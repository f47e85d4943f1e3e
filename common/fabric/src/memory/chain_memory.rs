//! The memory of a chain: a lane's buffers, or a request and its reply.

use zerocopy::IntoBytes;

use crate::{Buffer, ChainError};

/// The length from which a buffer no longer grows by doubling, in words of 8 bytes: 4 MiB.
const LARGE_BUFFER_WORDS: usize = (4 << 20) / size_of::<u64>();

/// A lane's own buffers, by [`Buffer`].
pub(crate) type Buffers = [Vec<u64>; Buffer::COUNT];

/// The memory of a chain: the targets of its READs, and the sources of its WRITEs.
pub(crate) trait ChainMemory {
    /// The target of a READ of this many bytes.
    fn target(&mut self, into: Buffer, bytes: u32) -> &mut [u64];

    /// The source of a WRITE of this many bytes.
    fn source(&mut self, from: Buffer, bytes: u32) -> &[u64];

    /// The target of a `ReadPart`. Only a client's own chains have this verb and the next one.
    fn target_part(&mut self, _into: Buffer, _at: u32, _bytes: u32) -> &mut [u8] {
        &mut []
    }

    /// The source of a `WritePart`.
    fn source_part(&mut self, _from: Buffer, _at: u32, _bytes: u32) -> &[u8] {
        &[]
    }

    /// Notes the CRC-32 of the part that the verb at this index of its chain has copied.
    fn note_sum(&mut self, _verb: usize, _sum: u32) {}

    /// Has `write` write what a `WriteSplit` has in lent memory, unless that was done before.
    ///
    /// # Errors
    /// [`ChainError`], as of a WRITE.
    fn end_split(
        &mut self,
        _write: impl FnOnce(&[u8]) -> Result<u32, ChainError>,
    ) -> Result<(), ChainError> {
        Ok(())
    }
}

/// These bytes of a buffer, which is long enough; none if it is not.
pub(crate) fn part_mut(buffers: &mut Buffers, buffer: Buffer, at: u32, bytes: u32) -> &mut [u8] {
    let (start, end) = (at as usize, at as usize + bytes as usize);
    buffers[buffer as usize].as_mut_bytes().get_mut(start..end).unwrap_or_default()
}

/// The buffers of a lane.
impl ChainMemory for Buffers {
    #[inline(always)]
    fn target(&mut self, into: Buffer, bytes: u32) -> &mut [u64] {
        words_mut(&mut self[into as usize], bytes)
    }

    #[inline(always)]
    fn source(&mut self, from: Buffer, bytes: u32) -> &[u64] {
        words_mut(&mut self[from as usize], bytes)
    }
}

/// The first `bytes` of a buffer, which grows if it is shorter.
#[inline]
pub(crate) fn words_mut(buffer: &mut Vec<u64>, bytes: u32) -> &mut [u64] {
    let words = (bytes as usize).div_ceil(size_of::<u64>());
    if buffer.len() < words {
        grow(buffer, words);
    }
    &mut buffer[..words]
}

#[cold]
fn grow(buffer: &mut Vec<u64>, words: usize) {
    // A power of two would be a waste of memory for a value of many MiB.
    let words = match words > LARGE_BUFFER_WORDS {
        true => words.next_multiple_of(LARGE_BUFFER_WORDS),
        false => words.next_power_of_two(),
    };
    buffer.resize(words, 0);
}
