//! Forks: a client must not be used in a child of the process that made it. The child has the
//! client's memory, but none of its threads, and shares its connections with the parent.
//!
//! A handler that runs in each child counts forks. Each object of a client stores the count at its
//! creation, so a check costs one load. In a child it is neither used nor dropped.
#![allow(unsafe_code, reason = "a handler of forks")]

use std::io;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU32, Ordering};

use pyo3::Python;

/// The number of forks from the process that loaded the module to this one.
static FORKS: AtomicU32 = AtomicU32::new(0);

extern "C" fn count_fork() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// Has forks counted from now on.
pub(crate) fn watch() -> io::Result<()> {
    // SAFETY: the handler changes an atomic, which is allowed between fork and exec. Python never
    // unloads the module that it is in.
    match unsafe { libc::pthread_atfork(None, None, Some(count_fork)) } {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}

/// The process has forked since the value was made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Forked;

/// A value that only the process that made it can use. A child leaks it. Its drop may wait, so it
/// releases the GIL.
#[derive(Debug)]
pub(crate) struct ProcessLocal<T: Send> {
    value: ManuallyDrop<T>,
    forks: u32,
}

impl<T: Send> ProcessLocal<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { value: ManuallyDrop::new(value), forks: FORKS.load(Ordering::Relaxed) }
    }

    #[inline]
    pub(crate) fn get(&self) -> Result<&T, Forked> {
        if self.forks == FORKS.load(Ordering::Relaxed) { Ok(&self.value) } else { Err(Forked) }
    }
}

impl<T: Send> Drop for ProcessLocal<T> {
    fn drop(&mut self) {
        if self.get().is_ok() {
            // SAFETY: it is taken here only, and not used after that.
            let value = unsafe { ManuallyDrop::take(&mut self.value) };
            Python::attach(|py| py.detach(|| drop(value)));
        }
    }
}
