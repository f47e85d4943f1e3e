//! `snapshot`: writes all entries of a region to a file, or those of a cluster to a folder.

use std::io::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Context;
use farside::{Client, Role};
use farside_cli::check::Scope;
use farside_snapshot::{Limits, Record, SnapshotError, Writer, stored_checksum};

use crate::args::{self, Args};
use crate::connect;
use crate::dump::{DumpProgress, Fatal};
use crate::files::{NewFolder, check_free, write_whole};
use crate::output::{self, ExitStatus};
use crate::parallel::for_all;
use crate::puts::check_regions;
use crate::raw::{self, RawRegion};
use crate::snapshot_folder::{MANIFEST, Manifest, ShardFile, check_replaceable, file_name};
use crate::stopping::StopSignal;

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
        let limits = Limits {
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
