//! Whether stdin and stdout were open when this process started.
//!
//! The standard library replaces a closed one by /dev/null, so `main` cannot see it. Then a value
//! would be read as empty, or a printed one would be lost, without an error.

use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::fcntl_getfd;
use rustix::stdio::{stdin, stdout};

static STDIN_CLOSED: AtomicBool = AtomicBool::new(false);
static STDOUT_CLOSED: AtomicBool = AtomicBool::new(false);

/// Runs before the standard library is set up, so it must not call anything that needs this.
extern "C" fn record_closed() {
    STDIN_CLOSED.store(fcntl_getfd(stdin()).is_err(), Ordering::Relaxed);
    STDOUT_CLOSED.store(fcntl_getfd(stdout()).is_err(), Ordering::Relaxed);
}

/// The C library calls the functions in this section, in order, before `main`.
// SAFETY: the section has pointers to functions of this type. `record_closed` only makes two system
// calls and two stores, for which the standard library need not be set up.
#[allow(unsafe_code, reason = "nothing else runs before the standard library")]
#[used]
#[unsafe(link_section = ".init_array")]
static RECORD_CLOSED: extern "C" fn() = record_closed;

pub(crate) fn stdin_was_open() -> bool {
    !STDIN_CLOSED.load(Ordering::Relaxed)
}

pub(crate) fn stdout_was_open() -> bool {
    !STDOUT_CLOSED.load(Ordering::Relaxed)
}
