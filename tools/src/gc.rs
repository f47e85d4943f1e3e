//! `gc` and `compact`.

use std::io::Write;
use std::time::Instant;

use crate::args::Args;
use crate::connect;
use crate::output::{self, ExitStatus, count};

/// `gc`: has the server look for lost blocks, and waits for the end.
pub(crate) fn gc(args: &Args) -> anyhow::Result<ExitStatus> {
    let client = connect::writer(args)?;
    let started = Instant::now();
    let before = client.statistics()?;
    let after = client.collect()?;
    // A server that started again meanwhile counts from 0.
    let is_new = after.uptime_ms < before.uptime_ms;
    let counted = if is_new { 0 } else { before.blocks_collected };
    let found = after.blocks_collected.saturating_sub(counted);
    let mut stdout = output::stdout();
    writeln!(
        stdout,
        "{} found in {} ms; {} since the server started",
        count(found, "lost block"),
        started.elapsed().as_millis(),
        after.blocks_collected
    )?;
    output::finish(stdout)
}

/// `compact`: moves blocks together.
pub(crate) fn compact(args: &Args) -> anyhow::Result<ExitStatus> {
    let client = connect::writer(args)?;
    let started = Instant::now();
    let done = client.compact()?;
    let mut stdout = output::stdout();
    writeln!(
        stdout,
        "{} moved, {}, out of {}, in {} ms",
        count(done.blocks_moved, "block"),
        output::bytes(done.bytes_moved),
        count(done.chunks_thin, "thin chunk"),
        started.elapsed().as_millis()
    )?;
    output::finish(stdout)
}
