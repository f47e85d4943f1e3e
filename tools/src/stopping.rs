//! Signals: code that writes a file checks whether a signal came, so that it leaves no half-written
//! file.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use farside_config::signals::is_ignored;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;
use signal_hook::low_level::signal_name;

/// The signal that asked this process to end, if one came.
#[derive(Debug, Default)]
pub(crate) struct StopSignal(Arc<AtomicUsize>);

impl StopSignal {
    /// Starts to record signals. A second signal kills the process at once.
    pub(crate) fn listen() -> anyhow::Result<Self> {
        let (stop, is_second) = (Self::default(), Arc::new(AtomicBool::new(false)));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            if !is_ignored(signal) {
                // In this order, so that on the first signal the conditional handler finds the flag
                // unset.
                flag::register_conditional_default(signal, Arc::clone(&is_second))?;
                flag::register(signal, Arc::clone(&is_second))?;
                flag::register_usize(signal, Arc::clone(&stop.0), signal as usize)?;
            }
        }
        Ok(stop)
    }

    /// Fails if a signal has come.
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
    /// Returns the exit code by which shells report a process that a signal ended.
    pub(crate) fn exit_code(&self) -> u8 {
        128 + self.signal
    }
}
