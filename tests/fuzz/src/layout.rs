//! Targets: the superblock, windows of the index with their words, and blocks. Then snapshot files,
//! and the records in their frame.

use farside_layout::{
    BLOCK_HEADER_BYTES, Block, BlockAddress, BlockStamp, CHUNK_BYTES, CLIENT_IDS, ChunkEntry,
    DirectoryEntry, Format, Geometry, INCARNATION_OFFSET, LayoutError, NamedBlock,
    REGION_BYTES_MAX, REGION_BYTES_MIN, ROW_BYTES, Row, RowHeader, SLOTS_PER_ROW, SUBTABLE_BYTES,
    SizeClass, Slot, SlotState, SlotWord, Superblock, WINDOW_BYTES, WINDOW_SLOTS, Window,
    block_bytes, seal, side_of, slot_in_subtable,
};
use farside_snapshot::{Reader, Record, SnapshotError, Writer};
use zerocopy::{FromBytes, IntoBytes};

use crate::decoded;

/// Offsets according to `docs/memory-layout.md`, in bytes.
const SUPERBLOCK_CRC32: usize = 12;
const SUPERBLOCK_REGION_BYTES: usize = 48;
const BLOCK_GENERATION: usize = 4;
const BLOCK_KEY_BYTES: usize = 12;
const BLOCK_WRITER: usize = 14;
const BLOCK_VALUE_BYTES: usize = 16;
/// 47 bits, and above them whether the value is pinned.
const BLOCK_WRITTEN_AT: usize = 20;
const BLOCK_PINNED: u64 = 1 << 47;
const BLOCK_EXPIRES_AT: usize = 26;

/// Returns the integer of `N` bytes at this offset, or 0 beyond the end.
fn integer<const N: usize>(bytes: &[u8], offset: usize) -> u64 {
    let mut word = [0; 8];
    if let Some(found) = bytes.get(offset..offset + N) {
        word[..N].copy_from_slice(found);
    }
    u64::from_le_bytes(word)
}

fn format(region_bytes: u64) -> Format {
    Format {
        region_bytes,
        region_id: [1; 16],
        hash_key: [2; 16],
        grace_ms: 100,
        key_bytes_max: 1024,
        value_bytes_max: 1 << 20,
    }
}

pub(crate) fn superblocks() -> Vec<Vec<u8>> {
    let new = |region_bytes, depth| Superblock::new(&format(region_bytes), depth).unwrap();
    let superblocks = [new(64 << 20, 5), new(REGION_BYTES_MIN, 0), new(REGION_BYTES_MAX, 25)];
    superblocks.map(|superblock| superblock.as_bytes().to_vec()).into()
}

/// A superblock. Its checksum is corrected, and the region has the length that it contains.
pub(crate) fn superblock(bytes: &[u8]) -> bool {
    let _ = Superblock::decode(bytes, bytes.len() as u64);
    let mut sealed = bytes.to_vec();
    if let Some(constant) = sealed.get_mut(..INCARNATION_OFFSET as usize) {
        constant[SUPERBLOCK_CRC32..SUPERBLOCK_CRC32 + 4].fill(0);
        let crc32 = crc32fast::hash(constant);
        constant[SUPERBLOCK_CRC32..SUPERBLOCK_CRC32 + 4].copy_from_slice(&crc32.to_le_bytes());
    }
    let region_bytes = integer::<8>(bytes, SUPERBLOCK_REGION_BYTES);
    let superblock = decoded(Superblock::decode(&sealed, region_bytes));
    let Some((superblock, format)) = superblock else { return false };
    assert!(Superblock::decode(&sealed, region_bytes ^ CHUNK_BYTES).is_err());
    assert!(sealed.starts_with(superblock.as_bytes()));
    format.check().unwrap();
    let geometry = format.geometry();
    let depth = superblock.directory_depth(&geometry).unwrap();
    let state = superblock.state().unwrap();
    let rebuilt = Superblock::new(&format, depth).unwrap();
    assert_eq!(Superblock::decode(rebuilt.as_bytes(), region_bytes).unwrap().1, format);
    let word = Superblock::state_word(state, depth);
    let state_offset = farside_layout::STATE_OFFSET as usize;
    assert_eq!(word, integer::<8>(&sealed, state_offset));
    check_parts_do_not_overlap(&geometry, depth);
    true
}

fn check_parts_do_not_overlap(geometry: &Geometry, depth: u8) {
    let clients_end = geometry.client_entry(CLIENT_IDS as u16 - 1).unwrap() + 64;
    let directory = geometry.directory_offset(depth).unwrap();
    assert!(clients_end <= directory);
    let last = geometry.chunks().checked_sub(1).expect("a heap of at least one chunk");
    assert!(directory + (8 << depth) <= geometry.chunk_entry(0).unwrap());
    assert!(geometry.chunk_entry(last).unwrap() + 8 <= geometry.chunk_offset(0).unwrap());
    let end = geometry.chunk_offset(last).unwrap() + CHUNK_BYTES;
    assert_eq!(end, geometry.region_bytes());
}

pub(crate) fn windows() -> Vec<Vec<u8>> {
    let geometry = format(64 << 20).geometry();
    let heap = geometry.chunk_offset(1).unwrap();
    let class = SizeClass::from_index(7).unwrap();
    let address = BlockAddress::from_offset(heap).unwrap();
    let block = NamedBlock { address, class, generation_low: 3 };
    let pending = SlotWord::empty(5).pending(0xaa, block);
    let live = pending.live(block, true);
    let words = [
        SlotWord::empty(63),
        pending,
        live,
        live.with_state(SlotState::Frozen),
        SlotWord::empty(1).moved().copy_of(live),
        live.moved(),
        SlotWord::from_bits(DirectoryEntry::new(heap, 3).bits()),
    ];
    let slots = words.map(|word| Slot::new(word, 0x0123_4567_89ab_cdef));
    let header = RowHeader::new(0b101, 3);
    let split = header.with_forward([heap, heap + SUBTABLE_BYTES]);
    let window =
        |headers: [RowHeader; 2]| Window { rows: headers.map(|header| Row { header, slots }) };
    let windows =
        [window([header, header]), window([split, split]), window([header.filling(), split])];
    windows.map(|window| window.as_bytes().to_vec()).into()
}

/// Two rows of the index, as a client reads them. Accepted if both row headers are valid.
pub(crate) fn window(bytes: &[u8]) -> bool {
    let geometry = format(64 << 20).geometry();
    let window = match Window::decode(bytes) {
        Ok(window) => window,
        Err(error) => {
            assert_ne!(bytes.len() as u64, WINDOW_BYTES, "{error}");
            return false;
        }
    };
    assert_eq!(window.as_bytes(), bytes);
    for n in 0..WINDOW_SLOTS {
        let (row, index) = (n / SLOTS_PER_ROW, n % SLOTS_PER_ROW);
        let offset = slot_in_subtable(row, index) as usize;
        let slot = &window.rows[row].slots[index];
        assert_eq!(Slot::read_from_prefix(&bytes[offset..]).unwrap().0, *slot);
        assert_eq!(Slot::new(slot.word(), slot.hint()), *slot);
        check_word(slot.word(), &geometry);
        check_entries(slot.word().bits(), &geometry);
    }
    window.rows.iter().for_each(|row| check_header(&row.header));
    window.rows.iter().all(|row| row.header.is_valid())
}

fn check_header(header: &RowHeader) {
    let bytes: [u8; 16] = zerocopy::transmute!(*header);
    assert_eq!(header.words().map(u64::to_le_bytes).concat(), bytes);
    let (depth, prefix) = (header.local_depth, header.prefix.get());
    let first = u64::from(prefix) << 32u8.saturating_sub(depth);
    assert!(header.is_valid() || !header.covers(first as u32));
    if let Some(subtables) = header.forward() {
        assert_eq!(header.with_forward(subtables), *header);
    }
    if header.is_valid() {
        let fits = prefix == 0 || prefix.ilog2() < u32::from(depth);
        assert_eq!(header.covers(first as u32), fits);
        assert!(side_of(first as u32, depth) <= 1);
        assert!(!header.filling().covers(0) || header.covers(0));
    }
}

fn check_word(word: SlotWord, geometry: &Geometry) {
    assert_eq!(SlotWord::from_bits(word.bits()), word);
    assert_eq!(word.with_state(word.state()), word);
    assert_eq!(word.emptied().incarnation(), word.incarnation());
    let _ = format!("{word:?}");
    let Ok(block) = word.block() else { return };
    assert_eq!(word.live(block, word.is_conditional()).with_state(word.state()), word);
    if geometry.check_block(block).is_ok() {
        let start = block.address.claimed_offset();
        let last = start + block.class.block_bytes() - 1;
        let chunks = [start, last].map(|offset| geometry.chunk_of(offset).unwrap());
        assert!(chunks[1] - chunks[0] <= block.class.chunks_per_span() as u32);
    }
}

/// Checks these bits as an entry of the directory, and as one of the chunk table.
fn check_entries(bits: u64, geometry: &Geometry) {
    let entry = DirectoryEntry::from_bits(bits);
    if let Ok(offset) = entry.subtable(geometry) {
        assert!(geometry.chunk_of(offset + SUBTABLE_BYTES - 1).is_some());
        assert_eq!(DirectoryEntry::new(offset, entry.local_depth()), entry);
        assert_eq!(offset % ROW_BYTES, 0);
    }
    let entry = ChunkEntry::from_bits(bits);
    if let Ok(chunk_use) = entry.chunk_use() {
        assert_eq!(ChunkEntry::new(chunk_use).with_age(entry.age()), entry);
    }
}

pub(crate) fn blocks() -> Vec<Vec<u8>> {
    let block = |key: &[u8], value: &[u8], units: u32| {
        let mut image = vec![0; BLOCK_HEADER_BYTES as usize];
        image.extend_from_slice(key);
        image.extend_from_slice(value);
        let address = BlockAddress(units);
        let stamp = BlockStamp {
            address,
            generation: 9,
            writer: 7,
            written_at_ms: 1,
            expires_at_ms: 0,
            is_pinned: units == 3,
        };
        seal(&mut image, key.len() as u16, value.len() as u32, stamp).unwrap();
        image.resize(image.len().next_multiple_of(64), 0);
        [&units.to_le_bytes()[..], &image].concat()
    };
    vec![block(b"key", b"value", 3), block(b"", b"", 0), block(&[7; 100], &[8; 300], u32::MAX)]
}

/// A block after its address: as it is, and with a corrected checksum.
pub(crate) fn block(bytes: &[u8]) -> bool {
    let Some((units, image)) = bytes.split_first_chunk() else { return false };
    let address = BlockAddress(u32::from_le_bytes(*units));
    let read = Block::decode(image, address);
    if let Ok(block) = &read {
        check_block(block, image);
    }
    let mut sealed = image.to_vec();
    let stamp = BlockStamp {
        address,
        generation: integer::<4>(image, BLOCK_GENERATION) as u32,
        writer: integer::<2>(image, BLOCK_WRITER) as u16,
        written_at_ms: integer::<6>(image, BLOCK_WRITTEN_AT) % BLOCK_PINNED,
        expires_at_ms: integer::<6>(image, BLOCK_EXPIRES_AT),
        is_pinned: integer::<6>(image, BLOCK_WRITTEN_AT) >= BLOCK_PINNED,
    };
    let key_bytes = integer::<2>(image, BLOCK_KEY_BYTES) as u16;
    let value_bytes = integer::<4>(image, BLOCK_VALUE_BYTES) as u32;
    if seal(&mut sealed, key_bytes, value_bytes, stamp).is_err() {
        assert!(matches!(read, Err(LayoutError::Truncated { .. })));
        return false;
    }
    let block = Block::decode(&sealed, address).unwrap();
    assert_eq!(block.header_word().generation, stamp.generation);
    check_block(&block, &sealed);
    let elsewhere = BlockAddress(address.0.wrapping_add(1));
    assert!(Block::decode(&sealed, elsewhere).is_err());
    // A valid block is sealed already. The mark may differ, because no checksum covers it.
    assert!(read.is_err() || sealed[4..] == image[4..]);
    true
}

fn check_block(block: &Block<'_>, image: &[u8]) {
    let length = block_bytes(block.key().len(), block.value().len()) as usize;
    let payload = &image[BLOCK_HEADER_BYTES as usize..length];
    assert_eq!([block.key(), block.value()].concat(), payload);
    assert_eq!(u64::from(block.writer()), integer::<2>(image, BLOCK_WRITER));
    let written_at = integer::<6>(image, BLOCK_WRITTEN_AT);
    assert_eq!(block.written_at_ms(), written_at % BLOCK_PINNED);
    assert_eq!(block.is_pinned(), written_at >= BLOCK_PINNED);
    assert_eq!(block.expires_at_ms(), integer::<6>(image, BLOCK_EXPIRES_AT));
}

/// The file's header: magic and version.
const HEADER_BYTES: usize = 12;
/// The flags of zstd's frame, which follow its magic number.
const DESCRIPTOR_OFFSET: usize = HEADER_BYTES + 4;
/// The flag that says that a checksum ends the frame.
const CHECKSUM_FLAG: u8 = 4;
const CHECKSUM_BYTES: usize = 4;
/// Limit on the length of a record, in bytes.
const RECORD_BYTES_MAX: usize = 6 << 20;

/// Key, value, expiry and pin of a record.
type OwnedRecord = (Vec<u8>, Vec<u8>, u64, bool);

fn written(records: &[OwnedRecord]) -> Result<Vec<u8>, SnapshotError> {
    let mut writer = Writer::create(Vec::new(), 1234, None)?;
    for (key, value, expires_at_ms, is_pinned) in records {
        let (expires_at_ms, is_pinned) = (*expires_at_ms, *is_pinned);
        writer.push(&Record { key, value, expires_at_ms, is_pinned })?;
    }
    writer.finish()
}

fn read(bytes: &[u8]) -> Result<Vec<OwnedRecord>, SnapshotError> {
    let mut reader = Reader::open(bytes)?;
    let mut records = Vec::new();
    while let Some(Record { key, value, expires_at_ms, is_pinned }) = reader.next_record()? {
        records.push((key.to_vec(), value.to_vec(), expires_at_ms, is_pinned));
    }
    assert_eq!(reader.records(), records.len() as u64);
    assert!(matches!(reader.next_record(), Ok(None)));
    Ok(records)
}

/// Whether this is a snapshot. If so, checks that its records round-trip through another file.
fn is_snapshot(bytes: &[u8]) -> bool {
    let Some(records) = decoded(read(bytes)) else { return false };
    for (key, value, ..) in &records {
        assert!((1..=65_535).contains(&key.len()) && key.len() + value.len() < RECORD_BYTES_MAX);
    }
    assert_eq!(read(&written(&records).unwrap()).unwrap(), records);
    true
}

pub(crate) fn files() -> Vec<Vec<u8>> {
    let many = (0..50u8).map(|n| (vec![n; 9], vec![n; n.into()], n.into(), n % 2 == 1)).collect();
    let contents = [vec![], vec![(b"key".to_vec(), b"value".to_vec(), 0, true)], many];
    contents.map(|records: Vec<OwnedRecord>| written(&records).unwrap()).into()
}

/// A file as it is, and without its checksum, so that the records are decoded.
pub(crate) fn file(bytes: &[u8]) -> bool {
    let mut without_checksum = bytes.to_vec();
    if let Some(descriptor) = without_checksum.get_mut(DESCRIPTOR_OFFSET)
        && *descriptor & CHECKSUM_FLAG != 0
    {
        *descriptor &= !CHECKSUM_FLAG;
        without_checksum.truncate(bytes.len() - CHECKSUM_BYTES);
    }
    let accepted = is_snapshot(&without_checksum);
    assert!(accepted || !is_snapshot(bytes));
    accepted
}

/// Inputs for `records`: the uncompressed content of a frame.
pub(crate) fn some_records() -> Vec<Vec<u8>> {
    let record = |key: &[u8], value: &[u8]| {
        let mut bytes = (key.len() as u16).to_le_bytes().to_vec();
        bytes.extend_from_slice(&[0; 2]);
        bytes.extend_from_slice(&(value.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&7u64.to_le_bytes());
        [&bytes, key, value].concat()
    };
    let head = [0; 16];
    let two = [&head[..], &record(b"key", b"value"), &record(b"k", b"")].concat();
    vec![[&head[..], &record(b"key", b"")].concat(), two]
}

/// Uncompressed content of the frame of a file that is valid otherwise.
pub(crate) fn records(bytes: &[u8]) -> bool {
    let mut file = written(&[]).unwrap();
    file.truncate(HEADER_BYTES);
    file.extend_from_slice(&zstd::bulk::compress(bytes, 1).unwrap());
    is_snapshot(&file)
}
