//! Connections on one host: Unix sockets that preserve message boundaries and carry descriptors.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::net::{
    self, AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use super::descriptors::{self, Socket};
use crate::MESSAGE_BYTES_MAX;

pub(super) fn new_socket(flags: SocketFlags) -> io::Result<OwnedFd> {
    let flags = flags | SocketFlags::CLOEXEC;
    Ok(net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

/// One end of a connection.
pub struct Connection {
    socket: Socket,
}

impl Connection {
    pub(super) fn accepted(socket: Socket) -> Self {
        Self { socket }
    }

    /// Connects to a server. Waits up to the timeout, which must not be zero, for room in its
    /// backlog.
    ///
    /// # Errors
    /// `NotFound` or `ConnectionRefused` if no server listens there, `WouldBlock` after the
    /// timeout, `Interrupted` by a signal, otherwise the system's error.
    pub fn connect(path: &Path, timeout: Duration) -> io::Result<Self> {
        use net::sockopt::{Timeout, set_socket_timeout};
        let socket = new_socket(SocketFlags::empty())?;
        set_socket_timeout(&socket, Timeout::Send, Some(timeout))?;
        net::connect(&socket, &SocketAddrUnix::new(path)?)?;
        Ok(Self { socket: Socket::new(socket, None) })
    }

    /// The user at the other end, which connected or listens.
    ///
    /// # Errors
    /// The system's error.
    pub fn peer_user(&self) -> io::Result<u32> {
        descriptors::peer_user(self.as_fd())
    }

    /// Sets how long [`Connection::receive`] waits before it fails with `WouldBlock`; `None` means
    /// forever.
    ///
    /// # Errors
    /// The system's error.
    pub fn set_receive_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        use net::sockopt::{Timeout, set_socket_timeout};
        Ok(set_socket_timeout(&self.socket, Timeout::Recv, timeout)?)
    }

    /// Sends one message, and a descriptor if there is one. Never blocks.
    ///
    /// # Errors
    /// `WouldBlock` while the peer does not receive earlier messages, `BrokenPipe` when it has
    /// disconnected, otherwise the system's error.
    pub fn send(&self, message: &[u8], descriptor: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let descriptors = descriptor.as_slice();
        if !descriptors.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(descriptors));
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        net::sendmsg(&self.socket, &[io::IoSlice::new(message)], &mut ancillary, flags)?;
        Ok(())
    }

    /// Ends this direction: the peer sees the end after the last message.
    ///
    /// # Errors
    /// The system's error, when the peer has disconnected already.
    pub fn hang_up(&self) -> io::Result<()> {
        Ok(net::shutdown(&self.socket, net::Shutdown::Write)?)
    }

    /// Receives one message into `buffer`. Returns its length and its descriptor, if there is one.
    /// An empty message means that the peer has disconnected.
    ///
    /// # Errors
    /// `InvalidData` for a message longer than the buffer, and on the accepting side for one with
    /// a descriptor; `WouldBlock` after the timeout; otherwise the system's error.
    pub fn receive(&self, buffer: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
        if self.socket.closers().is_some() && descriptors::has_descriptors(self.as_fd())? {
            let why = "a message with a descriptor, which a server does not accept";
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [io::IoSliceMut::new(buffer)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let received = net::recvmsg(&self.socket, &mut parts, &mut ancillary, flags)?;
        if received.flags.contains(ReturnFlags::TRUNC) {
            let why = format!("a message over {} bytes", buffer.len().min(MESSAGE_BYTES_MAX));
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        if received.flags.contains(ReturnFlags::CTRUNC) {
            // The message has a descriptor, and this process may open no more of them.
            return Err(rustix::io::Errno::MFILE.into());
        }
        let descriptor = ancillary.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut rights) => rights.next(),
            _ => None,
        });
        Ok((received.bytes, descriptor))
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
