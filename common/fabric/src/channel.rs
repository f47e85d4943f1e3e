//! The control channel, which each fabric implements, and what all of them agree on: roles, and
//! the longest of each message.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

/// What a connection may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Role {
    /// Only READ. Enforced by the memory (shm) or the device (verbs), not by the client.
    Reader = 1,
    /// Everything.
    Writer = 2,
}

/// The longest message on a control channel, in bytes.
pub const MESSAGE_BYTES_MAX: usize = 64 << 10;
/// What RDMA-CM lets a connecting side say, in bytes.
pub const REQUEST_BYTES_MAX: usize = 56;
/// What RDMA-CM lets an accepting side say, in bytes.
pub const REPLY_BYTES_MAX: usize = 196;

/// One end of a control channel. It never blocks.
///
/// The descriptor becomes readable when there is something to do: a message, room for another one,
/// or the end. Then call [`ControlChannel::receive`] until it returns `None`, and send what waited
/// for room.
pub trait ControlChannel: AsFd + Send {
    /// Sends a message of 1 to [`MESSAGE_BYTES_MAX`] bytes.
    ///
    /// # Errors
    /// `WouldBlock` when the peer does not take those before it, another error when it is gone.
    fn send(&mut self, message: &[u8]) -> io::Result<()>;

    /// Sends a message together with a descriptor, which only a channel on one host can carry.
    ///
    /// # Errors
    /// `Unsupported` on other channels, else as for [`ControlChannel::send`].
    fn send_with_descriptor(&mut self, _: &[u8], _: BorrowedFd<'_>) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Receives a message; returns its length, 0 when the peer is gone and everything that it sent
    /// before was received. `None` if there is no message just now; only after that does the
    /// descriptor become readable for the next.
    ///
    /// # Errors
    /// `InvalidData` for a message longer than the buffer, `TimedOut` when the peer is gone because
    /// it did not answer a probe, else what the system says.
    fn receive(&mut self, buffer: &mut [u8]) -> io::Result<Option<usize>>;

    /// Whether the descriptor becomes writable when there is room for another message; else it
    /// becomes readable.
    fn is_writable_with_room(&self) -> bool;

    /// Asks the peer's host for a sign of life. Its process does not notice. A channel on one host
    /// has nothing to ask: the system reports the end of a process.
    ///
    /// # Errors
    /// What the system says.
    fn probe(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// Waits until the messages sent do not need this end any more: for the last one.
    ///
    /// # Errors
    /// `TimedOut`, or `BrokenPipe` when the peer is gone: it may not get them.
    fn flush(&mut self, most: Duration) -> io::Result<()>;

    /// Ends this direction only: the peer sees the end once it has taken what was sent. False if
    /// the channel cannot do so: then only dropping it ends it.
    fn hang_up(&mut self) -> bool {
        false
    }
}
