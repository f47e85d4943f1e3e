//! `snapshot`.

use std::io::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Context;
use farside::{Client, Session};
use farside_snapshot::{Limits, Record, Writer};
use farside_tools::check::Scope;

use crate::args::{self, Args};
use crate::connect;
use crate::dump::for_each_entry;
use crate::files::{check_free, write_whole};
use crate::output::{self, ExitStatus};
use crate::raw::RawRegion;
use crate::stopping::Stop;

/// `snapshot`: a scan, into a file that is there only once it is whole.
pub(crate) fn snapshot(args: &Args, what: &args::Snapshot) -> anyhow::Result<ExitStatus> {
    let name = what.to.display();
    check_free(&what.to, what.force)?;
    let client = connect::reader(args)?;
    let mut session = client.session()?;
    let bar = output::progress("snapshot");
    if let Some(keys) = count_keys(args) {
        output::set_total(&bar, keys);
    }
    let stop = Stop::listen()?;
    let tally = write_whole(&what.to, |file| write(&client, &mut session, file, (&bar, &stop)));
    let tally = tally.with_context(|| format!("cannot write {name}"))?;
    // The file is complete, whether or not the server hears of it.
    let _ = client.report_snapshot(1000);
    Ok(tally.conclude("key", &what.to))
}

/// How many keys there are, for the bar alone: `None` where the index changes too fast to be
/// walked, or the server takes no other client. What else is wrong, the scan says.
fn count_keys(args: &Args) -> Option<u64> {
    let mut region = RawRegion::open(&connect::config(args).ok()?).ok()?;
    Some(region.check(Scope::Index, &output::progress("counting keys")).ok()?.keys)
}

fn write(
    client: &Client,
    session: &mut Session,
    to: impl Write,
    (bar, stop): (&indicatif::ProgressBar, &Stop),
) -> anyhow::Result<crate::dump::Tally> {
    let created_at_s = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    // Larger than a new region has them by default, or smaller on purpose.
    let of = session.limits();
    let limits = Limits {
        key_bytes_max: of.key_bytes_max as u32,
        value_bytes_max: of.value_bytes_max as u32,
    };
    let mut writer = Writer::create(to, created_at_s, Some(limits))?;
    let mut reported = None;
    let tally = for_each_entry(session, (bar, stop), |entry| {
        // For `stat`; should the server be gone, the scan says so. Keys that came meanwhile may
        // make it more than all. Without a total it stays 0.
        let permille = bar.length().map_or(0, |keys| bar.position() * 1000 / keys.max(1));
        let permille = permille.min(999) as u32;
        if reported.replace(permille) != Some(permille) {
            let _ = client.report_snapshot(permille);
        }
        let end = entry.expires_at.map(|end| end.duration_since(UNIX_EPOCH).unwrap_or_default());
        let expires_at_ms = end.map_or(0, |end| end.as_millis() as u64);
        let record = Record { key: &entry.key, value: &entry.value, expires_at_ms };
        writer.push(&record).map_err(|error| match error {
            farside_snapshot::SnapshotError::Io(error) => crate::dump::Fatal(error).into(),
            other => other.into(),
        })
    })?;
    writer.finish()?.flush()?;
    Ok(tally)
}
