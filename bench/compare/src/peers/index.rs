//! The common part of FUSEE and RACE: entries in pieces of memory, and the index of RACE hashing
//! (ATC'21), at a fixed size. It has groups of three buckets, of which the middle one is the
//! overflow of both others. A key has two choices in two groups. A choice is an outer bucket and
//! the middle one, which one READ of 128 bytes reads. A bucket is a header and 7 slots of 8 bytes.
//! Only resizing would use the header.

use std::cell::RefCell;

use farside_bench::records::{KEY_BYTES, Key};
use farside_fabric::{Buffer, Fabric, LaneId, Verb};
use farside_layout::checksum;
use farside_layout::hash::KeyHash;

use super::{Heap, PeerDemand, PeerEndpoint, Pieces, Result, Segments, segments};

const BUCKET_BYTES: u64 = 64;
const GROUP_BYTES: u64 = 3 * BUCKET_BYTES;
/// The length of a choice: an outer bucket and the middle one.
const CHOICE_BYTES: u64 = 2 * BUCKET_BYTES;
const WORDS_PER_BUCKET: usize = 8;
const WORDS_PER_CHOICE: usize = 2 * WORDS_PER_BUCKET;
/// The number of records for each group, which has 21 slots. With more records a choice could
/// become full, and the index does not resize.
const RECORDS_PER_GROUP: u64 = 8;
/// The lowest number of groups: a key needs two groups, and a few keys need some room.
const GROUPS_MIN: u64 = 16;

/// The buffers for READs of the two choices. The second is the source of the chain's WRITE. It can
/// be overwritten, because its READ is answered only once that WRITE has arrived.
const BUFFERS: [Buffer; 2] = [Buffer::Window, Buffer::NewBlock];

/// A slot's content: 0, or a fingerprint and an address in 48 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Word(pub u64);

impl Word {
    /// The word of a free slot.
    pub const FREE: Self = Self(0);
    const ADDRESS_BITS: u32 = 48;

    /// A word with this fingerprint and address.
    pub const fn new(fingerprint: u8, address: u64) -> Self {
        Self((fingerprint as u64) << Self::ADDRESS_BITS | address)
    }

    /// The address of the entry.
    pub const fn address(self) -> u64 {
        self.0 & ((1 << Self::ADDRESS_BITS) - 1)
    }

    /// Whether the entry may be that of a key with this fingerprint.
    pub const fn fits(self, fingerprint: u8) -> bool {
        self.0 != 0 && (self.0 >> Self::ADDRESS_BITS) as u8 == fingerprint
    }
}

/// The slots where a key can be.
#[derive(Clone, Copy)]
pub struct KeySlots {
    /// The fingerprint of the key.
    pub fingerprint: u8,
    choices: [u64; 2],
}

impl KeySlots {
    /// Returns the READs of both choices.
    #[inline]
    pub fn reads(&self) -> [Verb; 2] {
        let read = |choice: usize| Verb::Read {
            remote: self.choices[choice],
            into: BUFFERS[choice],
            bytes: CHOICE_BYTES as u32,
        };
        [read(0), read(1)]
    }

    /// Finds the first slot with a wanted word in the choices that were read, from this number on.
    #[inline]
    pub fn find(
        &self,
        read: impl Fn(Buffer) -> [u64; WORDS_PER_CHOICE],
        from: usize,
        wanted: impl Fn(Word) -> bool,
    ) -> Option<Slot> {
        for (choice, buffer) in BUFFERS.into_iter().enumerate().skip(from / WORDS_PER_CHOICE) {
            let words = read(buffer);
            let first = from.saturating_sub(choice * WORDS_PER_CHOICE);
            for (at, bits) in words.into_iter().enumerate().skip(first) {
                if at % WORDS_PER_BUCKET != 0 && wanted(Word(bits)) {
                    let address = self.choices[choice] + 8 * at as u64;
                    let number = choice * WORDS_PER_CHOICE + at;
                    return Some(Slot { number, address, word: Word(bits) });
                }
            }
        }
        None
    }
}

/// Decodes the words of a choice from the buffer that it was read into.
#[inline]
pub fn words(buffer: &[u8]) -> [u64; WORDS_PER_CHOICE] {
    let (words, _) = buffer.as_chunks::<8>();
    std::array::from_fn(|at| u64::from_le_bytes(words[at]))
}

/// A slot as it was read.
#[derive(Clone, Copy, Debug)]
pub struct Slot {
    /// The slot's number among the slots of the key.
    pub number: usize,
    /// The slot's address in the region.
    pub address: u64,
    /// The slot's content.
    pub word: Word,
}

/// The index.
pub struct Index {
    groups: Pieces,
}

impl Index {
    /// An index for this number of records.
    pub fn new(memory: &mut Segments, records: u64) -> Result<Self> {
        Ok(Self { groups: memory.cut(GROUP_BYTES, groups(records))? })
    }

    /// How many segments of memory the index needs.
    pub fn segments(records: u64) -> u64 {
        segments(GROUP_BYTES, groups(records))
    }

    /// The memory of the index. It has to be zeroed before the first use.
    pub fn groups(&self) -> &Pieces {
        &self.groups
    }

    /// The slots where a key can be.
    #[inline]
    pub fn slots(&self, hash: KeyHash) -> KeySlots {
        let (count, tag) = (self.groups.count(), hash.identity());
        let scaled = |bits: u64, bound: u64| (bits * bound) >> 32;
        let first = scaled(hash.directory().into(), count);
        // This is never the first choice's group.
        let second = (first + 1 + scaled(tag >> 32, count - 1)) % count;
        let choice = |group, bit: u32| self.groups.at(group) + (tag >> bit & 1) * BUCKET_BYTES;
        KeySlots { fingerprint: hash.fingerprint(), choices: [choice(first, 8), choice(second, 9)] }
    }
}

fn groups(records: u64) -> u64 {
    records.div_ceil(RECORDS_PER_GROUP).max(GROUPS_MIN)
}

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
    use farside_bench::records;
    use farside_layout::hash::KeyHasher;

    use super::*;

    #[test]
    fn a_key_has_28_slots_in_two_groups_and_no_header() {
        let mut memory = Segments::new((1..9).map(|n| n << 30).collect());
        let index = Index::new(&mut memory, 100_000).unwrap();
        let hasher = KeyHasher::new(&[7; 16]);
        for number in 0..1000u64 {
            let slots = index.slots(hasher.hash(&number.to_le_bytes()));
            let mut addresses = Vec::new();
            let mut from = 0;
            while let Some(slot) = slots.find(|_| [0; 16], from, |word| word == Word::FREE) {
                addresses.push(slot.address);
                from = slot.number + 1;
            }
            assert_eq!(addresses.len(), 28);
            addresses.sort_unstable();
            addresses.dedup();
            assert_eq!(addresses.len(), 28);
            assert!(addresses.iter().all(|address| address % BUCKET_BYTES != 0));
        }
    }

    #[test]
    fn a_word_has_its_address_and_fits_its_fingerprint() {
        let word = Word::new(0xab, 0x1234_5678_9abc);
        assert_eq!(word.address(), 0x1234_5678_9abc);
        assert!(word.fits(0xab) && !word.fits(0xac) && !Word::FREE.fits(0));
    }

    #[test]
    fn an_entry_is_decoded_unless_it_is_damaged() {
        for value in [&b""[..], b"seven b", b"much more than that"] {
            let mut buffer = vec![0; entry_bytes(value.len()) as usize];
            encode(&mut buffer, &records::key_of(3), value);
            assert_eq!(decode(&buffer, &records::key_of(3)), Some(value));
            assert_eq!(decode(&buffer, &records::key_of(4)), None);
            for byte in 0..VALUE_OFFSET + value.len() {
                buffer[byte] ^= 1;
                assert_eq!(decode(&buffer, &records::key_of(3)), None, "{byte}");
                buffer[byte] ^= 1;
            }
        }
    }
}
