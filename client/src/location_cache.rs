//! Where a session last saw its keys: what makes a GET one READ.
//!
//! Bounded and lossy: an entry that was pushed out, or that is wrong, costs a round trip and
//! nothing else, because the block itself says whether it is still the key's (invariants I2, I10).

use farside_common::fabric::Nanos;
use farside_common::fabric::shm::prefetch;
use farside_common::hash::KeyHash;
use farside_common::layout::{REGION_BYTES_MAX, SlotWord};
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
/// Where bits of the key's place stand in an entry, above the offset of a slot.
const PLACE_SHIFT: u32 = 40;
const PLACE_MASK: u64 = ((1 << 23) - 1) << PLACE_SHIFT;
const _: () = assert!(REGION_BYTES_MAX <= 1 << PLACE_SHIFT);

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Entry {
    /// Not 0: the key's tag.
    tag: u64,
    word: u64,
    /// The slot's offset, 23 bits of the key's place, and [`POISONED`].
    slot: u64,
    generation: u32,
    proved: u32,
}
const _: () = assert!(size_of::<Entry>() == 32);

impl Entry {
    /// The key's identity and its place have nothing in common: 87 bits tell keys apart, because a
    /// cached PUT or DELETE does not look at the key again.
    #[inline]
    fn is_of(&self, hash: KeyHash) -> bool {
        self.tag == hash.tag().max(1) && self.slot & PLACE_MASK == Self::place(hash)
    }

    #[inline]
    fn place(hash: KeyHash) -> u64 {
        (u64::from(hash.directory()) << PLACE_SHIFT) & PLACE_MASK
    }
}

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
        self.set(hash)?.0.iter_mut().find(|entry| entry.is_of(hash))
    }

    #[inline]
    pub(crate) fn get(&mut self, hash: KeyHash) -> Option<Location> {
        let entry = self.entry(hash)?;
        Some(Location {
            slot: entry.slot & !(POISONED | PLACE_MASK),
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
        let poisoned = if location.poisoned { POISONED } else { 0 };
        let new = Entry {
            tag: hash.tag().max(1),
            word: location.word.bits(),
            slot: location.slot | Entry::place(hash) | poisoned,
            generation: location.generation,
            proved: (location.proved_at >> PROVED_UNIT_SHIFT) as u32,
        };
        match entries.iter_mut().find(|entry| entry.is_of(hash)) {
            Some(known) => *known = new,
            None => {
                entries[1] = entries[0];
                entries[0] = new;
            }
        }
    }

    /// A READ posted then proved this word again, which another operation of the session may have
    /// replaced in the cache meanwhile.
    #[inline]
    pub(crate) fn prove(&mut self, hash: KeyHash, word: SlotWord, at: Nanos) {
        let proved = (at >> PROVED_UNIT_SHIFT) as u32;
        let is_older = |entry: &&mut Entry| entry.proved < proved && entry.word == word.bits();
        if let Some(entry) = self.entry(hash).filter(is_older) {
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
        cache.prove(hash(7), location(8).word, 99 << PROVED_UNIT_SHIFT);
        cache.prove(hash(7), location(9).word, 100 << PROVED_UNIT_SHIFT);
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
