//! A session's copy of the directory. An old copy is slow, never wrong: row headers tell.

use farside_common::hash::KeyHash;
use farside_common::layout::{DirectoryEntry, Geometry, LayoutError};

#[derive(Default)]
pub(crate) struct Directory {
    depth: u8,
    /// The byte offset of the subtable for each prefix of `depth` bits.
    subtables: Vec<u64>,
}

impl Directory {
    pub(crate) fn with_depth(depth: u8) -> Self {
        Self { depth, subtables: Vec::with_capacity(1 << depth) }
    }

    /// Appends the entries in these bytes.
    ///
    /// # Errors
    /// [`LayoutError::SubtableOutside`].
    pub(crate) fn extend(&mut self, bytes: &[u8], geometry: &Geometry) -> Result<(), LayoutError> {
        let (entries, _) = bytes.as_chunks();
        for entry in entries {
            let entry = DirectoryEntry::from_bits(u64::from_le_bytes(*entry));
            self.subtables.push(entry.subtable(geometry)?);
        }
        Ok(())
    }

    /// The byte offset of the key's window in the region.
    #[inline]
    pub(crate) fn window(&self, hash: KeyHash) -> u64 {
        self.subtables[hash.directory_index(self.depth) as usize] + hash.window_offset()
    }

    /// All subtables, each once: entries that share one stand side by side.
    pub(crate) fn subtables(&self) -> impl DoubleEndedIterator<Item = u64> {
        let entries = &self.subtables;
        let first = |at: usize| at == 0 || entries[at - 1] != entries[at];
        (0..entries.len()).filter(move |at| first(*at)).map(|at| entries[at])
    }
}
