//! A session's copy of the directory. An old copy costs round trips but does no harm, because row
//! headers show when it led to the wrong subtable.

use farside_layout::hash::KeyHash;
use farside_layout::{DirectoryEntry, Geometry, LayoutError, prefix_of};

/// A copy of the directory.
#[derive(Default)]
pub struct Directory {
    depth: u8,
    /// The entry for each prefix of `depth` bits.
    entries: Vec<DirectoryEntry>,
    /// For each entry, whether it is known to be undamaged: rows READ through it belonged to the
    /// right subtable.
    confirmed: Vec<bool>,
}

/// A subtable, by its directory entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Subtable {
    /// The byte offset of the subtable.
    pub offset: u64,
    /// The number of leading hash bits that its keys share. Its rows must have the same depth.
    pub local_depth: u8,
}

impl Directory {
    /// A copy of a directory of this depth, without entries yet.
    pub fn with_depth(depth: u8) -> Self {
        let (entries, confirmed) = (Vec::with_capacity(1 << depth), vec![false; 1 << depth]);
        Self { depth, entries, confirmed }
    }

    /// Appends the entries in these bytes.
    ///
    /// # Errors
    /// [`LayoutError`] for an entry that leads to no subtable.
    pub fn extend(&mut self, bytes: &[u8], geometry: &Geometry) -> Result<(), LayoutError> {
        let (entries, _) = bytes.as_chunks();
        for entry in entries {
            let entry = DirectoryEntry::from_bits(u64::from_le_bytes(*entry));
            check(entry, geometry)?;
            self.entries.push(entry);
        }
        Ok(())
    }

    /// Mixes the entries into a hash.
    pub fn hash_state(&self, hasher: &mut impl std::hash::Hasher) {
        self.entries.iter().for_each(|entry| hasher.write_u64(entry.bits()));
        self.confirmed.iter().for_each(|confirmed| hasher.write_u8((*confirmed).into()));
    }

    /// Notes that the rows of this window, with this local depth, belong to the key's subtable.
    /// Confirms the key's entry if it still leads to that window.
    #[inline]
    pub fn confirm(&mut self, hash: KeyHash, window: (u64, u8)) {
        if self.window(hash) == window {
            self.confirmed[prefix_of(hash.directory(), self.depth) as usize] = true;
        }
    }

    /// Whether the key's entry was confirmed since it was read.
    #[inline]
    pub fn is_confirmed(&self, hash: KeyHash) -> bool {
        self.confirmed[prefix_of(hash.directory(), self.depth) as usize]
    }

    /// The subtable for keys with this directory hash.
    #[inline]
    pub fn subtable(&self, directory_hash: u32) -> Subtable {
        let entry = self.entries[prefix_of(directory_hash, self.depth) as usize];
        Subtable { offset: entry.offset(), local_depth: entry.local_depth() }
    }

    /// The byte offset of the key's window in the region, and its subtable's local depth.
    #[inline]
    pub fn window(&self, hash: KeyHash) -> (u64, u8) {
        let Subtable { offset, local_depth } = self.subtable(hash.directory());
        (offset + hash.window_offset(), local_depth)
    }

    /// Replaces the entries for all keys of a subtable. They share the leading bits of this
    /// directory hash, in the number of the entry's local depth. Doubles the copy of
    /// the directory until it is deep enough.
    ///
    /// # Errors
    /// [`LayoutError`] for an entry that leads to no subtable.
    pub fn update(
        &mut self,
        directory_hash: u32,
        entry: DirectoryEntry,
        geometry: &Geometry,
    ) -> Result<(), LayoutError> {
        check(entry, geometry)?;
        while self.depth < entry.local_depth() {
            self.entries = self.entries.iter().flat_map(|entry| [*entry; 2]).collect();
            self.confirmed = self.confirmed.iter().flat_map(|confirmed| [*confirmed; 2]).collect();
            self.depth += 1;
        }
        let shift = self.depth - entry.local_depth();
        let first = (prefix_of(directory_hash, entry.local_depth()) as usize) << shift;
        self.entries[first..first + (1 << shift)].fill(entry);
        self.confirmed[first..first + (1 << shift)].fill(false);
        Ok(())
    }
}

fn check(entry: DirectoryEntry, geometry: &Geometry) -> Result<(), LayoutError> {
    entry.subtable(geometry)?;
    let (depth, max) = (entry.local_depth(), geometry.directory_depth_max());
    if depth <= max {
        return Ok(());
    }
    let (field, value) = ("local depth", u64::from(depth));
    Err(LayoutError::Bound { field, value, min: 0, max: max.into() })
}

#[cfg(test)]
mod tests {
    use farside_layout::{Format, SUBTABLE_BYTES};

    use super::*;

    #[test]
    fn an_update_changes_exactly_the_entries_of_its_prefix() {
        let format = Format {
            region_bytes: 64 << 20,
            region_id: [0; 16],
            hash_key: [0; 16],
            grace_ms: 100,
            key_bytes_max: 8,
            value_bytes_max: 8,
        };
        let geometry = format.geometry();
        let offset = |n| geometry.chunk_offset(0).unwrap() + n * SUBTABLE_BYTES;
        let mut directory = Directory::with_depth(0);
        let first = DirectoryEntry::new(offset(0), 0);
        directory.extend(&first.bits().to_le_bytes(), &geometry).unwrap();
        let update = |directory: &mut Directory, prefix: u32, depth: u8, n| {
            let entry = DirectoryEntry::new(offset(n), depth);
            directory.update(prefix << (32 - depth), entry, &geometry).unwrap();
        };
        update(&mut directory, 0b0, 1, 1);
        update(&mut directory, 0b1, 1, 2);
        update(&mut directory, 0b101, 3, 3);
        let at = |prefix: u32| directory.subtable(prefix << 29);
        let expected = [1, 1, 1, 1, 2, 3, 2, 2];
        for (prefix, n) in (0..).zip(expected) {
            assert_eq!(at(prefix).offset, offset(n), "{prefix:#b}");
        }
        assert_eq!((at(0).local_depth, at(5).local_depth), (1, 3));
        let deep = DirectoryEntry::new(offset(0), 33);
        assert!(directory.update(0, deep, &geometry).is_err());
        assert!(directory.update(0, DirectoryEntry::from_bits(0), &geometry).is_err());
    }
}
