//! The control channel on one host: the Unix socket through which the client connected.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use super::connect::Connection;
use crate::ControlChannel;

/// One end of a control channel over a Unix socket.
pub struct ShmChannel(Connection);

impl ShmChannel {
    /// Makes a channel of a socket, and makes the socket non-blocking.
    ///
    /// # Errors
    /// The system's error.
    pub fn over(socket: Connection) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        Ok(Self(socket))
    }
}

impl ControlChannel for ShmChannel {
    fn send(&mut self, message: &[u8]) -> io::Result<()> {
        self.0.send(message, None)
    }

    fn send_with_descriptor(
        &mut self,
        message: &[u8],
        descriptor: BorrowedFd<'_>,
    ) -> io::Result<()> {
        self.0.send(message, Some(descriptor))
    }

    fn receive(&mut self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        match self.0.receive(buffer) {
            Ok((bytes, _)) => Ok(Some(bytes)),
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
                _ => Err(error),
            },
        }
    }

    fn signals_room_as_writable(&self) -> bool {
        true
    }

    /// Returns at once: the system delivers the messages without this end.
    fn flush(&mut self, _: Duration) -> io::Result<()> {
        Ok(())
    }

    fn hang_up(&mut self) -> bool {
        // If this fails, the peer has disconnected already.
        let _ = self.0.hang_up();
        true
    }
}

impl AsFd for ShmChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
