//! That what another server has, or has just made, is neither removed nor replaced.

use std::os::unix::fs::MetadataExt;

use farside_common::fabric::shm::HugePages;
use farside_common::size::ByteSize;
use farside_snapshot::Writer;

use super::*;

fn write_snapshot(path: &Path) {
    let mut writer = Writer::create(File::create(path).unwrap(), 1).unwrap();
    writer.push(&Record { key: b"key", value: b"value", expires_at_s: 0 }).unwrap();
    writer.finish().unwrap();
}

fn config(region: &Path) -> ServerConfig {
    let (memory, region_file) = (Some(ByteSize::mib(8)), Some(region.to_owned()));
    ServerConfig { memory, region_file, ..Default::default() }
}

#[test]
fn a_snapshot_is_not_restored_over_what_another_server_uses() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let (snapshot, region, unfinished) = (path("snap"), path("region"), path("region.restoring"));
    write_snapshot(&snapshot);
    let config = config(&region);
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

/// As the next server will come by it, too.
#[test]
fn a_snapshot_is_restored_where_a_link_leads() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    fs::create_dir(path("elsewhere")).unwrap();
    let (snapshot, link, region) = (path("snap"), path("link"), path("elsewhere/region"));
    write_snapshot(&snapshot);
    std::os::unix::fs::symlink(&region, &link).unwrap();
    let is_link = || fs::symlink_metadata(&link).unwrap().is_symlink();
    assert!(restored_memory(&path("missing"), &config(&link)).is_err());
    assert!(is_link() && !region.exists(), "nothing is left but the link");
    for existed in [false, true] {
        if existed {
            File::create(&region).unwrap();
        }
        let restored = restored_memory(&snapshot, &config(&link)).unwrap();
        let found = fs::symlink_metadata(&region).unwrap();
        assert_eq!(found.ino(), restored.file.metadata().unwrap().ino());
        assert!(is_link() && !path("link.restoring").exists());
        assert!(matches!(RegionLock::take(&region), Err(MemoryError::Locked { .. })));
        fs::remove_file(&region).unwrap();
    }
}
