//! Proves that what is written comes back, that no part of a file can be missing or changed
//! unnoticed, and that any bytes are a snapshot or an error.

use proptest::prelude::*;

use super::*;

type Owned = (Vec<u8>, Vec<u8>, u64);

fn written(records: &[Owned]) -> Vec<u8> {
    let mut writer = Writer::create(Vec::new(), 1234, None).unwrap();
    for (key, value, expires_at_ms) in records {
        writer.push(&Record { key, value, expires_at_ms: *expires_at_ms }).unwrap();
    }
    writer.finish().unwrap()
}

fn read(bytes: &[u8]) -> Result<Vec<Owned>, SnapshotError> {
    let mut reader = Reader::open(bytes)?;
    let mut records = Vec::new();
    while let Some(Record { key, value, expires_at_ms }) = reader.next_record()? {
        records.push((key.to_vec(), value.to_vec(), expires_at_ms));
    }
    assert_eq!(reader.records(), records.len() as u64);
    Ok(records)
}

/// Several chunks of records that compress badly.
fn sample() -> Vec<Owned> {
    let mut state = 1u64;
    let mut noise = |bytes: usize| -> Vec<u8> {
        let step = |_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 56) as u8
        };
        (0..bytes).map(step).collect()
    };
    (0..100u32)
        .map(|n| (n.to_le_bytes().to_vec(), noise(n as usize * 300), u64::from(n % 3)))
        .collect()
}

#[test]
fn a_large_record_and_none_come_back() {
    assert_eq!(read(&written(&[])).unwrap(), []);
    let large = vec![(vec![1; 65_535], vec![2; 4 << 20], u64::MAX), (vec![3], vec![], 0)];
    assert_eq!(read(&written(&large)).unwrap(), large);
    let mut writer = Writer::create(Vec::new(), 0, None).unwrap();
    for (key, value) in [(vec![], vec![]), (vec![0; 65_536], vec![]), (vec![0], vec![0; 7 << 20])] {
        let pushed = writer.push(&Record { key: &key, value: &value, expires_at_ms: 0 });
        assert!(matches!(pushed, Err(SnapshotError::TooLarge { .. })));
    }
}

#[test]
fn a_file_that_ends_early_is_refused() {
    let bytes = written(&sample());
    assert_eq!(read(&bytes).unwrap(), sample());
    assert_eq!(Reader::open(&bytes[..]).unwrap().created_at_s(), 1234);
    for end in (0..bytes.len()).step_by(997).chain(bytes.len() - 30..bytes.len()) {
        let error = read(&bytes[..end]).unwrap_err();
        let said = matches!(error, SnapshotError::Truncated { .. } | SnapshotError::NotASnapshot);
        assert!(said, "{end}: {error}");
    }
}

#[test]
fn chunks_that_change_places_or_are_missing_are_noticed() {
    let bytes = written(&sample());
    let mut chunks = vec![&bytes[..32]];
    let mut rest = &bytes[32..];
    while let Some(length) = rest.first_chunk() {
        let (chunk, behind) = rest.split_at(16 + u32::from_le_bytes(*length) as usize);
        chunks.push(chunk);
        rest = behind;
    }
    assert!(chunks.len() > 3, "{} chunks", chunks.len());
    for at in 1..chunks.len() - 1 {
        let without = [&chunks[..at], &chunks[at + 1..]].concat().concat();
        assert!(matches!(read(&without), Err(SnapshotError::Corrupt { .. })), "{at} missing");
    }
    chunks.swap(1, 2);
    assert!(matches!(read(&chunks.concat()), Err(SnapshotError::Corrupt { .. })));
    let behind = [&bytes[..], b"x"].concat();
    assert!(matches!(read(&behind), Err(SnapshotError::Corrupt { .. })));
}

/// Files of before there were limits in them have zeros there.
#[test]
fn limits_come_back_and_a_file_need_not_have_any() {
    let limits = Limits { key_bytes_max: 1, value_bytes_max: 0 };
    for limits in [Some(limits), None] {
        let bytes = Writer::create(Vec::new(), 7, limits).unwrap().finish().unwrap();
        assert_eq!(Reader::open(&bytes[..]).unwrap().limits(), limits);
        assert_eq!(bytes[24..32] == [0; 8], limits.is_none());
    }
}

#[test]
fn other_files_are_told_what_they_are() {
    assert!(matches!(read(b"{\"key\":\"a\"}"), Err(SnapshotError::NotASnapshot)));
    for version in [0, 3] {
        let mut other = written(&[]);
        other[8] = version;
        let error = read(&other).unwrap_err().to_string();
        let said = format!("it has snapshot format {version}, this program reads 2 and before: ");
        assert!(error.starts_with(&said), "{error}");
    }
}

/// A file of one chunk, whose checksums are right.
fn file_of(version: u32, raw: &[u8], raw_bytes: u32, records: u32) -> Vec<u8> {
    use format::{ChunkHeader, Header};
    use zerocopy::IntoBytes;
    let header = Header { version: version.into(), ..Header::new(0, None) };
    let packed = zstd::bulk::compress(raw, 0).unwrap();
    let mut chunk = ChunkHeader {
        packed_bytes: (packed.len() as u32).into(),
        raw_bytes: raw_bytes.into(),
        records: records.into(),
        crc32: 0.into(),
    };
    chunk.crc32 = chunk.checksum(header.crc32.get(), &packed).into();
    [header.as_bytes(), chunk.as_bytes(), &packed].concat()
}

#[test]
fn ends_keep_their_milliseconds_and_those_of_older_files_have_none() {
    let ends = [0, 1, 1_700_000_000_123];
    let records = ends.map(|end| (vec![1], vec![], end));
    assert_eq!(read(&written(&records)).unwrap(), records);
    let seconds = [0, 1_700_000_000, u32::MAX];
    let record = |end: u32| [&[1, 0, 0, 0, 1, 0, 0, 0][..], &end.to_le_bytes(), b"kv"].concat();
    let raw = seconds.map(record).concat();
    let older = file_of(1, &raw, 42, 3);
    let mut reader = Reader::open(&older[..]).unwrap();
    for end in seconds {
        let record = reader.next_record().unwrap().unwrap();
        let expires_at_ms = u64::from(end) * 1000;
        assert_eq!(record, Record { key: b"k", value: b"v", expires_at_ms });
    }
}

/// A chunk may say that it becomes more than it does, or that it holds more records.
#[test]
fn a_chunk_that_lies_under_a_right_checksum_is_refused() {
    let mut raw = [&[1][..], &[0; 15], b"k"].concat();
    let file = |raw: &[u8], raw_bytes, records| file_of(2, raw, raw_bytes, records);
    let truncated = read(&file(&raw, 17, 1));
    assert!(matches!(truncated, Err(SnapshotError::Truncated { records: 1 })), "{truncated:?}");
    for (raw_bytes, records) in [(16, 1), (18, 1), (17, 2), (17, 0), (1 << 30, 1), (0, 1)] {
        let outcome = read(&file(&raw, raw_bytes, records));
        assert!(matches!(outcome, Err(SnapshotError::Corrupt { .. })), "{outcome:?}");
    }
    raw[4] = 1;
    assert!(matches!(read(&file(&raw, 17, 1)), Err(SnapshotError::Corrupt { .. })));
}

proptest! {
    #[test]
    fn any_records_come_back(records: Vec<(Vec<u8>, Vec<u8>, u64)>) {
        let records: Vec<Owned> =
            records.into_iter().filter(|(key, ..)| !key.is_empty()).collect();
        prop_assert_eq!(read(&written(&records)).unwrap(), records);
    }

    #[test]
    fn any_bytes_are_a_snapshot_or_an_error(bytes: Vec<u8>, behind_a_header: bool) {
        let start = if behind_a_header { written(&[])[..32].to_vec() } else { Vec::new() };
        let _ = read(&[start, bytes].concat());
    }

    #[test]
    fn no_changed_byte_goes_unnoticed(at: prop::sample::Index, bit in 0..8) {
        let records = sample();
        let mut bytes = written(&records[..20]);
        let at = at.index(bytes.len());
        bytes[at] ^= 1u8 << bit;
        prop_assert!(read(&bytes).is_err(), "byte {}", at);
    }
}
