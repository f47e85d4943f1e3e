//! The index of RACE hashing (ATC'21), which FUSEE uses as well, at a fixed size. It has groups of
//! three buckets, of which the middle one is the overflow of both others. A key has two choices in
//! two groups. A choice is an outer bucket and the middle one, which one READ of 128 bytes reads. A
//! bucket is a header and 7 slots of 8 bytes. Only resizing would use the header.

use farside_fabric::{Buffer, Verb};
use farside_layout::hash::KeyHash;

use super::Result;
use super::memory::{Pieces, Segments, segments};

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

#[cfg(test)]
mod tests {
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
}
