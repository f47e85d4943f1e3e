//! `scan`: prints all entries.

use std::io::Write;

use farside::Entry;
use farside_config::command_line::one_line;
use farside_tools::records::Record;

use crate::args::{self, Args};
use crate::connect;
use crate::output::{self, ExitStatus};

/// `scan`: prints one line for each entry.
pub(crate) fn scan(args: &Args, options: &args::Scan) -> anyhow::Result<ExitStatus> {
    let prefix = options.prefix.as_deref();
    let prefix =
        prefix.map(|text| connect::decode(args.key_encoding, "prefix", text)).transpose()?;
    let prefix = prefix.unwrap_or_default();
    let mut session = connect::reader(args)?.session()?;
    let mut stdout = output::stdout();
    let mut remaining = options.limit.unwrap_or(u64::MAX);
    let mut outcome = ExitStatus::Done;
    let mut entries = session.scan_prefix(&prefix)?;
    while remaining > 0
        && let Some(entry) = entries.next()
    {
        match entry {
            Ok(entry) => {
                stdout.write_all(line(args, options, &entry).as_bytes())?;
                remaining -= 1;
            }
            Err(error) => {
                // The scan continues with the other entries.
                output::print_message(one_line(&error));
                outcome = outcome.or_failed(error.exit_code());
            }
        }
    }
    output::finish(stdout)?;
    Ok(outcome)
}

fn line(args: &Args, options: &args::Scan, entry: &Entry) -> String {
    if options.json {
        return Record::new(&entry.key, &entry.value).to_line();
    }
    if options.keys_only {
        return format!("{}\n", args.key_encoding.encode_line(&entry.key));
    }
    entry_line(args, &entry.key, &entry.value)
}

/// The line of a key and its value.
pub(crate) fn entry_line(args: &Args, key: &[u8], value: &[u8]) -> String {
    let (key, value) = (args.key_encoding.encode_line(key), args.value_encoding.encode_line(value));
    format!("{key}\t{value}\n")
}
