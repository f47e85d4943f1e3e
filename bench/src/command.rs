//! The common main function of kv-bench and kv-compare. It prints one line for a mistake or a
//! failure, and exits with kv-cli's code for it.
//!
//! SIGINT (Ctrl-C), SIGQUIT, SIGTERM and SIGHUP end a run: its threads stop, its server is
//! stopped, its temporary files are removed. A second signal ends the process at once.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use clap::error::ErrorKind;
use farside_config::command_line::{exit_code, one_line, usage_line};
use farside_config::signals;
use signal_hook::consts::SIGQUIT;
use signal_hook::iterator::Signals;
use signal_hook::low_level::exit;

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
            signals::explain_bus_errors(self.0).map_err(Error::system("waiting for signals"))?;
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

/// Whether the error is a mistake on the command line. Other errors of clap are `--help` and
/// `--version`.
fn is_mistake(error: &clap::Error) -> bool {
    error.use_stderr() && error.kind() != ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
}

/// Whether a signal has interrupted the run.
#[derive(Clone, Default)]
pub struct Interrupt(Arc<State>);

#[derive(Default)]
struct State {
    is_wanted: AtomicBool,
    /// The folders that a second signal removes.
    folders: Mutex<Vec<PathBuf>>,
}

impl Interrupt {
    /// Starts to handle signals.
    pub fn install() -> Result<Self> {
        let failed = || Error::system("listening for signals");
        let ending = signals::ending().into_iter().chain([SIGQUIT]);
        let mut incoming = Signals::new(ending).map_err(failed())?;
        let interrupt = Self::default();
        let raised = interrupt.clone();
        let listen = move || {
            for _ in incoming.forever() {
                if raised.0.is_wanted.swap(true, Ordering::Relaxed) {
                    raised.folders().iter().for_each(|folder| drop(fs::remove_dir_all(folder)));
                    exit(Error::Interrupted.exit_code().into());
                }
            }
        };
        thread::Builder::new().spawn(listen).map_err(failed())?;
        Ok(interrupt)
    }

    /// Fails once the run is interrupted.
    pub fn check(&self) -> Result<()> {
        if self.0.is_wanted.load(Ordering::Relaxed) { Err(Error::Interrupted) } else { Ok(()) }
    }

    /// Makes a second signal, which ends the process at once, remove this folder first.
    pub fn remove_at_exit(&self, folder: &Path) {
        self.folders().push(folder.to_owned());
    }

    fn folders(&self) -> MutexGuard<'_, Vec<PathBuf>> {
        self.0.folders.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
