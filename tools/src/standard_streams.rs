//! Which of stdin and stdout this process was started with. The standard library opens /dev/null in
//! the place of one that is closed, so a program in `main` cannot tell. A value would be read as
//! empty, or be lost when it is printed, both without an error.

use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::fcntl_getfd;
use rustix::stdio::{stdin, stdout};

static STDIN_CLOSED: AtomicBool = AtomicBool::new(false);
static STDOUT_CLOSED: AtomicBool = AtomicBool::new(false);

/// Runs before the standard library starts: what is called here must not need it.
extern "C" fn look() {
    STDIN_CLOSED.store(fcntl_getfd(stdin()).is_err(), Ordering::Relaxed);
    STDOUT_CLOSED.store(fcntl_getfd(stdout()).is_err(), Ordering::Relaxed);
}

/// The C library calls the functions in this section, in order, before `main`.
// SAFETY: the section holds pointers to functions of this type, and `look` makes two system calls
// and two stores.
#[allow(unsafe_code, reason = "nothing else runs before the standard library")]
#[used]
#[unsafe(link_section = ".init_array")]
static LOOK: extern "C" fn() = look;

/// Whether stdin and stdout were open when the process started.
pub(crate) struct StandardStreams {
    pub(crate) stdin: bool,
    pub(crate) stdout: bool,
}

impl StandardStreams {
    pub(crate) fn at_start() -> Self {
        let is_open = |closed: &AtomicBool| !closed.load(Ordering::Relaxed);
        Self { stdin: is_open(&STDIN_CLOSED), stdout: is_open(&STDOUT_CLOSED) }
    }
}
