//! `gc` and `compact`: collect the blocks of dead clients, and empty chunks that are mostly free.

use std::io::Write;
use std::panic::resume_unwind;
use std::time::Instant;

use farside::{Admin, Result};
use farside_config::command_line::exit_code;

use crate::args::Args;
use crate::connect;
use crate::output::{self, ExitStatus, count};

/// `gc`: has all servers collect lost blocks at the same time, and waits until this is done. So a
/// server that does not answer delays the others by nothing.
pub(crate) fn gc(args: &Args) -> anyhow::Result<ExitStatus> {
    let client = connect::writer(args)?;
    let started = Instant::now();
    let shards = client.admin().shards();
    let results: Vec<Result<(u64, u64)>> = std::thread::scope(|scope| {
        let admin = client.admin();
        let threads: Vec<_> =
            (0..shards).map(|shard| scope.spawn(move || collect(admin.shard(shard)))).collect();
        let joined = threads.into_iter().map(|thread| thread.join());
        joined.map(|result| result.unwrap_or_else(|panic| resume_unwind(panic))).collect()
    });
    let (mut found, mut since_start, mut status) = (0, 0, ExitStatus::Done);
    for (shard, result) in results.into_iter().enumerate() {
        match result {
            Ok((of_shard, since)) => (found, since_start) = (found + of_shard, since_start + since),
            Err(error) if shards == 1 => return Err(error.into()),
            Err(error) => {
                output::print_message(format_args!("shard {shard} was not collected: {error}"));
                status = status.or_failed(exit_code::NO_SERVER);
            }
        }
    }
    let mut stdout = output::stdout();
    writeln!(
        stdout,
        "{} found in {} ms; {since_start} since the server started",
        count(found, "lost block"),
        started.elapsed().as_millis(),
    )?;
    output::finish(stdout)?;
    Ok(status)
}

/// Has a server collect. Returns how many blocks it has found, now and since it started.
fn collect(admin: Admin<'_>) -> Result<(u64, u64)> {
    let before = admin.statistics()?;
    let after = admin.collect()?;
    // A server that restarted meanwhile counts from 0.
    let has_restarted = after.uptime_ms < before.uptime_ms;
    let collected_before = if has_restarted { 0 } else { before.blocks_collected };
    Ok((after.blocks_collected.saturating_sub(collected_before), after.blocks_collected))
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
