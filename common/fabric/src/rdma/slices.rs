//! The remote keys of a region that is registered whole, or in slices.
//!
//! Some devices WRITE more slowly into a long memory region, so a server may register a region in
//! several slices of one length. Each has a key of its own, and a verb takes the key of the slice
//! in which it begins. A verb may cross the border to the next slice. So each slice is registered
//! with the beginning of the next one, which is as long as the longest verb.

use std::ops::Range;

/// Limit on the slices of a region: a server's reply to a connection request has room for so many
/// keys.
pub const SLICES_MAX: usize = 16;
/// How much of the next slice is registered with a slice, in bytes: the longest verb that may cross
/// a border. No block is longer.
pub const SLICE_OVERLAP_BYTES: u64 = 4 << 20;
/// The unit of a slice's length, in bytes: that of a chunk, which is no shorter than a huge page.
pub const SLICE_UNIT_BYTES: u64 = 2 << 20;
/// The shortest slice, in bytes. A shorter one would be registered mostly with its neighbours.
pub const SLICE_BYTES_MIN: u64 = 2 * SLICE_OVERLAP_BYTES;

/// The number of slices of this length in a region.
pub const fn slice_count(region_bytes: u64, slice_bytes: u64) -> u64 {
    region_bytes.div_ceil(slice_bytes)
}

/// The shortest valid slice of a region of this length, in bytes.
pub const fn slice_bytes_min(region_bytes: u64) -> u64 {
    let fitting = region_bytes.div_ceil(SLICES_MAX as u64).next_multiple_of(SLICE_UNIT_BYTES);
    if fitting > SLICE_BYTES_MIN { fitting } else { SLICE_BYTES_MIN }
}

/// The ranges of a region that are registered, one for each slice.
#[cfg_attr(not(feature = "verbs"), allow(dead_code, reason = "only devices register memory"))]
pub(crate) fn registered_ranges(
    region_bytes: u64,
    slice_bytes: u64,
) -> impl Iterator<Item = Range<u64>> {
    (0..slice_count(region_bytes, slice_bytes)).map(move |at| {
        let start = at * slice_bytes;
        start..region_bytes.min(start + slice_bytes + SLICE_OVERLAP_BYTES)
    })
}

/// The remote keys of a region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rkeys {
    /// The length of a slice, in bytes; 0 if the region is registered whole.
    pub slice_bytes: u64,
    /// The key of each slice, followed by zeros. The key of a whole region is the first one.
    pub keys: [u32; SLICES_MAX],
}

impl Rkeys {
    /// The key of a region that is registered whole.
    pub const fn whole(rkey: u32) -> Self {
        let mut keys = [0; SLICES_MAX];
        keys[0] = rkey;
        Self { slice_bytes: 0, keys }
    }

    /// The key for an access to these bytes; `None` if they are not in one registered range. The
    /// caller has checked that they are in the region.
    #[inline]
    #[cfg_attr(not(feature = "verbs"), allow(dead_code, reason = "only verbs take a key"))]
    pub(crate) fn key_for(&self, offset: u64, bytes: u64) -> Option<u32> {
        if self.slice_bytes == 0 { Some(self.keys[0]) } else { self.key_of_slice(offset, bytes) }
    }

    #[inline(never)]
    fn key_of_slice(&self, offset: u64, bytes: u64) -> Option<u32> {
        let (at, from) = (offset / self.slice_bytes, offset % self.slice_bytes);
        let is_registered = bytes <= self.slice_bytes - from + SLICE_OVERLAP_BYTES;
        self.keys.get(usize::try_from(at).ok()?).copied().filter(|_| is_registered)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Slices of 8 MiB. Slice n has the key n + 1.
    fn sliced() -> Rkeys {
        Rkeys { slice_bytes: 8 * MIB, keys: std::array::from_fn(|at| at as u32 + 1) }
    }

    #[test]
    fn a_whole_region_has_one_key() {
        let rkeys = Rkeys::whole(7);
        for (offset, bytes) in [(0, 8), (1 << 37, 8), (8 * MIB - 8, 16), (0, 1 << 30)] {
            assert_eq!(rkeys.key_for(offset, bytes), Some(7));
        }
    }

    #[test]
    fn a_verb_takes_the_key_of_the_slice_in_which_it_begins() {
        let rkeys = sliced();
        for (offset, bytes, key) in [
            (0, 8, 1),
            (8 * MIB - 8, 8, 1),
            (8 * MIB, 8, 2),
            (16 * MIB - 8, 8, 2),
            (127 * MIB, MIB, 16),
            // Across a border, as far as a verb may go.
            (8 * MIB - 8, 16, 1),
            (6 * MIB, 4 * MIB, 1),
            (8 * MIB - 8, 4 * MIB, 1),
            (8 * MIB, 12 * MIB, 2),
        ] {
            assert_eq!(rkeys.key_for(offset, bytes), Some(key), "{offset} {bytes}");
        }
        for (offset, bytes) in [(8 * MIB - 8, 4 * MIB + 16), (0, 12 * MIB + 8), (u64::MAX - 7, 8)] {
            assert_eq!(rkeys.key_for(offset, bytes), None, "{offset} {bytes}");
        }
    }

    /// Every verb that gets a key is inside of the range that is registered with this key.
    #[test]
    fn every_verb_with_a_key_is_in_its_registered_range() {
        let (region, slice) = (42 * MIB, 8 * MIB);
        let ranges: Vec<_> = registered_ranges(region, slice).collect();
        assert_eq!(ranges.len() as u64, slice_count(region, slice));
        assert_eq!(ranges[0], 0..12 * MIB);
        assert_eq!(ranges[4..], [32 * MIB..42 * MIB, 40 * MIB..42 * MIB]);
        let lengths = [8, 4096, 2 * MIB, 4 * MIB, 4 * MIB + 8, 8 * MIB, 12 * MIB, 16 * MIB];
        for offset in (0..region / MIB).flat_map(|at| [at * MIB, (at + 1) * MIB - 8]) {
            for bytes in lengths.into_iter().filter(|bytes| offset + bytes <= region) {
                let Some(key) = sliced().key_for(offset, bytes) else {
                    assert!(bytes > SLICE_OVERLAP_BYTES, "{offset} {bytes} has no key");
                    continue;
                };
                let range = &ranges[key as usize - 1];
                assert!(range.start <= offset && offset + bytes <= range.end, "{offset} {bytes}");
            }
        }
    }

    #[test]
    fn the_shortest_slice_has_not_too_many_neighbours() {
        for region in [8 * MIB, 128 * MIB, 130 * MIB, 1 << 30, (64 << 30) + 2 * MIB, 256 << 30] {
            let min = slice_bytes_min(region);
            assert!(min.is_multiple_of(SLICE_UNIT_BYTES) && min >= SLICE_BYTES_MIN);
            assert!(slice_count(region, min) <= SLICES_MAX as u64, "{region}");
            let shorter = min - SLICE_UNIT_BYTES;
            assert!(
                shorter < SLICE_BYTES_MIN || slice_count(region, shorter) > SLICES_MAX as u64,
                "{region}"
            );
        }
    }
}
