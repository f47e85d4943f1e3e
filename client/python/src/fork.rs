//! Forks: a client must not be used in a child of the process that made it. The child has the
//! client's memory, but none of its threads, and shares its connections with the parent.
//!
//! A handler that runs in each child counts forks. Each object of a client stores the count at its
//! creation, so a check costs one load. In a child it is neither used nor dropped.
#![allow(unsafe_code, reason = "a handler of forks")]

use std::io;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU32, Ordering};

use pyo3::{Python, ffi};

static FORKS: AtomicU32 = AtomicU32::new(0);

/// The number of forks from the process that loaded the module to this one.
#[inline]
pub(crate) fn count() -> u32 {
    FORKS.load(Ordering::Relaxed)
}

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

/// Whether the thread is attached to the main interpreter.
pub(crate) fn is_main_interpreter(_: Python<'_>) -> bool {
    // SAFETY: the thread is attached to an interpreter.
    let interpreter = unsafe { ffi::PyInterpreterState_Get() };
    // SAFETY: it is the thread's own. The first one has the number 0.
    unsafe { ffi::PyInterpreterState_GetID(interpreter) == 0 }
}

/// A value that only the process that made it can use. A child leaks it.
///
/// Its drop may wait, so it releases the GIL; but not in a subinterpreter. If that one ends with
/// the main interpreter, a thread that takes the GIL again is ended, and the process never ends.
#[derive(Debug)]
pub(crate) struct ProcessLocal<T: Send> {
    value: ManuallyDrop<T>,
    forks: u32,
}

impl<T: Send> ProcessLocal<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { value: ManuallyDrop::new(value), forks: count() }
    }

    #[inline]
    pub(crate) fn get(&self) -> Result<&T, Forked> {
        if self.forks == count() { Ok(&self.value) } else { Err(Forked) }
    }
}

impl<T: Send> Drop for ProcessLocal<T> {
    fn drop(&mut self) {
        if self.get().is_ok() {
            // SAFETY: it is taken here only, and not used after that.
            let value = unsafe { ManuallyDrop::take(&mut self.value) };
            Python::attach(|py| match is_main_interpreter(py) {
                true => py.detach(|| drop(value)),
                false => drop(value),
            });
        }
    }
}
