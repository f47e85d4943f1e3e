//! `bigkeys`: prints the keys with the longest values.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io::Write;

use farside_config::command_line::one_line;

use crate::args::{Args, BigKeys};
use crate::connect;
use crate::output::{self, ExitStatus};

/// `bigkeys`: reads all keys with the lengths of their values, and prints a line for each of the
/// longest.
pub(crate) fn bigkeys(args: &Args, options: &BigKeys) -> anyhow::Result<ExitStatus> {
    let mut session = connect::reader(args)?.session()?;
    let mut outcome = ExitStatus::Done;
    // The shortest of the values kept is on top. Equal lengths are in the order of the keys.
    let mut longest = BinaryHeap::new();
    let bar = output::progress("reading the keys");
    for entry in session.scan_keys("")? {
        match entry {
            Ok(entry) => {
                bar.inc(1);
                longest.push((Reverse(entry.value_bytes), entry.key));
                if longest.len() > options.count.get() {
                    longest.pop();
                }
            }
            Err(error) => {
                bar.suspend(|| output::print_message(one_line(&error)));
                outcome = outcome.or_failed(error.exit_code());
            }
        }
    }
    bar.finish_and_clear();
    let mut stdout = output::stdout();
    for (Reverse(bytes), key) in longest.into_sorted_vec() {
        writeln!(stdout, "{bytes}\t{}", args.key_encoding.encode_line(&key))?;
    }
    output::finish(stdout)?;
    Ok(outcome)
}
