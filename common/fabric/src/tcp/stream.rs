//! The byte stream of a connection.

use std::io::{self, IoSlice};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::net::{self, RecvFlags, SendAncillaryBuffer, SendFlags, sockopt};

use super::PEER_TIMEOUT;

/// The interval between keepalive probes, and the time of silence before the first.
const PROBE_INTERVAL: Duration = Duration::from_secs(1);

/// A connected socket. Several threads may hold it; one of them reads and writes.
pub(super) struct Stream {
    socket: Arc<OwnedFd>,
}

impl Stream {
    /// Takes over a connected socket, and sets it up: it sends at once, and notices that its peer's
    /// host is gone.
    ///
    /// # Errors
    /// The system's error.
    pub(super) fn over(socket: OwnedFd) -> io::Result<Self> {
        sockopt::set_tcp_nodelay(&socket, true)?;
        sockopt::set_socket_keepalive(&socket, true)?;
        sockopt::set_tcp_keepidle(&socket, PROBE_INTERVAL)?;
        sockopt::set_tcp_keepintvl(&socket, PROBE_INTERVAL)?;
        sockopt::set_tcp_keepcnt(&socket, PEER_TIMEOUT.as_secs() as u32)?;
        sockopt::set_tcp_user_timeout(&socket, PEER_TIMEOUT.as_millis() as u32)?;
        Ok(Self { socket: Arc::new(socket) })
    }

    /// Connects to a server.
    ///
    /// # Errors
    /// The system's error; `TimedOut` after the timeout.
    pub(super) fn connect(address: std::net::SocketAddr, timeout: Duration) -> io::Result<Self> {
        Self::over(TcpStream::connect_timeout(&address, timeout)?.into())
    }

    /// The socket, for a thread that ends the connection.
    pub(super) fn socket(&self) -> Arc<OwnedFd> {
        self.socket.clone()
    }

    /// Limits how long [`Stream::receive`] waits.
    ///
    /// # Errors
    /// The system's error.
    pub(super) fn set_wait_max(&self, wait_max: Duration) -> io::Result<()> {
        Ok(sockopt::set_socket_timeout(&self.socket, sockopt::Timeout::Recv, Some(wait_max))?)
    }

    /// Receives bytes. Returns 0 when the peer has ended its direction.
    ///
    /// # Errors
    /// `WouldBlock` if there are none, with `wait` only after the longest wait;
    /// otherwise the system's error.
    pub(super) fn receive(&mut self, into: &mut [u8], wait: bool) -> io::Result<usize> {
        let flags = if wait { RecvFlags::empty() } else { RecvFlags::DONTWAIT };
        match net::recv(&self.socket, into, flags) {
            Ok((_, bytes)) => Ok(bytes),
            Err(rustix::io::Errno::INTR) => Err(io::ErrorKind::WouldBlock.into()),
            Err(error) => Err(error.into()),
        }
    }

    /// Sends as many bytes of these parts as the socket has room for, and returns their number.
    /// Never waits.
    ///
    /// # Errors
    /// `WouldBlock` without any room, otherwise the system's error.
    pub(super) fn send(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        Ok(net::sendmsg(&self.socket, parts, &mut SendAncillaryBuffer::default(), flags)?)
    }

    /// Ends both directions: the peer, and a thread that reads, see the end.
    pub(super) fn shut_down(socket: &OwnedFd) {
        // If this fails, the connection has ended already.
        let _ = net::shutdown(socket, net::Shutdown::Both);
    }

    /// Receives nothing more: a thread that reads sees the end after the bytes that have arrived.
    pub(super) fn stop_receiving(socket: &OwnedFd) {
        // If this fails, the connection has ended already.
        let _ = net::shutdown(socket, net::Shutdown::Read);
    }

    /// Ends this direction.
    pub(super) fn hang_up(&self) {
        // If this fails, the connection has ended already.
        let _ = net::shutdown(&self.socket, net::Shutdown::Write);
    }

    /// The number of sent bytes that the peer's host has not acknowledged.
    ///
    /// # Errors
    /// The system's error.
    pub(super) fn unacknowledged_bytes(&self) -> io::Result<u64> {
        super::output::unacknowledged_bytes(self.as_fd())
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
