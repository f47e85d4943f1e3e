//! Restores a snapshot into a new region, before the server accepts clients.
//!
//! The engine of the clients' protocol stores the values. It gets its blocks from the depot of the
//! new region.

use std::collections::VecDeque;
use std::io::BufRead;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use farside_config::ServerConfig;
use farside_fabric::memory::RegionMemory;
use farside_fabric::shm::ShmFabric;
use farside_fabric::{RegionIndex, boot_time_ns};
use farside_layout::{FreeBlock, SizeClass};
use farside_protocol::allocator::{BlockDelivery, BlockSource, Delivery};
use farside_protocol::{
    Action, ConnectionCache, Engine, Failure, Lifetime, OpenRegion, OperationError, Prefix,
    RegionOptions,
};
use farside_snapshot::{Reader, Record};

use crate::error::{RestoreError, ServerError};
use crate::region::own_endpoint::OwnEndpoint;
use crate::region::recovery::{self, region_memory};
use crate::region::served::ServedRegion;

/// The client id in the restored blocks. No client has it yet.
const WRITER_ID: u16 = 1;

/// Returns a new region with the snapshot's content. If the restore fails, or `stop` becomes true,
/// it leaves no file, and an existing region file is unchanged.
pub(crate) fn restored_memory(
    snapshot: &Path,
    config: &ServerConfig,
    stop: &AtomicBool,
) -> Result<RegionMemory, ServerError> {
    let server_error =
        |source| ServerError::Restore { path: snapshot.to_owned(), source: Box::new(source) };
    if let Some(region_file) = config.region_file.clone().filter(|path| path.exists()) {
        return Err(server_error(RestoreError::RegionExists { region_file }));
    }
    // The file gets its name when it is complete. Otherwise the next server would serve what a
    // killed one had restored so far.
    let mut memory = restore(snapshot, config, stop).map_err(server_error)?;
    memory.name_file()?;
    Ok(memory)
}

/// Checks the snapshot, creates a region and stores the snapshot's records there.
fn restore(
    snapshot: &Path,
    config: &ServerConfig,
    stop: &AtomicBool,
) -> Result<RegionMemory, RestoreError> {
    // Reads the whole file before it makes a region, so that a damaged file is refused early.
    let mut reader = Reader::open_file(snapshot)?;
    while next_record(&mut reader, stop)?.is_some() {}
    let (total, limits) = (reader.records(), reader.limits());
    tracing::info!(keys = total, "restoring a snapshot");
    let config = ServerConfig {
        // A snapshot that does not fit is an error. With eviction, keys would be missing.
        evict: false,
        key_bytes_max: config.key_bytes_max.or(limits.map(|limits| limits.key_bytes_max)),
        value_bytes_max: config.value_bytes_max.or(limits.map(|limits| limits.value_bytes_max)),
        ..config.clone()
    };
    let region_error = |error: ServerError| RestoreError::Region(Box::new(error));
    config.validate().map_err(|error| region_error(error.into()))?;
    let mut memory = region_memory(&config).map_err(region_error)?;
    let opened = Arc::new(Mutex::new(recovery::open(&memory, &config).map_err(region_error)?));
    store_all(snapshot, &opened, (total, stop))?;
    lock(&opened).close().map_err(|error| region_error(error.into()))?;
    // The region has content now: `recovery::open` must not format it again.
    memory.is_new = false;
    tracing::info!(keys = total, "restored the snapshot");
    Ok(memory)
}

/// Locks the region. Only one thread uses it; the mutex is there because a [`BlockSource`] must be
/// `Send`.
fn lock(opened: &Mutex<ServedRegion>) -> MutexGuard<'_, ServedRegion> {
    opened.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes blocks from the depot of a region that has no clients yet, and splits its subtables.
struct DepotBlockSource {
    opened: Arc<Mutex<ServedRegion>>,
    endpoint: OwnEndpoint,
    deliveries: VecDeque<Delivery>,
    is_lost: bool,
}

impl BlockSource for DepotBlockSource {
    fn request(&mut self, class: SizeClass, count: u32) {
        let (mut opened, now) = (lock(&self.opened), boot_time_ns());
        let Ok(blocks) = opened.take_blocks(class, count, now) else {
            self.is_lost = true;
            return;
        };
        let soon = blocks.is_empty() && opened.has_block_soon(class, now);
        let delivery = BlockDelivery { class, rested: true, soon, blocks };
        self.deliveries.push_back(Delivery::Blocks(delivery));
    }

    fn request_split(&mut self, prefix: Prefix) {
        let mut opened = lock(&self.opened);
        let subtable = (prefix.directory_hash(), prefix.local_depth);
        let Ok(outcome) = opened.split(subtable, &self.endpoint) else {
            self.is_lost = true;
            return;
        };
        let outcome = outcome.unwrap_or_else(|| opened.outcome_without_place(boot_time_ns()));
        self.deliveries.push_back(Delivery::Split(prefix, outcome));
    }

    fn receive(&mut self) -> Option<Delivery> {
        self.deliveries.pop_front()
    }

    fn give(&mut self, class: SizeClass, rested: bool, blocks: Vec<FreeBlock>) {
        let result = lock(&self.opened).depot.give(class, blocks, rested, boot_time_ns());
        self.is_lost |= result.is_err();
    }

    fn is_lost(&self) -> bool {
        self.is_lost
    }
}

/// Returns the next record, or [`RestoreError::Stopped`] if the server is to stop.
fn next_record<'r>(
    reader: &'r mut Reader<impl BufRead>,
    stop: &AtomicBool,
) -> Result<Option<Record<'r>>, RestoreError> {
    if stop.load(Ordering::Relaxed) {
        return Err(RestoreError::Stopped);
    }
    Ok(reader.next_record()?)
}

/// Stores every record that has not expired, one after another: a key may occur twice, and then its
/// last record counts.
fn store_all(
    snapshot: &Path,
    opened: &Arc<Mutex<ServedRegion>>,
    (total, stop): (u64, &AtomicBool),
) -> Result<(), RestoreError> {
    let (engine, region) =
        open_region(opened).map_err(|failure| restore_error(failure, 0, total))?;
    let mut reader = Reader::open_file(snapshot)?;
    let mut records = 0;
    while let Some(record) = next_record(&mut reader, stop)? {
        records += 1;
        let lifetime = match record.expires_at() {
            None => Lifetime::FOREVER,
            Some(at) if at <= SystemTime::now() => continue,
            Some(at) => Lifetime::until(at),
        };
        let lifetime = lifetime.pinned(record.is_pinned);
        let key = region.hashed(record.key);
        let stored = engine.at(&region).perform(Action::Put(lifetime), key, record.value);
        stored.map_err(|failure| restore_error(failure, records, total))?;
    }
    Ok(())
}

fn open_region(
    opened: &Arc<Mutex<ServedRegion>>,
) -> Result<(Engine<ShmFabric>, OpenRegion), Failure> {
    let (region, format) = {
        let opened = lock(opened);
        (opened.region.clone(), opened.format)
    };
    let options = RegionOptions {
        trust: farside_fabric::Trust::forever(),
        region_id: format.region_id,
        region_bytes: format.region_bytes,
        client_id: WRITER_ID,
        cache_bytes: 0,
    };
    let endpoint = OwnEndpoint::over_memory(&region);
    let (opened, deliveries) = (opened.clone(), VecDeque::new());
    let blocks = Box::new(DepotBlockSource { opened, endpoint, deliveries, is_lost: false });
    let engine = Engine::new(ShmFabric::new(region, None, 1), 1);
    let region = engine.open(RegionIndex::FIRST, blocks, options, &ConnectionCache::default())?;
    Ok((engine, region))
}

fn restore_error(failure: Failure, record: u64, total: u64) -> RestoreError {
    let Failure::Error(error) = failure else { return RestoreError::Stuck { record } };
    match *error {
        source @ OperationError::OutOfSpace { .. } => {
            RestoreError::NoRoom { records: record, total, source }
        }
        source @ (OperationError::KeyTooLong { .. } | OperationError::ValueTooLong { .. }) => {
            RestoreError::TooLong { record, source }
        }
        source => RestoreError::Store { record, source },
    }
}

#[cfg(test)]
mod tests {
    //! Checks that a restore neither removes nor replaces files of another server, and that a
    //! restore that fails or is stopped leaves no file.

    use std::fs::{self, File};
    use std::os::unix::fs::MetadataExt;

    use farside_config::size::ByteSize;
    use farside_control::address::Address;
    use farside_fabric::memory::{HugePages, MemoryError};
    use farside_snapshot::Writer;

    use super::*;

    static NOT_STOPPED: AtomicBool = AtomicBool::new(false);

    fn write_snapshot(path: &Path) {
        let mut writer = Writer::create(File::create(path).unwrap(), 1, None).unwrap();
        writer
            .push(&Record { key: b"key", value: b"value", expires_at_ms: 0, is_pinned: false })
            .unwrap();
        writer.finish().unwrap();
    }

    fn config(region: &Path) -> ServerConfig {
        let (memory, region_file) = (Some(ByteSize::mib(8)), Some(region.to_owned()));
        let listen = vec![Address::Shm(region.with_extension("sock"))];
        ServerConfig { listen, memory, region_file, ..Default::default() }
    }

    #[test]
    fn a_snapshot_is_not_restored_over_the_region_of_another_server() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let (snapshot, region, unfinished) =
            (path("snap"), path("region"), path("region.restoring"));
        write_snapshot(&snapshot);
        let config = config(&region);
        let other = RegionMemory::file(&region, 8 << 20, HugePages::Never).unwrap();
        let before = fs::metadata(&unfinished).unwrap();
        let line = restored_memory(&snapshot, &config, &NOT_STOPPED).err().unwrap().to_string();
        assert!(line.contains("another server uses the region file"), "{line}");
        let after = fs::metadata(&unfinished).unwrap();
        assert_eq!((before.ino(), before.len()), (after.ino(), after.len()));
        assert!(!region.exists());
        drop(other);
        assert!(restored_memory(&path("missing"), &config, &NOT_STOPPED).is_err());
        assert_eq!((region.exists(), unfinished.exists()), (false, false));
        let restored = restored_memory(&snapshot, &config, &NOT_STOPPED).unwrap();
        let found = fs::metadata(&region).unwrap();
        assert_eq!(found.ino(), restored.file.metadata().unwrap().ino());
        let second = RegionMemory::file(&region, 8 << 20, HugePages::Never);
        assert!(matches!(second, Err(MemoryError::Locked { .. })));
    }

    /// The next server follows the link, too.
    #[test]
    fn a_snapshot_is_restored_to_the_target_of_a_link() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::create_dir(path("elsewhere")).unwrap();
        let (snapshot, link, region) = (path("snap"), path("link"), path("elsewhere/region"));
        write_snapshot(&snapshot);
        std::os::unix::fs::symlink(&region, &link).unwrap();
        let is_link = || fs::symlink_metadata(&link).unwrap().is_symlink();
        assert!(restored_memory(&path("missing"), &config(&link), &NOT_STOPPED).is_err());
        assert!(is_link() && !region.exists(), "nothing is left but the link");
        {
            let restored = restored_memory(&snapshot, &config(&link), &NOT_STOPPED).unwrap();
            let found = fs::symlink_metadata(&region).unwrap();
            assert_eq!(found.ino(), restored.file.metadata().unwrap().ino());
            assert!(is_link() && !path("link.restoring").exists());
            let second = RegionMemory::file(&link, 8 << 20, HugePages::Never);
            assert!(matches!(second, Err(MemoryError::Locked { .. })));
        }
        let again = restored_memory(&snapshot, &config(&link), &NOT_STOPPED);
        assert!(again.err().unwrap().to_string().contains("is there already"));
    }

    /// The restore is stopped while it checks the file, and while it stores records.
    #[test]
    fn a_stopped_restore_says_so_and_leaves_nothing() {
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
        let line = restored_memory(&pipe, &config(&folder.path().join("region")), &NOT_STOPPED);
        let line = line.err().unwrap().to_string();
        assert!(line.contains("pipe: it is no regular file"), "{line}");
    }
}
