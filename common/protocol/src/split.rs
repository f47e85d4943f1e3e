//! Splitting a subtable while clients read and write: every entry moves to one of two new
//! subtables.
//!
//! kv-server splits subtables, through an endpoint of its own. A split can be interrupted at any
//! moment: the index stays usable, and the same call continues from there. A step takes one round
//! trip for as many slots as there are lanes, and no step waits for a client. `docs/protocol.md`
//! ("Splits") has the steps.

mod chains;
mod directory;
mod ending;
mod places;
mod rows;

use std::ops::Range;

use farside_fabric::{Buffer, ChainError, Endpoint, Fabric, LaneId, RegionIndex, Verb};
use farside_layout::hash::{KeyHash, KeyHasher};
use farside_layout::{
    BLOCK_HEADER_BYTES, BlockHeader, BlockRef, Format, Geometry, HINT_OFFSET, ROWS_PER_SUBTABLE,
    RowHeader, SLOTS_PER_SUBTABLE, SUBTABLE_BYTES, Slot, SlotState, SlotWord, prefix_of, side_of,
    slot_offset,
};
use zerocopy::FromBytes;

use chains::Chain;

/// The maximum number of attempts to move a slot. If clients change it during all of them, the
/// split ends as [`SplitProgress::Busy`].
const ROUNDS_MAX: u32 = 64;
/// The lane of chains that are executed one at a time.
const LANE: LaneId = LaneId(0);

/// A subtable and the two that its keys move to, by their byte offsets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split {
    /// The leading bits of the hashes of all keys in the old subtable, right-aligned.
    pub prefix: u32,
    /// The number of bits in `prefix`.
    pub local_depth: u8,
    /// The full subtable.
    pub old: u64,
    /// The new subtables, for keys whose next bit is 0, and is 1. Before the split all their words
    /// are MOVED, and neither the directory nor a row leads to them.
    pub new: [u64; 2],
}

impl Split {
    /// The header of the rows in a new subtable.
    fn header(&self, side: usize) -> RowHeader {
        RowHeader::new(self.prefix << 1 | side as u32, self.local_depth + 1)
    }
}

/// The progress of a split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SplitProgress {
    /// Every key is in its new subtable.
    Done,
    /// Clients changed some entry during every attempt to move it. It stays in the old subtable,
    /// and the split has to be tried again.
    Busy,
    /// The entry in this slot stays in the old subtable, because its block or the slot is damaged.
    /// Clients can read and change all keys, but insert none. The split has to be tried again after
    /// the entry was repaired.
    Stuck {
        /// The slot's byte offset.
        slot: u64,
    },
}

/// Splits subtables through an endpoint that has no other use meanwhile.
pub struct SubtableSplitter<'e, F> {
    endpoint: &'e Endpoint<F>,
    region: RegionIndex,
    lanes: u16,
    geometry: Geometry,
    hasher: KeyHasher,
    key_bytes_max: u64,
    /// All rows and all slots. Only the simulator leaves some out: [`Self::with_part`].
    rows: Range<usize>,
    slots: Range<usize>,
}

/// A FROZEN entry and the subtable that it moves to.
struct MovingEntry {
    /// The index of its slot, in the old subtable as in the new one.
    at: usize,
    /// The index of the new subtable in [`Split::new`].
    side: usize,
    hash: KeyHash,
}

/// The words of the three subtables, as last read or swapped.
struct Words {
    old: Vec<SlotWord>,
    new: [Vec<SlotWord>; 2],
    /// Read once, because only the splitter changes them: clients swap a hint only in a subtable to
    /// which the directory leads.
    new_hints: [Vec<u64>; 2],
    /// The byte offset of a slot whose entry is damaged.
    stuck: Option<u64>,
    /// Whether clients changed some entry during every attempt.
    busy: bool,
}

fn swap(remote: u64, expected: SlotWord, desired: SlotWord) -> Verb {
    Verb::CompareSwap { remote, expected: expected.bits(), desired: desired.bits() }
}

impl<'e, F: Fabric> SubtableSplitter<'e, F> {
    /// A splitter for a region of this format, with this many lanes of the endpoint.
    pub fn new(
        endpoint: &'e Endpoint<F>,
        region: RegionIndex,
        lanes: u16,
        format: &Format,
    ) -> Self {
        let hasher = KeyHasher::new(&format.hash_key);
        let key_bytes_max = format.key_bytes_max.into();
        let (geometry, rows) = (format.geometry(), 0..ROWS_PER_SUBTABLE);
        let slots = 0..SLOTS_PER_SUBTABLE;
        Self { endpoint, region, lanes, geometry, hasher, key_bytes_max, rows, slots }
    }

    /// Reserves the buffers of a split, so that it cannot fail for lack of memory in the middle.
    ///
    /// # Errors
    /// [`ChainError::Unregistered`] if the system refuses to register so much memory.
    pub fn reserve(&self) -> Result<(), ChainError> {
        let key_bytes = (BLOCK_HEADER_BYTES + self.key_bytes_max).next_multiple_of(8);
        let keys = (0..self.lanes).map(|lane| (LaneId(lane), Buffer::ReadBlock, key_bytes));
        let block = (LANE, Buffer::ReadBlock, SUBTABLE_BYTES.max(directory::PIECE_BYTES));
        let image = (LANE, Buffer::NewBlock, 2 * directory::PIECE_BYTES);
        let mut fabric = self.endpoint.fabric_mut();
        for (lane, buffer, bytes) in keys.chain([block, image]) {
            if !fabric.reserve(lane, buffer, bytes as usize) {
                return Err(ChainError::Unregistered { bytes });
            }
        }
        Ok(())
    }

    /// Moves all entries to the new subtables. Continues where an earlier call was interrupted.
    /// Clients find the new subtables through the old one until [`SubtableSplitter::publish`]
    /// changes the directory.
    ///
    /// # Errors
    /// [`ChainError`] if the endpoint cannot reach the region.
    pub async fn split(&self, split: &Split) -> Result<SplitProgress, ChainError> {
        if self.is_released(split).await? {
            // The directory may have led clients there already. `filling` must not be set again:
            // their directory is right, and they would read it again and again.
            self.write_headers(split, [split.header(0), split.header(1)]).await?;
            return Ok(SplitProgress::Done);
        }
        self.open(split).await?;
        let words = |slots: &[Slot]| slots.iter().map(Slot::word).collect();
        let hints = |slots: &[Slot]| slots.iter().map(Slot::hint).collect();
        let old = self.slots_of(split.old).await?;
        let new = [self.slots_of(split.new[0]).await?, self.slots_of(split.new[1]).await?];
        let mut words = Words {
            old: words(&old),
            new: new.each_ref().map(|slots| words(slots)),
            new_hints: new.each_ref().map(|slots| hints(slots)),
            stuck: None,
            busy: false,
        };
        let slots: Vec<usize> = self.slots.clone().collect();
        for batch in slots.chunks(self.lanes.into()) {
            self.move_batch(split, &mut words, batch).await?;
        }
        self.finish_copies(split, &mut words).await?;
        if let Some(slot) = words.stuck {
            return Ok(SplitProgress::Stuck { slot });
        }
        if words.busy {
            return Ok(SplitProgress::Busy);
        }
        self.release(split, &words).await?;
        // Without `filling`, clients rely on a new subtable even if the directory led them there.
        // So all hints and words have to be in place before (invariant I17).
        self.write_headers(split, [split.header(0), split.header(1)]).await?;
        Ok(SplitProgress::Done)
    }

    async fn slots_of(&self, subtable: u64) -> Result<Vec<Slot>, ChainError> {
        let rows = self.read_rows(subtable).await?;
        Ok(rows.iter().flat_map(|row| row.slots).collect())
    }

    /// Moves the entries of these slots, at most as many as there are lanes. A slot that a client
    /// changes meanwhile is tried again. An ABORTED slot is left alone: only its owner clears it.
    async fn move_batch(
        &self,
        split: &Split,
        words: &mut Words,
        batch: &[usize],
    ) -> Result<(), ChainError> {
        let is_left = |words: &Words, at: usize| {
            !matches!(words.old[at].state(), SlotState::Moved | SlotState::Aborted)
        };
        let mut left: Vec<usize> = batch.to_vec();
        for _ in 0..ROUNDS_MAX {
            left.retain(|at| is_left(words, *at));
            if left.is_empty() {
                return Ok(());
            }
            let frozen = self.freeze(split, words, &mut left).await?;
            self.carry(split, words, frozen).await?;
        }
        words.busy |= left.iter().any(|at| is_left(words, *at));
        Ok(())
    }

    /// Makes the first step for each slot: EMPTY and TOMB become MOVED, PENDING becomes ABORTED,
    /// LIVE becomes FROZEN. Returns the FROZEN entries. Removes damaged slots from `left`.
    async fn freeze(
        &self,
        split: &Split,
        words: &mut Words,
        left: &mut Vec<usize>,
    ) -> Result<Vec<MovingEntry>, ChainError> {
        let mut chains = Vec::with_capacity(left.len());
        left.retain(|at| match self.first_step(split, *at, words.old[*at]) {
            Some(chain) => {
                chains.push(chain);
                true
            }
            None => {
                words.stuck = Some(split.old + slot_offset(*at));
                false
            }
        });
        let found = self.execute_batch(&chains).await?;
        let (mut frozen, mut damaged) = (Vec::new(), Vec::new());
        for (lane, (at, found)) in left.iter().copied().zip(found).enumerate() {
            let before = words.old[at];
            if before.state() != SlotState::Frozen {
                let found = SlotWord::from_bits(found);
                words.old[at] = if found == before { after_first_step(before) } else { found };
                if found != before {
                    continue;
                }
            }
            if words.old[at].state() == SlotState::Frozen {
                match self.entry(split, LaneId(lane as u16), at, words.old[at]) {
                    Some(entry) => frozen.push(entry),
                    None => damaged.push(at),
                }
            }
        }
        left.retain(|at| !damaged.contains(at));
        self.thaw(split, words, damaged).await?;
        Ok(frozen)
    }

    /// The chain of the first step for a slot with this word; `None` if the word is damaged.
    fn first_step(&self, split: &Split, at: usize, word: SlotWord) -> Option<Chain> {
        let slot = split.old + slot_offset(at);
        let freeze = swap(slot, word, after_first_step(word));
        match word.state() {
            SlotState::Empty | SlotState::Tomb | SlotState::Pending => Some(Chain::of(&[freeze])),
            SlotState::Live | SlotState::Frozen => {
                let block = self.geometry.block_of(word).ok()?;
                // After the swap, because no client changes the hint and the block of a FROZEN
                // word.
                let read_slot = Verb::Read { remote: slot, into: Buffer::Window, bytes: 16 };
                let read_key = self.read_key(block);
                Some(match word.state() {
                    SlotState::Frozen => Chain::of(&[read_slot, read_key]),
                    _ => Chain::of(&[freeze, read_slot, read_key]),
                })
            }
            SlotState::Copy | SlotState::Moved | SlotState::Aborted => None,
        }
    }

    /// A READ of the part of a block that can contain its key.
    fn read_key(&self, block: BlockRef) -> Verb {
        let key_end = (BLOCK_HEADER_BYTES + self.key_bytes_max).next_multiple_of(8);
        let bytes = key_end.min(block.class.block_bytes()) as u32;
        Verb::Read { remote: block.offset(), into: Buffer::ReadBlock, bytes }
    }

    /// The FROZEN entry that a lane has READ; `None` if the block's key does not fit the slot.
    fn entry(
        &self,
        split: &Split,
        lane: LaneId,
        at: usize,
        frozen: SlotWord,
    ) -> Option<MovingEntry> {
        let fabric = self.endpoint.fabric();
        let (slot, _) = Slot::read_from_prefix(fabric.buffer(lane, Buffer::Window)).ok()?;
        let (header, rest) =
            BlockHeader::ref_from_prefix(fabric.buffer(lane, Buffer::ReadBlock)).ok()?;
        let hash = self.hasher.hash(rest.get(..header.key_bytes())?);
        let belongs_here = prefix_of(hash.directory(), split.local_depth) == split.prefix;
        // The hint is made of 64 bits of the key's hash, so it proves that the key is undamaged.
        let is_undamaged = slot.word() == frozen && slot.is_of(hash);
        let side = side_of(hash.directory(), split.local_depth);
        (belongs_here && is_undamaged).then_some(MovingEntry { at, side, hash })
    }

    /// Carries FROZEN entries to the same slots of their new subtables: COPY, then the hint, then
    /// MOVED in the old subtable, then LIVE.
    ///
    /// In this order the hint is in place before a client can rely on the word (I6, decision 0002),
    /// the new subtable has the entry before the old one loses it (I14), and no key is LIVE twice
    /// (I1).
    async fn carry(
        &self,
        split: &Split,
        words: &mut Words,
        entries: Vec<MovingEntry>,
    ) -> Result<(), ChainError> {
        let slot_of = |entry: &MovingEntry| split.new[entry.side] + slot_offset(entry.at);
        let copy_words = |words: &Words, entry: &MovingEntry| {
            let (frozen, new) = (words.old[entry.at], words.new[entry.side][entry.at]);
            match new.state() {
                SlotState::Moved => Some((new, new.copy_of(frozen))),
                // This COPY was made before the split was interrupted.
                SlotState::Copy if new.block() == frozen.block() => Some((new, new)),
                _ => None,
            }
        };
        let (ready, blocked): (Vec<MovingEntry>, Vec<MovingEntry>) =
            entries.into_iter().partition(|entry| copy_words(words, entry).is_some());
        let copy = |entry: &MovingEntry| {
            let (expected, desired) = copy_words(words, entry).unwrap_or_default();
            Chain::of(&[swap(slot_of(entry), expected, desired)])
        };
        let chains: Vec<Chain> = ready.iter().map(copy).collect();
        let found = self.execute_batch(&chains).await?;
        let mut blocked: Vec<usize> = blocked.iter().map(|entry| entry.at).collect();
        let mut copied = Vec::with_capacity(ready.len());
        for (entry, found) in ready.into_iter().zip(found) {
            let (expected, desired) = copy_words(words, &entry).unwrap_or_default();
            if found == expected.bits() {
                words.new[entry.side][entry.at] = desired;
                copied.push(entry);
            } else {
                blocked.push(entry.at);
            }
        }
        let hint_and_move = |entry: &MovingEntry| {
            let desired = entry.hash.hint(words.new[entry.side][entry.at].incarnation());
            let (expected, remote) =
                (words.new_hints[entry.side][entry.at], slot_of(entry) + HINT_OFFSET);
            let frozen = words.old[entry.at];
            Chain::of(&[
                Verb::CompareSwap { remote, expected, desired },
                swap(split.old + slot_offset(entry.at), frozen, frozen.moved()),
            ])
        };
        self.execute_batch(&copied.iter().map(hint_and_move).collect::<Vec<_>>()).await?;
        let enliven = |entry: &MovingEntry| {
            let copy = words.new[entry.side][entry.at];
            Chain::of(&[swap(slot_of(entry), copy, copy.with_state(SlotState::Live))])
        };
        self.execute_batch(&copied.iter().map(enliven).collect::<Vec<_>>()).await?;
        for entry in copied {
            words.old[entry.at] = words.old[entry.at].moved();
            let new = &mut words.new[entry.side][entry.at];
            *new = new.with_state(SlotState::Live);
        }
        self.thaw(split, words, blocked).await
    }

    /// Makes FROZEN entries LIVE again, because they cannot be moved.
    async fn thaw(
        &self,
        split: &Split,
        words: &mut Words,
        slots: Vec<usize>,
    ) -> Result<(), ChainError> {
        let live = |words: &Words, at: usize| words.old[at].with_state(SlotState::Live);
        let thaw = |at: &usize| {
            Chain::of(&[swap(split.old + slot_offset(*at), words.old[*at], live(words, *at))])
        };
        self.execute_batch(&slots.iter().map(thaw).collect::<Vec<_>>()).await?;
        for at in slots {
            words.old[at] = live(words, at);
            words.stuck = Some(split.old + slot_offset(at));
        }
        Ok(())
    }
}

/// A word of the old subtable after its first step.
fn after_first_step(word: SlotWord) -> SlotWord {
    match word.state() {
        SlotState::Empty | SlotState::Tomb => word.moved(),
        SlotState::Pending => word.with_state(SlotState::Aborted),
        SlotState::Live => word.with_state(SlotState::Frozen),
        SlotState::Aborted | SlotState::Frozen | SlotState::Copy | SlotState::Moved => word,
    }
}
