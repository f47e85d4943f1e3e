//! The memory of a peer, in free blocks of the server. A peer uses only the part behind a block's
//! header, and cuts it into pieces of one length.

use std::collections::VecDeque;

use farside_layout::{BLOCK_BYTES_MAX, BLOCK_UNIT};

use super::{PeerError, Result};

/// How much of a block of the largest class a peer uses: the whole cache lines after the header.
pub const SEGMENT_BYTES: u64 = BLOCK_BYTES_MAX - BLOCK_UNIT;

/// The number of segments that `count` pieces of `piece_bytes` need, each on a cache line of its
/// own.
pub const fn segments(piece_bytes: u64, count: u64) -> u64 {
    let per_segment = SEGMENT_BYTES / piece_bytes.next_multiple_of(BLOCK_UNIT);
    count.div_ceil(per_segment)
}

/// Memory that is not used yet.
pub struct Segments {
    /// The start of each segment in the region.
    segments: Vec<u64>,
}

impl Segments {
    /// Segments of [`SEGMENT_BYTES`] that start at these multiples of a cache line.
    pub fn new(segments: Vec<u64>) -> Self {
        Self { segments }
    }

    /// Takes as many segments as `count` pieces need.
    pub fn cut(&mut self, bytes: u64, count: u64) -> Result<Pieces> {
        let bytes = bytes.next_multiple_of(BLOCK_UNIT);
        let left = self.segments.len().checked_sub(segments(bytes, count) as usize);
        let starts = self.segments.split_off(left.ok_or(PeerError::OutOfMemory)?);
        Ok(Pieces { starts, per_segment: SEGMENT_BYTES / bytes, bytes, count })
    }
}

/// Pieces of one length.
pub struct Pieces {
    starts: Vec<u64>,
    per_segment: u64,
    bytes: u64,
    count: u64,
}

impl Pieces {
    /// The number of pieces.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The start of a piece in the region.
    #[inline]
    pub fn at(&self, index: u64) -> u64 {
        let (segment, within) = (index / self.per_segment, index % self.per_segment);
        self.starts[segment as usize] + within * self.bytes
    }

    /// The ranges of memory that contain the pieces: start, and length in bytes.
    pub fn stretches(&self) -> impl Iterator<Item = (u64, u64)> {
        self.starts.iter().map(|start| (*start, self.per_segment * self.bytes))
    }
}

/// Pieces that are taken and given back. The piece that was free for the longest time is taken
/// first, because only this delay protects a reader from memory that has a new use.
pub struct Heap {
    pieces: Pieces,
    /// The number of pieces that were taken at least once.
    fresh: u64,
    free: VecDeque<u64>,
}

impl Heap {
    /// A heap with all pieces free.
    pub fn new(pieces: Pieces) -> Self {
        let free = VecDeque::with_capacity(pieces.count as usize);
        Self { pieces, fresh: 0, free }
    }

    /// Takes a free piece. Returns its start.
    #[inline]
    pub fn take(&mut self) -> Result<u64> {
        if self.fresh < self.pieces.count() {
            self.fresh += 1;
            return Ok(self.pieces.at(self.fresh - 1));
        }
        self.free.pop_front().ok_or(PeerError::OutOfMemory)
    }

    /// Gives a piece back.
    #[inline]
    pub fn give(&mut self, at: u64) {
        self.free.push_back(at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_do_not_overlap_and_stay_within_their_segments() {
        let (bytes, count) = (100, 100_000);
        let starts: Vec<u64> = (1..=segments(bytes, count)).map(|n| n << 30).collect();
        let mut memory = Segments::new(starts.clone());
        let pieces = memory.cut(bytes, count).unwrap();
        assert!(memory.cut(1, 1).is_err());
        let mut places: Vec<u64> = (0..count).map(|index| pieces.at(index)).collect();
        places.sort_unstable();
        assert!(places.is_sorted_by(|a, b| a + bytes <= *b));
        let within = |at: &u64| starts.iter().any(|s| *s <= *at && at + bytes <= s + SEGMENT_BYTES);
        assert!(places.iter().all(within));
    }

    #[test]
    fn the_piece_that_was_free_longest_is_taken_first() {
        let mut heap = Heap::new(Segments::new(vec![0]).cut(64, 2).unwrap());
        let (first, second) = (heap.take().unwrap(), heap.take().unwrap());
        assert!(heap.take().is_err());
        heap.give(second);
        heap.give(first);
        assert_eq!([heap.take().unwrap(), heap.take().unwrap()], [second, first]);
    }
}
