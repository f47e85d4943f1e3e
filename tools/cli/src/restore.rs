//! `restore`: stores the entries of a snapshot in a store that runs: one server, or a cluster of
//! any number of shards.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use anyhow::{Context, bail};
use farside::{Client, Error, Limits};
use farside_cli::encoding::brief;
use farside_snapshot::{Reader, Record, stored_checksum};
use indicatif::ProgressBar;

use crate::args::{self, Args};
use crate::connect;
use crate::output::{self, ExitStatus, Usage, count};
use crate::parallel::for_all;
use crate::puts::{Put, PutSource, check_regions, store_all};
use crate::snapshot_folder::{MANIFEST, ShardFile, SnapshotFile, files_of};
use crate::stopping::StopSignal;

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
