//! kv-bench: measures Farside.

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use farside_bench::allocations::CountingAllocator;
use farside_bench::args::{Args, Command};
use farside_bench::interrupt::Interrupt;
use farside_bench::report::{YcsbReport, publish};
use farside_bench::{Error, Result, run, verbs};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn main() -> ExitCode {
    let args = Args::parse();
    match measure(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Nobody is left to tell when stderr is closed.
            let _ = writeln!(std::io::stderr(), "kv-bench: {error}");
            error.exit_code().into()
        }
    }
}

fn measure(args: &Args) -> Result<()> {
    let interrupt = Interrupt::install()?;
    match &args.command {
        Command::Ycsb(ycsb) => {
            let measured = run::ycsb(ycsb, &interrupt)?;
            let report = YcsbReport::new(ycsb, &measured);
            let table = report.table(&measured).map_err(|_| Error::Panicked)?;
            publish(&report, &table, ycsb.json.as_deref())
        }
        Command::Verbs(args) => {
            let report = verbs::run(args, &interrupt)?;
            let table = report.table().map_err(|_| Error::Panicked)?;
            publish(&report, &table, args.json.as_deref())
        }
    }
}
