//! The location cache: where the sessions of a connection last saw their keys. With it a GET takes
//! one READ.
//!
//! The cache is bounded and may lose entries. A missing or wrong entry costs only a round trip,
//! because the block itself proves whether it is still the key's (invariants I2, I10). Threads
//! share the cache: a thread leaves an entry alone that another one is replacing
//! (docs/decisions/0013).

mod entry;
mod proof_time_base;
mod proofs;

use std::sync::atomic::{AtomicIsize, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use farside_fabric::Nanos;
use farside_fabric::memory::prefetch;
use farside_layout::hash::KeyHash;
use farside_layout::{SlotState, SlotWord};
use portable_atomic::AtomicU128;

use crate::pairs::Pairs;
use crate::read_reports::ReadReports;

use self::proofs::{ProofClock, empty, entry};

pub use self::entry::Successor;
pub(crate) use self::entry::{Location, PackedLocation};

/// The number of cells in a set.
const WAYS: usize = 8;
/// The average number of entries in a set above which the number of sets doubles, as long as the
/// cache has unused memory.
const ENTRIES_PER_SET: usize = 1;
/// The number of sets of an empty cache: 256 KiB of them. See docs/decisions/0009.
const FIRST_SETS: usize = 1 << FIRST_SETS_BITS;
const FIRST_SETS_BITS: u32 = 11;

/// A set of entries: two cache lines of the processor. Each key prefers one of the two lines, so a
/// lookup usually loads a single line.
type Set = [AtomicU128; WAYS];
const SET_BYTES: usize = WAYS * size_of::<PackedLocation>();
const _: () = assert!(SET_BYTES == 128);

/// The index of the first cell in the line that the key prefers.
#[inline]
fn first_way(hash: KeyHash) -> usize {
    (hash.identity() >> 8) as usize & (WAYS / 2)
}

/// The indexes of all cells of the key's set, those in its preferred line first.
#[inline]
fn ways(hash: KeyHash) -> impl Iterator<Item = usize> {
    let first = first_way(hash);
    (0..WAYS).map(move |way| way ^ first)
}

/// All cells of the key's set with their entries, those in its preferred line first.
#[inline]
fn entries(set: &Set, hash: KeyHash) -> impl Iterator<Item = (&AtomicU128, PackedLocation)> {
    ways(hash).map(|way| (&set[way], entry(&set[way])))
}

/// Returns the cell for a new entry of the key, and the entry that it replaces: the key's own, an
/// empty one, or else the one with the oldest proof.
#[inline]
fn cell_for(set: &Set, hash: KeyHash) -> Option<(&AtomicU128, PackedLocation)> {
    let stamp_of = |entry: &PackedLocation| (!entry.is_empty()).then(|| entry.stamp());
    let mut best: Option<(&AtomicU128, PackedLocation)> = None;
    for (cell, known) in entries(set, hash) {
        if known.is_of(hash) {
            return Some((cell, known));
        }
        if best.is_none_or(|(_, other)| stamp_of(&known) < stamp_of(&other)) {
            best = Some((cell, known));
        }
    }
    best
}

/// The key's entry and its cell, in any cell of the set.
#[inline(never)]
fn find_further(set: &Set, hash: KeyHash) -> Option<(&AtomicU128, PackedLocation)> {
    entries(set, hash).find(|(_, entry)| entry.is_of(hash))
}

/// An entry as it was found, and its cell.
pub(crate) type FoundEntry<'c> = (&'c AtomicU128, PackedLocation);

/// A value on a cache line of its own.
#[derive(Default)]
#[repr(align(128))]
struct CachePadded<T>(T);

/// The location cache of a connection, which its first session creates.
#[derive(Default)]
pub struct ConnectionCache(OnceLock<Arc<LocationCache>>);

impl ConnectionCache {
    /// Returns the cache. The first call creates it, with at most this many bytes, for words whose
    /// proof is good for `proof_ns`.
    pub fn get(&self, bytes: usize, proof_ns: Nanos, now: Nanos) -> Arc<LocationCache> {
        self.0.get_or_init(|| Arc::new(LocationCache::new(bytes, proof_ns, now))).clone()
    }
}

/// The locations of keys, shared by all sessions of a client.
pub struct LocationCache {
    /// Memory for a power of two of sets, or `None` if the cache is off.
    memory: Option<Pairs>,
    /// The number of sets in use, a power of two. It never shrinks: entries outside these sets
    /// would miss a [`LocationCache::rebase`]. Stored with release and loaded with acquire, so that
    /// a thread that uses a set has seen all rebases from before the set came into use.
    sets: AtomicUsize,
    proofs: ProofClock<AtomicU64>,
    /// The number of entries, roughly while threads change them.
    filled: CachePadded<AtomicIsize>,
    /// Locked by a thread that goes through the whole cache.
    upkeep: Mutex<()>,
}

impl LocationCache {
    fn new(bytes: usize, proof_ns: Nanos, now: Nanos) -> Self {
        let sets_wanted = (bytes / SET_BYTES + 1).next_power_of_two() / 2;
        let mut sets_max = sets_wanted;
        // Without a cache all operations still work: they only take one more round trip.
        let memory = loop {
            match Pairs::new(sets_max * WAYS) {
                Err(_) if sets_max > FIRST_SETS => sets_max /= 2,
                memory => break memory.ok(),
            }
        };
        if sets_max < sets_wanted {
            let mapped_bytes = sets_max * SET_BYTES;
            let cache_bytes = bytes;
            tracing::warn!(
                cache_bytes,
                mapped_bytes,
                "cannot map cache_bytes of memory; the location cache is smaller"
            );
        }
        Self {
            memory,
            sets: AtomicUsize::new(sets_max.clamp(1, FIRST_SETS)),
            proofs: ProofClock::new(proof_ns, now),
            filled: CachePadded::default(),
            upkeep: Mutex::default(),
        }
    }

    fn cells(&self) -> &[AtomicU128] {
        self.memory.as_deref().unwrap_or_default()
    }

    /// All cells in use. Only a thread that holds `upkeep` is sure to see cells that just came into
    /// use.
    fn cells_in_use(&self) -> &[AtomicU128] {
        let cells = self.cells();
        &cells[..cells.len().min(self.sets.load(Ordering::Acquire) * WAYS)]
    }

    #[inline]
    fn set(&self, hash: KeyHash) -> Option<&Set> {
        let start = (entry::set_bits(hash) & (self.sets.load(Ordering::Acquire) - 1)) * WAYS;
        self.memory.as_deref()?.get(start..)?.first_chunk()
    }

    /// The key's entry and its cell.
    #[inline]
    fn find(&self, hash: KeyHash) -> Option<(&AtomicU128, PackedLocation)> {
        let set = self.set(hash)?;
        // Most keys are alone in their line.
        let first = &set[first_way(hash)];
        let known = entry(first);
        if known.is_of(hash) { Some((first, known)) } else { find_further(set, hash) }
    }

    /// Counts a new entry. Doubles the number of sets if they are full and there is memory left.
    #[inline]
    fn count_new_entry(&self) {
        // Signed: another thread may remove this entry before it is counted.
        let filled = self.filled.0.fetch_add(1, Ordering::Relaxed) + 1;
        if self.is_full(filled) {
            self.double();
        }
    }

    #[inline]
    fn is_full(&self, filled: isize) -> bool {
        let sets = self.sets.load(Ordering::Relaxed);
        filled > (sets * ENTRIES_PER_SET) as isize && sets * WAYS < self.cells().len()
    }

    /// Doubles the number of sets in use: about half of the entries of each set move to a new set.
    /// A change to an entry that is moving is lost.
    #[cold]
    fn double(&self) {
        let Ok(_upkeep) = self.upkeep.try_lock() else { return };
        if !self.is_full(self.filled.0.load(Ordering::Relaxed)) {
            return;
        }
        let (old, sets) = (self.cells_in_use(), self.sets.load(Ordering::Relaxed));
        let new = &self.cells()[old.len()..];
        let moves = |at: usize| {
            let known = entry(&old[at]);
            let stays = known.is_empty() || known.is_locked();
            (!stays && known.set_bits(at / WAYS) & sets != 0).then_some(known)
        };
        // Entries are first copied, then removed, so that a lookup finds every entry meanwhile.
        let mut entries_added = 0;
        for (at, to) in new.iter().enumerate().take(old.len()) {
            if let Some(known) = moves(at) {
                to.store(known.bits(), Ordering::Release);
                entries_added += 1;
            }
        }
        self.sets.store(2 * sets, Ordering::Release);
        for (at, from) in old.iter().enumerate() {
            entries_added -= isize::from(moves(at).is_some_and(|known| empty(from, known)));
        }
        self.filled.0.fetch_add(entries_added, Ordering::Relaxed);
    }

    /// Moves the time base, in one pass over the cache. Between two passes lies at least fourteen
    /// times the life of a proof.
    #[cold]
    fn rebase(&self, now: Nanos) {
        if let Ok(_upkeep) = self.upkeep.try_lock()
            && self.proofs.needs_rebase(now)
        {
            self.proofs.rebase(now, self.cells_in_use().iter());
        }
    }

    /// Removes all entries, except those that other threads are replacing meanwhile.
    pub fn clear(&self) {
        self.cells_in_use().iter().for_each(|cell| self.forget_at(cell, entry(cell)));
    }

    /// Prefetches the cache line of a key that will be looked up soon.
    #[inline]
    pub fn prefetch(&self, hash: KeyHash) {
        if let Some(set) = self.set(hash) {
            prefetch(&set[first_way(hash)]);
        }
    }

    /// Returns the cached location of the key with this hash, as it is stored: most readers need
    /// only some of its fields.
    #[inline]
    pub(crate) fn get_packed(&self, hash: KeyHash) -> Option<PackedLocation> {
        Some(self.find(hash)?.1)
    }

    /// As [`LocationCache::get_packed`], with the entry's cell and the time of the proof.
    #[inline]
    pub(crate) fn get_proved(&self, hash: KeyHash) -> Option<(FoundEntry<'_>, Nanos)> {
        let proofs = self.proofs.for_reading();
        let (cell, entry) = self.find(hash)?;
        Some(((cell, entry), proofs.at(entry.stamp())))
    }

    /// As [`LocationCache::put`], for a LIVE word that replaced the one of this entry. The cell is
    /// not looked up again, unless the entry was changed or has moved meanwhile.
    #[inline(always)]
    pub(crate) fn replace(
        &self,
        hash: KeyHash,
        (cell, known): FoundEntry<'_>,
        new: PackedLocation,
        at: Nanos,
    ) {
        self.prepare_base(at);
        if !self.proofs.replace(cell, known, new, at) {
            self.put_again(hash, new, at);
        }
    }

    /// Caches a location. It replaces the key's old location, or the entry with the oldest proof.
    /// A word that is not LIVE removes the entry instead: a split is moving that key.
    #[inline(always)]
    pub fn put(&self, hash: KeyHash, location: Location) {
        match PackedLocation::new(hash, &location) {
            Ok(new) if location.word.state() == SlotState::Live => {
                self.prepare_base(location.proved_at);
                if !self.put_entry(hash, new, location.proved_at) {
                    self.put_again(hash, new, location.proved_at);
                }
            }
            _ => self.forget(hash),
        }
    }

    /// A second attempt, because another thread changed the entry or is replacing it, usually by an
    /// older location.
    #[cold]
    fn put_again(&self, hash: KeyHash, new: PackedLocation, at: Nanos) {
        self.put_entry(hash, new, at);
    }

    /// Returns false if another thread changed the cell meanwhile.
    #[inline]
    fn put_entry(&self, hash: KeyHash, new: PackedLocation, at: Nanos) -> bool {
        match self.find(hash) {
            Some((cell, known)) => self.proofs.replace(cell, known, new, at),
            None => self.add_entry(hash, new, at),
        }
    }

    /// [`LocationCache::put_entry`] of a key that had no entry just now.
    #[inline(never)]
    fn add_entry(&self, hash: KeyHash, new: PackedLocation, at: Nanos) -> bool {
        let cell = self.set(hash).and_then(|set| cell_for(set, hash));
        let Some((cell, known)) = cell else { return true };
        let is_put = self.proofs.replace(cell, known, new, at);
        if is_put && known.is_empty() {
            self.count_new_entry();
        }
        is_put
    }

    /// Moves the time base if it is too old for a proof of this time. Called before such a proof is
    /// stored.
    #[inline]
    fn prepare_base(&self, at: Nanos) {
        if self.proofs.needs_rebase(at) {
            self.rebase(at);
        }
    }

    /// Returns the latest time before `at` that has another stamp; `at` itself if there is none.
    pub(crate) fn earlier_stamp(&self, at: Nanos) -> Nanos {
        self.proofs.for_reading().earlier(at)
    }

    /// Notes that a READ of a session posted at `at` proved this location again. Does nothing if
    /// another operation has replaced the entry meanwhile. If the entry gets a later stamp, which
    /// happens now and then, the block is added to the session's `reads`.
    #[inline]
    pub(crate) fn prove(
        &self,
        hash: KeyHash,
        location: PackedLocation,
        at: Nanos,
        reads: &ReadReports,
    ) {
        // A guess, because the base may have moved since the entry was loaded.
        if self.proofs.for_reading().since_base(at) > location.stamp() {
            self.prove_later(hash, location, at, reads);
        }
    }

    #[cold]
    fn prove_later(&self, hash: KeyHash, location: PackedLocation, at: Nanos, reads: &ReadReports) {
        self.prepare_base(at);
        let proofs = self.proofs.for_reading();
        if let Some((cell, known)) = self.find(hash)
            // All fields have to agree: another block generation may have the same word.
            && known.is_at(location)
            && self.proofs.is_later(at, proofs.at(known.stamp()))
            && self.proofs.replace(cell, known, known, at)
            && let Ok(block) = location.block()
        {
            reads.add(block.address);
        }
    }

    /// Removes the entry of the key with this hash.
    #[inline]
    pub fn forget(&self, hash: KeyHash) {
        if let Some((cell, known)) = self.find(hash) {
            self.forget_at(cell, known);
        }
    }

    /// Removes the key's entry if it has this word, which is not in the slot any more. An entry
    /// that another operation stored meanwhile stays.
    #[inline]
    pub fn forget_word(&self, hash: KeyHash, word: SlotWord) {
        if let Some((cell, known)) = self.find(hash)
            && known.word(hash).is_ok_and(|known| known == word)
        {
            self.forget_at(cell, known);
        }
    }

    fn forget_at(&self, cell: &AtomicU128, known: PackedLocation) {
        if !known.is_empty() && empty(cell, known) {
            self.filled.0.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Mixes all entries into a hash.
    pub fn hash_state(&self, hasher: &mut impl std::hash::Hasher) {
        self.cells_in_use().iter().for_each(|cell| hasher.write_u128(entry(cell).bits()));
    }
}

#[cfg(test)]
mod tests;
