//! kv-cli: Farside from the command line.
//!
//! Data goes to stdout, messages go to stderr; `--help` lists the exit codes.
#![deny(unsafe_code)]

mod admin;
mod args;
mod cluster;
mod confined_paths;
mod connect;
mod doctor;
mod dump;
mod files;
mod keys;
mod output;
mod puts;
mod raw;
mod snapshot;
mod stat;
mod stopping;
mod top;

use std::process::ExitCode;
use std::sync::Arc;

use clap::error::{ContextKind, ContextValue};
use clap::{CommandFactory, Parser};
use farside::Store;
use farside_config::command_line::{exit_code, one_line, usage_line};
use farside_config::generate::generate;

use args::{Args, Command};
use output::ExitStatus;

fn main() -> ExitCode {
    if let Some(code) = generate(Args::command) {
        return code;
    }
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) if is_usage_error(&error) => {
            let text = other_word(&error).unwrap_or_else(|| error.to_string());
            output::print_message(usage_line("kv-cli", &text));
            return exit_code::USAGE.into();
        }
        Err(error) => return print_help(&error),
    };
    match run(&args) {
        Ok(outcome) => outcome.into(),
        Err(error) if output::is_stdout_closed(&error) => ExitStatus::Done.into(),
        Err(error) => {
            output::print_message(one_line(error.as_ref()));
            output::exit_code(&error).into()
        }
    }
}

/// Prints `--help`, `--version`, or the help for a command line without a command.
fn print_help(help: &clap::Error) -> ExitCode {
    match help.print() {
        Ok(()) => (help.exit_code() as u8).into(),
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => ExitStatus::Done.into(),
        Err(error) => {
            output::print_message(format_args!("cannot print the help: {error}"));
            exit_code::FAILED.into()
        }
    }
}

/// Whether the command line is wrong, which is reported in one line. The other errors of clap are
/// `--help` and the like.
fn is_usage_error(error: &clap::Error) -> bool {
    let kind = clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand;
    error.use_stderr() && error.kind() != kind
}

/// Words for commands in other programs, and the commands here.
const OTHER_WORDS: [(&[&str], &str); 14] = [
    (&["set", "store", "write", "mset"], "put"),
    (&["setex", "psetex", "expire", "pexpire", "touch"], "put --ttl"),
    (&["setnx", "add", "create"], "insert"),
    (&["replace", "setxx"], "update"),
    (&["del", "rm", "unlink", "remove", "getdel"], "delete"),
    (&["read", "cat", "fetch"], "get"),
    (&["keys", "ls", "list"], "scan"),
    (&["info", "stats", "status", "dbsize", "memory"], "stat"),
    (&["incrby", "increment", "decr", "decrby"], "incr"),
    (&["pttl"], "ttl"),
    (&["has", "test"], "exists"),
    (&["save", "bgsave", "backup"], "snapshot"),
    (&["monitor", "watch"], "top"),
    (&["client", "sessions"], "clients"),
];

/// The message for the word of another program.
fn other_word(error: &clap::Error) -> Option<String> {
    let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidSubcommand) else {
        return None;
    };
    let lower = word.to_lowercase();
    let (_, command) = OTHER_WORDS.iter().find(|(words, _)| words.contains(&&*lower))?;
    Some(format!("there is no command '{word}': use '{command}'"))
}

fn run(args: &Args) -> anyhow::Result<ExitStatus> {
    // If file sizes are limited (ulimit -f), a write over the limit becomes an error. Otherwise it
    // would kill the process.
    signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default())?;
    farside_config::signals::explain_bus_errors("kv-cli")?;
    match &args.command {
        Command::Get(options) => keys::get(args, options),
        Command::Put(options) => keys::put(args, options),
        Command::Insert(options) => {
            keys::store(args, options, Store::if_absent(), "is present; nothing was changed")
        }
        Command::Update(options) => {
            keys::store(args, options, Store::if_present(), "is absent; nothing was changed")
        }
        Command::Delete(options) => keys::delete(args, options),
        Command::Mget(options) => keys::get_many(args, options),
        Command::Exists(options) => keys::exists(args, options),
        Command::Incr(options) => keys::increment(args, options),
        Command::Ttl(options) => keys::ttl(args, options),
        Command::Cas(options) => keys::compare_and_swap(args, options),
        Command::Scan(options) => keys::scan(args, options),
        Command::Bigkeys(options) => keys::bigkeys(args, options),
        Command::Hot(options) => keys::hot(args, options),
        Command::Top(options) => top::top(args, options),
        Command::Clients { json } => admin::clients(args, *json),
        Command::Kick(options) => admin::kick(args, options),
        Command::Stat { json } => stat::stat(args, *json),
        Command::Ping => admin::ping(args),
        Command::Load(options) => dump::load(args, options),
        Command::Dump(options) => dump::dump(args, options),
        Command::Gc => admin::gc(args),
        Command::Compact => admin::compact(args),
        Command::Snapshot(options) => snapshot::snapshot(args, options),
        Command::Restore(options) => snapshot::restore(args, options),
        Command::Verify { region } => stat::verify(args, region.as_deref()),
        Command::Cluster(command) => cluster::cluster(args, command),
        Command::Doctor { measure } => doctor::doctor(args, *measure),
    }
}
