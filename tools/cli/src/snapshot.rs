//! `snapshot` and `restore`: all entries of a store in a file, or those of a cluster in a folder.
//!
//! The folder has a file for each shard, and a manifest, and gets its name once all of them are
//! complete. The manifest is for copies of the folder: it says how many files there are, and which
//! belong together. The files themselves have the format of every snapshot (`common/snapshot`), so
//! each can also be used without the others.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use farside::{Client, Error, Limits, Role};
use farside_cli::check::Scope;
use farside_cli::formats::brief;
use farside_snapshot::{Reader, Record, SnapshotError, Writer, stored_checksum};
use indicatif::ProgressBar;
use serde::{Deserialize, Serialize};

use crate::args::{self, Args};
use crate::connect;
use crate::dump::{DumpProgress, Fatal};
use crate::files::{NewFolder, check_free, write_whole};
use crate::keys::read_at_most;
use crate::output::{self, ExitStatus, Usage, count};
use crate::puts::{Put, PutSource, check_regions, store_all};
use crate::raw::{self, RawRegion};
use crate::stopping::{StopSignal, for_all};

/// `snapshot`: writes all entries to a file or folder, which gets its name only when it is
/// complete.
pub(crate) fn snapshot(args: &Args, options: &args::Snapshot) -> anyhow::Result<ExitStatus> {
    let to = &options.to;
    check_free(to, options.force)?;
    let client = connect::reader(args)?;
    let shards = client.admin().shards();
    let snapshot = Snapshot {
        client,
        created_at_s: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs(),
        progress: DumpProgress::new("snapshot")?,
    };
    let written = match shards {
        1 => write_whole(to, |file| {
            snapshot.show_total(args);
            snapshot.write_shard(0, file).map(|_| ())
        }),
        shards => snapshot.write_folder(args, options, shards),
    };
    written.with_context(|| format!("cannot write {}", to.display()))?;
    // Ignored: the file is complete even if the server does not learn of it.
    let _ = snapshot.client.admin().report_snapshot(1000);
    Ok(snapshot.progress.conclude("key", to))
}

/// Returns the number of keys, for the progress bar only. `None` after any error, such as a server
/// without room for another client: the scan reports errors that matter.
fn count_keys(args: &Args, stop: &StopSignal) -> Option<u64> {
    let regions = RawRegion::open_all(&connect::config(args).ok()?).ok()?;
    let regions: anyhow::Result<Vec<RawRegion>> = regions.into_iter().collect();
    let mut counts = regions.ok()?.into_iter().map(|mut region| {
        stop.check().ok()?;
        Some(region.check(Scope::Index, &output::progress("counting keys")).ok()?.keys)
    });
    counts.try_fold(0, |sum, keys| Some(sum + keys?))
}

/// The id of the cluster.
fn cluster_id(args: &Args) -> anyhow::Result<String> {
    let options = connect::config(args)?.connect_options(Role::Reader)?;
    Ok(raw::fetch_map(&options)?.cluster.to_string())
}

/// A snapshot that is being written.
struct Snapshot {
    client: Client,
    /// When it was begun, in seconds since 1970.
    created_at_s: u64,
    progress: DumpProgress,
}

impl Snapshot {
    fn show_total(&self, args: &Args) {
        if let Some(keys) = count_keys(args, &self.progress.stop) {
            output::set_total(&self.progress.bar, keys);
        }
    }

    /// Writes a folder with a file for each shard. A failure leaves no folder.
    fn write_folder(
        &self,
        args: &Args,
        options: &args::Snapshot,
        shards: u16,
    ) -> anyhow::Result<()> {
        check_replaceable(&options.to)?;
        let folder = NewFolder::create(&options.to)?;
        self.show_total(args);
        let files = for_all((0..shards).collect(), &self.progress.stop, |shard| {
            let path = folder.path_of(&file_name(shard.into()));
            let keys = write_whole(&path, |file| self.write_shard(shard, file))?;
            Ok(ShardFile { keys, checksum: stored_checksum(&path)? })
        })?;
        let manifest = Manifest::new(cluster_id(args)?, self.created_at_s, files);
        write_whole(&folder.path_of(MANIFEST), |file| {
            serde_json::to_writer(&mut *file, &manifest)?;
            Ok(writeln!(file)?)
        })?;
        // Another program may have made the folder meanwhile, or put files into the former one.
        check_free(&options.to, options.force)?;
        check_replaceable(&options.to)?;
        Ok(folder.finish()?)
    }

    /// Writes the entries of a shard; without a cluster those of the server. Returns their number.
    fn write_shard(&self, shard: u16, to: impl Write) -> anyhow::Result<u64> {
        let (mut session, bar) = (self.client.session()?, &self.progress.bar);
        // A restored region gets the limits of this one, which may differ from the defaults.
        let region = session.limits();
        let limits = farside_snapshot::Limits {
            key_bytes_max: region.key_bytes_max as u32,
            value_bytes_max: region.value_bytes_max as u32,
        };
        let mut writer = Writer::create(to, self.created_at_s, Some(limits))?;
        let (mut reported, mut keys) = (None, 0);
        self.progress.for_each_entry(session.scan_shard(shard)?, |entry| {
            // For `kv-cli stat`. Errors are ignored: if the server is gone, the scan reports it.
            // Keys that were inserted meanwhile can exceed the total. Without a total this stays 0.
            let permille = bar.length().map_or(0, |keys| bar.position() * 1000 / keys.max(1));
            let permille = permille.min(999) as u32;
            if reported.replace(permille) != Some(permille) {
                let _ = self.client.admin().shard(shard).report_snapshot(permille);
            }
            let since_epoch = |at: SystemTime| at.duration_since(UNIX_EPOCH).unwrap_or_default();
            let expires_at_ms = entry.expires_at.map_or(0, |at| since_epoch(at).as_millis() as u64);
            let (key, value, is_pinned) = (&*entry.key, &*entry.value, entry.is_pinned);
            let record = Record { key, value, expires_at_ms, is_pinned };
            writer.push(&record).map_err(|error| match error {
                SnapshotError::Io(error) => anyhow::Error::from(Fatal(error)),
                other => other.into(),
            })?;
            keys += 1;
            Ok(())
        })?;
        writer.finish()?.flush()?;
        check_regions(&self.client)?;
        Ok(keys)
    }
}

/// `restore`: checks the whole snapshot and the store, and then stores all keys.
pub(crate) fn restore(args: &Args, options: &args::Restore) -> anyhow::Result<ExitStatus> {
    let name = options.from.display();
    let failed = || format!("cannot restore {name}");
    let files = files_of(&options.from).with_context(failed)?;
    let client = connect::writer(args)?;
    let limits = check_store(&client, options.force).with_context(failed)?;
    let (stop, bar) = (StopSignal::listen()?, output::progress("checking"));
    let keys = for_all(files.iter().collect(), &stop, |file: &SnapshotFile| {
        check(file, &limits, &stop).with_context(|| file.path.display().to_string())
    });
    let total = keys.with_context(failed)?.into_iter().sum();
    bar.set_message("restoring");
    output::set_total(&bar, total);
    let restore = Restore {
        client: &client,
        retry_for: options.retries.retry_for,
        stop: &stop,
        bar: &bar,
        stored: AtomicU64::new(0),
        expired: AtomicU64::new(0),
    };
    let stored = for_all(files, &stop, |file| {
        restore.store(&file.path).with_context(|| file.path.display().to_string())
    });
    let all_kept = stored.and_then(|_| check_regions(&client));
    let (stored, expired) = (restore.stored.into_inner(), restore.expired.into_inner());
    all_kept.with_context(|| {
        format!("{} after {stored} of {total} keys; --force repeats it", failed())
    })?;
    bar.finish_and_clear();
    let mut summary = format!("{} restored from {name}", count(stored, "key"));
    if expired > 0 {
        summary += &format!(", {} skipped", count(expired, "expired value"));
    }
    output::print_message(summary);
    Ok(ExitStatus::Done)
}

/// Fails if the store has keys, unless `may_have_keys`, or if a shard is not available. Returns the
/// limits that hold for all shards.
fn check_store(client: &Client, may_have_keys: bool) -> anyhow::Result<Limits> {
    let mut session = client.session()?;
    for shard in 0..client.admin().shards() {
        let first = session.scan_shard(shard)?.next();
        match first {
            None => {}
            // A damaged entry is one, too.
            Some(Ok(_) | Err(Error::Operation(_))) if may_have_keys => {}
            Some(Ok(_) | Err(Error::Operation(_))) => {
                return Err(Usage::error(
                    "the store has keys: restore into an empty one, or use --force to store the \
                     keys of the snapshot beside and over them",
                ));
            }
            Some(Err(error)) => return Err(error.into()),
        }
    }
    Ok(session.limits())
}

/// Reads the file to its end. Fails if it is damaged, belongs to another snapshot than its folder,
/// or has a key or value that the store does not allow. Returns the number of its keys.
fn check(file: &SnapshotFile, limits: &Limits, stop: &StopSignal) -> anyhow::Result<u64> {
    let mut reader = Reader::open_file(&file.path)?;
    let mut too_long = None;
    while let Some(record) = reader.next_record()? {
        stop.check()?;
        let Record { key, value, .. } = record;
        let fits = key.len() <= limits.key_bytes_max && value.len() <= limits.value_bytes_max;
        if !fits && too_long.is_none() {
            let (value_bytes, name) = (value.len(), brief(key));
            too_long = Some(format!(
                "the key `{name}` of {} bytes with a value of {value_bytes} is longer than the \
                 store allows: make its regions with a larger key_bytes_max or value_bytes_max",
                key.len()
            ));
        }
    }
    let found = ShardFile { keys: reader.records(), checksum: stored_checksum(&file.path)? };
    if file.expected.is_some_and(|expected| expected != found) {
        bail!("it is not the file that {MANIFEST} names, but that of another shard or snapshot");
    }
    // Not before the end of the file: a damaged record may have any length.
    too_long.map_or(Ok(reader.records()), |error| Err(Usage::error(error)))
}

/// A restore that stores keys.
struct Restore<'a> {
    client: &'a Client,
    retry_for: Duration,
    stop: &'a StopSignal,
    bar: &'a ProgressBar,
    stored: AtomicU64,
    expired: AtomicU64,
}

impl Restore<'_> {
    /// Stores the records of a file.
    fn store(&self, file: &Path) -> anyhow::Result<()> {
        let mut session = self.client.session()?;
        let reader = Reader::open_file(file)?;
        store_all(&mut session, &mut RecordSource { restore: self, reader }, self.retry_for)
    }
}

/// The records of a file that have not expired.
struct RecordSource<'a, R: std::io::BufRead> {
    restore: &'a Restore<'a>,
    reader: Reader<R>,
}

impl<R: std::io::BufRead> PutSource for RecordSource<'_, R> {
    type Origin = ();

    fn next(&mut self) -> anyhow::Result<Option<Put<()>>> {
        while let Some(record) = self.reader.next_record()? {
            let expires_at = record.expires_at();
            if expires_at.is_some_and(|at| at <= SystemTime::now()) {
                self.restore.expired.fetch_add(1, Ordering::Relaxed);
                self.restore.bar.inc(1);
                continue;
            }
            let (key, value) = (record.key.to_vec(), record.value.to_vec());
            let is_pinned = record.is_pinned;
            return Ok(Some(Put { origin: (), key, value, expires_at, is_pinned }));
        }
        Ok(None)
    }

    fn stored(&mut self, _put: &Put<()>) {
        self.restore.stored.fetch_add(1, Ordering::Relaxed);
        self.restore.bar.inc(1);
    }

    /// Ends the restore: a store without some of the keys is of no use.
    fn failed(&mut self, put: &Put<()>, error: Error) -> anyhow::Result<()> {
        let name = brief(&put.key);
        Err(anyhow::Error::from(error).context(format!("the key `{name}`")))
    }

    fn check(&self) -> anyhow::Result<()> {
        Ok(self.restore.stop.check()?)
    }
}

/// The name of the manifest.
pub(crate) const MANIFEST: &str = "snapshot.json";
/// The number of the manifest's format.
const FORMAT: u32 = 1;
/// Limit on the length of a manifest, in bytes.
const MANIFEST_BYTES_MAX: usize = 1 << 20;

/// What is in a folder.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Manifest {
    format: u32,
    /// The id of the cluster.
    cluster: String,
    /// When the snapshot was begun, in seconds since 1970.
    created_at_s: u64,
    /// What identifies the file of each shard.
    shards: Vec<ShardFile>,
}

/// The file of a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ShardFile {
    pub(crate) keys: u64,
    /// The checksum at the end of the file.
    pub(crate) checksum: u32,
}

impl Manifest {
    pub(crate) fn new(cluster: String, created_at_s: u64, shards: Vec<ShardFile>) -> Self {
        Self { format: FORMAT, cluster, created_at_s, shards }
    }

    fn read(folder: &Path) -> anyhow::Result<Self> {
        let file = match File::open(folder.join(MANIFEST)) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                bail!("it is no snapshot of a cluster: it has no {MANIFEST}")
            }
            file => file.with_context(|| format!("{MANIFEST} cannot be opened"))?,
        };
        let bytes = read_at_most(file, MANIFEST_BYTES_MAX)?;
        let bytes = bytes.with_context(|| format!("{MANIFEST} is too long"))?;
        let manifest: Self = serde_json::from_slice(&bytes)
            .with_context(|| format!("{MANIFEST} is not what `kv-cli snapshot` writes"))?;
        if manifest.format != FORMAT {
            let found = manifest.format;
            bail!("{MANIFEST} has format {found}, and this program reads format {FORMAT} only");
        }
        Ok(manifest)
    }
}

/// Returns the name of a shard's file.
pub(crate) fn file_name(shard: usize) -> String {
    format!("shard-{shard:04}.snap")
}

/// A file to restore.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct SnapshotFile {
    pub(crate) path: PathBuf,
    /// What the manifest says of it.
    pub(crate) expected: Option<ShardFile>,
}

/// Returns the files of a snapshot: those of a folder, or the file of one server.
pub(crate) fn files_of(snapshot: &Path) -> anyhow::Result<Vec<SnapshotFile>> {
    if !snapshot.is_dir() {
        return Ok(vec![SnapshotFile { path: snapshot.to_owned(), expected: None }]);
    }
    let shards = Manifest::read(snapshot)?.shards.into_iter().enumerate();
    let file = |(shard, expected)| SnapshotFile {
        path: snapshot.join(file_name(shard)),
        expected: Some(expected),
    };
    Ok(shards.map(file).collect())
}

/// Fails if something has this name, unless it is the folder of a snapshot and nothing else.
pub(crate) fn check_replaceable(name: &Path) -> anyhow::Result<()> {
    let is_absent = fs::symlink_metadata(name).is_err();
    if is_absent || is_snapshot_only(name).unwrap_or(false) {
        return Ok(());
    }
    let name = name.display();
    Err(Usage::error(format!(
        "{name} is not the folder of a snapshot, or has other files in it, so that --force does \
         not replace it: choose another name"
    )))
}

fn is_snapshot_only(folder: &Path) -> anyhow::Result<bool> {
    if !fs::symlink_metadata(folder)?.is_dir() {
        return Ok(false);
    }
    let files = (0..Manifest::read(folder)?.shards.len()).map(file_name);
    let names: HashSet<String> = files.chain([MANIFEST.to_owned()]).collect();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let is_known = entry.file_name().to_str().is_some_and(|name| names.contains(name));
        if !is_known || !entry.file_type()?.is_file() {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_folder_of_a_snapshot_is_replaced() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("snapshot");
        check_replaceable(&folder).unwrap();
        fs::create_dir(&folder).unwrap();
        assert!(check_replaceable(&folder).is_err(), "an empty folder");
        let shards = [3, 4].map(|checksum| ShardFile { keys: 2, checksum });
        let manifest = Manifest::new("id".to_owned(), 7, shards.into());
        let text = serde_json::to_string(&manifest).unwrap();
        fs::write(folder.join(MANIFEST), &text).unwrap();
        fs::write(folder.join(file_name(1)), "").unwrap();
        check_replaceable(&folder).unwrap();
        let files = files_of(&folder).unwrap();
        assert_eq!(files[1].path, folder.join("shard-0001.snap"));
        assert_eq!([files[0].expected, files[1].expected], shards.map(Some));
        for other in ["shard-0002.snap", "notes"] {
            fs::write(folder.join(other), "").unwrap();
            assert!(check_replaceable(&folder).is_err(), "{other}");
            fs::remove_file(folder.join(other)).unwrap();
        }
        std::os::unix::fs::symlink(&folder, parent.path().join("link")).unwrap();
        assert!(check_replaceable(&parent.path().join("link")).is_err());
        for wrong in [text.replace("\"format\":1", "\"format\":2"), text.replace('}', "")] {
            fs::write(folder.join(MANIFEST), wrong).unwrap();
            assert!(files_of(&folder).is_err() && check_replaceable(&folder).is_err());
        }
    }
}
