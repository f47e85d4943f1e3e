//! Snapshot files.

use farside_snapshot::{Reader, Record, SnapshotError, Writer};

use crate::is_told_in_one_line;

const HEADER_BYTES: usize = 32;
const CHUNK_HEADER_BYTES: usize = 16;
/// Of the file's header, where what its checksum covers starts.
const COVERED_OFFSET: usize = 16;
/// Records longer than this cannot be written.
const RECORD_BYTES_MAX: usize = 6 << 20;

type Owned = (Vec<u8>, Vec<u8>, u64);

fn written(records: &[Owned]) -> Result<Vec<u8>, SnapshotError> {
    let mut writer = Writer::create(Vec::new(), 1234, None)?;
    for (key, value, expires_at_ms) in records {
        writer.push(&Record { key, value, expires_at_ms: *expires_at_ms })?;
    }
    writer.finish()
}

fn read(bytes: &[u8]) -> Result<Vec<Owned>, SnapshotError> {
    let mut reader = Reader::open(bytes)?;
    let mut records = Vec::new();
    while let Some(Record { key, value, expires_at_ms }) = reader.next_record()? {
        records.push((key.to_vec(), value.to_vec(), expires_at_ms));
    }
    assert_eq!(reader.records(), records.len() as u64);
    assert!(matches!(reader.next_record(), Ok(None)));
    Ok(records)
}

/// Whether this is a snapshot. If it is, its records can be written, and come back.
fn holds(bytes: &[u8]) -> bool {
    let records = match read(bytes) {
        Ok(records) => records,
        Err(error) => {
            is_told_in_one_line(&error);
            return false;
        }
    };
    for (key, value, _) in &records {
        assert!((1..=65_535).contains(&key.len()) && key.len() + value.len() < RECORD_BYTES_MAX);
    }
    assert_eq!(read(&written(&records).unwrap()).unwrap(), records);
    true
}

pub(crate) fn files() -> Vec<Vec<u8>> {
    let many = (0..50u8).map(|n| (vec![n; 9], vec![n; n.into()], n.into())).collect();
    let all = [vec![], vec![(b"key".to_vec(), b"value".to_vec(), 0)], many];
    all.map(|records: Vec<Owned>| written(&records).unwrap()).into()
}

/// Puts all checksums right.
fn sealed(bytes: &[u8]) -> Vec<u8> {
    let mut file = bytes.to_vec();
    let Some(header) = file.get_mut(..HEADER_BYTES) else { return file };
    let mut crc32 = crc32fast::hash(&header[COVERED_OFFSET..]);
    header[12..16].copy_from_slice(&crc32.to_le_bytes());
    let mut rest = &mut file[HEADER_BYTES..];
    while let Some((header, behind)) = rest.split_first_chunk_mut::<CHUNK_HEADER_BYTES>() {
        let packed = header.first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes)) as usize;
        let Some((packed, behind)) = behind.split_at_mut_checked(packed) else { break };
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&crc32.to_le_bytes());
        hasher.update(&header[..12]);
        hasher.update(packed);
        crc32 = hasher.finalize();
        header[12..].copy_from_slice(&crc32.to_le_bytes());
        rest = behind;
    }
    file
}

/// A file as it is, and with checksums that are right.
pub(crate) fn file(bytes: &[u8]) -> bool {
    let sealed = sealed(bytes);
    // A checksum that is right is not changed.
    assert!(!holds(bytes) || sealed == bytes);
    holds(&sealed)
}

/// What stands in chunks before they are compressed, behind the number of records that is claimed.
pub(crate) fn some_records() -> Vec<Vec<u8>> {
    let record = |key: &[u8], value: &[u8]| {
        let mut bytes = (key.len() as u16).to_le_bytes().to_vec();
        bytes.extend_from_slice(&[0; 2]);
        bytes.extend_from_slice(&(value.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&7u64.to_le_bytes());
        [&bytes, key, value].concat()
    };
    let two = [&[2][..], &record(b"key", b"value"), &record(b"k", b"")].concat();
    vec![[&[1][..], &record(b"key", b"")].concat(), two]
}

/// A file of one chunk with these records, all else in order.
pub(crate) fn records(bytes: &[u8]) -> bool {
    let Some((records, raw)) = bytes.split_first() else { return false };
    let mut file = written(&[]).unwrap();
    file.truncate(HEADER_BYTES);
    let packed = zstd::bulk::compress(raw, 1).unwrap();
    let end = u64::from(*records).to_le_bytes();
    for (raw, records, packed) in [(raw.len(), *records, &packed[..]), (0, 0, &end)] {
        for number in [packed.len() as u32, raw as u32, records.into(), 0] {
            file.extend_from_slice(&number.to_le_bytes());
        }
        file.extend_from_slice(packed);
    }
    holds(&sealed(&file))
}
