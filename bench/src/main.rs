//! kv-bench: measures Farside.

use std::io::Write;
use std::process::ExitCode;

use clap::CommandFactory;
use farside_bench::allocations::CountingAllocator;
use farside_bench::args::{Args, Command};
use farside_bench::command::Interrupt;
use farside_bench::publish::IntervalLog;
use farside_bench::report::YcsbReport;
use farside_bench::{Error, Result, command, html, publish, run, verbs};
use farside_config::generate::generate;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const COMMAND: command::Command = command::Command("kv-bench");

fn main() -> ExitCode {
    if let Some(code) = generate(Args::command) {
        return code;
    }
    COMMAND.run(Args::read(std::env::args_os()), measure)
}

fn measure(args: &Args, interrupt: &Interrupt) -> Result<()> {
    match &args.command {
        Command::Ycsb(ycsb) => {
            ycsb.output.check()?;
            publish::check_file_or_stdout(ycsb.client_metrics.as_deref())?;
            if !ycsb.ignored.is_empty() {
                COMMAND.tell(&format!(
                    "these properties are not known here: {}",
                    ycsb.ignored.join(", ")
                ));
            }
            let measured = run::ycsb(ycsb, interrupt)?;
            let report = YcsbReport::new(ycsb, &measured);
            let table = report.table(&measured).map_err(|_| Error::Panicked)?;
            let kinds = measured.threads.recorder.kinds();
            let latencies: Vec<_> =
                kinds.map(|(kind, record)| (kind.name(), record.latencies.histogram())).collect();
            let log = IntervalLog {
                latencies: &latencies,
                seconds: report.seconds,
                ended: measured.ended,
            };
            ycsb.output.publish(&report, &table, &log)
        }
        Command::Report(args) => {
            let message = html::report(args, |line| COMMAND.tell(line))?;
            let written = std::io::stdout().write_all(message.as_bytes());
            written.map_err(Error::system("writing the result"))
        }
        Command::Verbs(args) => {
            publish::check_file_or_stdout(args.json.as_deref())?;
            if let Some(sizes) = &args.values {
                let report = verbs::values(args, sizes, interrupt)?;
                let table = report.table().map_err(|_| Error::Panicked)?;
                return publish::result(&report, &table, args.json.as_deref());
            }
            let report = verbs::run(args, interrupt)?;
            let table = report.table().map_err(|_| Error::Panicked)?;
            publish::result(&report, &table, args.json.as_deref())
        }
    }
}
