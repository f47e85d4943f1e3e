//! Writing to stderr although it may have no reader.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::stdio::stderr;

/// What a pipe takes without a wait when it reports room: PIPE_BUF of Linux.
const PART_BYTES: usize = 4096;

/// Writes to stderr, but waits for room no longer than this at a time. The rest is lost then, and
/// after an error. Safe in a signal handler.
pub(crate) fn write_within(mut bytes: &[u8], wait_max: Option<&Timespec>) {
    let stderr = stderr();
    while !bytes.is_empty() {
        match poll(&mut [PollFd::new(&stderr, PollFlags::OUT)], wait_max) {
            Ok(1) => {}
            Err(Errno::INTR) => continue,
            _ => return,
        }
        match rustix::io::write(stderr, &bytes[..bytes.len().min(PART_BYTES)]) {
            Ok(written) => bytes = &bytes[written..],
            Err(Errno::INTR | Errno::AGAIN) => {}
            // It may be closed.
            Err(_) => return,
        }
    }
}
