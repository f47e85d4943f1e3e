//! SWARM-KV (Murat et al., SOSP'24), with one replica: a driver written from the published
//! description, not the authors' code.
//!
//! The driver models "In-n-Out". A location never moves and begins with a metadata word: a
//! timestamp, the address of a buffer, and whether the write was verified. After the word is a copy
//! of the value with a hash that binds it to the word. Every update has a fresh buffer, written in
//! one chain with the compare-and-swap that commits. No operation waits for the verification and
//! the new copy in place.
//!
//! | operation | round trips, each a chain |
//! |---|---|
//! | GET, cached | READ (the word and the value in place) |
//! | GET, and the copy is not there yet | READ; READ (the buffer) |
//! | GET, not cached | READ, READ (the index); READ |
//! | UPDATE, cached | WRITE (the buffer), CAS (the word) |
//! | ... not waited for | WRITE (the copy in place), CAS (verified) |
//! | UPDATE, not cached | WRITE, READ, READ; READ; CAS; and as above |
//! | INSERT | WRITE (the location), READ, READ; CAS of a free slot of the index |
//!
//! The index is RACE's, while SWARM-KV's own index is a separate service. Timestamps are the
//! client's count. Values have one length. Left out are replicas, quorums, the guessing of
//! timestamps among several clients, and the recycling of buffers by agreement.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::task::Poll;

use farside_bench::records::{KEY_BYTES, Key};
use farside_fabric::{Buffer, Endpoint, Fabric, LaneId, Verb};
use farside_layout::checksum;

use super::index::{Index, KeySlots, Slot, Word};
use super::{
    ATTEMPTS_MAX, Cache, Heap, Peer, PeerDemand, PeerEndpoint, PeerError, Result, Segments,
    segments,
};

/// The length of the metadata word, and of the hash.
const WORD_BYTES: usize = 8;

/// A metadata word.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Metadata(u64);

impl Metadata {
    const VERIFIED: u64 = 1;
    const TIME_BITS: u32 = 15;
    const ADDRESS_SHIFT: u32 = 1 + Self::TIME_BITS;

    const fn new(time: u64, buffer: u64) -> Self {
        Self(buffer << Self::ADDRESS_SHIFT | (time % (1 << Self::TIME_BITS)) << 1)
    }

    const fn verified(self) -> Self {
        Self(self.0 | Self::VERIFIED)
    }

    /// The address of the buffer; `None` before the first update.
    const fn buffer(self) -> Option<u64> {
        match self.0 >> Self::ADDRESS_SHIFT {
            0 => None,
            buffer => Some(buffer),
        }
    }

    /// The hash that binds this value to the word.
    fn hash(self, value: &[u8]) -> u64 {
        let word = self.0 & !Self::VERIFIED;
        checksum(value, checksum(&word.to_le_bytes(), 0)).into()
    }
}

#[derive(Clone, Copy)]
pub(super) struct Cached {
    location: u64,
    metadata: Metadata,
}

/// A client of SWARM-KV. An operation has a second lane for the chain that it does not wait for.
pub struct Swarm<F> {
    endpoint: PeerEndpoint<F>,
    index: Index,
    locations: RefCell<Heap>,
    buffers: RefCell<Heap>,
    pub(super) cache: Cache<Cached>,
    /// By operation, whether its second lane has a chain in flight.
    is_busy: Box<[Cell<bool>]>,
    time: Cell<u64>,
    demand: PeerDemand,
}

/// The length of a value with its hash, in whole words.
const fn hashed_bytes(value_bytes: usize) -> u64 {
    (WORD_BYTES + value_bytes.next_multiple_of(WORD_BYTES)) as u64
}

const fn location_bytes(value_bytes: usize) -> u64 {
    WORD_BYTES as u64 + hashed_bytes(value_bytes) + KEY_BYTES as u64
}

fn word_at(bytes: &[u8], at: usize) -> u64 {
    let (words, _) = bytes.as_chunks();
    u64::from_le_bytes(words[at])
}

impl<F: Fabric> Swarm<F> {
    /// An empty store.
    pub fn new(fabric: F, memory: &mut Segments, demand: PeerDemand) -> Result<Self> {
        let bytes = location_bytes(demand.value_bytes);
        let endpoint = PeerEndpoint::new(fabric, Self::LANES * demand.depth, bytes);
        let index = Index::new(memory, demand.records)?;
        endpoint.clear(index.groups())?;
        let buffers = Heap::new(memory.cut(hashed_bytes(demand.value_bytes), demand.pieces())?);
        Ok(Self {
            endpoint,
            index,
            locations: RefCell::new(Heap::new(memory.cut(bytes, demand.pieces())?)),
            buffers: RefCell::new(buffers),
            cache: Cache::new(true),
            is_busy: (0..demand.depth).map(|_| Cell::new(false)).collect(),
            time: Cell::new(0),
            demand,
        })
    }

    /// How many segments of memory the store needs.
    pub fn segments(demand: PeerDemand) -> u64 {
        let pieces = demand.pieces();
        Index::segments(demand.records)
            + segments(hashed_bytes(demand.value_bytes), pieces)
            + segments(location_bytes(demand.value_bytes), pieces)
    }

    fn slots(&self, key: &Key) -> (KeySlots, u64) {
        let hash = self.endpoint.hasher.hash(key);
        (self.index.slots(hash), hash.identity())
    }

    fn new_metadata(&self, buffer: u64) -> Metadata {
        self.time.set(self.time.get() + 1);
        Metadata::new(self.time.get(), buffer)
    }

    /// Gets the value of the location just read: the copy in place, or else the one in the buffer.
    /// Returns false if both were overwritten meanwhile.
    async fn value(&self, lane: LaneId, value: &mut Vec<u8>) -> Result<bool> {
        let metadata = Metadata(word_at(&self.endpoint.buffer(lane, Buffer::ReadBlock), 0));
        if self.copy_if_bound(lane, WORD_BYTES, metadata, value) {
            return Ok(true);
        }
        let Some(remote) = metadata.buffer() else { return Ok(false) };
        let bytes = hashed_bytes(self.demand.value_bytes) as u32;
        let read = Verb::Read { remote, into: Buffer::ReadBlock, bytes };
        self.endpoint.chain(lane, &[read]).await?;
        Ok(self.copy_if_bound(lane, 0, metadata, value))
    }

    /// Copies the value at this offset of the block that was read, if its hash binds it to the
    /// word. Returns whether it does.
    fn copy_if_bound(
        &self,
        lane: LaneId,
        offset: usize,
        metadata: Metadata,
        value: &mut Vec<u8>,
    ) -> bool {
        let block = self.endpoint.buffer(lane, Buffer::ReadBlock);
        let found = &block[offset + WORD_BYTES..][..self.demand.value_bytes];
        let is_bound = word_at(&block[offset..], 0) == metadata.hash(found);
        if is_bound {
            value.clear();
            value.extend_from_slice(found);
        }
        is_bound
    }

    /// Searches for the key in the slots that were just read. If it returns a slot, the location in
    /// that slot has been read, too.
    async fn search(&self, lane: LaneId, slots: &KeySlots, key: &Key) -> Result<Option<Slot>> {
        let bytes = location_bytes(self.demand.value_bytes);
        let mut from = 0;
        while let Some(slot) =
            self.endpoint.find(lane, slots, from, |word| word.fits(slots.fingerprint))
        {
            let remote = slot.word.address();
            let read = Verb::Read { remote, into: Buffer::ReadBlock, bytes: bytes as u32 };
            self.endpoint.chain(lane, &[read]).await?;
            let block = self.endpoint.buffer(lane, Buffer::ReadBlock);
            if block[bytes as usize - KEY_BYTES..].starts_with(key) {
                return Ok(Some(slot));
            }
            from = slot.number + 1;
        }
        Ok(None)
    }

    async fn put(&self, lane: LaneId, key: &Key, value: &[u8]) -> Result<bool> {
        let (slots, tag) = self.slots(key);
        let buffer = self.buffers.borrow_mut().take()?;
        let new = self.new_metadata(buffer);
        self.endpoint.fill(lane, |image| write_hashed(image, new, value));
        let bytes = hashed_bytes(value.len()) as u32;
        let write = Verb::Write { remote: buffer, from: Buffer::NewBlock, bytes };
        let swap = |location, old: Metadata| Verb::CompareSwap {
            remote: location,
            expected: old.0,
            desired: new.0,
        };
        let (location, mut old, mut found) = if let Some(cached) = self.cache.get(tag) {
            let Cached { location, metadata } = cached;
            let found = self.endpoint.chain(lane, &[write, swap(location, metadata)]).await?;
            (location, metadata, Some(Metadata(found)))
        } else {
            let [first, second] = slots.reads();
            self.endpoint.chain(lane, &[write, first, second]).await?;
            let Some(slot) = self.search(lane, &slots, key).await? else {
                self.buffers.borrow_mut().give(buffer);
                return self.insert(lane, key, value).await;
            };
            let metadata = Metadata(word_at(&self.endpoint.buffer(lane, Buffer::ReadBlock), 0));
            (slot.word.address(), metadata, None)
        };
        for _ in 0..ATTEMPTS_MAX {
            if found == Some(old) {
                self.finish(lane, location, new, value).await?;
                self.cache.insert(tag, Cached { location, metadata: new.verified() });
                old.buffer().into_iter().for_each(|old| self.buffers.borrow_mut().give(old));
                return Ok(true);
            }
            old = found.unwrap_or(old);
            found = Some(Metadata(self.endpoint.chain(lane, &[swap(location, old)]).await?));
        }
        Err(PeerError::Contended(ATTEMPTS_MAX))
    }

    /// Posts the chain that an update does not wait for: the copy in place, and the verified word.
    /// It shares the doorbell of the next operation, if one comes.
    async fn finish(&self, lane: LaneId, location: u64, new: Metadata, value: &[u8]) -> Result<()> {
        self.wait_for_last_chain(lane).await?;
        let second = self.second(lane);
        self.endpoint.fill(second, |image| write_hashed(image, new, value));
        let (remote, bytes) = (location + WORD_BYTES as u64, hashed_bytes(value.len()) as u32);
        let copy = Verb::Write { remote, from: Buffer::NewBlock, bytes };
        let (expected, desired) = (new.0, new.verified().0);
        let verify = Verb::CompareSwap { remote: location, expected, desired };
        self.endpoint.post(second, &[copy, verify]);
        self.is_busy[usize::from(lane.0)].set(true);
        Ok(())
    }

    fn second(&self, lane: LaneId) -> LaneId {
        LaneId(lane.0 + self.demand.depth)
    }

    /// Waits for the chain that the lane's last update left in flight.
    async fn wait_for_last_chain(&self, lane: LaneId) -> Result<()> {
        poll_fn(|_| self.poll_last(lane)).await
    }

    /// Returns the result of the chain that the lane's last update left in flight, once it is
    /// complete.
    fn poll_last(&self, lane: LaneId) -> Poll<Result<()>> {
        let is_busy = &self.is_busy[usize::from(lane.0)];
        if !is_busy.get() {
            return Poll::Ready(Ok(()));
        }
        let Some(result) = self.endpoint.inner.take_result(self.second(lane)) else {
            return Poll::Pending;
        };
        is_busy.set(false);
        Poll::Ready(result.map(drop).map_err(PeerError::from))
    }

    async fn insert(&self, lane: LaneId, key: &Key, value: &[u8]) -> Result<bool> {
        let (slots, tag) = self.slots(key);
        let location = self.locations.borrow_mut().take()?;
        let metadata = self.new_metadata(0).verified();
        let bytes = location_bytes(value.len());
        self.endpoint.fill(lane, |image| {
            image[..WORD_BYTES].copy_from_slice(&metadata.0.to_le_bytes());
            write_hashed(&mut image[WORD_BYTES..], metadata, value);
            image[bytes as usize - KEY_BYTES..][..KEY_BYTES].copy_from_slice(key);
        });
        let write = Verb::Write { remote: location, from: Buffer::NewBlock, bytes: bytes as u32 };
        let [first, second] = slots.reads();
        self.endpoint.chain(lane, &[write, first, second]).await?;
        for _ in 0..ATTEMPTS_MAX {
            if self.search(lane, &slots, key).await?.is_some() {
                self.locations.borrow_mut().give(location);
                return Ok(false);
            }
            let free = self.endpoint.find(lane, &slots, 0, |word| word == Word::FREE);
            let slot = free.ok_or(PeerError::OutOfMemory)?;
            let (remote, expected) = (slot.address, slot.word.0);
            let desired = Word::new(slots.fingerprint, location).0;
            let swap = Verb::CompareSwap { remote, expected, desired };
            if self.endpoint.chain(lane, &[swap]).await? == expected {
                self.cache.insert(tag, Cached { location, metadata });
                return Ok(true);
            }
            self.endpoint.chain(lane, &slots.reads()).await?;
        }
        Err(PeerError::Contended(ATTEMPTS_MAX))
    }
}

/// Writes a value with its hash to the start of the buffer.
#[inline]
fn write_hashed(buffer: &mut [u8], metadata: Metadata, value: &[u8]) {
    buffer[..WORD_BYTES].copy_from_slice(&metadata.hash(value).to_le_bytes());
    buffer[WORD_BYTES..][..value.len()].copy_from_slice(value);
}

impl<F: Fabric> Peer for Swarm<F> {
    type Fabric = F;
    const LANES: u16 = 2;

    fn endpoint(&self) -> &Endpoint<F> {
        &self.endpoint.inner
    }

    async fn get(&self, lane: LaneId, key: &Key, value: &mut Vec<u8>) -> Result<bool> {
        let (slots, tag) = self.slots(key);
        let bytes = WORD_BYTES as u64 + hashed_bytes(self.demand.value_bytes);
        for _ in 0..ATTEMPTS_MAX {
            if let Some(Cached { location, .. }) = self.cache.get(tag) {
                let read =
                    Verb::Read { remote: location, into: Buffer::ReadBlock, bytes: bytes as u32 };
                self.endpoint.chain(lane, &[read]).await?;
            } else {
                self.endpoint.chain(lane, &slots.reads()).await?;
                let Some(slot) = self.search(lane, &slots, key).await? else { return Ok(false) };
                let metadata = Metadata(word_at(&self.endpoint.buffer(lane, Buffer::ReadBlock), 0));
                self.cache.insert(tag, Cached { location: slot.word.address(), metadata });
            }
            if self.value(lane, value).await? {
                return Ok(true);
            }
        }
        Err(PeerError::Contended(ATTEMPTS_MAX))
    }

    async fn store(&self, lane: LaneId, key: &Key, value: &[u8], is_insert: bool) -> Result<bool> {
        if is_insert {
            self.insert(lane, key, value).await
        } else {
            self.put(lane, key, value).await
        }
    }

    fn has_no_chain_in_flight(&self) -> bool {
        // An error is ignored here: the next verb fails as well and reports it.
        (0..self.demand.depth).all(|lane| self.poll_last(LaneId(lane)).is_ready())
    }

    async fn wait_for_chains(&self) -> Result<()> {
        for lane in 0..self.demand.depth {
            self.wait_for_last_chain(LaneId(lane)).await?;
        }
        Ok(())
    }
}
