//! `gc`.

use std::io::Write;
use std::time::Instant;

use crate::args::Args;
use crate::connect;
use crate::output::{self, Outcome, count};

/// `gc`: has the server look for lost blocks, and waits for the end.
pub(crate) fn gc(args: &Args) -> anyhow::Result<Outcome> {
    let client = connect::writer(args)?;
    let started = Instant::now();
    let before = client.statistics()?;
    let after = client.collect()?;
    let found = after.blocks_collected - before.blocks_collected;
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
