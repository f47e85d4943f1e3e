//! `snapshot`: writes all entries of a region to one file, for `kv-server --restore`.

use std::io::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Context;
use farside::{Client, Session};
use farside_snapshot::{Limits, Record, SnapshotError, Writer};
use farside_tools::check::Scope;

use crate::args::{self, Args};
use crate::connect;
use crate::dump::{DumpTally, Fatal, for_each_entry};
use crate::files::{check_free, write_whole};
use crate::output::{self, ExitStatus};
use crate::raw::RawRegion;
use crate::stopping::StopSignal;

/// `snapshot`: writes all entries to a file, which gets its name only when it is complete.
pub(crate) fn snapshot(args: &Args, options: &args::Snapshot) -> anyhow::Result<ExitStatus> {
    let name = options.to.display();
    check_free(&options.to, options.force)?;
    let client = connect::reader(args)?;
    let mut session = client.session()?;
    let bar = output::progress("snapshot");
    if let Some(keys) = count_keys(args) {
        output::set_total(&bar, keys);
    }
    let stop = StopSignal::listen()?;
    let tally = write_whole(&options.to, |file| write(&client, &mut session, file, (&bar, &stop)));
    let tally = tally.with_context(|| format!("cannot write {name}"))?;
    // Ignored: the file is complete even if the server does not learn of it.
    let _ = client.admin().report_snapshot(1000);
    Ok(tally.conclude("key", &options.to))
}

/// Returns the number of keys, for the progress bar only. `None` after any error, such as a server
/// without room for another client: the scan reports errors that matter.
fn count_keys(args: &Args) -> Option<u64> {
    let regions = RawRegion::open_all(&connect::config(args).ok()?).ok()?;
    let count = |region: Option<RawRegion>| {
        Some(region?.check(Scope::Index, &output::progress("counting keys")).ok()?.keys)
    };
    regions.into_iter().map(count).sum()
}

fn write(
    client: &Client,
    session: &mut Session,
    to: impl Write,
    (bar, stop): (&indicatif::ProgressBar, &StopSignal),
) -> anyhow::Result<DumpTally> {
    let created_at_s = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    // A restored region gets the limits of this one, which may differ from the defaults.
    let region = session.limits();
    let limits = Limits {
        key_bytes_max: region.key_bytes_max as u32,
        value_bytes_max: region.value_bytes_max as u32,
    };
    let mut writer = Writer::create(to, created_at_s, Some(limits))?;
    let mut reported = None;
    let tally = for_each_entry(session, (bar, stop), |entry| {
        // For `kv-cli stat`. Errors are ignored: if the server is gone, the scan reports it. Keys
        // that were inserted meanwhile can exceed the total. Without a total this stays 0.
        let permille = bar.length().map_or(0, |keys| bar.position() * 1000 / keys.max(1));
        let permille = permille.min(999) as u32;
        if reported.replace(permille) != Some(permille) {
            let _ = client.admin().report_snapshot(permille);
        }
        let since_epoch = |at: SystemTime| at.duration_since(UNIX_EPOCH).unwrap_or_default();
        let expires_at_ms = entry.expires_at.map_or(0, |at| since_epoch(at).as_millis() as u64);
        let record = Record { key: &entry.key, value: &entry.value, expires_at_ms };
        writer.push(&record).map_err(|error| match error {
            SnapshotError::Io(error) => Fatal(error).into(),
            other => other.into(),
        })
    })?;
    writer.finish()?.flush()?;
    Ok(tally)
}
