//! The frame of a command that measures: one line for each mistake and each failure, with the exit
//! code that kv-cli has for it.

use std::io::Write;
use std::process::ExitCode;

use clap::error::ErrorKind;
use farside_config::command_line::{exit_code, one_line, usage_line};
use farside_config::signals::explain_bus_errors;

use crate::interrupt::Interrupt;
use crate::{Error, Result};

/// A command, by its name.
#[derive(Clone, Copy)]
pub struct Command(pub &'static str);

impl Command {
    /// Runs `measure` with the arguments, until it ends or a signal interrupts it.
    pub fn run<A>(
        self,
        args: std::result::Result<A, clap::Error>,
        measure: impl FnOnce(&A, &Interrupt) -> Result<()>,
    ) -> ExitCode {
        let args = match args {
            Ok(args) => args,
            Err(error) if is_mistake(&error) => {
                self.tell(&usage_line(self.0, &error.to_string()));
                return exit_code::USAGE.into();
            }
            // --help and --version.
            Err(error) => error.exit(),
        };
        let interrupt = || {
            let interrupt = Interrupt::install()?;
            explain_bus_errors(self.0).map_err(Error::system("waiting for signals"))?;
            Ok(interrupt)
        };
        match interrupt().and_then(|interrupt| measure(&args, &interrupt)) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                self.tell(&one_line(&error));
                error.exit_code().into()
            }
        }
    }

    /// Writes a line to stderr.
    pub fn tell(self, line: &str) {
        // A closed stderr has no reader.
        let _ = writeln!(std::io::stderr(), "{}: {line}", self.0);
    }
}

/// Whether the error is a mistake, which gets one line. The others are `--help` and the like.
fn is_mistake(error: &clap::Error) -> bool {
    error.use_stderr() && error.kind() != ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
}
