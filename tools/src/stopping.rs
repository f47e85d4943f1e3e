//! Signals: code that writes a file checks for them, so that nothing half is left.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use farside_config::signals::is_ignored;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::flag;
use signal_hook::low_level::signal_name;

/// Where files have a limit, a longer one is an error, and not the end without a word.
pub(crate) fn survive_long_files() -> io::Result<()> {
    flag::register(SIGXFSZ, Arc::default())?;
    Ok(())
}

/// Whether a signal asked for the end.
#[derive(Debug, Default)]
pub(crate) struct Stop(Arc<AtomicUsize>);

impl Stop {
    /// Listens from now on. A second signal ends the process at once.
    pub(crate) fn listen() -> anyhow::Result<Self> {
        let (stop, is_second) = (Self::default(), Arc::new(AtomicBool::new(false)));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            if !is_ignored(signal) {
                // In this order: the first finds the flag as it was before.
                flag::register_conditional_default(signal, Arc::clone(&is_second))?;
                flag::register(signal, Arc::clone(&is_second))?;
                flag::register_usize(signal, Arc::clone(&stop.0), signal as usize)?;
            }
        }
        Ok(stop)
    }

    /// Fails once there was a signal.
    pub(crate) fn check(&self) -> Result<(), Stopped> {
        match self.0.load(Ordering::Relaxed) {
            0 => Ok(()),
            signal => Err(Stopped { signal: signal as u8 }),
        }
    }
}

/// A signal ended the command.
#[derive(Debug, thiserror::Error)]
#[error("stopped by {}", signal_name((*signal).into()).unwrap_or("a signal"))]
pub(crate) struct Stopped {
    signal: u8,
}

impl Stopped {
    /// As a shell has it.
    pub(crate) fn exit_code(&self) -> u8 {
        128 + self.signal
    }
}
