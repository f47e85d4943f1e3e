//! A control channel, whichever fabric it belongs to.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use super::Request;
use farside_fabric::shm::Connection;
use farside_fabric::verbs::ControlChannel;

/// One end of a control channel. It never blocks.
pub enum Channel {
    /// A Unix socket.
    Shm(Connection),
    /// SEND and RECV on a queue pair.
    Verbs(ControlChannel),
}

impl Channel {
    /// The channel over a socket, which does not block from now on.
    ///
    /// # Errors
    /// What the system says.
    pub fn over(socket: Connection) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        Ok(Self::Shm(socket))
    }

    /// Sends a message.
    ///
    /// # Errors
    /// `WouldBlock` when the peer does not take those before it, another error when it is gone.
    pub fn send(&mut self, message: &[u8]) -> io::Result<()> {
        match self {
            Self::Shm(socket) => socket.send(message, None),
            Self::Verbs(channel) => channel.send(message),
        }
    }

    /// Receives a message; returns its length, 0 when the peer is gone. `None` if there is none
    /// just now; only after that does the descriptor become readable for the next.
    ///
    /// # Errors
    /// `InvalidData` for a message longer than the buffer, else what the system says.
    pub fn receive(&mut self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        match self {
            Self::Shm(socket) => match socket.receive(buffer) {
                Ok((bytes, _)) => Ok(Some(bytes)),
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
                    _ => Err(error),
                },
            },
            Self::Verbs(channel) => channel.receive(buffer),
        }
    }

    /// Whether the descriptor becomes writable when there is room for another message; else it
    /// becomes readable.
    pub fn is_writable_with_room(&self) -> bool {
        matches!(self, Self::Shm(_))
    }

    /// Says goodbye; waits this long until the message does not need this end any more. If it does
    /// not arrive, the server sees the connection end, and takes this client for one that died.
    pub fn say_goodbye(&mut self, most: Duration) {
        let mut goodbye = Vec::new();
        Request::Goodbye.encode(&mut goodbye);
        let _ = self.send(&goodbye);
        let _ = self.flush(most);
    }

    /// Waits until the messages sent do not need this end any more.
    ///
    /// # Errors
    /// What the system says; the peer may not get them.
    pub fn flush(&mut self, most: Duration) -> io::Result<()> {
        match self {
            Self::Shm(_) => Ok(()),
            Self::Verbs(channel) => channel.flush(most),
        }
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Shm(socket) => socket.as_fd(),
            Self::Verbs(channel) => channel.as_fd(),
        }
    }
}
