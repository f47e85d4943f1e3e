//! The byte stream of a connection.

use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    self, AddressFamily, RecvFlags, SendAncillaryBuffer, SendFlags, SocketFlags, SocketType,
    sockopt,
};

use super::PEER_TIMEOUT;
use super::tls::{Tls, TlsClient, TlsServer, no_handshake};
use crate::interrupt;

/// The interval between keepalive probes, and the time of silence before the first.
const PROBE_INTERVAL: Duration = Duration::from_secs(1);

/// A connected socket. Several threads may hold it; one of them reads and writes.
pub(super) struct Stream {
    socket: Arc<OwnedFd>,
    tls: Option<Box<Tls>>,
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
        Ok(Self::unchanged(socket))
    }

    /// Takes over a connected socket as it is.
    pub(super) fn unchanged(socket: OwnedFd) -> Self {
        Self { socket: Arc::new(socket), tls: None }
    }

    /// Connects to a server, with TLS if it is given.
    ///
    /// # Errors
    /// The system's error; `TimedOut` after the timeout, `WouldBlock` if the server does not take
    /// part in the handshake, and `InvalidData` for an error of TLS.
    pub(super) fn connect(
        address: SocketAddr,
        tls: Option<&TlsClient>,
        timeout: Duration,
    ) -> io::Result<Self> {
        let started = Instant::now();
        let mut stream = Self::over(connect_socket(address, timeout)?)?;
        let Some(tls) = tls else { return Ok(stream) };
        let mut tls = tls.connection()?;
        // The handshake begins with this side's first message.
        tls.flush(&stream.socket)?;
        while tls.is_handshaking() {
            let left = timeout.saturating_sub(started.elapsed());
            stream.set_wait_max(interrupt::step(left).max(Duration::from_millis(1)))?;
            match tls.fill(&stream.socket, true) {
                Ok(0) => return Err(no_handshake()),
                Ok(_) => drop(tls.take(&stream.socket, &mut [])?),
                Err(error)
                    if error.kind() == io::ErrorKind::WouldBlock
                        && !left.is_zero()
                        && !interrupt::gives_up() => {}
                Err(error) => return Err(error),
            }
        }
        stream.tls = Some(Box::new(tls));
        Ok(stream)
    }

    /// Expects TLS of the peer, as its server.
    ///
    /// # Errors
    /// TLS cannot begin.
    pub(super) fn expect_tls(&mut self, server: &TlsServer) -> io::Result<()> {
        self.tls = Some(Box::new(server.connection()?));
        Ok(())
    }

    /// The socket, for a thread that ends the connection.
    pub(super) fn socket(&self) -> Arc<OwnedFd> {
        self.socket.clone()
    }

    /// Whether the bytes are encrypted, so that they have to be copied.
    pub(super) fn is_encrypted(&self) -> bool {
        self.tls.is_some()
    }

    /// Whether there are bytes that the socket does not report, because they were received already.
    pub(super) fn has_received(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.has_received())
    }

    /// Takes memory for encrypted bytes, if it needs some and has none.
    pub(super) fn borrow(&mut self, spare: &mut Vec<u8>) {
        if let Some(tls) = &mut self.tls {
            tls.borrow(spare);
        }
    }

    /// Gives the memory for encrypted bytes back, if there are none.
    pub(super) fn give_back(&mut self, spare: &mut Vec<u8>) {
        if let Some(tls) = &mut self.tls {
            tls.give_back(spare);
        }
    }

    /// The memory for encrypted bytes that wait.
    pub(super) fn kept_bytes(&self) -> usize {
        self.tls.as_ref().map_or(0, |tls| tls.kept_bytes())
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
        match &mut self.tls {
            None => receive(&self.socket, into, wait),
            Some(tls) => receive_encrypted(&self.socket, tls, into, wait),
        }
    }

    /// As [`Stream::receive`], but with `wait` it waits for all of these bytes, so that the thread
    /// is not woken for each part. After the longest wait it returns what has arrived.
    ///
    /// # Errors
    /// As [`Stream::receive`].
    pub(super) fn receive_all(&mut self, into: &mut [u8], wait: bool) -> io::Result<usize> {
        match &mut self.tls {
            None if wait => receive_with(&self.socket, into, RecvFlags::WAITALL),
            _ => self.receive(into, wait),
        }
    }

    /// Sends as many bytes of these parts as there is room for, and returns their number. Encrypted
    /// bytes leave with [`Stream::flush`]. Never waits.
    ///
    /// # Errors
    /// `WouldBlock` without any room, otherwise the system's error.
    pub(super) fn send(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let Some(tls) = &mut self.tls else { return send(&self.socket, parts) };
        match tls.flush(&self.socket)? {
            true => tls.encrypt(parts),
            false => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    /// Sends encrypted bytes. Returns whether nothing is left. Never waits.
    ///
    /// # Errors
    /// The system's error.
    #[inline]
    pub(super) fn flush(&mut self) -> io::Result<bool> {
        match &mut self.tls {
            None => Ok(true),
            Some(tls) => tls.flush(&self.socket),
        }
    }

    /// Whether encrypted bytes wait for room.
    pub(super) fn has_unsent(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.has_unsent())
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
    pub(super) fn hang_up(&mut self) {
        if let Some(tls) = &mut self.tls {
            tls.close();
            // Without it the peer sees the end of the connection.
            let _ = tls.flush(&self.socket);
        }
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

/// As [`std::net::TcpStream::connect_timeout`], also for a call that its caller can end.
fn connect_socket(address: SocketAddr, timeout: Duration) -> io::Result<OwnedFd> {
    let started = Instant::now();
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = net::socket_with(family, SocketType::STREAM, flags, None)?;
    match net::connect(&socket, &address) {
        Ok(()) | Err(Errno::INPROGRESS) => {}
        Err(error) => return Err(error.into()),
    }
    loop {
        let left = timeout.saturating_sub(started.elapsed());
        if left.is_zero() || interrupt::gives_up() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let step = Timespec::try_from(interrupt::step(left)).ok();
        match poll(&mut [PollFd::new(&socket, PollFlags::OUT)], step.as_ref()) {
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => break,
            Err(error) => return Err(error.into()),
        }
    }
    sockopt::socket_error(&socket)??;
    rustix::io::ioctl_fionbio(&socket, false)?;
    Ok(socket)
}

/// As [`Stream::receive`], without TLS.
pub(super) fn receive(socket: &OwnedFd, into: &mut [u8], wait: bool) -> io::Result<usize> {
    let flags = if wait { RecvFlags::empty() } else { RecvFlags::DONTWAIT };
    receive_with(socket, into, flags)
}

fn receive_with(socket: &OwnedFd, into: &mut [u8], flags: RecvFlags) -> io::Result<usize> {
    match net::recv(socket, into, flags) {
        Ok((_, bytes)) => Ok(bytes),
        Err(Errno::INTR) => Err(io::ErrorKind::WouldBlock.into()),
        Err(error) => Err(error.into()),
    }
}

/// As [`Stream::send`], without TLS.
pub(super) fn send(socket: &OwnedFd, parts: &[IoSlice<'_>]) -> io::Result<usize> {
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    Ok(net::sendmsg(socket, parts, &mut SendAncillaryBuffer::default(), flags)?)
}

/// As [`Stream::receive`], with at most one system call unless all that it received was of the
/// handshake.
#[cold]
fn receive_encrypted(
    socket: &OwnedFd,
    tls: &mut Tls,
    into: &mut [u8],
    wait: bool,
) -> io::Result<usize> {
    loop {
        if let Some(bytes) = tls.take(socket, into)? {
            return Ok(bytes);
        }
        if tls.fill(socket, wait)? == 0 {
            return Ok(0);
        }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
