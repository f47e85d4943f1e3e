//! Where a session last saw its keys: what makes a GET one READ.
//!
//! Bounded and lossy: an entry that was pushed out, or that is wrong, costs a round trip and
//! nothing else, because the block itself says whether it is still the key's (invariants I2, I10).

use farside_common::fabric::Nanos;
use farside_common::fabric::shm::prefetch;
use farside_common::hash::KeyHash;
use farside_common::layout::SlotWord;
use memmap2::{Advice, MmapMut};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// What the location cache did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStatistics {
    /// Operations whose key's location was known and right.
    pub hits: u64,
    /// Operations that had to READ the index.
    pub misses: u64,
}

/// Where a key's value is, as of `proved_at`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Location {
    /// The byte offset of the slot.
    pub(crate) slot: u64,
    /// The word it held.
    pub(crate) word: SlotWord,
    /// The generation of the block the word points to.
    pub(crate) generation: u32,
    /// The block was linked although its `superseded` was set: its writer died, or a late mark hit
    /// it. Only the slot can tell whether it still is.
    pub(crate) poisoned: bool,
    /// When the last READ or compare-and-swap that proved it was posted.
    pub(crate) proved_at: Nanos,
}

/// The unit in which entries remember `proved_at`: 2^24 ns, 17 ms.
const PROVED_UNIT_SHIFT: u32 = 24;
const POISONED: u64 = 1 << 63;

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Entry {
    /// Not 0: the key's tag.
    tag: u64,
    word: u64,
    /// The slot's offset, and [`POISONED`].
    slot: u64,
    generation: u32,
    proved: u32,
}
const _: () = assert!(size_of::<Entry>() == 32);

const WAYS: usize = 2;

/// One cache line of the processor.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(64))]
struct Set([Entry; WAYS]);

pub(crate) struct LocationCache {
    /// A power of two of sets, or nothing when the cache is off. Mapped, because the system then
    /// provides zeroed pages, and huge ones, only as they are used.
    memory: Option<MmapMut>,
    pub(crate) statistics: CacheStatistics,
}

impl LocationCache {
    /// A cache of at most this many bytes.
    pub(crate) fn new(bytes: usize) -> Self {
        let sets = (bytes / size_of::<Set>() + 1).next_power_of_two() / 2;
        let memory = Self::map(sets * size_of::<Set>());
        Self { memory, statistics: CacheStatistics::default() }
    }

    /// Without memory for the cache the store works as well, one round trip slower.
    fn map(bytes: usize) -> Option<MmapMut> {
        let memory = MmapMut::map_anon(bytes).ok().filter(|_| bytes > 0)?;
        // Small pages do as well, a little slower.
        let _ = memory.advise(Advice::HugePage);
        Some(memory)
    }

    /// Forgets everything.
    pub(crate) fn clear(&mut self) {
        self.memory = self.memory.take().and_then(|old| Self::map(old.len()));
    }

    #[inline]
    fn set(&mut self, hash: KeyHash) -> Option<&mut Set> {
        let sets = <[Set]>::mut_from_bytes(self.memory.as_deref_mut()?).ok()?;
        // Bits of the tag above the fingerprint, which neighbours of a window share.
        let at = (hash.tag() >> 16) as usize & (sets.len() - 1);
        sets.get_mut(at)
    }

    /// The key will be looked up soon.
    #[inline]
    pub(crate) fn expect(&mut self, hash: KeyHash) {
        if let Some(set) = self.set(hash) {
            prefetch(set);
        }
    }

    #[inline]
    fn entry(&mut self, hash: KeyHash) -> Option<&mut Entry> {
        let tag = hash.tag().max(1);
        self.set(hash)?.0.iter_mut().find(|entry| entry.tag == tag)
    }

    #[inline]
    pub(crate) fn get(&mut self, hash: KeyHash) -> Option<Location> {
        let entry = self.entry(hash)?;
        Some(Location {
            slot: entry.slot & !POISONED,
            word: SlotWord::from_bits(entry.word),
            generation: entry.generation,
            poisoned: entry.slot & POISONED != 0,
            proved_at: Nanos::from(entry.proved) << PROVED_UNIT_SHIFT,
        })
    }

    /// Remembers a location in place of what was known of the key, or of the older of the two
    /// entries in its set.
    #[inline]
    pub(crate) fn put(&mut self, hash: KeyHash, location: Location) {
        let Some(Set(entries)) = self.set(hash) else { return };
        let tag = hash.tag().max(1);
        let new = Entry {
            tag,
            word: location.word.bits(),
            slot: location.slot | if location.poisoned { POISONED } else { 0 },
            generation: location.generation,
            proved: (location.proved_at >> PROVED_UNIT_SHIFT) as u32,
        };
        match entries.iter_mut().find(|entry| entry.tag == tag) {
            Some(known) => *known = new,
            None => {
                entries[1] = entries[0];
                entries[0] = new;
            }
        }
    }

    /// A READ posted then proved the entry again.
    #[inline]
    pub(crate) fn prove(&mut self, hash: KeyHash, at: Nanos) {
        let proved = (at >> PROVED_UNIT_SHIFT) as u32;
        if let Some(entry) = self.entry(hash).filter(|entry| entry.proved != proved) {
            entry.proved = proved;
        }
    }

    #[inline]
    pub(crate) fn forget(&mut self, hash: KeyHash) {
        if let Some(entry) = self.entry(hash) {
            entry.zero();
        }
    }
}

#[cfg(test)]
mod tests {
    use farside_common::hash::KeyHasher;

    use super::*;

    fn location(n: u64) -> Location {
        Location {
            slot: n * 16,
            word: SlotWord::from_bits(n),
            generation: n as u32,
            poisoned: n % 2 == 1,
            proved_at: n << PROVED_UNIT_SHIFT,
        }
    }

    fn hash(n: u64) -> KeyHash {
        KeyHasher::new(&[0; 16]).hash(&n.to_le_bytes())
    }

    #[test]
    fn what_is_put_comes_back_until_forgotten() {
        let mut cache = LocationCache::new(1 << 20);
        for n in 0..100 {
            cache.put(hash(n), location(n));
        }
        for n in 0..100 {
            assert_eq!(cache.get(hash(n)), Some(location(n)));
        }
        cache.put(hash(7), location(8));
        assert_eq!(cache.get(hash(7)), Some(location(8)));
        cache.prove(hash(7), 99 << PROVED_UNIT_SHIFT);
        assert_eq!(cache.get(hash(7)).unwrap().proved_at, 99 << PROVED_UNIT_SHIFT);
        cache.forget(hash(7));
        assert_eq!(cache.get(hash(7)), None);
        cache.clear();
        assert_eq!(cache.get(hash(8)), None);
    }

    #[test]
    fn memory_is_bounded_and_zero_is_off() {
        for bytes in [64, 127, 128, 1000, 1 << 20] {
            let cache = LocationCache::new(bytes);
            assert!((64..=bytes).contains(&cache.memory.unwrap().len()));
        }
        let mut off = LocationCache::new(0);
        off.put(hash(1), location(1));
        assert_eq!(off.get(hash(1)), None);
        let mut small = LocationCache::new(64);
        for n in 0..3 {
            small.put(hash(n), location(n));
        }
        assert_eq!(small.get(hash(0)), None);
        assert_eq!(small.get(hash(2)), Some(location(2)));
    }
}
