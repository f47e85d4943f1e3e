//! That what another server has, or has just made, is neither removed nor replaced.

use std::os::unix::fs::MetadataExt;

use farside_config::size::ByteSize;
use farside_control::address::Address;
use farside_fabric::shm::{HugePages, MemoryError};
use farside_snapshot::Writer;

use super::*;

static GO_ON: AtomicBool = AtomicBool::new(false);

fn write_snapshot(path: &Path) {
    let mut writer = Writer::create(File::create(path).unwrap(), 1, None).unwrap();
    writer.push(&Record { key: b"key", value: b"value", expires_at_ms: 0 }).unwrap();
    writer.finish().unwrap();
}

fn config(region: &Path) -> ServerConfig {
    let (memory, region_file) = (Some(ByteSize::mib(8)), Some(region.to_owned()));
    let listen = Some(Address::Shm(region.with_extension("sock")));
    ServerConfig { listen, memory, region_file, ..Default::default() }
}

#[test]
fn a_snapshot_is_not_restored_over_what_another_server_uses() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let (snapshot, region, unfinished) = (path("snap"), path("region"), path("region.restoring"));
    write_snapshot(&snapshot);
    let config = config(&region);
    let other = RegionMemory::file(&region, 8 << 20, HugePages::Never).unwrap();
    let before = fs::metadata(&unfinished).unwrap();
    let line = restored_memory(&snapshot, &config, &GO_ON).err().unwrap().to_string();
    assert!(line.contains("another server uses the region file"), "{line}");
    let after = fs::metadata(&unfinished).unwrap();
    assert_eq!((before.ino(), before.len()), (after.ino(), after.len()));
    assert!(!region.exists());
    drop(other);
    assert!(restored_memory(&path("missing"), &config, &GO_ON).is_err());
    assert_eq!((region.exists(), unfinished.exists()), (false, false));
    let restored = restored_memory(&snapshot, &config, &GO_ON).unwrap();
    let found = fs::metadata(&region).unwrap();
    assert_eq!(found.ino(), restored.file.metadata().unwrap().ino());
    let used = RegionMemory::file(&region, 8 << 20, HugePages::Never);
    assert!(matches!(used, Err(MemoryError::Locked { .. })));
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
    assert!(restored_memory(&path("missing"), &config(&link), &GO_ON).is_err());
    assert!(is_link() && !region.exists(), "nothing is left but the link");
    {
        let restored = restored_memory(&snapshot, &config(&link), &GO_ON).unwrap();
        let found = fs::symlink_metadata(&region).unwrap();
        assert_eq!(found.ino(), restored.file.metadata().unwrap().ino());
        assert!(is_link() && !path("link.restoring").exists());
        let used = RegionMemory::file(&link, 8 << 20, HugePages::Never);
        assert!(matches!(used, Err(MemoryError::Locked { .. })));
    }
    let again = restored_memory(&snapshot, &config(&link), &GO_ON);
    assert!(again.err().unwrap().to_string().contains("is there already"));
}

/// In the middle of its first look at the file, and while records are stored.
#[test]
fn who_stops_a_restore_gets_its_end_and_nothing_is_left() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let (snapshot, region) = (path("snap"), path("region"));
    write_snapshot(&snapshot);
    let stopped = restored_memory(&snapshot, &config(&region), &AtomicBool::new(true));
    let line = stopped.err().unwrap().to_string();
    assert!(line.contains("told to stop") && line.contains("nothing was kept"), "{line}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    let config = config(&region);
    let memory = region_memory(&config).unwrap();
    let opened = Arc::new(Mutex::new(recovery::open(&memory, &config).unwrap()));
    let stored = store_all(&snapshot, &opened, (1, &AtomicBool::new(true)));
    assert!(matches!(stored, Err(RestoreError::Stopped)));
}

#[test]
fn a_pipe_is_no_snapshot() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status();
    assert!(made.unwrap().success());
    let line = restored_memory(&pipe, &config(&folder.path().join("region")), &GO_ON);
    let line = line.err().unwrap().to_string();
    assert!(line.contains("pipe: it is no regular file"), "{line}");
}
