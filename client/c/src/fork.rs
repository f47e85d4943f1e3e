//! Finds out that a process is a child made by `fork`.
//!
//! A child must not use what its parent connected: both would post in the same queues, and give out
//! the same free blocks.

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::error::{Ended, Failure};
use crate::farside_status::FARSIDE_ERROR_INTERNAL;

/// How many forks lead from the process that loaded the library to this one.
static GENERATION: AtomicU32 = AtomicU32::new(0);

extern "C" fn count_fork() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

/// A process, as far as forks tell processes apart.
#[derive(Clone, Copy)]
pub(crate) struct Process(u32);

impl Process {
    /// This process. From now on forks are counted, unless the system has no memory for that.
    pub(crate) fn this() -> Self {
        static REGISTERED: Once = Once::new();
        REGISTERED.call_once(|| {
            // SAFETY: the handler only changes an atomic number.
            let _ = unsafe { libc::pthread_atfork(None, None, Some(count_fork)) };
        });
        Self(GENERATION.load(Ordering::Relaxed))
    }

    /// Fails if this is another process.
    #[inline]
    pub(crate) fn check(self) -> Result<(), Failure> {
        if self.is_this() {
            return Ok(());
        }
        Err(Failure::argument(
            "it belongs to the parent process: after fork(), connect a client anew",
        ))
    }

    /// Whether this process made the object.
    pub(crate) fn is_this(self) -> bool {
        self.0 == GENERATION.load(Ordering::Relaxed)
    }

    /// Drops what belongs to the process. Another process only forgets it.
    pub(crate) fn drop<T>(self, value: T) {
        if self.is_this() { drop(value) } else { std::mem::forget(value) }
    }
}

/// Whether an object can be used: by its process only, and not after a panic.
pub(crate) struct Health {
    pub(crate) process: Process,
    is_defective: bool,
}

impl Health {
    pub(crate) fn new() -> Self {
        Self { process: Process::this(), is_defective: false }
    }

    /// Fails if the object cannot be used.
    #[inline]
    pub(crate) fn check(&self) -> Result<(), Failure> {
        self.process.check()?;
        if !self.is_defective {
            return Ok(());
        }
        let text = "a call has failed by a defect of the library: close what it used";
        Err(Failure { status: FARSIDE_ERROR_INTERNAL, text: text.to_owned() })
    }

    /// Notes how a call with the object ended.
    #[inline]
    pub(crate) fn note(&mut self, ended: &Ended) {
        self.is_defective |= ended.has_panicked;
    }
}
