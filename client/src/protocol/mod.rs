//! The operations, once, as async functions over the fabric: every `.await` is a round trip.
//!
//! `docs/protocol.md` has the protocol, why it is right, and the numbered invariants cited here.

mod conditional;
mod delete;
mod get;
mod insert;
mod put;
mod scan;
#[cfg(test)]
mod tests;
mod window;

use std::cell::Cell;

use farside_common::control::FreeBlock;
use farside_common::fabric::{Buffer, ChainError, Fabric, LaneId, Nanos, Verb};
use farside_common::hash::KeyHash;
use farside_common::layout::{
    BLOCK_HEADER_BYTES, Block, BlockHeader, BlockRef, BlockStamp, HeaderWord, LayoutError,
    SUPERSEDED, SlotState, SlotWord, WORD_GENERATIONS, class_for, seal,
};

use zerocopy::FromBytes;

use crate::Error;
use crate::allocator::Depot;
use crate::engine::{Engine, Failure};
use crate::location_cache::Location;

pub(crate) use conditional::{Compared, Expected};
pub(crate) use scan::{ScannedSlot, read_entry, read_subtable};

/// How often an operation that others keep disturbing is tried.
const ATTEMPTS_MAX: u32 = 128;
/// The longest random pause between two attempts is this, doubled with each attempt ...
const BACKOFF_NS: Nanos = 250;
/// ... this often.
const BACKOFF_DOUBLINGS_MAX: u32 = 10;

type Outcome<T> = Result<T, Failure>;

/// One operation on one key, on one lane. The key stands in the lane's image buffer, where the
/// block of a PUT wants it.
pub(crate) struct Operation<'e, F, D: Depot> {
    engine: &'e Engine<F, D>,
    lane: LaneId,
    hash: KeyHash,
    key_bytes: usize,
    value_bytes: usize,
}

/// A value that a GET found; the bytes are in the lane's block buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found {
    pub(crate) location: Location,
    pub(crate) value_start: usize,
    pub(crate) value_bytes: usize,
}

/// A slot that is the key's, as seen during this operation or proved before.
#[derive(Clone, Copy, Debug)]
struct Target {
    slot: u64,
    word: SlotWord,
    /// The full generation of its block, where it is known.
    generation: Option<u32>,
    /// When the READ or compare-and-swap that last proved it was posted.
    proved_at: Nanos,
}

impl From<Location> for Target {
    fn from(location: Location) -> Self {
        let Location { slot, word, generation, proved_at, .. } = location;
        Self { slot, word, generation: Some(generation), proved_at }
    }
}

/// A block of our own, sealed in the image buffer.
struct NewBlock {
    free: FreeBlock,
    block: BlockRef,
    /// How much of it there is to WRITE, in bytes.
    write_bytes: u32,
    /// It stands in the region already, unlinked.
    written: Cell<bool>,
}

/// Whether a new block ended up linked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Linked {
    Yes,
    No,
}

/// How a compare-and-swap of a slot went.
#[derive(Clone, Copy, Debug)]
enum Swung {
    Done,
    /// The slot held this instead.
    Lost(SlotWord),
    /// It was too late for the compare-and-swap: it did not happen.
    Late,
}

/// What a block that was READ turned out to be.
enum Examined {
    Ours(Found, HeaderWord),
    Other,
    Damaged(LayoutError),
}

impl<'e, F: Fabric, D: Depot> Operation<'e, F, D> {
    /// Prepares an operation: the key, and the value if it has one, are copied into the lane's
    /// image. Both must be within the region's limits.
    #[inline]
    pub(crate) fn stage(engine: &'e Engine<F, D>, lane: LaneId, key: &[u8], value: &[u8]) -> Self {
        Self::fill(engine, lane, key, value);
        Self::staged(engine, lane, engine.hasher.hash(key), key.len(), value.len())
    }

    /// Copies key and value into the lane's image.
    #[inline]
    pub(crate) fn fill(engine: &Engine<F, D>, lane: LaneId, key: &[u8], value: &[u8]) {
        let start = BLOCK_HEADER_BYTES as usize;
        let (key_end, end) = (start + key.len(), start + key.len() + value.len());
        let mut fabric = engine.endpoint.fabric_mut();
        fabric.reserve(lane, Buffer::Image, end);
        let image = fabric.buffer_mut(lane, Buffer::Image);
        image[start..key_end].copy_from_slice(key);
        if !value.is_empty() {
            image[key_end..end].copy_from_slice(value);
        }
    }

    /// An operation whose key, with this hash, and value stand in the lane's image already.
    #[inline]
    pub(crate) fn staged(
        engine: &'e Engine<F, D>,
        lane: LaneId,
        hash: KeyHash,
        key_bytes: usize,
        value_bytes: usize,
    ) -> Self {
        Self { engine, lane, hash, key_bytes, value_bytes }
    }

    #[inline]
    fn now(&self) -> Nanos {
        self.engine.endpoint.now()
    }

    /// Whether what was seen in a READ posted then is still to be believed (invariant I3).
    #[inline]
    fn is_fresh(&self, posted: Nanos) -> bool {
        self.now().saturating_sub(posted) <= self.engine.constants.patience_ns
    }

    /// One round trip.
    #[inline]
    async fn chain(&self, verbs: &[Verb], posted: Nanos) -> Result<u64, ChainError> {
        let deadline = posted.saturating_add(self.engine.constants.lateness_ns);
        self.engine.endpoint.chain(self.lane, verbs, deadline).await
    }

    /// A pause before the next attempt: random, so that two clients do not stay in step.
    async fn back_off(&self, attempt: u32) {
        let most = BACKOFF_NS << attempt.min(BACKOFF_DOUBLINGS_MAX);
        let pause = self.engine.random_below(most);
        self.engine.endpoint.sleep_until(self.lane, self.now() + pause).await;
    }

    fn contended(&self) -> Failure {
        Error::Contended { attempts: ATTEMPTS_MAX }.into()
    }

    /// READs a block into the block buffer. One round trip.
    async fn read_block(&self, block: BlockRef, posted: Nanos) -> Outcome<()> {
        self.engine.geometry.check_block(block)?;
        self.chain(&[read_block(block)], posted).await?;
        Ok(())
    }

    /// What the block that was READ is to this key.
    #[inline]
    fn examine(&self, slot: u64, word: SlotWord, block: BlockRef, posted: Nanos) -> Examined {
        let fabric = self.engine.endpoint.fabric();
        let bytes = fabric.buffer(self.lane, Buffer::Block);
        let image = fabric.buffer(self.lane, Buffer::Image);
        let bytes = &bytes[..block.class.block_bytes() as usize];
        let found = match Block::decode(bytes, block.address) {
            Ok(found) => found,
            Err(error) => return Examined::Damaged(error),
        };
        let header = found.header_word();
        if header.generation as u8 != block.generation_low {
            let (field, value) = ("generation", u64::from(header.generation));
            return Examined::Damaged(LayoutError::Field { field, value });
        }
        let start = BLOCK_HEADER_BYTES as usize;
        if found.key() != &image[start..start + self.key_bytes] {
            return Examined::Other;
        }
        let location = Location {
            slot,
            word,
            generation: header.generation,
            poisoned: header.superseded,
            proved_at: posted,
        };
        let (value_start, value_bytes) = (start + self.key_bytes, found.value().len());
        Examined::Ours(Found { location, value_start, value_bytes }, header)
    }

    /// Takes a free block and seals key and value into it.
    async fn new_block(&self) -> Outcome<NewBlock> {
        let Some(class) = class_for(self.key_bytes, self.value_bytes) else {
            let bytes = self.value_bytes;
            let max = self.engine.format.value_bytes_max as usize;
            return Err(Error::ValueTooLong { bytes, max }.into());
        };
        let free = self.engine.take_block(self.lane, class).await?;
        let generation_low = (u64::from(free.generation) % WORD_GENERATIONS) as u8;
        let block = BlockRef { address: free.address, class, generation_low };
        self.engine.geometry.check_block(block)?;
        let stamp = BlockStamp {
            address: free.address,
            generation: free.generation,
            writer: self.engine.client_id,
            written_at_ns: self.engine.wall_clock_ns(self.now()),
            expires_at_s: 0,
        };
        let total = BLOCK_HEADER_BYTES as usize + self.key_bytes + self.value_bytes;
        let write_bytes = total.next_multiple_of(8);
        let mut fabric = self.engine.endpoint.fabric_mut();
        fabric.reserve(self.lane, Buffer::Image, write_bytes);
        let image = fabric.buffer_mut(self.lane, Buffer::Image);
        image[total..write_bytes].fill(0);
        seal(image, self.key_bytes as u16, self.value_bytes as u32, stamp)?;
        Ok(NewBlock { free, block, write_bytes: write_bytes as u32, written: Cell::new(false) })
    }

    /// Gives a new block back unless it got linked, or may have been, or a lost connection left a
    /// PENDING word that still points to it.
    fn settle(&self, new: &NewBlock, outcome: Outcome<Linked>) -> Outcome<Linked> {
        let unlinked = match &outcome {
            Ok(linked) => *linked == Linked::No,
            Err(Failure::Disconnected | Failure::Error(Error::Indeterminate)) => false,
            Err(Failure::Error(_)) => true,
        };
        if unlinked {
            self.engine.allocator().put_back(new.block.class, new.free);
        }
        outcome
    }

    /// The update: `[WRITE new][WRITE superseded at the old][CAS slot]`, one round trip. The mark
    /// stands before the CAS in the chain: invariant I2. With `new` absent it unlinks only.
    ///
    /// Not tried with a word whose proof is older than T_word: it may have come again for another
    /// key by the time the chain takes effect (invariant I4).
    async fn swing(
        &self,
        target: Target,
        new: Option<&NewBlock>,
        desired: SlotWord,
    ) -> Outcome<Swung> {
        let posted = self.now();
        if posted.saturating_sub(target.proved_at) > self.engine.constants.word_ns {
            return Ok(Swung::Late);
        }
        let old = target.word.block()?;
        self.engine.geometry.check_block(old)?;
        let old_offset = old.address.offset();
        let cas = Verb::CompareSwap {
            remote: target.slot,
            expected: target.word.bits(),
            desired: desired.bits(),
        };
        let mark = Verb::WriteHalf { remote: old_offset, value: SUPERSEDED };
        let key_end = (BLOCK_HEADER_BYTES as usize + self.key_bytes).next_multiple_of(8);
        let bytes = (key_end as u64).min(old.class.block_bytes()) as u32;
        let header = Verb::Read { remote: old_offset, into: Buffer::Block, bytes };
        let mut chain = [mark; 4];
        let mut verbs = 0;
        let mut push = |verb| {
            chain[verbs] = verb;
            verbs += 1;
        };
        let write = new.filter(|new| !new.written.replace(true)).map(NewBlock::write);
        if let Some(write) = write {
            push(write);
        }
        push(mark);
        push(cas);
        if target.generation.is_none() {
            // The old block's next generation is one more than its last: READ it on the way, and
            // the key, by which the block vouches for the word.
            push(header);
        }
        let found = match self.chain(&chain[..verbs], posted).await {
            Ok(found) => SlotWord::from_bits(found),
            Err(ChainError::Late) => {
                new.inspect(|new| new.written.set(false));
                return Ok(Swung::Late);
            }
            Err(error) => return Err(error.into()),
        };
        if found != target.word {
            self.engine.cache().forget(self.hash);
            return Ok(Swung::Lost(found));
        }
        self.retire(old, target.generation);
        match new {
            Some(new) => self.remember(target.slot, desired, new, posted),
            None => self.engine.cache().forget(self.hash),
        }
        Ok(Swung::Done)
    }

    /// The block this operation just unlinked is this session's now: no LIVE word points to it, and
    /// it is in no other list (invariant I1).
    fn retire(&self, old: BlockRef, generation: Option<u32>) {
        let Some(generation) = generation.or_else(|| self.read_generation(old)) else {
            // Damage: whose block it is cannot be told, so nobody gets it.
            return;
        };
        let free = FreeBlock { address: old.address, generation: generation.wrapping_add(1) };
        self.engine.allocator().retire(old.class, free, self.now());
    }

    /// The generation of the old block, whose header and key were READ; `None` if it is not what
    /// the word said: a damaged word may lead to another key's block, or into one.
    fn read_generation(&self, old: BlockRef) -> Option<u32> {
        let fabric = self.engine.endpoint.fabric();
        let block = fabric.buffer(self.lane, Buffer::Block);
        let image = fabric.buffer(self.lane, Buffer::Image);
        let (header, rest) = BlockHeader::ref_from_prefix(block).ok()?;
        let start = BLOCK_HEADER_BYTES as usize;
        let key = &image[start..start + self.key_bytes];
        // A header that fits means that the READ went as far as the key.
        let is_ours = header.fits(old.class, self.key_bytes) && rest.starts_with(key);
        let (words, _) = block.as_chunks();
        let generation = HeaderWord::from_bits(u64::from_le_bytes(words[0])).generation;
        (is_ours && generation as u8 == old.generation_low).then_some(generation)
    }

    fn remember(&self, slot: u64, word: SlotWord, new: &NewBlock, posted: Nanos) {
        let location = Location {
            slot,
            word,
            generation: new.free.generation,
            poisoned: false,
            proved_at: posted,
        };
        self.engine.cache().put(self.hash, location);
    }

    /// Where the cache says the key is; not where a split holds it.
    fn cached_target(&self) -> Option<Target> {
        let location = self.engine.cache().get(self.hash)?;
        (location.word.state() == SlotState::Live).then(|| location.into())
    }
}

impl NewBlock {
    fn write(&self) -> Verb {
        Verb::Write {
            remote: self.free.address.offset(),
            from: Buffer::Image,
            bytes: self.write_bytes,
        }
    }
}

/// The READ of a whole block.
fn read_block(block: BlockRef) -> Verb {
    let bytes = block.class.block_bytes() as u32;
    Verb::Read { remote: block.address.offset(), into: Buffer::Block, bytes }
}

/// Whether a split has the entry in its hands: wait and look again.
fn is_moving(word: SlotWord) -> bool {
    matches!(word.state(), SlotState::Frozen | SlotState::Copy)
}

/// Whether a PUT that lost its compare-and-swap to this word may call itself overwritten: not by a
/// split, which overwrites nothing, nor by a conditional operation, whose condition held for what
/// was there before.
fn absorbs(found: SlotWord) -> bool {
    match found.state() {
        SlotState::Empty | SlotState::Pending | SlotState::Aborted => true,
        SlotState::Live => !found.is_conditional(),
        SlotState::Frozen | SlotState::Copy | SlotState::Moved | SlotState::Tomb => false,
    }
}
