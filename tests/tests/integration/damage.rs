//! Proves that no damage of a region makes the client library panic, loop, or return a value that
//! was not stored under the key. When a bit flips, the outcome is the right value, a miss or an
//! error, in a bounded time.
//!
//! A real server has its region in a file, which the test maps and damages. After each change under
//! damage the test restores the words that the change can have written. GRACE is longer than a
//! test, so no block that was unlinked, and is restored, has been reused.

mod bits;
mod flood;
mod mending;
mod words;

use std::fmt::Display;
use std::time::{Duration, Instant};

use farside::{Result, Session};
use farside_fabric::memory::Region;
use farside_layout::hash::{KeyHash, KeyHasher};
use farside_layout::{
    DirectoryEntry, Format, Geometry, HINT_OFFSET, ROWS_PER_SUBTABLE, SLOTS_PER_ROW, SlotState,
    SlotWord, Superblock, WINDOW_BYTES, slot_in_subtable,
};
use farside_tests::{ServerProcess, self_describing};

/// Limit on a single call, for a machine that is busy with other tests.
const CALL_MAX: Duration = Duration::from_secs(60);
const GRACE_MS_MAX: &str = "60000";
/// The number of low bits of a word with its block's address, class and generation.
const TARGET_BITS: u32 = 46;

/// A key, and its value before the damage.
#[derive(Clone)]
struct Sample {
    key: Vec<u8>,
    value: Vec<u8>,
}

/// Returns the `count`-th value of a key, of any length.
fn value(key: u64, count: u64, bytes: usize) -> Vec<u8> {
    self_describing::value(key, 0, count, self_describing::HEADER_BYTES + bytes)
        .split_off(self_describing::HEADER_BYTES)
}

/// A server whose region the test maps.
struct Scene {
    server: ServerProcess,
    region: Region,
    geometry: Geometry,
    depth: u8,
    hasher: KeyHasher,
    started: Instant,
}

impl Scene {
    fn new(arguments: &str) -> Self {
        let server = ServerProcess::start_with_file(arguments);
        let path = server.region_file();
        let file = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
        let region = Region::map(&file).unwrap();
        let (superblock, format) = superblock(&region);
        let geometry = format.geometry();
        let depth = superblock.directory_depth(&geometry).unwrap();
        let hasher = KeyHasher::new(&format.hash_key);
        Self { server, region, geometry, depth, hasher, started: Instant::now() }
    }

    /// Whether no freed block can be in use again, if GRACE is [`GRACE_MS_MAX`].
    fn is_in_grace(&self) -> bool {
        self.started.elapsed() < Duration::from_secs(55)
    }

    /// Returns a session with a location cache.
    fn warm(&self) -> Session {
        let builder = self.server.client_builder().cache_bytes(1 << 16);
        builder.connect().unwrap().session().unwrap()
    }

    /// Returns a session without a location cache.
    fn cold(&self) -> Session {
        self.server.client_builder().cache_bytes(0).connect().unwrap().session().unwrap()
    }

    fn hash(&self, key: &[u8]) -> KeyHash {
        self.hasher.hash(key)
    }

    fn directory_entry(&self, hash: KeyHash) -> u64 {
        self.geometry.directory_offset(self.depth).unwrap() + 8 * hash.directory_index(self.depth)
    }

    /// Returns the offset of the key's window.
    fn window(&self, key: &[u8]) -> u64 {
        let hash = self.hash(key);
        let bits = self.region.load(self.directory_entry(hash)).unwrap();
        let subtable = DirectoryEntry::from_bits(bits).subtable(&self.geometry).unwrap();
        subtable + hash.window_offset()
    }

    /// Returns the offsets of a window's slots.
    fn slots(&self, window: u64) -> impl Iterator<Item = u64> + use<> {
        (0..2 * SLOTS_PER_ROW)
            .map(move |n| window + slot_in_subtable(n / SLOTS_PER_ROW, n % SLOTS_PER_ROW))
    }

    /// Returns the offsets of the slots of a subtable.
    fn subtable_slots(&self, subtable: u64) -> impl Iterator<Item = u64> + use<> {
        (0..ROWS_PER_SUBTABLE * SLOTS_PER_ROW)
            .map(move |n| subtable + slot_in_subtable(n / SLOTS_PER_ROW, n % SLOTS_PER_ROW))
    }

    fn word(&self, slot: u64) -> SlotWord {
        SlotWord::from_bits(self.region.load(slot).unwrap())
    }

    /// Returns the slot with the key's LIVE word.
    fn slot_of(&self, key: &[u8]) -> u64 {
        let hash = self.hash(key);
        let is_its_slot = |slot: &u64| {
            let hint = self.region.load(slot + HINT_OFFSET).unwrap();
            let word = self.word(*slot);
            // EMPTY keeps the hint of the key that was there.
            word.state() == SlotState::Live && hint == hash.hint(word.incarnation())
        };
        self.slots(self.window(key)).find(is_its_slot).unwrap()
    }

    fn flip(&self, at: Bit) {
        let word = self.region.load(at.offset).unwrap();
        self.region.store(at.offset, word ^ 1 << at.bit).unwrap();
    }

    /// Returns the words of a window, and the headers of all blocks its words point to as they are
    /// now.
    fn save(&self, window: u64) -> Saved {
        let mut saved = Saved(Vec::new());
        saved.keep(&self.region, window, WINDOW_BYTES / 8);
        for slot in self.slots(window) {
            saved.keep_block(&self.region, self.word(slot));
        }
        saved
    }
}

fn superblock(region: &Region) -> (Superblock, Format) {
    let mut words = [0; 64];
    region.read(0, &mut words).unwrap();
    let bytes: Vec<u8> = words.into_iter().flat_map(u64::to_le_bytes).collect();
    Superblock::decode(&bytes, region.bytes()).unwrap()
}

/// One bit of the region.
#[derive(Clone, Copy, Debug)]
struct Bit {
    /// The offset of its word, in bytes.
    offset: u64,
    bit: u32,
}

/// Returns the bits of `words` words from an offset on.
fn bits(offset: u64, words: u64) -> impl Iterator<Item = Bit> {
    (0..words * 64).map(move |n| Bit { offset: offset + n / 64 * 8, bit: (n % 64) as u32 })
}

/// Offsets of words, and their values before a change.
struct Saved(Vec<(u64, u64)>);

impl Saved {
    fn keep(&mut self, region: &Region, offset: u64, words: u64) {
        for offset in (0..words).map(|n| offset + n * 8) {
            let known = self.0.iter().any(|(saved, _)| *saved == offset);
            if let (false, Ok(word)) = (known, region.load(offset)) {
                self.0.push((offset, word));
            }
        }
    }

    /// The header of the block a word points to, wherever that is.
    fn keep_block(&mut self, region: &Region, word: SlotWord) {
        if let Ok(block) = word.block() {
            self.keep(region, block.address.claimed_offset(), 4);
        }
    }

    fn restore(&self, region: &Region) {
        self.0.iter().for_each(|(offset, word)| region.store(*offset, *word).unwrap());
    }
}

/// Makes a call, and checks that it returns within the limit.
fn timed<T>(what: &dyn Display, call: impl FnOnce() -> T) -> T {
    let started = Instant::now();
    let output = call();
    let took = started.elapsed();
    assert!(took < CALL_MAX, "{what}: {took:?}");
    output
}

/// A GET under damage: it must return one of these values, a miss, or an error.
fn get(session: &mut Session, key: &[u8], allowed: &[&[u8]], what: &dyn Display) -> Result<bool> {
    let found = timed(what, || session.get(key))?;
    if let Some(found) = &found {
        let right = allowed.contains(&found.data.as_slice());
        assert!(right, "{what}: GET has a wrong value of {} bytes", found.len());
    }
    Ok(found.is_some())
}

/// The changes that are tried under damage.
#[derive(Clone, Copy, Debug)]
enum Change {
    Put,
    Insert,
    Update,
    Delete,
    Exchange,
}

const CHANGES: [Change; 5] =
    [Change::Put, Change::Insert, Change::Update, Change::Delete, Change::Exchange];

impl Change {
    /// Changes the key's value from `old` to `new`; returns the values that it can then have.
    fn apply<'v>(
        self,
        session: &mut Session,
        key: &[u8],
        old: &'v [u8],
        new: &'v [u8],
        what: &dyn Display,
    ) -> Vec<&'v [u8]> {
        let done = timed(what, || match self {
            Self::Put => session.put(key, new).map(|()| true),
            Self::Insert => session.insert(key, new),
            Self::Update => session.update(key, new),
            Self::Delete => session.delete(key),
            Self::Exchange => session.compare_exchange(key, Some(old), new).map(|outcome| {
                if let Some(found) = &outcome.value {
                    let known = [old, new].contains(&found.data.as_slice());
                    assert!(known, "{what}: a value that was not stored");
                }
                outcome.applied
            }),
        });
        match (self, done) {
            (Self::Delete, Ok(true)) => vec![],
            (_, Ok(true)) => vec![new],
            // A failed operation changed nothing.
            (_, Ok(false) | Err(_)) => vec![old],
        }
    }
}
