//! RACE's index, and entries in pieces of memory: the common part of FUSEE and RACE.

use std::cell::RefCell;

use farside_bench::keys::{KEY_BYTES, Key};
use farside_fabric::{Buffer, Fabric, LaneId, Verb};
use farside_layout::checksum::checksum;

use super::endpoint::PeerEndpoint;
use super::index::{Index, KeySlots, Slot, Word};
use super::memory::{Heap, Segments, segments};
use super::{PeerDemand, Result};

/// The index and the entries it leads to.
pub struct Table<F> {
    /// The endpoint.
    pub endpoint: PeerEndpoint<F>,
    index: Index,
    heap: RefCell<Heap>,
    /// The length of an entry, without the tail that may follow it.
    entry_bytes: u64,
}

impl<F: Fabric> Table<F> {
    /// An empty table. `tail_bytes` is the length of the tail that follows each entry.
    pub fn new(
        fabric: F,
        memory: &mut Segments,
        demand: PeerDemand,
        tail_bytes: u64,
    ) -> Result<Self> {
        let entry_bytes = entry_bytes(demand.value_bytes);
        let endpoint = PeerEndpoint::new(fabric, demand.depth, entry_bytes + tail_bytes);
        let index = Index::new(memory, demand.records)?;
        endpoint.clear(index.groups())?;
        let heap = Heap::new(memory.cut(entry_bytes + tail_bytes, demand.pieces())?);
        Ok(Self { endpoint, index, heap: RefCell::new(heap), entry_bytes })
    }

    /// How many segments of memory the table needs.
    pub fn segments(demand: PeerDemand, tail_bytes: u64) -> u64 {
        let piece_bytes = entry_bytes(demand.value_bytes) + tail_bytes;
        Index::segments(demand.records) + segments(piece_bytes, demand.pieces())
    }

    /// The slots where a key can be, and the tag by which it is cached.
    #[inline]
    pub fn slots(&self, key: &Key) -> (KeySlots, u64) {
        let hash = self.endpoint.hasher.hash(key);
        (self.index.slots(hash), hash.identity())
    }

    /// Returns the READ of the entry at a slot's address.
    #[inline]
    pub fn read(&self, word: Word) -> Verb {
        let (remote, bytes) = (word.address(), self.entry_bytes as u32);
        Verb::Read { remote, into: Buffer::ReadBlock, bytes }
    }

    /// Takes a piece for an entry. Returns its word, and the WRITE of the entry and `tail_bytes` of
    /// zeros after it.
    #[inline]
    pub fn stage(
        &self,
        lane: LaneId,
        (key, value): (&Key, &[u8]),
        fingerprint: u8,
        tail_bytes: u64,
    ) -> Result<(Word, Verb)> {
        let remote = self.heap.borrow_mut().take()?;
        let bytes = entry_bytes(value.len()) + tail_bytes;
        self.endpoint.fill(lane, |image| {
            encode(image, key, value);
            image[entry_bytes(value.len()) as usize..bytes as usize].fill(0);
        });
        let write = Verb::Write { remote, from: Buffer::NewBlock, bytes: bytes as u32 };
        Ok((Word::new(fingerprint, remote), write))
    }

    /// The address of an entry's tail.
    #[inline]
    pub fn tail(&self, word: Word) -> u64 {
        word.address() + self.entry_bytes
    }

    /// Gives the entry's piece back.
    #[inline]
    pub fn free(&self, word: Word) {
        self.heap.borrow_mut().give(word.address());
    }

    /// Copies the value of the entry just read into `value`, if the entry is complete and has this
    /// key. Returns whether it does.
    #[inline]
    pub fn copy_if_found(&self, lane: LaneId, key: &Key, value: Option<&mut Vec<u8>>) -> bool {
        let block = self.endpoint.buffer(lane, Buffer::ReadBlock);
        let Some(found) = decode(&block, key) else { return false };
        if let Some(value) = value {
            value.clear();
            value.extend_from_slice(found);
        }
        true
    }

    /// Looks for the key among the choices just read. It takes one round trip for each slot that
    /// its fingerprint fits, except the one whose entry was read with them.
    #[inline]
    pub async fn search(
        &self,
        lane: LaneId,
        slots: &KeySlots,
        key: &Key,
        read_already: Option<Word>,
        mut value: Option<&mut Vec<u8>>,
    ) -> Result<Option<Slot>> {
        if let Some(word) = read_already
            && let Some(slot) = self.endpoint.find(lane, slots, 0, |found| found == word)
            && self.copy_if_found(lane, key, value.as_deref_mut())
        {
            return Ok(Some(slot));
        }
        let mut from = 0;
        while let Some(slot) =
            self.endpoint.find(lane, slots, from, |word| word.fits(slots.fingerprint))
        {
            self.endpoint.chain(lane, &[self.read(slot.word)]).await?;
            if self.copy_if_found(lane, key, value.as_deref_mut()) {
                return Ok(Some(slot));
            }
            from = slot.number + 1;
        }
        Ok(None)
    }
}

/// The length of an entry's header: a checksum, and the length of the value.
const HEADER_BYTES: usize = 8;
const LENGTH_OFFSET: usize = 4;
const VALUE_OFFSET: usize = HEADER_BYTES + KEY_BYTES;

/// How many bytes an entry takes, in whole words.
const fn entry_bytes(value_bytes: usize) -> u64 {
    (VALUE_OFFSET + value_bytes).next_multiple_of(8) as u64
}

/// Writes an entry to the start of the buffer.
#[inline]
fn encode(buffer: &mut [u8], key: &Key, value: &[u8]) {
    let entry = &mut buffer[..VALUE_OFFSET + value.len()];
    entry[LENGTH_OFFSET..HEADER_BYTES].copy_from_slice(&(value.len() as u32).to_le_bytes());
    entry[HEADER_BYTES..VALUE_OFFSET].copy_from_slice(key);
    entry[VALUE_OFFSET..].copy_from_slice(value);
    let checksum = checksum(&entry[LENGTH_OFFSET..], 0);
    entry[..LENGTH_OFFSET].copy_from_slice(&checksum.to_le_bytes());
}

/// Returns the value, if the buffer starts with a complete entry of this key.
#[inline]
fn decode<'b>(buffer: &'b [u8], key: &Key) -> Option<&'b [u8]> {
    let (expected, rest) = buffer.split_first_chunk::<LENGTH_OFFSET>()?;
    let (length, rest) = rest.split_first_chunk::<LENGTH_OFFSET>()?;
    let value_bytes = u32::from_le_bytes(*length) as usize;
    let value = rest.strip_prefix(key)?.get(..value_bytes)?;
    let covered = &buffer[LENGTH_OFFSET..VALUE_OFFSET + value_bytes];
    (checksum(covered, 0) == u32::from_le_bytes(*expected)).then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use farside_bench::keys;

    #[test]
    fn an_entry_is_decoded_unless_it_is_damaged() {
        for value in [&b""[..], b"seven b", b"much more than that"] {
            let mut buffer = vec![0; entry_bytes(value.len()) as usize];
            encode(&mut buffer, &keys::encode(3), value);
            assert_eq!(decode(&buffer, &keys::encode(3)), Some(value));
            assert_eq!(decode(&buffer, &keys::encode(4)), None);
            for byte in 0..VALUE_OFFSET + value.len() {
                buffer[byte] ^= 1;
                assert_eq!(decode(&buffer, &keys::encode(3)), None, "{byte}");
                buffer[byte] ^= 1;
            }
        }
    }
}
