//! Targets: snapshot files, and the records in their frame.

use farside_snapshot::{Reader, Record, SnapshotError, Writer};

use crate::decoded;

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
