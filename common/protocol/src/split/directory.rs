//! Changes the directory after a split, so that it leads to the new subtables.

use farside_fabric::{Buffer, ChainError, Fabric, Nanos, Verb};
use farside_layout::{DirectoryEntry, RegionState, STATE_OFFSET, Superblock};

use super::{LANE, Split, SplitProgress, SubtableSplitter};

const ENTRY_BYTES: u64 = size_of::<DirectoryEntry>() as u64;
/// The number of directory entries that are doubled at a time.
const PIECE_ENTRIES: u64 = 4096;
pub(super) const PIECE_BYTES: u64 = PIECE_ENTRIES * ENTRY_BYTES;

impl<F: Fabric> SubtableSplitter<'_, F> {
    /// Executes a whole split: moves the entries, changes the directory, which has this depth, and
    /// takes the old subtable out of use. Continues where an earlier call was interrupted. Returns
    /// the progress and the directory's depth afterwards.
    ///
    /// # Errors
    /// [`ChainError`] if the endpoint cannot reach the region.
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

    /// Changes the directory, which has this depth, so that it leads to the new subtables of a
    /// split that is done. Returns the depth afterwards: one more if the old subtable had a single
    /// entry.
    ///
    /// # Errors
    /// [`ChainError`] if the endpoint cannot reach the region, or if the region cannot have a
    /// directory of that depth.
    pub async fn publish(&self, split: &Split, mut depth: u8) -> Result<u8, ChainError> {
        if split.local_depth == depth {
            self.double(depth).await?;
            depth += 1;
        }
        let half = 1u64 << (depth - split.local_depth - 1);
        let first = self.entry_offset(depth, u64::from(split.prefix) * 2 * half)?;
        // From the last entry to the first. As long as the first one leads to the old subtable, a
        // server that continues after an interruption finds the split and repeats this.
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

    /// Builds a directory with each entry twice, beside the directory in use. Then switches to it
    /// by a WRITE of one word.
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

    /// Copies each entry in the buffer of READ blocks twice into the buffer of new blocks.
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
