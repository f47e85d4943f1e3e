//! `scan`: prints all entries.

use std::io::Write;

use farside::{Entry, Result, Session};
use farside_cli::records::Record;
use farside_config::command_line::one_line;

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
    let mut lines = lines(args, options, &mut session, &prefix)?;
    while remaining > 0
        && let Some(line) = lines.next()
    {
        match line {
            Ok(line) => {
                stdout.write_all(line.as_bytes())?;
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

/// The lines of all entries. Values are read only if they are printed.
fn lines<'s>(
    args: &'s Args,
    options: &args::Scan,
    session: &'s mut Session,
    prefix: &[u8],
) -> Result<Box<dyn Iterator<Item = Result<String>> + 's>> {
    if options.keys_only {
        let line = |key: Vec<u8>| format!("{}\n", args.key_encoding.encode_line(&key));
        return Ok(Box::new(session.scan_keys(prefix)?.map(move |entry| Ok(line(entry?.key)))));
    }
    let is_json = options.json;
    let line = move |Entry { key, value, .. }: Entry| match is_json {
        true => Record::new(&key, &value).to_line(),
        false => entry_line(args, &key, &value),
    };
    Ok(Box::new(session.scan_prefix(prefix)?.map(move |entry| Ok(line(entry?)))))
}

/// The line of a key and its value.
pub(crate) fn entry_line(args: &Args, key: &[u8], value: &[u8]) -> String {
    let (key, value) = (args.key_encoding.encode_line(key), args.value_encoding.encode_line(value));
    format!("{key}\t{value}\n")
}
