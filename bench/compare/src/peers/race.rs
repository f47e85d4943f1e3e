//! RACE hashing (Zuo et al., ATC'21), as SMART-HT (Ren et al., ASPLOS'24) runs it: a driver written
//! from the published descriptions, not the authors' code.
//!
//! The driver models two choices of a bucket and its overflow, which are read with one doorbell. A
//! slot has a fingerprint and an address; an entry has a key and a checksum. The new entry is
//! written in the chain of the first READs. At its end an INSERT checks for the same key in another
//! slot.
//!
//! | operation | round trips, each a chain |
//! |---|---|
//! | GET | READ, READ (the two choices); READ (the entry) |
//! | GET, speculative | READ (the entry at the cached address) |
//! | UPDATE | WRITE (the new entry), READ, READ; READ (the old one, for its key); CAS |
//! | INSERT | WRITE, READ, READ; CAS of a free slot; READ, READ |
//!
//! `smart` is `race` with the speculative lookup that SMART has for its tree: a cached address is
//! trusted if the key fits. With several clients the cached address may be that of an earlier
//! value, and nothing in the entry shows it; this driver runs one client only. Left out: resizing
//! (SMART-HT disables it), and SMART's measures for many threads that share a device, of which
//! there is one here.

use farside_bench::records::Key;
use farside_fabric::{Endpoint, Fabric, LaneId, Verb};

use super::index::{KeySlots, Slot, Table, Word};
use super::{ATTEMPTS_MAX, Cache, Peer, PeerDemand, PeerError, Result, Segments};

/// A client of RACE.
pub struct Race<F> {
    table: Table<F>,
    /// The slot words of entries, for a client that reads an entry without reading the index first.
    pub(super) cache: Cache<Word>,
}

impl<F: Fabric> Race<F> {
    /// An empty store, with the speculative lookup of SMART if `is_speculative` is true.
    pub fn new(
        fabric: F,
        memory: &mut Segments,
        demand: PeerDemand,
        is_speculative: bool,
    ) -> Result<Self> {
        let table = Table::new(fabric, memory, demand, 0)?;
        Ok(Self { table, cache: Cache::new(is_speculative) })
    }

    /// How many segments of memory the store needs.
    pub fn segments(demand: PeerDemand) -> u64 {
        Table::<F>::segments(demand, 0)
    }

    async fn swap(&self, lane: LaneId, slot: &Slot, new: Word) -> Result<bool> {
        let (remote, expected, desired) = (slot.address, slot.word.0, new.0);
        let swap = Verb::CompareSwap { remote, expected, desired };
        Ok(self.table.endpoint.chain(lane, &[swap]).await? == expected)
    }

    /// Removes duplicates after an insert: if another operation has inserted the same key
    /// meanwhile, the entry in the first slot stays. Returns whether this insert stays.
    async fn resolve_duplicates(
        &self,
        lane: LaneId,
        (slots, tag): (&KeySlots, u64),
        key: &Key,
        new: Word,
    ) -> Result<bool> {
        self.table.endpoint.chain(lane, &slots.reads()).await?;
        let Some(own) = self.table.endpoint.find(lane, slots, 0, |word| word == new) else {
            return Ok(true);
        };
        let others = |word: Word| word.fits(slots.fingerprint) && word != new;
        let mut from = 0;
        while let Some(other) = self.table.endpoint.find(lane, slots, from, others) {
            from = other.number + 1;
            self.table.endpoint.chain(lane, &[self.table.read(other.word)]).await?;
            if !self.table.copy_if_found(lane, key, None) {
                continue;
            }
            let is_first = own.number < other.number;
            let loser = if is_first { &other } else { &own };
            if self.swap(lane, loser, Word::FREE).await? {
                self.table.free(loser.word);
            }
            if !is_first {
                self.cache.remove(tag);
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl<F: Fabric> Peer for Race<F> {
    type Fabric = F;

    fn endpoint(&self) -> &Endpoint<F> {
        &self.table.endpoint.inner
    }

    async fn get(&self, lane: LaneId, key: &Key, value: &mut Vec<u8>) -> Result<bool> {
        let (slots, tag) = self.table.slots(key);
        let cached = self.cache.get(tag);
        if let Some(word) = cached {
            self.table.endpoint.chain(lane, &[self.table.read(word)]).await?;
            if self.table.copy_if_found(lane, key, Some(value)) {
                return Ok(true);
            }
        }
        self.table.endpoint.chain(lane, &slots.reads()).await?;
        let slot = self.table.search(lane, &slots, key, None, Some(value)).await?;
        // If a PUT has cached a newer word meanwhile, that word stays.
        if let Some(slot) = slot
            && self.cache.get(tag) == cached
        {
            self.cache.insert(tag, slot.word);
        }
        Ok(slot.is_some())
    }

    async fn store(&self, lane: LaneId, key: &Key, value: &[u8], is_insert: bool) -> Result<bool> {
        let (slots, tag) = self.table.slots(key);
        let (new, write) = self.table.stage(lane, (key, value), slots.fingerprint, 0)?;
        let [first, second] = slots.reads();
        self.table.endpoint.chain(lane, &[write, first, second]).await?;
        for _ in 0..ATTEMPTS_MAX {
            let found = self.table.search(lane, &slots, key, None, None).await?;
            if is_insert && found.is_some() {
                self.table.free(new);
                return Ok(false);
            }
            let free = || self.table.endpoint.find(lane, &slots, 0, |word| word == Word::FREE);
            let slot = found.or_else(free).ok_or(PeerError::OutOfMemory)?;
            if self.swap(lane, &slot, new).await? {
                self.cache.insert(tag, new);
                if found.is_some() {
                    self.table.free(slot.word);
                    return Ok(true);
                }
                return self.resolve_duplicates(lane, (&slots, tag), key, new).await;
            }
            self.table.endpoint.chain(lane, &slots.reads()).await?;
        }
        Err(PeerError::Contended(ATTEMPTS_MAX))
    }
}
