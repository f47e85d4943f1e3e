//! kv-compare: measures Farside beside other stores.

use std::process::ExitCode;

use clap::Parser;
use farside_bench::command::{self, Interrupt};
use farside_bench::{Error, Result, publish};
use farside_bench_compare::args::{Command, Compare};
use farside_bench_compare::{cache, run};

fn main() -> ExitCode {
    command::Command("kv-compare").run(Compare::try_parse(), measure)
}

fn measure(args: &Compare, interrupt: &Interrupt) -> Result<()> {
    if let Some(Command::Cache(args)) = &args.command {
        publish::check_file_or_stdout(args.json.as_deref())?;
        let report = cache::run(args, interrupt)?;
        let table = report.table().map_err(|_| Error::Panicked)?;
        return publish::result(&report, &table, args.json.as_deref());
    }
    publish::check_file_or_stdout(args.json.as_deref())?;
    let report = run::run(args, interrupt)?;
    let table = report.table().map_err(|_| Error::Panicked)?;
    publish::result(&report, &table, args.json.as_deref())
}
