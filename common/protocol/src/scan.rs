//! Scans: they read all entries, subtable by subtable in the order of hashes, also during splits.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use farside_fabric::{Buffer, Fabric, LaneId, Verb};
use farside_layout::hash::KeyHash;
use farside_layout::{
    BLOCK_HEADER_BYTES, Block, BlockAddress, BlockHeader, BlockRef, ExtentTable, LayoutError,
    NamedBlock, ROW_BYTES, Row, SLOTS_PER_ROW, SUBTABLE_BYTES, Slot, SlotState, SlotWord,
    SubtableState, prefix_of,
};
use zerocopy::FromBytes;

use super::{Found, ProtocolResult, read_block};
use crate::directory::Subtable;
use crate::region_handle::RegionHandle;
use crate::{OpenRegion, OperationError, Value, Version};

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

/// A key without its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyEntry {
    /// The key.
    pub key: Vec<u8>,
    /// The version of its value.
    pub version: Version,
    /// The length of its value, in bytes.
    pub value_bytes: u64,
    /// When the value expires, a full millisecond; `None` for never.
    pub expires_at: Option<SystemTime>,
    /// Whether the value is pinned: the server never evicts it.
    pub is_pinned: bool,
}

impl KeyEntry {
    /// The entry with this value.
    fn with_value(self, data: Vec<u8>) -> Entry {
        let Self { key, version, expires_at, is_pinned, .. } = self;
        Entry { key, value: Value { data, version }, expires_at, is_pinned }
    }
}

/// How much of an entry a scan READs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Depth {
    /// The block's header and key. The slot's hint, 64 bits of the key's hash, proves the key.
    Key,
    /// All of the block, and its extents. The checksums prove them.
    Value,
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
    /// The block that its word names; `None` if the word is damaged.
    pub fn block(&self) -> Option<NamedBlock> {
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
/// How much of a block is READ for its key at first. A longer key takes another READ.
const KEY_READ_BYTES: u64 = 256;
/// Limit on the attempts to find a subtable while splits replace it.
const COLLECTS_MAX: u32 = 64;

/// The result of the READ of a slot's entry.
enum ScanRead {
    /// The key, and the value if it was READ.
    Entry(KeyEntry, Vec<u8>),
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
    let next = next(handle, lane, cursor, Depth::Value).await?;
    Ok(next.map(|(key, data)| key.with_value(data)))
}

/// As [`next_entry`], without the value, of which at most 256 bytes are READ. A key that
/// does not fit in as many takes one round trip more.
pub async fn next_key<F: Fabric>(
    handle: RegionHandle<'_, F>,
    lane: LaneId,
    cursor: &mut ScanCursor,
) -> ProtocolResult<Option<KeyEntry>> {
    Ok(next(handle, lane, cursor, Depth::Key).await?.map(|(key, _)| key))
}

async fn next<F: Fabric>(
    handle: RegionHandle<'_, F>,
    lane: LaneId,
    cursor: &mut ScanCursor,
    depth: Depth,
) -> ProtocolResult<Option<(KeyEntry, Vec<u8>)>> {
    loop {
        while let Some(slot) = cursor.slots.pop() {
            match read_entry(handle, lane, slot, depth).await? {
                ScanRead::Entry(entry, data) => {
                    let hash = handle.region.hasher.hash(&entry.key);
                    if u64::from(hash.directory()) >= cursor.from && cursor.returned.insert(hash) {
                        return Ok(Some((entry, data)));
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

/// Counts the keys of the part that starts at `from`, by its slots alone. Also returns the end of
/// the part. Round trips as for [`read_part`].
pub async fn count_part<F: Fabric>(
    handle: RegionHandle<'_, F>,
    lane: LaneId,
    from: u32,
) -> ProtocolResult<(u64, u64)> {
    let mut slots = Vec::new();
    let end = read_part(handle, lane, from, &mut slots).await?;
    // If the directory knows one of the new subtables of a split, and not the other, the part
    // begins within the old subtable. All its entries have moved, and some are before the part.
    slots.retain(|slot| end_of(slot.directory_hash, slot.local_depth) > u64::from(from));
    Ok((count_keys(&slots), end))
}

/// The number of keys that these slots of a part hold. A split moves an entry to the same place of
/// a new subtable, which is READ later, so an entry may be among them twice. Whatever else is at
/// that place of the new subtable came after the READ of the old one.
fn count_keys(slots: &[ScannedSlot]) -> u64 {
    let is_split = slots.iter().any(|slot| slot.local_depth != slots[0].local_depth);
    if !is_split {
        return slots.len() as u64;
    }
    let mut ordered: Vec<&ScannedSlot> = slots.iter().collect();
    ordered.sort_by_key(|slot| slot.local_depth);
    let (mut seen, mut keys) = (HashMap::<_, Vec<&ScannedSlot>>::new(), 0);
    for slot in ordered {
        let same_place = seen.entry((slot.row % SUBTABLE_BYTES, slot.at)).or_default();
        let was_seen = same_place.iter().any(|old| {
            let prefix = |slot: &ScannedSlot| prefix_of(slot.directory_hash, old.local_depth);
            old.local_depth < slot.local_depth && prefix(old) == prefix(slot)
        });
        keys += u64::from(!was_seen);
        same_place.push(slot);
    }
    keys
}

/// READs the entry of a slot; `None` if the entry is gone. Round trips as for a scan.
pub async fn read_slot<F: Fabric>(
    handle: RegionHandle<'_, F>,
    lane: LaneId,
    slot: ScannedSlot,
) -> ProtocolResult<Option<Entry>> {
    match read_entry(handle, lane, slot, Depth::Value).await? {
        ScanRead::Entry(entry, data) => Ok(Some(entry.with_value(data))),
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
    depth: Depth,
) -> ProtocolResult<ScanRead> {
    let ScannedSlot { row, at, mut word, local_depth, directory_hash } = scanned;
    let (mut seen_at, mut damaged) = (None, 0);
    let mut wanted = if depth == Depth::Key { KEY_READ_BYTES } else { u64::MAX };
    for _ in 0..FOLLOWS_MAX {
        let block_ref = handle.region.geometry.block_of(word)?;
        let block_bytes = block_ref.class.block_bytes();
        // A head is short, and has the length of the value behind its key.
        let bytes = if block_ref.class.is_head() { block_bytes } else { wanted.min(block_bytes) };
        let posted = handle.engine.endpoint.now();
        // The word is READ before the block, in the same round trip. If it is the same as before,
        // the block was linked when it was READ.
        let read_row = Verb::Read { remote: row, into: Buffer::Window, bytes: ROW_BYTES as u32 };
        let chain = [read_row, read_block(block_ref, bytes)];
        handle.read(lane, &chain).await?;
        let (decoded, current_word, wall) = {
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
            let image = &fabric.buffer(lane, Buffer::ReadBlock)[..bytes as usize];
            let wall = UNIX_EPOCH + Duration::from_nanos(fabric.wall_clock_ns());
            let slot = &current_row.slots[at];
            (decode(handle.region, image, block_ref, slot, depth), current_word, wall)
        };
        match decoded {
            Ok(Decoded::Longer(bytes)) => wanted = bytes,
            Ok(Decoded::Entry(key, ..)) if key.expires_at.is_some_and(|end| end <= wall) => {
                return Ok(ScanRead::Gone);
            }
            Ok(Decoded::Entry(key, data, None)) => return Ok(ScanRead::Entry(key, data)),
            Ok(Decoded::Entry(key, _, Some(head))) => {
                if let Some(whole) = handle.read_extents(lane, block_ref, head, posted).await? {
                    let block = handle.engine.endpoint.buffer(lane, Buffer::ReadBlock);
                    return Ok(ScanRead::Entry(key, whole.value_in(&block).to_vec()));
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

/// What a READ of a block, or of its first bytes, shows of an entry.
enum Decoded {
    /// The key, and the value if it is asked for. If that has extents, where its table is instead.
    Entry(KeyEntry, Vec<u8>, Option<Found>),
    /// Nothing, unless so many bytes are READ.
    Longer(u64),
}

/// Decodes the first bytes of the block to which a slot leads.
fn decode(
    region: &OpenRegion,
    image: &[u8],
    block_ref: BlockRef,
    slot: &Slot,
    depth: Depth,
) -> Result<Decoded, LayoutError> {
    let (address, class) = (block_ref.address, block_ref.class);
    let bytes = image.len() as u64;
    if let Ok((header, rest)) = BlockHeader::ref_from_prefix(image)
        && header.block_bytes() > bytes
        && class.block_bytes() > bytes
    {
        // A key that is too long for the block is left to the checksum, and so is one that is not
        // proved: for a moment a COPY has a former key's hint.
        let Some(key) = rest.get(..header.key_bytes()) else {
            let key_end = BLOCK_HEADER_BYTES + header.key_bytes() as u64;
            return Ok(Decoded::Longer(key_end.next_multiple_of(8)));
        };
        let is_proved = slot.is_of(region.hasher.hash(key))
            && block_ref.has_generation(header.generation())
            && header.is_of_class(class);
        return Ok(match is_proved {
            true => Decoded::Entry(key_entry(header, key, address), Vec::new(), None),
            false => Decoded::Longer(u64::MAX),
        });
    }
    let block = Block::decode(image, address)?;
    let mut key = key_entry(block.header(), block.key(), address);
    if class.is_head() {
        key.value_bytes = ExtentTable::of(&block, region.extent_shape)?.value_bytes;
        let head = (depth == Depth::Value).then(|| Found::new(address, &block));
        return Ok(Decoded::Entry(key, Vec::new(), head));
    }
    let data = if depth == Depth::Value { block.value().to_vec() } else { Vec::new() };
    Ok(Decoded::Entry(key, data, None))
}

fn key_entry(header: &BlockHeader, key: &[u8], address: BlockAddress) -> KeyEntry {
    let expires_at_ms = header.expires_at_ms();
    let expires_at =
        (expires_at_ms != 0).then(|| UNIX_EPOCH + Duration::from_millis(expires_at_ms));
    KeyEntry {
        key: key.to_vec(),
        version: Version::of(address, header.generation()),
        value_bytes: header.value_bytes().into(),
        expires_at,
        is_pinned: header.is_pinned(),
    }
}
