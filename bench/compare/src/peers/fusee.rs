//! FUSEE (Shen et al., FAST'23), with one replica: a driver written from the published description,
//! not the authors' code.
//!
//! The driver models RACE's index with READs of both choices. Entries have a key and a checksum,
//! which readers verify; an index cache has slot words. The operation log is embedded in the entry:
//! its field for the old value is written just before the compare-and-swap that commits.
//!
//! | operation | round trips, each a chain |
//! |---|---|
//! | GET, cached | READ, READ (the two choices), READ (the entry at the cached address) |
//! | GET, not cached, or the slot has changed | READ, READ; READ (the entry) |
//! | UPDATE, cached | WRITE (the new entry and its log), READ, READ, READ; WRITE (log), CAS |
//! | UPDATE, not cached | WRITE, READ, READ; READ; WRITE (log), CAS |
//! | INSERT | WRITE, READ, READ; WRITE (log), CAS of a free slot |
//!
//! An UPDATE that loses the compare-and-swap counts as overwritten at once: SNAPSHOT, its protocol
//! for replicas, lets the last writer win. Replicas and their cost are left out, and so are the
//! master and memory from servers in two levels. A client frees what it unlinked, without bitmaps.
//! The cache has no adaptive bypass, entries have one block, and clients do not recover.

use farside_bench::records::Key;
use farside_fabric::{Endpoint, Fabric, LaneId, Verb};

use super::index::{KeySlots, Slot, Table, Word};
use super::{ATTEMPTS_MAX, Cache, Peer, PeerDemand, PeerError, Result, Segments};

/// The length of the log after each entry: the old slot word, and the flag of an unused entry,
/// which only a DELETE sets.
const TAIL_BYTES: u64 = 16;

/// A client of FUSEE.
pub struct Fusee<F> {
    table: Table<F>,
    pub(super) cache: Cache<Word>,
}

impl<F: Fabric> Fusee<F> {
    /// An empty store.
    pub fn new(fabric: F, memory: &mut Segments, demand: PeerDemand) -> Result<Self> {
        let table = Table::new(fabric, memory, demand, TAIL_BYTES)?;
        Ok(Self { table, cache: Cache::new(true) })
    }

    /// How many segments of memory the store needs.
    pub fn segments(demand: PeerDemand) -> u64 {
        Table::<F>::segments(demand, TAIL_BYTES)
    }

    /// Writes the slot's old word to the log, then swaps the slot to `desired`. Returns the word
    /// that the slot held.
    async fn commit(&self, lane: LaneId, slot: &Slot, log: Word, desired: Word) -> Result<Word> {
        let old = Verb::WriteWord { remote: self.table.tail(log), value: slot.word.0 };
        let (remote, expected, desired) = (slot.address, slot.word.0, desired.0);
        let swap = Verb::CompareSwap { remote, expected, desired };
        Ok(Word(self.table.endpoint.chain(lane, &[old, swap]).await?))
    }

    /// Puts a new key's word into a free slot.
    async fn link(&self, lane: LaneId, slots: &KeySlots, tag: u64, new: Word) -> Result<bool> {
        for _ in 0..ATTEMPTS_MAX {
            let free = self.table.endpoint.find(lane, slots, 0, |word| word == Word::FREE);
            let slot = free.ok_or(PeerError::OutOfMemory)?;
            if self.commit(lane, &slot, new, new).await? == slot.word {
                self.cache.insert(tag, new);
                return Ok(true);
            }
            self.table.endpoint.chain(lane, &slots.reads()).await?;
        }
        Err(PeerError::Contended(ATTEMPTS_MAX))
    }
}

impl<F: Fabric> Peer for Fusee<F> {
    type Fabric = F;

    fn endpoint(&self) -> &Endpoint<F> {
        &self.table.endpoint.inner
    }

    async fn get(&self, lane: LaneId, key: &Key, value: &mut Vec<u8>) -> Result<bool> {
        let (slots, tag) = self.table.slots(key);
        let cached = self.cache.get(tag);
        let [first, second] = slots.reads();
        let entry = self.table.read(cached.unwrap_or(Word::FREE));
        let chain = [first, second, entry];
        let verbs = if cached.is_some() { &chain[..] } else { &chain[..2] };
        self.table.endpoint.chain(lane, verbs).await?;
        let slot = self.table.search(lane, &slots, key, cached, Some(value)).await?;
        if let Some(slot) = slot.filter(|slot| Some(slot.word) != cached) {
            self.cache.insert(tag, slot.word);
        }
        Ok(slot.is_some())
    }

    async fn store(&self, lane: LaneId, key: &Key, value: &[u8], is_insert: bool) -> Result<bool> {
        let (slots, tag) = self.table.slots(key);
        let cached = self.cache.get(tag);
        let (new, write) = self.table.stage(lane, (key, value), slots.fingerprint, TAIL_BYTES)?;
        let [first, second] = slots.reads();
        let entry = self.table.read(cached.unwrap_or(Word::FREE));
        let chain = [write, first, second, entry];
        let verbs = if cached.is_some() { &chain[..] } else { &chain[..3] };
        self.table.endpoint.chain(lane, verbs).await?;
        let found = self.table.search(lane, &slots, key, cached, None).await?;
        let Some(slot) = found else { return self.link(lane, &slots, tag, new).await };
        if is_insert {
            self.table.free(new);
            return Ok(false);
        }
        let found = self.commit(lane, &slot, new, new).await?;
        if found == slot.word {
            self.table.free(slot.word);
            self.cache.insert(tag, new);
        } else {
            self.table.free(new);
            self.cache.remove(tag);
        }
        Ok(true)
    }
}
