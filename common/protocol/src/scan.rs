//! Scans: they read all entries, subtable by subtable in the order of hashes, also during splits.

use std::collections::HashSet;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use farside_fabric::{Buffer, Fabric, LaneId, Verb};
use farside_layout::hash::KeyHash;
use farside_layout::{
    Block, BlockAddress, BlockRef, ROW_BYTES, Row, SLOTS_PER_ROW, SUBTABLE_BYTES, Slot, SlotState,
    SlotWord, SubtableState, prefix_of,
};
use zerocopy::FromBytes;

use super::{Found, ProtocolResult, read_block};
use crate::directory::Subtable;
use crate::region_handle::RegionHandle;
use crate::{OperationError, Value, Version};

/// A key with its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The key.
    pub key: Vec<u8>,
    /// The value and its version.
    pub value: Value,
    /// When the value expires, a full millisecond; `None` for never.
    pub expires_at: Option<SystemTime>,
    /// Whether the value is pinned: the server never evicts it.
    pub is_pinned: bool,
}

/// A slot with an entry as a scan saw it.
#[derive(Clone, Copy, Debug)]
pub struct ScannedSlot {
    row: u64,
    at: usize,
    word: SlotWord,
    /// The local depth of its subtable, and a directory hash that leads to it.
    local_depth: u8,
    directory_hash: u32,
}

impl ScannedSlot {
    /// The block to which it leads; `None` if the word is damaged.
    pub fn block(&self) -> Option<BlockRef> {
        self.word.block().ok()
    }
}

/// The position of a scan. A *part* is the range of hashes of one subtable.
#[derive(Default)]
pub struct ScanCursor {
    /// The start and the end of the part that is being read.
    from: u64,
    to: u64,
    /// The slots of the part whose entries were not read yet.
    slots: Vec<ScannedSlot>,
    /// Whether a split moved an entry before it was read. Then the part is read again.
    must_repeat_part: bool,
    /// The keys that were returned from this part, and from the larger one before a split.
    returned: HashSet<KeyHash>,
    /// The end of the hashes that `returned` covers.
    returned_to: u64,
}

impl ScanCursor {
    /// A cursor that starts at this directory hash.
    pub fn starting_at(from: u32) -> Self {
        Self { from: from.into(), to: from.into(), ..Self::default() }
    }

    /// The end of the parts that were returned completely, if no part is being read now. From there
    /// another cursor can go on.
    pub fn completed_to(&self) -> Option<u64> {
        // After a split, keys behind `to` may have been returned already.
        let is_complete = self.slots.is_empty() && self.to >= self.returned_to;
        (is_complete && !self.must_repeat_part).then_some(self.to)
    }

    /// Starts the present part again. Keys of it that were returned are not returned again.
    pub fn restart_part(&mut self) {
        self.slots.clear();
        self.must_repeat_part = true;
    }
}

/// The number of directory hashes: one more than the last one.
pub const HASHES: u64 = 1 << 32;
/// Limit on the READs of a slot whose value is replaced between them.
const FOLLOWS_MAX: u32 = 64;
/// Limit on the READs of a damaged block whose word stays, before a scan reports the damage.
const DAMAGE_READS_MAX: u32 = 3;
/// Limit on the attempts to find a subtable while splits replace it.
const COLLECTS_MAX: u32 = 64;

/// The result of the READ of a slot's entry.
enum ScanRead {
    Entry(Entry),
    /// The key was deleted, or its value has expired.
    Gone,
    /// A split moved the entry to another subtable.
    Elsewhere,
}

/// Returns the next entry. One round trip for each subtable and each entry, and one more if the
/// value was replaced meanwhile.
pub async fn next_entry<F: Fabric>(
    handle: RegionHandle<'_, F>,
    lane: LaneId,
    cursor: &mut ScanCursor,
) -> ProtocolResult<Option<Entry>> {
    loop {
        while let Some(slot) = cursor.slots.pop() {
            match read_entry(handle, lane, slot).await? {
                ScanRead::Entry(entry) => {
                    let hash = handle.region.hasher.hash(&entry.key);
                    if u64::from(hash.directory()) >= cursor.from && cursor.returned.insert(hash) {
                        return Ok(Some(entry));
                    }
                }
                ScanRead::Gone => {}
                ScanRead::Elsewhere => cursor.must_repeat_part = true,
            }
        }
        if !std::mem::take(&mut cursor.must_repeat_part) {
            cursor.from = cursor.to;
        }
        if cursor.from == HASHES {
            return Ok(None);
        }
        if cursor.from >= cursor.returned_to {
            cursor.returned.clear();
        }
        let from = cursor.from as u32;
        let collected = collect(handle, lane, from, &mut cursor.slots).await;
        // After an error the scan skips this part, whose end the directory shows.
        cursor.to = end_of(from, handle.region.directory().subtable(from).local_depth);
        cursor.returned_to = cursor.returned_to.max(cursor.to);
        if let Err(error) = collected {
            cursor.slots.clear();
            return Err(error);
        }
    }
}

/// READs the slots of the part that starts at `from`, and returns the end of the part. One round
/// trip for each subtable.
pub async fn read_part<F: Fabric>(
    handle: RegionHandle<'_, F>,
    lane: LaneId,
    from: u32,
    slots: &mut Vec<ScannedSlot>,
) -> ProtocolResult<u64> {
    collect(handle, lane, from, slots).await?;
    Ok(end_of(from, handle.region.directory().subtable(from).local_depth))
}

/// READs the entry of a slot; `None` if the entry is gone. Round trips as for a scan.
pub async fn read_slot<F: Fabric>(
    handle: RegionHandle<'_, F>,
    lane: LaneId,
    slot: ScannedSlot,
) -> ProtocolResult<Option<Entry>> {
    match read_entry(handle, lane, slot).await? {
        ScanRead::Entry(entry) => Ok(Some(entry)),
        ScanRead::Gone | ScanRead::Elsewhere => Ok(None),
    }
}

/// Returns the end of the range of directory hashes that share this many leading bits with this
/// one.
fn end_of(directory_hash: u32, local_depth: u8) -> u64 {
    (u64::from(prefix_of(directory_hash, local_depth)) + 1) << (32 - u32::from(local_depth))
}

/// READs the subtable for keys with this directory hash, and the subtables to which a split moves
/// the keys. A moving entry is seen at least once, because the new subtables are READ after the old
/// one (I14).
async fn collect<F: Fabric>(
    handle: RegionHandle<'_, F>,
    lane: LaneId,
    from: u32,
    slots: &mut Vec<ScannedSlot>,
) -> ProtocolResult<()> {
    for _ in 0..COLLECTS_MAX {
        slots.clear();
        let first = handle.region.directory().subtable(from);
        if collect_from(handle, lane, from, first, slots).await? {
            return Ok(());
        }
        handle.reload_entry(lane, from).await?;
    }
    Err(OperationError::Contended { attempts: COLLECTS_MAX }.into())
}

/// [`collect`] for one copy of the directory. Returns false if the copy of the directory is out of
/// date, or a READ took too long.
async fn collect_from<F: Fabric>(
    handle: RegionHandle<'_, F>,
    lane: LaneId,
    from: u32,
    first: Subtable,
    slots: &mut Vec<ScannedSlot>,
) -> ProtocolResult<bool> {
    let mut left = vec![(first, from, false)];
    while let Some((subtable, directory_hash, is_new)) = left.pop() {
        let Subtable { offset, local_depth } = subtable;
        handle.region.geometry.check_subtable(offset)?;
        let read =
            Verb::Read { remote: offset, into: Buffer::ReadBlock, bytes: SUBTABLE_BYTES as u32 };
        let posted = handle.engine.endpoint.now();
        handle.read(lane, &[read]).await?;
        if !handle.is_fresh(posted) {
            return Ok(false);
        }
        let block = handle.engine.endpoint.buffer(lane, Buffer::ReadBlock);
        let rows = <[Row]>::ref_from_bytes(&block[..SUBTABLE_BYTES as usize]).unwrap_or_default();
        let words = rows.iter().flat_map(|row| &row.slots).map(Slot::word);
        let has_moved = words.clone().any(|word| word.state() == SlotState::Moved);
        let headers = rows.iter().map(|row| &row.header);
        let forward = match SubtableState::of(headers, directory_hash, local_depth, has_moved) {
            SubtableState::Whole => None,
            SubtableState::Splitting(forward) => Some(forward),
            // A subtable that is being filled counts only after a READ of the old one.
            SubtableState::Filling if is_new => None,
            SubtableState::Filling | SubtableState::Elsewhere => return Ok(false),
        };
        slots.extend(words.enumerate().filter(|(_, word)| has_entry(*word)).map(|(at, word)| {
            let row = offset + (at / SLOTS_PER_ROW) as u64 * ROW_BYTES;
            ScannedSlot { row, at: at % SLOTS_PER_ROW, word, local_depth, directory_hash }
        }));
        for (side, offset) in (0u32..).zip(forward.into_iter().flatten()) {
            let next_bit = 1 << 31 >> local_depth.min(31);
            let directory_hash = (directory_hash & !next_bit) | (next_bit * side);
            left.push((Subtable { offset, local_depth: local_depth + 1 }, directory_hash, true));
        }
    }
    Ok(true)
}

fn has_entry(word: SlotWord) -> bool {
    matches!(word.state(), SlotState::Live | SlotState::Frozen | SlotState::Copy)
}

/// READs the entry of a slot.
async fn read_entry<F: Fabric>(
    handle: RegionHandle<'_, F>,
    lane: LaneId,
    scanned: ScannedSlot,
) -> ProtocolResult<ScanRead> {
    let ScannedSlot { row, at, mut word, local_depth, directory_hash } = scanned;
    let (mut seen_at, mut damaged) = (None, 0);
    for _ in 0..FOLLOWS_MAX {
        let block_ref = word.block()?;
        handle.region.geometry.check_block(block_ref)?;
        let posted = handle.engine.endpoint.now();
        // The word is READ before the block, in the same round trip. If it is the same as before,
        // the block was linked when it was READ.
        let read_row = Verb::Read { remote: row, into: Buffer::Window, bytes: ROW_BYTES as u32 };
        let chain = [read_row, read_block(block_ref, block_ref.class.block_bytes())];
        handle.read(lane, &chain).await?;
        let (decoded, current_word) = {
            let fabric = handle.engine.endpoint.fabric();
            let Ok((current_row, _)) = Row::read_from_prefix(fabric.buffer(lane, Buffer::Window))
            else {
                return Ok(ScanRead::Elsewhere);
            };
            if !current_row.header.is_of(directory_hash, local_depth) {
                return Ok(ScanRead::Elsewhere);
            }
            let current_word = current_row.slots[at].word();
            if !has_entry(current_word) {
                let moved = current_word.state() == SlotState::Moved;
                return Ok(if moved || !handle.is_fresh(posted) {
                    ScanRead::Elsewhere
                } else {
                    ScanRead::Gone
                });
            }
            // The block was linked when it was READ, or less than GRACE before (invariant I3).
            let is_linked = current_word == word && handle.is_fresh(posted);
            if !is_linked && !seen_at.is_some_and(|seen_at| handle.is_fresh(seen_at)) {
                (word, seen_at, damaged) = (current_word, Some(posted), 0);
                continue;
            }
            let bytes =
                &fabric.buffer(lane, Buffer::ReadBlock)[..block_ref.class.block_bytes() as usize];
            let wall = UNIX_EPOCH + Duration::from_nanos(fabric.wall_clock_ns());
            let decoded = Block::decode(bytes, block_ref.address).map(|block| {
                let entry = entry(&block, block_ref.address);
                let has_expired = entry.expires_at.is_some_and(|end| end <= wall);
                (entry, Found::new(block_ref.address, &block), has_expired)
            });
            (decoded, current_word)
        };
        match decoded {
            Ok((.., true)) => return Ok(ScanRead::Gone),
            Ok((entry, ..)) if !block_ref.class.is_head() => return Ok(ScanRead::Entry(entry)),
            Ok((mut entry, head, _)) => {
                if let Some(whole) = handle.read_extents(lane, block_ref, head, posted).await? {
                    let block = handle.engine.endpoint.buffer(lane, Buffer::ReadBlock);
                    entry.value.data = whole.value_in(&block).to_vec();
                    return Ok(ScanRead::Entry(entry));
                }
                (word, seen_at, damaged) = (current_word, None, 0);
            }
            Err(_) if current_word != word => {
                (word, seen_at, damaged) = (current_word, Some(posted), 0)
            }
            Err(error) => {
                damaged += 1;
                if damaged == DAMAGE_READS_MAX {
                    return Err(error.into());
                }
            }
        }
    }
    Err(OperationError::Contended { attempts: FOLLOWS_MAX }.into())
}

fn entry(block: &Block<'_>, address: BlockAddress) -> Entry {
    let version = Version::of(address, block.header_word().generation);
    let value = Value { data: block.value().to_vec(), version };
    let expires_at_ms = block.expires_at_ms();
    let expires_at =
        (expires_at_ms != 0).then(|| UNIX_EPOCH + Duration::from_millis(expires_at_ms));
    Entry { key: block.key().to_vec(), value, expires_at, is_pinned: block.is_pinned() }
}
