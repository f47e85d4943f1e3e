//! Events with which one thread wakes another.

use std::io;
use std::os::fd::OwnedFd;

use rustix::event::{EventfdFlags, eventfd};

/// Returns an event, which is not readable at first.
///
/// # Errors
/// The system's error.
pub(crate) fn new_event() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// Makes an event readable.
pub(crate) fn signal(event: &OwnedFd) {
    // Fails only if the counter is full, and then the event is readable.
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}
