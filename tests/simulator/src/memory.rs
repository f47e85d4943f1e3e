//! The words of a region that exist, and a hash of them that is always up to date. The times of an
//! execution and those that the fabric promises, and the clocks of clients. A client's clock runs
//! slower or faster than the world's clock, and stands still while the client is paused.

use std::rc::Rc;

use farside_fabric::{ChainError, Nanos, RegionIndex, Timing};

/// The number of bits of an offset in a region.
const REGION_BITS: u32 = 48;

/// Turns an offset in a region into an offset in the memory of all regions. In the first region
/// both are equal.
pub(crate) fn global(region: RegionIndex, remote: u64) -> u64 {
    remote | u64::from(region.0) << REGION_BITS
}

/// Turns an offset in the memory of all regions into the region and the offset in it.
pub(crate) fn local(offset: u64) -> (RegionIndex, u64) {
    (RegionIndex((offset >> REGION_BITS) as u16), offset & ((1 << REGION_BITS) - 1))
}

/// A part of a region that exists. An access elsewhere is an error.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    /// The number of its first word of 8 bytes, in the memory of all regions.
    pub(crate) first: u64,
    /// The number of its words.
    pub(crate) words: usize,
}

/// The words that exist. A word's index is its number among them.
#[derive(Clone)]
pub(crate) struct Memory {
    extents: Rc<[Extent]>,
    words: Vec<u64>,
    hash: u64,
}

/// Returns a good hash of two numbers: the finalizer of SplitMix64, twice.
pub(crate) fn mix(left: u64, right: u64) -> u64 {
    let finish = |mut mixed: u64| {
        mixed = mixed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    };
    finish(finish(left) ^ right)
}

impl Memory {
    /// Returns zeroed memory.
    pub(crate) fn new(extents: &[Extent]) -> Self {
        let words = extents.iter().map(|extent| extent.words).sum();
        Self { extents: extents.into(), words: vec![0; words], hash: 0 }
    }

    /// Returns the index of the word at this offset, if `bytes` bytes from there exist.
    pub(crate) fn index(&self, remote: u64, bytes: u64) -> Result<usize, ChainError> {
        let outside = ChainError::Outside { remote, bytes };
        if !remote.is_multiple_of(8) || !bytes.is_multiple_of(8) {
            return Err(outside);
        }
        let (first, count) = (remote / 8, (bytes / 8) as usize);
        let mut start = 0;
        for extent in &*self.extents {
            if first >= extent.first && first - extent.first < extent.words as u64 {
                let within = (first - extent.first) as usize;
                let fits = within + count <= extent.words;
                return if fits { Ok(start + within) } else { Err(outside) };
            }
            start += extent.words;
        }
        Err(outside)
    }

    /// Returns the offset of the word with this index.
    pub(crate) fn offset(&self, index: usize) -> u64 {
        let mut start = 0;
        for extent in &*self.extents {
            if index < start + extent.words {
                return (extent.first + (index - start) as u64) * 8;
            }
            start += extent.words;
        }
        u64::MAX
    }

    /// Returns the number of words.
    pub(crate) fn len(&self) -> usize {
        self.words.len()
    }

    pub(crate) fn load(&self, index: usize) -> u64 {
        self.words[index]
    }

    /// Returns the word at this offset, or 0 if there is none.
    pub(crate) fn word_at_offset(&self, remote: u64) -> u64 {
        self.index(remote, 8).map_or(0, |index| self.words[index])
    }

    pub(crate) fn slice(&self, index: usize, words: usize) -> &[u64] {
        &self.words[index..index + words]
    }

    pub(crate) fn store(&mut self, index: usize, value: u64) {
        let old = std::mem::replace(&mut self.words[index], value);
        self.hash ^= mix(index as u64, old) ^ mix(index as u64, value);
    }

    /// Stores bytes while a region is made.
    pub(crate) fn fill(&mut self, remote: u64, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks();
        assert!(rest.is_empty(), "a region consists of whole words");
        let index = self
            .index(remote, bytes.len() as u64)
            .expect("a region is filled only where memory exists");
        for (at, word) in words.iter().enumerate() {
            self.store(index + at, u64::from_le_bytes(*word));
        }
    }

    /// Returns a hash of the content. It does not depend on the order of the stores.
    pub(crate) fn hash(&self) -> u64 {
        self.hash
    }
}

/// The promises of the simulated fabric: the shortest round trip, and how late a chain can take
/// effect (L).
pub(crate) const TIMING: Timing =
    Timing { round_trip_min_ns: 20_000, lateness_max_ns: 8_000_000_000 };

/// The time at the start of an execution. The wall clock shows the same time.
pub(crate) const START_NS: Nanos = 1_000_000_000;
/// The expiries of touched values are later than this, in milliseconds: two years after the start.
/// So no touched value expires in an execution.
pub(crate) const EXPIRY_BASE_MS: u64 = 1 << 36;
/// When values with a time to live expire, in milliseconds: 50 ms after the start.
pub(crate) const EXPIRES_AT_MS: u64 = START_NS / 1_000_000 + TTL_NS / 1_000_000;
/// How long after the start of an execution values with a time to live expire.
pub const TTL_NS: Nanos = 50_000_000;

/// The pace of a clock that is as fast as the world's: it counts 16 sixteenths of a second in a
/// second.
pub(crate) const PACE: u8 = 16;

/// The clock of a client.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    pace: Nanos,
    /// The time at which the clock was right.
    origin: Nanos,
    /// How long the clock has stood still in ended pauses, and when the present pause began. Both
    /// by the world's clock.
    pub(crate) stood_still: Nanos,
    pub(crate) stopped_at: Option<Nanos>,
}

impl Clock {
    pub(crate) fn new(pace: u8, origin: Nanos) -> Self {
        Self { pace: pace.into(), origin, stood_still: 0, stopped_at: None }
    }

    /// Returns what the clock shows when the world's clock shows `now`.
    pub(crate) fn shows(&self, now: Nanos) -> Nanos {
        let ran = self.stopped_at.unwrap_or(now) - self.stood_still - self.origin;
        self.origin + ran * self.pace / Nanos::from(PACE)
    }

    /// Returns the world's time at which the clock will show `shown`, unless it is paused before.
    pub(crate) fn when(&self, shown: Nanos) -> Nanos {
        let Some(left) = shown.checked_sub(self.origin) else { return shown };
        let left = u128::from(left) * u128::from(PACE);
        let ran = left.div_ceil(self.pace.into()).try_into().unwrap_or(Nanos::MAX);
        self.origin.saturating_add(ran).saturating_add(self.stood_still)
    }
}
