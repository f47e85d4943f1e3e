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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
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
    /// The block's value ends some day.
    pub(crate) expires: bool,
    /// When the last READ or compare-and-swap that proved it was posted.
    pub(crate) proved_at: Nanos,
}

/// The unit in which entries remember `proved_at`: 2^24 ns, 17 ms.
const PROVED_UNIT_SHIFT: u32 = 24;
const POISONED: u64 = 1 << 63;
/// Where the offset of a slot, which is a multiple of 16, has no bits of its own.
const EXPIRES: u64 = 1;
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
    /// The slot's offset, 23 bits of the key's place, [`POISONED`] and [`EXPIRES`].
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

const WAYS: usize = 4;

/// Two cache lines of the processor. A key's entry stands in its own of the two as long as there is
/// room, so that finding it takes one.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(128))]
struct Set([Entry; WAYS]);

impl Set {
    /// Where the key's own line starts; `ways` go on from there.
    #[inline]
    fn first(hash: KeyHash) -> usize {
        hash.tag() as usize & (WAYS / 2)
    }

    /// All places an entry of the key can have, those in its own line first.
    #[inline]
    fn ways(hash: KeyHash) -> impl Iterator<Item = usize> {
        let first = Self::first(hash);
        (0..WAYS).map(move |way| way ^ first)
    }

    #[inline]
    fn entry(&mut self, hash: KeyHash) -> Option<&mut Entry> {
        let way = Self::ways(hash).find(|way| self.0[*way].is_of(hash))?;
        Some(&mut self.0[way])
    }

    /// The entry that a new one for the key replaces: the key's old one, else an empty one, else
    /// the one that was not proved for the longest time.
    fn victim(&mut self, hash: KeyHash) -> &mut Entry {
        let age = |way: &usize| {
            let entry = &self.0[*way];
            if entry.is_of(hash) { None } else { Some((entry.tag != 0, entry.proved)) }
        };
        let way = Self::ways(hash).min_by_key(age).unwrap_or_default();
        &mut self.0[way]
    }
}

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
            prefetch(&set.0[Set::first(hash)]);
        }
    }

    #[inline]
    fn entry(&mut self, hash: KeyHash) -> Option<&mut Entry> {
        self.set(hash)?.entry(hash)
    }

    #[inline]
    pub(crate) fn get(&mut self, hash: KeyHash) -> Option<Location> {
        let entry = self.entry(hash)?;
        Some(Location {
            slot: entry.slot & !(POISONED | PLACE_MASK | EXPIRES),
            word: SlotWord::from_bits(entry.word),
            generation: entry.generation,
            poisoned: entry.slot & POISONED != 0,
            expires: entry.slot & EXPIRES != 0,
            proved_at: Nanos::from(entry.proved) << PROVED_UNIT_SHIFT,
        })
    }

    /// Remembers a location in place of what was known of the key, or of an entry nobody used for
    /// long.
    #[inline]
    pub(crate) fn put(&mut self, hash: KeyHash, location: Location) {
        let Some(set) = self.set(hash) else { return };
        let poisoned = if location.poisoned { POISONED } else { 0 };
        let expires = if location.expires { EXPIRES } else { 0 };
        *set.victim(hash) = Entry {
            tag: hash.tag().max(1),
            word: location.word.bits(),
            slot: location.slot | Entry::place(hash) | poisoned | expires,
            generation: location.generation,
            proved: (location.proved_at >> PROVED_UNIT_SHIFT) as u32,
        };
    }

    /// A READ posted then proved this location again, whose entry another operation of the session
    /// may have replaced meanwhile.
    #[inline]
    pub(crate) fn prove(&mut self, hash: KeyHash, location: &Location, at: Nanos) {
        let proved = at >> PROVED_UNIT_SHIFT;
        if proved <= location.proved_at >> PROVED_UNIT_SHIFT {
            return;
        }
        let is_same = |entry: &&mut Entry| entry.word == location.word.bits();
        if let Some(entry) = self.entry(hash).filter(is_same) {
            entry.proved = entry.proved.max(proved as u32);
        }
    }

    #[inline]
    pub(crate) fn forget(&mut self, hash: KeyHash) {
        if let Some(entry) = self.entry(hash) {
            entry.zero();
        }
    }

    /// Mixes everything that is remembered into a hash.
    #[cfg(feature = "testing")]
    pub(crate) fn hash_state(&self, hasher: &mut impl std::hash::Hasher) {
        hasher.write(self.memory.as_deref().unwrap_or_default());
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
            expires: n % 3 == 1,
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
        cache.prove(hash(7), &location(8), 99 << PROVED_UNIT_SHIFT);
        cache.prove(hash(7), &location(9), 100 << PROVED_UNIT_SHIFT);
        cache.prove(hash(7), &location(8), 98 << PROVED_UNIT_SHIFT);
        assert_eq!(cache.get(hash(7)).unwrap().proved_at, 99 << PROVED_UNIT_SHIFT);
        cache.forget(hash(7));
        assert_eq!(cache.get(hash(7)), None);
        cache.clear();
        assert_eq!(cache.get(hash(8)), None);
    }

    #[test]
    fn a_key_whose_line_is_full_stands_in_the_other_one() {
        let mut cache = LocationCache::new(128);
        let same_line = |n: &u64| Set::first(hash(*n)) == Set::first(hash(0));
        let keys: Vec<u64> = (0..).filter(same_line).take(WAYS).collect();
        keys.iter().for_each(|n| cache.put(hash(*n), location(*n)));
        for (at, n) in keys.iter().enumerate() {
            let way = Set::ways(hash(*n))
                .position(|way| cache.set(hash(*n)).is_some_and(|set| set.0[way].is_of(hash(*n))));
            assert_eq!((way, cache.get(hash(*n))), (Some(at), Some(location(*n))));
        }
        // Found there, a key is also replaced and forgotten there.
        let last = keys[WAYS - 1];
        cache.put(hash(last), location(100));
        assert_eq!(cache.get(hash(last)), Some(location(100)));
        cache.forget(hash(last));
        assert_eq!(cache.get(hash(last)), None);
        assert!(keys[..WAYS - 1].iter().all(|n| cache.get(hash(*n)).is_some()));
    }

    #[test]
    fn memory_is_bounded_and_zero_is_off() {
        for bytes in [128, 255, 256, 1000, 1 << 20] {
            let cache = LocationCache::new(bytes);
            assert!((128..=bytes).contains(&cache.memory.unwrap().len()));
        }
        let mut off = LocationCache::new(0);
        off.put(hash(1), location(1));
        assert_eq!(off.get(hash(1)), None);
        let mut small = LocationCache::new(128);
        for n in 1..=4 {
            small.put(hash(n), location(n));
        }
        // Used again, so the one after it is the oldest.
        small.prove(hash(1), &location(1), 9 << PROVED_UNIT_SHIFT);
        small.put(hash(5), location(5));
        let kept: Vec<u64> = (1..=5).filter(|n| small.get(hash(*n)).is_some()).collect();
        assert_eq!(kept, [1, 3, 4, 5]);
    }
}
