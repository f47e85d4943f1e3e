//! Region memory is shared, locked and reserved as documented. Errors name their remedies.

use std::fs;

use super::*;

const BYTES: u64 = 8 << 20;

/// A path for a region file, and its temporary folder.
fn new_path() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("region");
    (folder, path)
}

/// The error of memory in a file at this path.
fn file_error(path: &Path, huge_pages: HugePages) -> MemoryError {
    RegionMemory::file(path, BYTES, huge_pages).err().unwrap()
}

#[test]
fn anonymous_memory_is_shared_and_a_reader_cannot_write_it() {
    let memory = RegionMemory::anonymous(BYTES, HugePages::Auto).unwrap();
    assert_eq!((memory.region.bytes(), memory.is_new), (BYTES, true));
    let reader = memory.reader_descriptor().unwrap();
    assert_eq!(Region::map(&reader).err().unwrap().kind(), io::ErrorKind::PermissionDenied);
    let read_only = Region::map_read_only(&reader).unwrap();
    memory.region.store(64, 7).unwrap();
    assert_eq!(read_only.load(64).unwrap(), 7);
    assert!(read_only.store(64, 8).is_err());
    assert!(Region::map(&memory.file).is_ok());
}

#[test]
fn all_pages_are_allocated_at_the_start() {
    use std::os::unix::fs::MetadataExt;
    let small = RegionMemory::anonymous(BYTES, HugePages::Never).unwrap();
    assert_eq!(small.pages, Pages::Small);
    assert!(small.file.metadata().unwrap().blocks() * 512 >= BYTES);
}

#[test]
fn a_region_larger_than_the_available_memory_is_refused() {
    let error = RegionMemory::anonymous(1 << 46, HugePages::Auto).err().unwrap();
    assert!(matches!(error, MemoryError::TooMuch { asked, available } if asked > available));
    let line = error.to_string();
    assert!(line.starts_with("64.0 TiB are more than the ") && !line.contains('\n'), "{line}");
}

#[test]
fn a_region_larger_than_the_limit_of_a_cgroup_is_refused() {
    let room = |left| Some(Room { left, limit: "/sys/fs/cgroup/memory.max".into() });
    let error = check_room(1 << 30, room(1 << 30)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "1.0 GiB, and 36.0 MiB for the server itself, are more than the 1.0 GiB that the limit in \
         /sys/fs/cgroup/memory.max leaves: ask for less memory, or raise the limit of the \
         container or service"
    );
    assert!(check_room(1 << 30, room((1 << 30) + (36 << 20))).is_ok());
    assert!(check_room(1 << 30, None).is_ok());
    assert!(check_room(u64::MAX, room(0)).is_err());
}

#[test]
fn a_region_that_requires_huge_pages_gets_no_others() {
    // More than the pool of any test machine.
    let error = RegionMemory::anonymous(1 << 45, HugePages::Require).err().unwrap();
    let line = error.to_string();
    assert!(line.contains("sysctl vm.nr_hugepages=16777216"), "{line}");
    let (_folder, path) = new_path();
    let error = file_error(&path, HugePages::Require);
    assert!(matches!(error, MemoryError::NotHugetlbfs { .. }), "{error}");
    assert!(!path.exists());
}

#[test]
fn a_file_is_new_once_and_locked_while_it_is_used() {
    let (_folder, path) = new_path();
    let mut memory = RegionMemory::file(&path, BYTES, HugePages::Auto).unwrap();
    assert!(memory.is_new && !path.exists(), "it has no name yet");
    let second = file_error(&path, HugePages::Auto);
    assert!(matches!(second, MemoryError::Locked { .. }), "{second}");
    memory.name_file().unwrap();
    memory.region.store(0, 5).unwrap();
    let second = file_error(&path, HugePages::Auto);
    assert!(matches!(second, MemoryError::Locked { .. }), "{second}");
    // A client's copy of the descriptor and its mapping outlive the server.
    let with_client = memory.file.try_clone().unwrap();
    let mapped = Region::map(&with_client).unwrap();
    drop(memory);
    let reopened = RegionMemory::file(&path, 2 * BYTES, HugePages::Auto).unwrap();
    reopened.reserve().unwrap();
    assert_eq!((reopened.is_new, reopened.region.bytes()), (false, BYTES));
    assert_eq!((reopened.region.load(0).unwrap(), mapped.load(0).unwrap()), (5, 5));
}

/// Of servers that start together, one gets the new file, and the others neither use nor remove it.
#[test]
fn one_of_many_servers_that_start_together_gets_the_new_file() {
    use std::os::unix::fs::MetadataExt;
    use std::sync::Barrier;
    const STARTING: usize = 4;
    let folder = tempfile::tempdir().unwrap();
    for round in 0..100 {
        let path = folder.path().join(round.to_string());
        let (barrier, path) = (Barrier::new(STARTING), path.as_path());
        let start = || {
            barrier.wait();
            let mut memory = RegionMemory::file(path, 1 << 20, HugePages::Never)?;
            memory.name_file().map(|()| memory)
        };
        let outcomes: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..STARTING).map(|_| scope.spawn(start)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let (got, refused): (Vec<_>, Vec<_>) = outcomes.into_iter().partition(Result::is_ok);
        for refused in refused {
            let error = refused.err().unwrap();
            assert!(matches!(error, MemoryError::Locked { .. }), "round {round}: {error}");
        }
        assert_eq!(got.len(), 1, "round {round}");
        let winner = got.into_iter().next().unwrap().unwrap();
        assert_eq!(fs::metadata(path).unwrap().ino(), winner.file.metadata().unwrap().ino());
    }
}

#[test]
fn a_new_file_without_a_name_is_removed_with_its_server() {
    let (folder, path) = new_path();
    let names = || fs::read_dir(folder.path()).unwrap().count();
    let new = || RegionMemory::file(&path, BYTES, HugePages::Never);
    drop(new().unwrap());
    assert_eq!(names(), 0);
    // A killed server leaves such a file.
    fs::write(folder.path().join("region.restoring"), b"half").unwrap();
    let next = new().unwrap();
    assert!(next.is_new && next.replaces_unfinished());
    assert_eq!(next.region.load(0).unwrap(), 0);
    drop(next);
    assert_eq!(names(), 0);
}

#[test]
fn an_empty_file_is_refused() {
    let (_folder, path) = new_path();
    fs::write(&path, b"").unwrap();
    let line = file_error(&path, HugePages::Never).to_string();
    assert!(
        line.contains("/region is empty: a region was there") && line.contains("remove the file")
    );
    assert_eq!(fs::metadata(&path).unwrap().len(), 0);
}

#[test]
fn a_path_without_a_folder_and_a_folder_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let absent = folder.path().join("no/region");
    let error = file_error(&absent, HugePages::Auto);
    assert!(matches!(error, MemoryError::NoFolder { .. }), "{error}");
    let error = file_error(folder.path(), HugePages::Auto);
    assert!(matches!(error, MemoryError::NotAFile { .. }), "{error}");
}

#[test]
fn memory_reports_its_pages_and_how_to_get_better_ones() {
    let mut memory = RegionMemory::anonymous(BYTES, HugePages::Never).unwrap();
    assert_eq!((memory.pages_text().as_str(), memory.advice()), ("4 KiB pages", None));
    assert!(memory.collapse().is_none(), "small pages, as asked");
    memory.pages = Pages::Ordinary;
    let advice = memory.advice().unwrap();
    assert!(advice.contains("vm.nr_hugepages=4"), "{advice}");
    memory.huge_bytes.store(BYTES / 4, Ordering::Relaxed);
    assert_eq!(memory.pages_text(), "25 % in 2 MiB pages, the rest in 4 KiB pages");
    memory.huge_bytes.store(BYTES, Ordering::Relaxed);
    assert_eq!((memory.pages_text().as_str(), memory.advice()), ("2 MiB pages", None));
    memory.pages = Pages::Disk;
    assert!(memory.advice().unwrap().contains("tmpfs"));
}
