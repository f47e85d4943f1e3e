//! The bytes of a connection: those of its socket, or encrypted.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::net::{SendFlags, send};
use rustls::{ServerConfig, ServerConnection};

/// The bytes that may wait, encrypted, for room in the socket.
const UNSENT_BYTES_MAX: usize = 256 << 10;
/// The bytes that one call decrypts at most.
const DECRYPTED_BYTES_MAX: usize = 64 << 10;

/// A connection's stream. Nothing blocks.
pub(crate) enum Stream {
    Plain(OwnedFd),
    Tls(OwnedFd, Box<ServerConnection>),
}

impl Stream {
    /// A stream over a socket that does not block.
    pub(crate) fn new(socket: OwnedFd, tls: Option<Arc<ServerConfig>>) -> io::Result<Self> {
        let Some(config) = tls else { return Ok(Self::Plain(socket)) };
        let mut tls = ServerConnection::new(config).map_err(io::Error::other)?;
        tls.set_buffer_limit(Some(UNSENT_BYTES_MAX));
        Ok(Self::Tls(socket, Box::new(tls)))
    }

    /// Appends received bytes to a buffer that has spare room. Returns their number; 0 at the end.
    ///
    /// # Errors
    /// `WouldBlock` if there are none now; otherwise the connection is broken.
    pub(crate) fn read(&mut self, into: &mut Vec<u8>) -> io::Result<usize> {
        match self {
            Self::Plain(socket) => {
                Ok(rustix::io::read(&*socket, rustix::buffer::spare_capacity(into))?)
            }
            Self::Tls(socket, tls) => loop {
                let start = into.len();
                into.resize(start + DECRYPTED_BYTES_MAX.min(into.capacity() - start), 0);
                let read = tls.reader().read(&mut into[start..]);
                into.truncate(start + read.as_ref().copied().unwrap_or(0));
                match read {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    read => return read,
                }
                if tls.read_tls(&mut Socket(socket))? == 0 {
                    return Ok(0);
                }
                let state = tls.process_new_packets();
                // An answer of the handshake, or an alert. It waits if there is no room.
                let _ = send_encrypted(socket, tls);
                state.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
            },
        }
    }

    /// Sends bytes, as many as there is room for.
    ///
    /// # Errors
    /// `WouldBlock` without any room; otherwise the connection is broken.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(socket) => Ok(send(socket, bytes, SendFlags::NOSIGNAL)?),
            Self::Tls(socket, tls) => {
                send_encrypted(socket, tls)?;
                let taken = tls.writer().write(bytes)?;
                match send_encrypted(socket, tls) {
                    Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
                    _ if taken == 0 => Err(io::ErrorKind::WouldBlock.into()),
                    _ => Ok(taken),
                }
            }
        }
    }

    /// Sends what waits encrypted.
    ///
    /// # Errors
    /// As [`Stream::write`].
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Plain(_) => Ok(()),
            Self::Tls(socket, tls) => send_encrypted(socket, tls),
        }
    }

    /// Whether encrypted bytes wait for room in the socket.
    pub(crate) fn wants_flush(&self) -> bool {
        matches!(self, Self::Tls(_, tls) if tls.wants_write())
    }

    /// Whether the handshake of TLS is not done yet.
    pub(crate) fn is_handshaking(&self) -> bool {
        matches!(self, Self::Tls(_, tls) if tls.is_handshaking())
    }

    /// Whether a short read shows that no more bytes have come.
    pub(crate) fn short_read_is_all(&self) -> bool {
        matches!(self, Self::Plain(_))
    }

    /// Announces the end, if the stream is encrypted.
    pub(crate) fn close(&mut self) {
        if let Self::Tls(socket, tls) = self {
            tls.send_close_notify();
            // The client may be gone.
            let _ = send_encrypted(socket, tls);
        }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Plain(socket) | Self::Tls(socket, _) => socket.as_fd(),
        }
    }
}

fn send_encrypted(socket: &OwnedFd, tls: &mut ServerConnection) -> io::Result<()> {
    while tls.wants_write() {
        tls.write_tls(&mut Socket(socket))?;
    }
    Ok(())
}

/// A socket, as a reader and writer.
struct Socket<'s>(&'s OwnedFd);

impl Read for Socket<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        Ok(rustix::io::read(self.0, into)?)
    }
}

impl Write for Socket<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(send(self.0, bytes, SendFlags::NOSIGNAL)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
