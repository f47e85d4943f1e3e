//! Ctrl-C and SIGTERM end a run in order: its threads stop, its server is stopped. A second one
//! ends the process at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

use crate::{Error, Result};

/// Whether somebody asked for the end.
#[derive(Clone, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Listens from now on.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn install() -> Result<Self> {
        let interrupt = Self::default();
        for signal in [SIGINT, SIGTERM] {
            // In this order: the first signal finds the flag clear, the second finds it set.
            flag::register_conditional_shutdown(signal, 130, interrupt.0.clone())
                .and_then(|_| flag::register(signal, interrupt.0.clone()))
                .map_err(Error::system("listening for signals"))?;
        }
        Ok(interrupt)
    }

    /// Asks for the end.
    pub fn raise(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Fails once somebody asked for the end.
    ///
    /// # Errors
    /// [`Error::Interrupted`].
    pub fn check(&self) -> Result<()> {
        if self.0.load(Ordering::Relaxed) { Err(Error::Interrupted) } else { Ok(()) }
    }
}
