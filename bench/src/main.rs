//! kv-bench: measures Farside.

use std::io::Write;
use std::process::ExitCode;
use std::time::SystemTime;

use farside_bench::allocations::CountingAllocator;
use farside_bench::args::{Args, Command};
use farside_bench::interrupt::Interrupt;
use farside_bench::publish::{self, Published};
use farside_bench::report::YcsbReport;
use farside_bench::{Error, Result, compare, html, processes, run, verbs};
use farside_config::command_line::{exit_code, one_line, usage_line};
use farside_config::signals::explain_bus_errors;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn main() -> ExitCode {
    let args = match Args::read(std::env::args_os()) {
        Ok(args) => args,
        Err(error) if is_mistake(&error) => {
            tell(&usage_line("kv-bench", &error.to_string()));
            return exit_code::USAGE.into();
        }
        // --help and --version.
        Err(error) => error.exit(),
    };
    match measure(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tell(&one_line(&error));
            error.exit_code().into()
        }
    }
}

/// Whether it is to be told in one line, not by the whole help.
fn is_mistake(error: &clap::Error) -> bool {
    let kind = clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand;
    error.use_stderr() && error.kind() != kind
}

fn tell(line: &str) {
    // Nobody is left to tell when stderr is closed.
    let _ = writeln!(std::io::stderr(), "kv-bench: {line}");
}

fn measure(args: &Args) -> Result<()> {
    let interrupt = Interrupt::install()?;
    explain_bus_errors("kv-bench").map_err(Error::system("waiting for signals"))?;
    match &args.command {
        Command::Ycsb(ycsb) if ycsb.process.is_some() => {
            processes::child(ycsb, &interrupt);
            Ok(())
        }
        Command::Ycsb(ycsb) => {
            ycsb.output.check()?;
            if !ycsb.ignored.is_empty() {
                tell(&format!("these properties are not known here: {}", ycsb.ignored.join(", ")));
            }
            let measured = run::ycsb(ycsb, &interrupt)?;
            let report = YcsbReport::new(ycsb, &measured);
            let table = report.table(&measured).map_err(|_| Error::Panicked)?;
            let kinds = measured.recorder.kinds();
            let latencies: Vec<_> = kinds.map(|(kind, of)| (kind.name(), &of.latencies)).collect();
            let (json, table, latencies) = (&report, &*table, &*latencies);
            let (seconds, ended) = (report.seconds, measured.ended);
            Published { json, table, latencies, seconds, ended }.publish(&ycsb.output)
        }
        Command::Report(args) => {
            let told = html::report(args, tell)?;
            let written = std::io::stdout().write_all(told.as_bytes());
            written.map_err(Error::system("writing the result"))
        }
        Command::Compare(args) => {
            publish::check_json(args.json.as_deref())?;
            let report = compare::run(args, &interrupt)?;
            let table = report.table().map_err(|_| Error::Panicked)?;
            publish::result(&report, &table, args.json.as_deref())
        }
        Command::Verbs(args) => {
            args.output.check()?;
            let report = verbs::run(args, &interrupt)?;
            let table = report.table().map_err(|_| Error::Panicked)?;
            let names = report.rates().map(|(verb, _)| verb);
            let latencies: Vec<_> = names.into_iter().zip(&report.latencies).collect();
            let (json, table, latencies) = (&report, &*table, &*latencies);
            let (seconds, ended) = (report.seconds, SystemTime::now());
            Published { json, table, latencies, seconds, ended }.publish(&args.output)
        }
    }
}
