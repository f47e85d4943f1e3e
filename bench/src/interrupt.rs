//! SIGINT (Ctrl-C), SIGQUIT, SIGTERM and SIGHUP end a run in order: its threads stop, its server is
//! stopped, its temporary files are removed. A second signal ends the process at once.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use farside_config::signals;
use signal_hook::consts::SIGQUIT;
use signal_hook::iterator::Signals;
use signal_hook::low_level::exit;

use crate::{Error, Result};

/// Whether a signal asked for the end.
#[derive(Clone, Default)]
pub struct Interrupt(Arc<State>);

#[derive(Default)]
struct State {
    is_wanted: AtomicBool,
    /// What the second signal removes.
    folders: Mutex<Vec<PathBuf>>,
}

impl Interrupt {
    /// Listens from now on.
    pub fn install() -> Result<Self> {
        let failed = || Error::system("listening for signals");
        let ending = signals::ending().into_iter().chain([SIGQUIT]);
        let mut signals = Signals::new(ending).map_err(failed())?;
        let interrupt = Self::default();
        let heard = interrupt.clone();
        let listen = move || {
            for _ in signals.forever() {
                if heard.0.is_wanted.swap(true, Ordering::Relaxed) {
                    heard.folders().iter().for_each(|folder| drop(fs::remove_dir_all(folder)));
                    exit(Error::Interrupted.exit_code().into());
                }
            }
        };
        thread::Builder::new().spawn(listen).map_err(failed())?;
        Ok(interrupt)
    }

    /// Asks for the end.
    pub fn raise(&self) {
        self.0.is_wanted.store(true, Ordering::Relaxed);
    }

    /// Fails once a signal asked for the end.
    pub fn check(&self) -> Result<()> {
        if self.0.is_wanted.load(Ordering::Relaxed) { Err(Error::Interrupted) } else { Ok(()) }
    }

    /// Nothing is to be left of this folder, also if the process ends at once.
    pub fn removes(&self, folder: &Path) {
        self.folders().push(folder.to_owned());
    }

    fn folders(&self) -> MutexGuard<'_, Vec<PathBuf>> {
        self.0.folders.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
