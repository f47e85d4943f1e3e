//! The directory leads to the subtables that a split made.

use farside_fabric::{Buffer, ChainError, Fabric, Nanos, Verb};
use farside_layout::{DirectoryEntry, RegionState, STATE_OFFSET, Superblock};

use super::{LANE, Split, SplitProgress, SubtableSplitter};

const ENTRY_BYTES: u64 = size_of::<DirectoryEntry>() as u64;
/// How many entries of the old directory one READ brings to be doubled.
const PIECE_ENTRIES: u64 = 4096;
pub(super) const PIECE_BYTES: u64 = PIECE_ENTRIES * ENTRY_BYTES;

impl<F: Fabric> SubtableSplitter<'_, F> {
    /// Moves the entries of a subtable to two others and makes the directory, which is `depth`
    /// deep, lead there, from wherever an earlier call stopped; how far that came, and the
    /// directory's depth afterwards.
    ///
    /// # Errors
    /// [`ChainError`] when the endpoint does not reach the region any more.
    pub async fn run(&self, split: &Split, depth: u8) -> Result<(SplitProgress, u8), ChainError> {
        let progress = self.split(split).await?;
        match progress {
            SplitProgress::Done => {
                let depth = self.publish(split, depth).await?;
                self.disown(split).await?;
                Ok((progress, depth))
            }
            SplitProgress::Busy | SplitProgress::Stuck { .. } => Ok((progress, depth)),
        }
    }

    /// Leads readers to the new subtables of a split that is done; `depth` is that of the directory
    /// in use. Returns its depth afterwards: one more if the old subtable had an entry for itself.
    ///
    /// # Errors
    /// [`ChainError`] when the endpoint does not reach the region, or the region has no directory
    /// that deep.
    pub async fn publish(&self, split: &Split, mut depth: u8) -> Result<u8, ChainError> {
        if split.local_depth == depth {
            self.double(depth).await?;
            depth += 1;
        }
        let half = 1u64 << (depth - split.local_depth - 1);
        let first = self.entry_offset(depth, u64::from(split.prefix) * 2 * half)?;
        // From the last to the first: as long as the first leads to the old subtable, a client that
        // continues after an interruption finds the split and repeats this.
        for at in (0..2 * half).rev() {
            let side = (at / half) as usize;
            let entry = DirectoryEntry::new(split.new[side], split.local_depth + 1);
            let remote = first + at * ENTRY_BYTES;
            let write = [Verb::WriteWord { remote, value: entry.bits() }];
            self.endpoint.chain(LANE, self.region, &write, Nanos::MAX).await?;
        }
        Ok(depth)
    }

    fn entry_offset(&self, depth: u8, number: u64) -> Result<u64, ChainError> {
        let outside = ChainError::Outside { remote: number, bytes: ENTRY_BYTES };
        let directory = self.geometry.directory_offset(depth).ok_or(outside)?;
        Ok(directory + number * ENTRY_BYTES)
    }

    /// Builds a directory with each entry twice beside the one in use, then makes it the one in use
    /// with one word.
    async fn double(&self, depth: u8) -> Result<(), ChainError> {
        let (old, new) = (self.entry_offset(depth, 0)?, self.entry_offset(depth + 1, 0)?);
        let total = 1u64 << depth;
        for from in (0..total).step_by(PIECE_ENTRIES as usize) {
            let bytes = (PIECE_ENTRIES.min(total - from) * ENTRY_BYTES) as u32;
            let remote = old + from * ENTRY_BYTES;
            let read = [Verb::Read { remote, into: Buffer::ReadBlock, bytes }];
            self.endpoint.chain(LANE, self.region, &read, Nanos::MAX).await?;
            self.fill_twice(bytes as usize);
            let remote = new + 2 * from * ENTRY_BYTES;
            let write = [Verb::Write { remote, from: Buffer::NewBlock, bytes: 2 * bytes }];
            self.endpoint.chain(LANE, self.region, &write, Nanos::MAX).await?;
        }
        let value = Superblock::state_word(RegionState::InUse, depth + 1);
        let switch = [Verb::WriteWord { remote: STATE_OFFSET, value }];
        self.endpoint.chain(LANE, self.region, &switch, Nanos::MAX).await.map(|_| ())
    }

    /// Each entry in the block buffer twice into the image buffer.
    fn fill_twice(&self, bytes: usize) {
        let entries = {
            let block = self.endpoint.buffer(LANE, Buffer::ReadBlock);
            block[..bytes].as_chunks::<{ ENTRY_BYTES as usize }>().0.to_vec()
        };
        let mut fabric = self.endpoint.fabric_mut();
        fabric.reserve(LANE, Buffer::NewBlock, 2 * bytes);
        let image = fabric.buffer_mut(LANE, Buffer::NewBlock);
        for (pair, entry) in image.chunks_exact_mut(2 * ENTRY_BYTES as usize).zip(&entries) {
            let (first, second) = pair.split_at_mut(entry.len());
            first.copy_from_slice(entry);
            second.copy_from_slice(entry);
        }
    }
}
