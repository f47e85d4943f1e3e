//! That what another server has, or has just made, is neither removed nor replaced.

use std::os::unix::fs::MetadataExt;

use farside_common::fabric::shm::HugePages;
use farside_common::size::ByteSize;
use farside_snapshot::Writer;

use super::*;

#[test]
fn a_snapshot_is_not_restored_over_what_another_server_uses() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let (snapshot, region, unfinished) = (path("snap"), path("region"), path("region.restoring"));
    let mut writer = Writer::create(File::create(&snapshot).unwrap(), 1).unwrap();
    writer.push(&Record { key: b"key", value: b"value", expires_at_s: 0 }).unwrap();
    writer.finish().unwrap();
    let (memory, region_file) = (Some(ByteSize::mib(8)), Some(region.clone()));
    let config = ServerConfig { memory, region_file, ..Default::default() };
    let refuses = |used: &Path| {
        let before = fs::metadata(used).unwrap();
        let line = restored_memory(&snapshot, &config).err().unwrap().to_string();
        assert!(line.contains("another server uses the region file"), "{line}");
        let after = fs::metadata(used).unwrap();
        assert_eq!((before.ino(), before.len()), (after.ino(), after.len()));
    };
    let other = RegionMemory::file(&unfinished, 8 << 20, HugePages::Never).unwrap();
    refuses(&unfinished);
    assert!(!region.exists(), "the empty file was for nothing");
    drop(other);
    let begun = RegionLock::take(&region).unwrap();
    refuses(&region);
    drop(begun);
    // What those left whom nobody hears of any more is in nobody's way.
    assert!(restored_memory(&path("missing"), &config).is_err());
    assert_eq!((fs::metadata(&region).unwrap().len(), unfinished.exists()), (0, false));
    let restored = restored_memory(&snapshot, &config).unwrap();
    let found = fs::metadata(&region).unwrap();
    assert_eq!(found.ino(), restored.file.metadata().unwrap().ino());
    assert!(matches!(RegionLock::take(&region), Err(MemoryError::Locked { .. })));
}
