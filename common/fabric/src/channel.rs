//! The control channel, which each fabric implements, with the roles of its clients and the limits
//! of its messages.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

/// The rights of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum Role {
    /// May only READ. The memory (shm) or the device (verbs) enforces this limit.
    Reader = 1,
    /// May execute all verbs.
    Writer = 2,
}

impl Role {
    /// Its name, as in a config file.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Reader => "reader",
            Self::Writer => "writer",
        }
    }
}

/// The longest message on a control channel, in bytes.
pub const MESSAGE_BYTES_MAX: usize = 64 << 10;
/// The longest private data that RDMA-CM carries in a connection request, in bytes.
pub const REQUEST_BYTES_MAX: usize = 56;
/// The longest private data that RDMA-CM carries in the reply of an accepting side, in bytes.
pub const REPLY_BYTES_MAX: usize = 196;

/// One end of a control channel. No call blocks, except [`ControlChannel::flush`].
///
/// The descriptor becomes readable when a message has arrived, when there is room for another one,
/// or at the end. Then call [`ControlChannel::receive`] until it returns `None`, and send the
/// messages that waited for room.
pub trait ControlChannel: AsFd + Send {
    /// Sends a message of 1 to [`MESSAGE_BYTES_MAX`] bytes.
    ///
    /// # Errors
    /// `WouldBlock` while the peer does not receive the messages before it, another error when the
    /// peer has disconnected.
    fn send(&mut self, message: &[u8]) -> io::Result<()>;

    /// Sends a message and a descriptor, which only a channel on one host can carry.
    ///
    /// # Errors
    /// `Unsupported` on other channels, otherwise those of [`ControlChannel::send`].
    fn send_with_descriptor(&mut self, _: &[u8], _: BorrowedFd<'_>) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Receives a message and returns its length: 0 when the peer has disconnected and all its
    /// messages were received. Returns `None` if there is no message yet. Only after that does the
    /// descriptor become readable for the next one.
    ///
    /// # Errors
    /// `InvalidData` for a message longer than the buffer, `TimedOut` when the peer's host did not
    /// answer a probe, otherwise the system's error.
    fn receive(&mut self, buffer: &mut [u8]) -> io::Result<Option<usize>>;

    /// Whether the descriptor becomes writable when there is room for another message. Otherwise it
    /// becomes readable.
    fn signals_room_as_writable(&self) -> bool;

    /// Whether this end still has a part of a sent message, for which there was no room. Then the
    /// caller also waits until the descriptor is writable, and calls [`ControlChannel::receive`],
    /// which sends more of it.
    fn has_unsent(&self) -> bool {
        false
    }

    /// Asks the peer's host for an acknowledgement, without its process. On one host this
    /// does nothing, because the system reports the end of a process.
    ///
    /// # Errors
    /// The system's error.
    fn probe(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// Waits until the messages sent arrive even if this end is dropped.
    ///
    /// # Errors
    /// `TimedOut`, or `BrokenPipe` when the peer has disconnected. Messages may be lost then.
    fn flush(&mut self, timeout: Duration) -> io::Result<()>;

    /// Ends this direction only: the peer sees the end after the last message. Returns false if the
    /// channel cannot end one direction.
    fn hang_up(&mut self) -> bool {
        false
    }
}
