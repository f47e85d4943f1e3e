//! Signals: code that writes a file checks whether a signal came, so that it leaves no half-written
//! file. In the same way the threads of a command notice that one of them has failed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use farside_config::command_line::exit_code;
use farside_config::signals::is_ignored;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;
use signal_hook::low_level::signal_name;

/// What [`StopSignal`] has after [`StopSignal::cancel`]: no number of a signal.
const CANCELLED: usize = usize::MAX;

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

    /// Fails if a signal has come, or the command was cancelled.
    pub(crate) fn check(&self) -> Result<(), Stopped> {
        match self.0.load(Ordering::Relaxed) {
            0 => Ok(()),
            CANCELLED => Err(Stopped::Cancelled),
            signal => Err(Stopped::Signal(signal as u8)),
        }
    }

    /// Makes the other threads of the command end: one has failed. Its error is the command's.
    pub(crate) fn cancel(&self) {
        // A signal that came before stays.
        let _ = self.0.compare_exchange(0, CANCELLED, Ordering::Relaxed, Ordering::Relaxed);
    }
}

/// Why a command has to end.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Stopped {
    /// A signal came.
    #[error("stopped by {}", signal_name((*.0).into()).unwrap_or("a signal"))]
    Signal(u8),
    /// Another thread of the command has failed.
    #[error("another part of the command has failed")]
    Cancelled,
}

impl Stopped {
    /// Returns the exit code by which shells report a process that a signal ended.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Signal(signal) => 128 + signal,
            Self::Cancelled => exit_code::FAILED,
        }
    }
}
