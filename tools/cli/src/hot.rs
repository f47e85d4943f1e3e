//! `hot`: prints the keys that are read most.

use std::io::Write;
use std::time::Duration;

use crate::args::{Args, Hot};
use crate::connect;
use crate::output::{self, ExitStatus};

/// `hot`: has the servers sample reads for a while, and prints a line for each of the hottest keys.
pub(crate) fn hot(args: &Args, options: &Hot) -> anyhow::Result<ExitStatus> {
    let client = connect::reader(args)?;
    let time = Duration::from_secs(options.seconds.into());
    let hot = client.admin().hot_keys(time, options.count.get())?;
    if hot.samples == 0 {
        output::print_message("clients reported no reads");
    }
    let mut stdout = output::stdout();
    for key in hot.keys {
        let percent = key.reads as f64 * 100.0 / hot.samples.max(1) as f64;
        let line = args.key_encoding.encode_line(&key.key);
        writeln!(stdout, "{percent:.2} %\t{}\t{line}", key.reads)?;
    }
    output::finish(stdout)
}
