//! Where a session last saw its keys: what makes a GET one READ.
//!
//! Bounded and lossy: an entry that was pushed out, or that is wrong, costs a round trip and
//! nothing else, because the block itself says whether it is still the key's (invariants I2, I10).

mod entry;

use farside_common::fabric::Nanos;
use farside_common::fabric::shm::prefetch;
use farside_common::hash::KeyHash;
use farside_common::layout::SlotState;
use memmap2::{Advice, MmapMut};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use self::entry::{Entry, Proofs};

pub(crate) use self::entry::Location;

/// What the location cache did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStatistics {
    /// Operations whose key's location was known and right.
    pub hits: u64,
    /// Operations whose key's location was not known, or wrong.
    pub misses: u64,
}

const WAYS: usize = 8;
/// How many entries a set has on average, until the memory given to the cache is in use.
const ENTRIES_PER_SET: usize = 1;
/// The sets of an empty cache: 256 KiB. See docs/decisions/0009.
const FIRST_SETS: usize = 1 << FIRST_SETS_BITS;
const FIRST_SETS_BITS: u32 = 11;

/// Two cache lines of the processor. A key's entry stands in its own of the two as long as there is
/// room, so that finding it takes one.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(128))]
struct Set([Entry; WAYS]);
const _: () = assert!(size_of::<Set>() == 128);

impl Set {
    /// Where the key's own line starts; `ways` go on from there.
    #[inline]
    fn first(hash: KeyHash) -> usize {
        (hash.tag() >> 8) as usize & (WAYS / 2)
    }

    /// All places an entry of the key can have, those in its own line first.
    #[inline]
    fn ways(hash: KeyHash) -> impl Iterator<Item = usize> {
        let first = Self::first(hash);
        (0..WAYS).map(move |way| way ^ first)
    }

    /// Where the key's entry stands.
    #[inline]
    fn way(&self, hash: KeyHash) -> Option<usize> {
        Self::ways(hash).find(|way| self.0[*way].is_of(hash))
    }

    /// Where an entry of a key that has none goes: in place of an empty one, else of the one that
    /// was not proved for the longest time.
    fn victim(&self, hash: KeyHash) -> usize {
        let age = |way: &usize| {
            let entry = &self.0[*way];
            (!entry.is_empty()).then(|| entry.stamp())
        };
        Self::ways(hash).min_by_key(age).unwrap_or_default()
    }
}

pub(crate) struct LocationCache {
    /// A power of two of sets, or nothing when the cache is off. Mapped, because the system then
    /// provides zeroed pages, and huge ones, only as they are used.
    memory: Option<MmapMut>,
    /// How many of the sets are in use, a power of two.
    sets: usize,
    /// How many entries are in use.
    filled: usize,
    proofs: Proofs,
    pub(crate) statistics: CacheStatistics,
}

impl LocationCache {
    /// A cache of at most this many bytes, for words whose proof is good for `proof_ns`.
    pub(crate) fn new(bytes: usize, proof_ns: Nanos, now: Nanos) -> Self {
        let most = (bytes / size_of::<Set>() + 1).next_power_of_two() / 2;
        Self {
            memory: Self::map(most * size_of::<Set>()),
            sets: most.clamp(1, FIRST_SETS),
            filled: 0,
            proofs: Proofs::new(proof_ns, now),
            statistics: CacheStatistics::default(),
        }
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
        (self.sets, self.filled) = (self.sets.min(FIRST_SETS), 0);
    }

    fn all_sets(&mut self) -> &mut [Set] {
        let memory = self.memory.as_deref_mut().unwrap_or_default();
        <[Set]>::mut_from_bytes(memory).unwrap_or_default()
    }

    #[inline]
    fn set(&mut self, hash: KeyHash) -> Option<&mut Set> {
        let start = (entry::spread(hash) & (self.sets - 1)) * size_of::<Set>();
        // Not by way of all sets, which takes three times as many instructions.
        let (set, _) = Set::mut_from_prefix(self.memory.as_deref_mut()?.get_mut(start..)?).ok()?;
        Some(set)
    }

    /// An entry more is in use: as long as there is memory, the sets shall have room for the next.
    #[inline]
    fn filled_one(&mut self) {
        self.filled += 1;
        let bytes = self.memory.as_ref().map_or(0, |memory| memory.len());
        if self.filled > self.sets * ENTRIES_PER_SET && self.sets * size_of::<Set>() < bytes {
            self.double();
        }
    }

    /// Uses twice as many sets: the entries of each are shared out among two.
    #[cold]
    fn double(&mut self) {
        let sets = self.sets;
        let Some((old, new)) = self.all_sets().split_at_mut_checked(sets) else { return };
        for (at, (old, new)) in old.iter_mut().zip(new).enumerate() {
            for (from, to) in old.0.iter_mut().zip(&mut new.0) {
                if !from.is_empty() && from.spread(at) & sets != 0 {
                    *to = std::mem::replace(from, Entry::new_zeroed());
                }
            }
        }
        self.sets = 2 * sets;
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
        let set = self.set(hash)?;
        let way = set.way(hash)?;
        Some(&mut set.0[way])
    }

    #[inline]
    pub(crate) fn get(&mut self, hash: KeyHash) -> Option<Location> {
        let proofs = self.proofs;
        self.entry(hash)?.location(hash, proofs).ok()
    }

    /// Remembers a location in place of what was known of the key, or of an entry nobody used for
    /// long. Only of a LIVE word: what a split has in its hands will not stay.
    #[inline]
    pub(crate) fn put(&mut self, hash: KeyHash, location: Location) {
        let stamp = self.stamp(location.proved_at);
        match Entry::new(hash, &location, stamp) {
            Ok(entry) if location.word.state() == SlotState::Live => {
                let Some(set) = self.set(hash) else { return };
                let way = set.way(hash).unwrap_or_else(|| set.victim(hash));
                if std::mem::replace(&mut set.0[way], entry).is_empty() {
                    self.filled_one();
                }
            }
            _ => self.forget(hash),
        }
    }

    /// A READ posted then proved this location again, whose entry another operation of the session
    /// may have replaced meanwhile.
    #[inline]
    pub(crate) fn prove(&mut self, hash: KeyHash, location: &Location, at: Nanos) {
        if self.proofs.is_later(at, location.proved_at) {
            self.prove_later(hash, location, at);
        }
    }

    fn prove_later(&mut self, hash: KeyHash, location: &Location, at: Nanos) {
        let stamp = self.stamp(at);
        if self.get(hash).is_some_and(|now| now.word == location.word)
            && let Some(entry) = self.entry(hash)
        {
            entry.set_stamp(stamp.max(entry.stamp()));
        }
    }

    /// What an entry proved then writes down.
    #[inline]
    fn stamp(&mut self, at: Nanos) -> u64 {
        if self.proofs.stamp(at) > Proofs::STAMP_MAX {
            self.rebase(at);
        }
        self.proofs.stamp(at)
    }

    /// One pass over the cache, once in more than two hundred times as long as a proof is good for.
    #[cold]
    fn rebase(&mut self, now: Nanos) {
        let (passed, sets) = (self.proofs.rebase(now), self.sets);
        for entry in self.all_sets().iter_mut().take(sets).flat_map(|set| &mut set.0) {
            // Memory that was never used is not to be taken up now.
            if !entry.is_empty() {
                entry.set_stamp(entry.stamp().saturating_sub(passed));
            }
        }
    }

    #[inline]
    pub(crate) fn forget(&mut self, hash: KeyHash) {
        if let Some(entry) = self.entry(hash) {
            entry.zero();
            self.filled -= 1;
        }
    }

    /// Mixes everything that is remembered into a hash.
    #[cfg(feature = "testing")]
    pub(crate) fn hash_state(&self, hasher: &mut impl std::hash::Hasher) {
        hasher.write(self.memory.as_deref().unwrap_or_default());
    }
}

#[cfg(test)]
mod tests;
