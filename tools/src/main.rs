//! kv-cli: Farside from the command line.
//!
//! stdout is data, stderr is talk; the exit codes are in `--help`.
#![deny(unsafe_code)]

mod args;
mod below;
mod connect;
mod doctor;
mod dump;
mod files;
mod gc;
mod keys;
mod load;
mod output;
mod raw;
mod scan;
mod snapshot;
mod standard_streams;
mod stat;
mod stopping;
mod verify;

use std::process::ExitCode;

use clap::{CommandFactory, Parser};
use farside::Store;
use farside_config::command_line::{exit_code, usage_line};

use args::{Args, Command};
use output::ExitStatus;

fn main() -> ExitCode {
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) if is_mistake(&error) => {
            output::tell(usage_line("kv-cli", &error.to_string()));
            return exit_code::USAGE.into();
        }
        Err(error) => return help(&error),
    };
    match run(&args) {
        Ok(outcome) => outcome.into(),
        Err(error) if output::is_closed(&error) => ExitStatus::Done.into(),
        Err(error) => {
            output::tell_error(&error);
            output::exit_code(&error).into()
        }
    }
}

/// `--help` and `--version`, and the help of a command line without a command.
fn help(asked: &clap::Error) -> ExitCode {
    match asked.print() {
        Ok(()) => (asked.exit_code() as u8).into(),
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => ExitStatus::Done.into(),
        Err(error) => {
            output::tell(format_args!("cannot print the help: {error}"));
            exit_code::FAILED.into()
        }
    }
}

/// Whether the error is a mistake, which gets one line. The others are `--help` and the like.
fn is_mistake(error: &clap::Error) -> bool {
    let kind = clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand;
    error.use_stderr() && error.kind() != kind
}

fn run(args: &Args) -> anyhow::Result<ExitStatus> {
    stopping::survive_long_files()?;
    farside_config::signals::explain_bus_errors("kv-cli")?;
    match &args.command {
        Command::Get(what) => keys::get(args, what),
        Command::Put(what) => keys::store(args, what, Store::always(), ""),
        Command::Insert(what) => {
            keys::store(args, what, Store::if_absent(), "is there already; nothing was changed")
        }
        Command::Update(what) => {
            keys::store(args, what, Store::if_present(), "is absent; nothing was changed")
        }
        Command::Delete(what) => keys::delete(args, what),
        Command::Cas(what) => keys::compare_and_swap(args, what),
        Command::Scan(what) => scan::scan(args, what),
        Command::Stat(what) => stat::stat(args, what),
        Command::Load(what) => load::load(args, what),
        Command::Dump(what) => dump::dump(args, what),
        Command::Gc => gc::gc(args),
        Command::Compact => gc::compact(args),
        Command::Snapshot(what) => snapshot::snapshot(args, what),
        Command::Verify(what) => verify::verify(args, what),
        Command::Doctor => doctor::doctor(args),
        Command::Completions(what) => completions(what.shell),
    }
}

fn completions(shell: clap_complete::Shell) -> anyhow::Result<ExitStatus> {
    let mut command = Args::command();
    let name = command.get_name().to_owned();
    // Into memory first: the generator panics when its writer fails.
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, name, &mut script);
    let mut stdout = output::stdout();
    std::io::Write::write_all(&mut stdout, &script)?;
    output::finish(stdout)
}
