//! `gc` and `compact`: collect the blocks of dead clients, and empty chunks that are mostly free.

use std::io::Write;
use std::time::Instant;

use crate::args::Args;
use crate::connect;
use crate::output::{self, ExitStatus, count};

/// `gc`: has the server collect lost blocks, and waits until this is done.
pub(crate) fn gc(args: &Args) -> anyhow::Result<ExitStatus> {
    let client = connect::writer(args)?;
    let started = Instant::now();
    let before = client.admin().statistics()?;
    let after = client.admin().collect()?;
    // A server that restarted meanwhile counts from 0.
    let has_restarted = after.uptime_ms < before.uptime_ms;
    let collected_before = if has_restarted { 0 } else { before.blocks_collected };
    let found = after.blocks_collected.saturating_sub(collected_before);
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

/// `compact`: moves blocks out of chunks that are mostly free.
pub(crate) fn compact(args: &Args) -> anyhow::Result<ExitStatus> {
    let client = connect::writer(args)?;
    let started = Instant::now();
    let compaction = client.admin().compact()?;
    let mut stdout = output::stdout();
    writeln!(
        stdout,
        "{} moved, {}, out of {}, in {} ms",
        count(compaction.blocks_moved, "block"),
        output::bytes(compaction.bytes_moved),
        count(compaction.chunks_thin, "mostly free chunk"),
        started.elapsed().as_millis()
    )?;
    output::finish(stdout)
}
