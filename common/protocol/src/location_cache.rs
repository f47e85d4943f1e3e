//! Where the sessions of a connection last saw their keys: what makes a GET one READ.
//!
//! Bounded and lossy: an entry that was pushed out, or that is wrong, costs a round trip and
//! nothing else. The block itself says whether it is still the key's (invariants I2, I10).
//! Threads share it: what one of them is replacing another one leaves as it is
//! (docs/decisions/0013).

mod entry;
mod proofs;

use std::cell::Cell;
use std::sync::atomic::{AtomicIsize, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use farside_fabric::Nanos;
use farside_fabric::shm::prefetch;
use farside_layout::hash::KeyHash;
use farside_layout::{SlotState, SlotWord};
use portable_atomic::AtomicU128;

use crate::pairs::Pairs;

use self::entry::PackedLocation;
use self::proofs::{ProofClock, empty, entry};

pub(crate) use self::entry::Location;

/// What the location cache did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStatistics {
    /// Operations whose key's location was known and right.
    pub hits: u64,
    /// Operations whose key's location was not known, or wrong.
    pub misses: u64,
}

/// [`CacheStatistics`] of one session, as they grow.
#[derive(Default)]
pub struct Lookups {
    hits: Cell<u64>,
    misses: Cell<u64>,
}

impl Lookups {
    #[inline]
    pub fn note_hit(&self) {
        self.hits.update(|hits| hits + 1);
    }

    #[inline]
    pub fn note_miss(&self) {
        self.misses.update(|misses| misses + 1);
    }

    pub fn statistics(&self) -> CacheStatistics {
        CacheStatistics { hits: self.hits.get(), misses: self.misses.get() }
    }
}

const WAYS: usize = 8;
/// How many entries a set has on average, until the memory given to the cache is in use.
const ENTRIES_PER_SET: usize = 1;
/// The sets of an empty cache: 256 KiB. See docs/decisions/0009.
const FIRST_SETS: usize = 1 << FIRST_SETS_BITS;
const FIRST_SETS_BITS: u32 = 11;

/// Two cache lines of the processor. A key's entry stands in its own of the two as long as there is
/// room, so that finding it takes one.
type Set = [AtomicU128; WAYS];
const SET_BYTES: usize = WAYS * size_of::<PackedLocation>();
const _: () = assert!(SET_BYTES == 128);

/// Where the key's own line starts; `ways` go on from there.
#[inline]
fn first_way(hash: KeyHash) -> usize {
    (hash.identity() >> 8) as usize & (WAYS / 2)
}

/// All places an entry of the key can have, those in its own line first.
#[inline]
fn ways(hash: KeyHash) -> impl Iterator<Item = usize> {
    let first = first_way(hash);
    (0..WAYS).map(move |way| way ^ first)
}

/// All entries that stand there.
#[inline]
fn entries(set: &Set, hash: KeyHash) -> impl Iterator<Item = (&AtomicU128, PackedLocation)> {
    ways(hash).map(|way| (&set[way], entry(&set[way])))
}

/// Where an entry of the key goes: in place of its own, of an empty one, or else of the one that
/// was not proved for the longest time.
#[inline]
fn place(set: &Set, hash: KeyHash) -> Option<(&AtomicU128, PackedLocation)> {
    let age = |entry: &PackedLocation| (!entry.is_empty()).then(|| entry.stamp());
    let mut best: Option<(&AtomicU128, PackedLocation)> = None;
    for (place, known) in entries(set, hash) {
        if known.is_of(hash) {
            return Some((place, known));
        }
        if best.is_none_or(|(_, other)| age(&known) < age(&other)) {
            best = Some((place, known));
        }
    }
    best
}

/// A value on a cache line of its own.
#[derive(Default)]
#[repr(align(128))]
struct CachePadded<T>(T);

/// The location cache of a connection, made by the first session.
#[derive(Default)]
pub struct ConnectionCache(OnceLock<Arc<LocationCache>>);

impl ConnectionCache {
    /// It, of at most this many bytes, for words whose proof is good for `proof_ns`.
    pub fn get(&self, bytes: usize, proof_ns: Nanos, now: Nanos) -> Arc<LocationCache> {
        self.0.get_or_init(|| Arc::new(LocationCache::new(bytes, proof_ns, now))).clone()
    }
}

/// Where keys were found, for all sessions of a client.
pub struct LocationCache {
    /// A power of two of sets, or nothing when the cache is off.
    memory: Option<Pairs>,
    /// How many of the sets are in use, a power of two. Never less than before, for what stood in
    /// others would miss a [`LocationCache::rebase`]. Released and acquired: a thread that uses a
    /// set knows of the rebases before it came into use.
    sets: AtomicUsize,
    proofs: ProofClock<AtomicU64>,
    /// How many entries are in use.
    filled: CachePadded<AtomicIsize>,
    /// Whose thread goes through the whole cache, one at a time.
    upkeep: Mutex<()>,
}

impl LocationCache {
    fn new(bytes: usize, proof_ns: Nanos, now: Nanos) -> Self {
        let wanted = (bytes / SET_BYTES + 1).next_power_of_two() / 2;
        let mut most = wanted;
        // Without memory for the cache the store works as well, one round trip slower.
        let memory = loop {
            match Pairs::new(most * WAYS) {
                Err(_) if most > FIRST_SETS => most /= 2,
                memory => break memory.ok(),
            }
        };
        if most < wanted {
            let bytes = most * SET_BYTES;
            tracing::warn!(bytes, "the system lets the location cache be no larger than this");
        }
        Self {
            memory,
            sets: AtomicUsize::new(most.clamp(1, FIRST_SETS)),
            proofs: ProofClock::new(proof_ns, now),
            filled: CachePadded::default(),
            upkeep: Mutex::default(),
        }
    }

    fn all(&self) -> &[AtomicU128] {
        self.memory.as_deref().unwrap_or_default()
    }

    /// Every place in use; a thread without `upkeep` may miss some that come into use.
    fn used(&self) -> &[AtomicU128] {
        let all = self.all();
        &all[..all.len().min(self.sets.load(Ordering::Acquire) * WAYS)]
    }

    #[inline]
    fn set(&self, hash: KeyHash) -> Option<&Set> {
        let start = (entry::spread(hash) & (self.sets.load(Ordering::Acquire) - 1)) * WAYS;
        self.memory.as_deref()?.get(start..)?.first_chunk()
    }

    /// The key's entry, and where it stands.
    #[inline]
    fn find(&self, hash: KeyHash) -> Option<(&AtomicU128, PackedLocation)> {
        entries(self.set(hash)?, hash).find(|(_, entry)| entry.is_of(hash))
    }

    /// An entry more is in use: as long as there is memory, the sets shall have room for the next.
    #[inline]
    fn filled_one(&self) {
        // Below 0 when another thread removed what this one has not counted yet.
        let filled = self.filled.0.fetch_add(1, Ordering::Relaxed) + 1;
        if self.is_full(filled) {
            self.double();
        }
    }

    #[inline]
    fn is_full(&self, filled: isize) -> bool {
        let sets = self.sets.load(Ordering::Relaxed);
        filled > (sets * ENTRIES_PER_SET) as isize && sets * WAYS < self.all().len()
    }

    /// Uses twice as many sets: the entries of each are shared out among two. What is learnt of
    /// those that move is lost.
    #[cold]
    fn double(&self) {
        let Ok(_upkeep) = self.upkeep.try_lock() else { return };
        if !self.is_full(self.filled.0.load(Ordering::Relaxed)) {
            return;
        }
        let (old, sets) = (self.used(), self.sets.load(Ordering::Relaxed));
        let new = &self.all()[old.len()..];
        let moves = |at: usize| {
            let known = entry(&old[at]);
            let stays = known.is_empty() || known.is_locked();
            (!stays && known.spread(at / WAYS) & sets != 0).then_some(known)
        };
        // Copies, so that all are found meanwhile.
        let mut more = 0;
        for (at, to) in new.iter().enumerate().take(old.len()) {
            if let Some(known) = moves(at) {
                to.store(known.bits(), Ordering::Release);
                more += 1;
            }
        }
        self.sets.store(2 * sets, Ordering::Release);
        for (at, from) in old.iter().enumerate() {
            more -= isize::from(moves(at).is_some_and(|known| empty(from, known)));
        }
        self.filled.0.fetch_add(more, Ordering::Relaxed);
    }

    /// One pass over the cache, once in fourteen times as long as a proof is good for, or more.
    #[cold]
    fn rebase(&self, now: Nanos) {
        if let Ok(_upkeep) = self.upkeep.try_lock()
            && self.proofs.is_over(now)
        {
            self.proofs.rebase(now, self.used().iter());
        }
    }

    /// Forgets everything but what other threads are learning meanwhile.
    pub fn clear(&self) {
        self.used().iter().for_each(|place| self.forget_at(place, entry(place)));
    }

    /// The key will be looked up soon.
    #[inline]
    pub fn prefetch(&self, hash: KeyHash) {
        if let Some(set) = self.set(hash) {
            prefetch(&set[first_way(hash)]);
        }
    }

    /// Where the key with this hash was found last, if the word is still proved.
    #[inline]
    pub fn get(&self, hash: KeyHash) -> Option<Location> {
        let proofs = self.proofs.for_reading();
        let (_, entry) = self.find(hash)?;
        entry.location(hash, proofs).ok()
    }

    /// Remembers a location. It replaces the key's old location, or an entry that was unused for
    /// long. Only of a LIVE word: what a split has in its hands will not stay.
    #[inline]
    pub fn put(&self, hash: KeyHash, location: Location) {
        match PackedLocation::new(hash, &location) {
            Ok(new) if location.word.state() == SlotState::Live => {
                self.prepare_base(location.proved_at);
                // Twice: other threads may be at it, mostly with older news.
                (0..2).any(|_| self.put_entry(hash, new, location.proved_at));
            }
            _ => self.forget(hash),
        }
    }

    /// Whether it could be put.
    #[inline]
    fn put_entry(&self, hash: KeyHash, new: PackedLocation, at: Nanos) -> bool {
        let place = self.set(hash).and_then(|set| place(set, hash));
        let Some((place, known)) = place else { return true };
        let is_put = self.proofs.replace(place, known, new, at);
        if is_put && known.is_empty() {
            self.filled_one();
        }
        is_put
    }

    /// Moves the time base if it is too old for a proof of this time, which is about to be stored.
    #[inline]
    fn prepare_base(&self, at: Nanos) {
        if self.proofs.is_over(at) {
            self.rebase(at);
        }
    }

    /// A READ posted then proved this location again, whose entry another operation may have
    /// replaced meanwhile.
    #[inline]
    pub fn prove(&self, hash: KeyHash, location: &Location, at: Nanos) {
        if self.proofs.is_later(at, location.proved_at) {
            self.prove_later(hash, location, at);
        }
    }

    fn prove_later(&self, hash: KeyHash, location: &Location, at: Nanos) {
        self.prepare_base(at);
        let proofs = self.proofs.for_reading();
        if let Some((place, known)) = self.find(hash)
            && let Ok(now) = known.location(hash, proofs)
            // The word alone may have come again.
            && now == (Location { proved_at: now.proved_at, ..*location })
            && self.proofs.is_later(at, now.proved_at)
        {
            self.proofs.replace(place, known, known, at);
        }
    }

    /// Forgets where the key with this hash was.
    #[inline]
    pub fn forget(&self, hash: KeyHash) {
        if let Some((place, known)) = self.find(hash) {
            self.forget_at(place, known);
        }
    }

    /// This word is not there any more. What another operation learnt since stays.
    #[inline]
    pub fn forget_word(&self, hash: KeyHash, word: SlotWord) {
        let proofs = self.proofs.for_reading();
        if let Some((place, known)) = self.find(hash)
            && known.location(hash, proofs).is_ok_and(|now| now.word == word)
        {
            self.forget_at(place, known);
        }
    }

    fn forget_at(&self, place: &AtomicU128, known: PackedLocation) {
        if !known.is_empty() && empty(place, known) {
            self.filled.0.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Mixes everything that is remembered into a hash.
    pub fn hash_state(&self, hasher: &mut impl std::hash::Hasher) {
        self.used().iter().for_each(|place| hasher.write_u128(entry(place).bits()));
    }
}

#[cfg(test)]
mod tests;
