//! `ping`: asks whether servers answer.

use std::io::Write;
use std::time::Instant;

use farside_config::command_line::{exit_code, one_line};

use crate::args::Args;
use crate::connect;
use crate::output::{self, ExitStatus};

/// `ping`: sends a request to each server, and prints how long its thread took to answer.
pub(crate) fn ping(args: &Args) -> anyhow::Result<ExitStatus> {
    let client = connect::reader(args)?;
    let (mut stdout, mut status) = (output::stdout(), ExitStatus::Done);
    let shards = client.admin().shards();
    for number in 0..shards {
        let prefix = if shards > 1 { format!("shard {number}: ") } else { String::new() };
        let began = Instant::now();
        match client.admin().shard(number).statistics() {
            Ok(statistics) => {
                let (took_us, up_s) = (began.elapsed().as_micros(), statistics.uptime_ms / 1000);
                writeln!(stdout, "{prefix}answered in {took_us} us, up {up_s} s")?;
            }
            Err(error) => {
                output::print_message(format_args!("{prefix}{}", one_line(&error)));
                status = status.or_failed(exit_code::NO_SERVER);
            }
        }
    }
    output::finish(stdout)?;
    Ok(status)
}
