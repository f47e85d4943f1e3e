//! Proves that records round-trip, and that a reader notices when a part of a file is missing or
//! changed. Any bytes are a snapshot or an error.

use proptest::prelude::*;

use super::*;

type OwnedRecord = (Vec<u8>, Vec<u8>, u64);

/// Whether a test pins the value with this expiry.
fn is_pinned(expires_at_ms: u64) -> bool {
    expires_at_ms & 1 == 1
}

fn snapshot_of(records: &[OwnedRecord]) -> Vec<u8> {
    let mut writer = Writer::create(Vec::new(), 1234, None).unwrap();
    for (key, value, expires_at_ms) in records {
        let is_pinned = is_pinned(*expires_at_ms);
        writer.push(&Record { key, value, expires_at_ms: *expires_at_ms, is_pinned }).unwrap();
    }
    writer.finish().unwrap()
}

fn read(bytes: &[u8]) -> Result<Vec<OwnedRecord>, SnapshotError> {
    let mut reader = Reader::open(bytes)?;
    let mut records = Vec::new();
    while let Some(Record { key, value, expires_at_ms, is_pinned: pinned }) =
        reader.next_record()?
    {
        assert_eq!(pinned, is_pinned(expires_at_ms));
        records.push((key.to_vec(), value.to_vec(), expires_at_ms));
    }
    assert_eq!(reader.records(), records.len() as u64);
    Ok(records)
}

/// Records that compress badly, and more of them than zstd's window holds.
fn sample() -> Vec<OwnedRecord> {
    let mut state = 1u64;
    let mut noise = |bytes: usize| -> Vec<u8> {
        let step = |_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 56) as u8
        };
        (0..bytes).map(step).collect()
    };
    (0..130u32)
        .map(|n| (n.to_le_bytes().to_vec(), noise(n as usize * 300), u64::from(n % 3)))
        .collect()
}

/// Returns a file with this content after its headers, and with a valid checksum.
fn file_of(content: &[u8]) -> Vec<u8> {
    let mut writer = Writer::create(Vec::new(), 0, None).unwrap();
    writer.push_bytes(content);
    writer.finish().unwrap()
}

#[test]
fn a_large_record_and_no_records_round_trip() {
    assert_eq!(read(&snapshot_of(&[])).unwrap(), []);
    let large = vec![(vec![1; 65_535], vec![2; 4 << 20], u64::MAX), (vec![3], vec![], 0)];
    assert_eq!(read(&snapshot_of(&large)).unwrap(), large);
    let mut writer = Writer::create(Vec::new(), 0, None).unwrap();
    for (key, value) in [(vec![], vec![]), (vec![0; 65_536], vec![]), (vec![0], vec![0; 258 << 20])]
    {
        let pushed =
            writer.push(&Record { key: &key, value: &value, expires_at_ms: 0, is_pinned: false });
        assert!(matches!(pushed, Err(SnapshotError::TooLarge { .. })));
    }
}

#[test]
fn a_file_that_ends_early_is_refused() {
    let bytes = snapshot_of(&sample());
    assert_eq!(read(&bytes).unwrap(), sample());
    assert_eq!(Reader::open(&bytes[..]).unwrap().created_at_s(), 1234);
    for end in (0..bytes.len()).step_by(997).chain(bytes.len() - 30..bytes.len()) {
        let error = read(&bytes[..end]).unwrap_err();
        let is_expected =
            matches!(error, SnapshotError::Truncated { .. } | SnapshotError::NotASnapshot);
        assert!(is_expected, "{end}: {error}");
    }
}

#[test]
fn the_checksum_at_the_end_differs_between_snapshots() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("snap");
    let checksum_of = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        stored_checksum(&path)
    };
    let records = |value: u8| snapshot_of(&[(vec![1], vec![value], 0)]);
    let [one, again, two] = [1, 1, 2].map(|value| checksum_of(&records(value)).unwrap());
    assert!(one == again && one != two);
    assert!(matches!(checksum_of(b"abc"), Err(SnapshotError::Open(_))));
    assert!(
        Reader::open_file(folder.path())
            .is_err_and(|error| { matches!(error, SnapshotError::NotAFile) })
    );
}

#[test]
fn bytes_after_the_end_are_refused() {
    let bytes = snapshot_of(&sample()[..9]);
    for extra in [&b"x"[..], &bytes, &bytes[size_of::<FileHeader>()..]] {
        let error = read(&[&bytes, extra].concat()).unwrap_err().to_string();
        assert!(error.contains("bytes after the end, after 9 records"), "{error}");
    }
}

#[test]
fn limits_round_trip_and_are_optional() {
    let limits = Limits { key_bytes_max: 1, value_bytes_max: 0 };
    for limits in [Some(limits), None] {
        let bytes = Writer::create(Vec::new(), 7, limits).unwrap().finish().unwrap();
        assert_eq!(Reader::open(&bytes[..]).unwrap().limits(), limits);
    }
}

#[test]
fn the_error_for_another_file_names_its_format() {
    assert!(matches!(read(b"{\"key\":\"a\"}"), Err(SnapshotError::NotASnapshot)));
    for version in [0, 1, 2, 5] {
        let mut other = snapshot_of(&[]);
        other[8] = version;
        let error = read(&other).unwrap_err().to_string();
        let expected =
            format!("it has snapshot format {version}, and this program reads formats 3 to 4:");
        assert!(error.starts_with(&expected), "{error}");
    }
    let mut former = snapshot_of(&sample());
    former[8] = 3;
    assert_eq!(read(&former).unwrap(), sample());
}

#[test]
fn times_of_expiry_keep_their_milliseconds() {
    let records =
        [0, 1, 1_700_000_000_123, u64::MAX].map(|expires_at_ms| (vec![1], vec![], expires_at_ms));
    assert_eq!(read(&snapshot_of(&records)).unwrap(), records);
}

/// Only a program that forges a file writes such records, because their checksum is valid.
#[test]
fn a_forged_record_with_a_valid_checksum_is_refused() {
    let record = |key_bytes: u16, reserved: u16, value_bytes: u32| {
        let head = [key_bytes.to_le_bytes(), reserved.to_le_bytes()].concat();
        [&head, &value_bytes.to_le_bytes()[..], &[0; 8], b"kv"].concat()
    };
    let whole = record(1, 0, 1);
    assert_eq!(read(&file_of(&whole)).unwrap(), [(b"k".to_vec(), b"v".to_vec(), 0)]);
    for forged in [
        record(0, 0, 2),
        record(1, 2, 1),
        record(1, 256, 1),
        record(2, 0, u32::MAX),
        record(1, 0, 257 << 20),
    ] {
        let outcome = read(&file_of(&forged));
        assert!(matches!(outcome, Err(SnapshotError::Corrupt { records: 0, .. })), "{outcome:?}");
    }
    for forged in [record(1, 0, 2), record(3, 0, 0), [&whole[..], b"x"].concat()] {
        let outcome = read(&file_of(&forged));
        assert!(matches!(outcome, Err(SnapshotError::Truncated { .. })), "{outcome:?}");
    }
}

/// A reader allocates the whole window, so the file must not choose its size.
#[test]
fn a_file_with_a_larger_window_is_refused() {
    let mut frame = zstd::Encoder::new(Vec::new(), 1).unwrap();
    frame.window_log(WINDOW_LOG + 1).unwrap();
    std::io::Write::write_all(&mut frame, &[0; 16]).unwrap();
    let header = &snapshot_of(&[])[..size_of::<FileHeader>()];
    let error = read(&[header, &frame.finish().unwrap()].concat()).unwrap_err().to_string();
    assert!(error.contains("it is corrupted (") && error.contains("memory"), "{error}");
}

/// Flips every bit of a file that compresses well, and of one that does not. A few bits have no
/// meaning to zstd: the padding of its tables, and some bits of the window's size, because several
/// sizes are large enough for this file.
#[test]
fn a_changed_bit_is_refused_or_changes_no_record() {
    let text = (0..60u64)
        .map(|n| (format!("user{n:04}").into(), format!("{:x}", n * n).repeat(5).into(), n % 7));
    for records in [text.collect(), sample()[..5].to_vec()] {
        let bytes = snapshot_of(&records);
        let bits = bytes.len() * 8;
        let mut without_meaning = 0;
        for bit in 0..bits {
            let mut changed = bytes.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            if let Ok(found) = read(&changed) {
                assert_eq!(found, records, "bit {bit}");
                without_meaning += 1;
            }
        }
        assert!(without_meaning < bits / 64, "{without_meaning} of {bits}");
    }
}

proptest! {
    #[test]
    fn any_records_round_trip(records: Vec<(Vec<u8>, Vec<u8>, u64)>) {
        let records: Vec<OwnedRecord> =
            records.into_iter().filter(|(key, ..)| !key.is_empty()).collect();
        prop_assert_eq!(read(&snapshot_of(&records)).unwrap(), records);
    }

    #[test]
    fn any_bytes_are_a_snapshot_or_an_error(bytes: Vec<u8>, after_a_header: bool) {
        let header = &snapshot_of(&[])[..size_of::<FileHeader>()];
        let start = if after_a_header { header } else { &[] };
        let _ = read(&[start, &bytes].concat());
    }
}
