//! The refusal of descriptors in messages, and the user of a socket's peer.
//!
//! Closing the last copy of a descriptor can block for as long as the sender chooses. A TCP socket
//! with SO_LINGER and unsent data blocks like this. A server needs no descriptors. Since Linux 6.16
//! its sockets refuse them (SO_PASSRIGHTS), so the sender's call fails.
//!
//! Before 6.16 a socket's queue accepts every descriptor. There each message is first peeked at,
//! which closes nothing, and a connection whose message carries a descriptor is closed. Every
//! connection is closed on a thread of its own, because that also closes the descriptors in its
//! queue. Such a thread may hang without harm. While [`CLOSING_MAX`] sockets are not closed, the
//! server accepts no connection.

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use rustix::net::{RecvAncillaryBuffer, RecvFlags, ReturnFlags, recvmsg};

/// The socket option that allows or refuses descriptors in messages, since Linux 6.16. On PA-RISC
/// and SPARC the number is a different one, and the call fails or has no important effect.
const SO_PASSRIGHTS: libc::c_int = 83;
/// Limit on connections that are being closed. When it is reached, no connection is accepted.
const CLOSING_MAX: usize = 64;
/// The stack of a thread that calls only `close`.
const STACK_BYTES: usize = 64 << 10;

/// Makes a socket, and every connection that it will accept, refuse descriptors.
pub(super) fn refuse_descriptors(socket: BorrowedFd<'_>) -> io::Result<()> {
    let no: libc::c_int = 0;
    let (value, bytes) = ((&raw const no).cast(), size_of_val(&no) as libc::socklen_t);
    let (level, option) = (libc::SOL_SOCKET, SO_PASSRIGHTS);
    // SAFETY: the descriptor is open, and the option is read from an integer that is alive.
    match unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, value, bytes) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The user that connected or listens, by its number in this process's user namespace.
///
/// This does not use rustix's `socket_peercred`, which requires a process id other than 0. The
/// kernel returns 0 for a process in another namespace.
pub(super) fn peer_user(socket: BorrowedFd<'_>) -> io::Result<u32> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut bytes = size_of_val(&peer) as libc::socklen_t;
    let (value, length) = ((&raw mut peer).cast(), &raw mut bytes);
    let (level, option) = (libc::SOL_SOCKET, libc::SO_PEERCRED);
    // SAFETY: the descriptor is open, and the structure is as long as `bytes` says.
    match unsafe { libc::getsockopt(socket.as_raw_fd(), level, option, value, length) } {
        0 => Ok(peer.uid),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Whether the next message carries descriptors. Waits for the message if the socket blocks. The
/// message and its descriptors stay in the queue, so none is closed.
pub(super) fn has_descriptors(socket: BorrowedFd<'_>) -> io::Result<bool> {
    let mut none = RecvAncillaryBuffer::default();
    let received = recvmsg(socket, &mut [], &mut none, RecvFlags::PEEK)?;
    Ok(received.flags.contains(ReturnFlags::CTRUNC))
}

/// Closes sockets on threads of their own, because a close may block.
#[derive(Clone, Default)]
pub(super) struct Closers(Arc<ClosersShared>);

#[derive(Default)]
struct ClosersShared {
    /// Sockets that no thread has taken yet.
    waiting: Mutex<Vec<OwnedFd>>,
    /// The number of sockets in `waiting`, and of those whose `close` has not returned.
    closing: AtomicUsize,
}

impl Closers {
    /// Whether [`CLOSING_MAX`] sockets are being closed.
    pub(super) fn is_full(&self) -> bool {
        self.0.closing.load(Ordering::Relaxed) >= CLOSING_MAX
    }

    fn close(&self, socket: OwnedFd) {
        self.0.closing.fetch_add(1, Ordering::Relaxed);
        self.0.waiting.lock().unwrap_or_else(PoisonError::into_inner).push(socket);
        let shared = Arc::clone(&self.0);
        let close_all = move || {
            let next = || shared.waiting.lock().unwrap_or_else(PoisonError::into_inner).pop();
            while let Some(socket) = next() {
                drop(socket);
                shared.closing.fetch_sub(1, Ordering::Relaxed);
            }
        };
        let thread = thread::Builder::new().name("farside-close".to_owned());
        // If the system starts no thread, the socket waits for the next one.
        let _ = thread.stack_size(STACK_BYTES).spawn(close_all);
    }
}

/// A socket. If its queue may hold descriptors, another thread closes it.
pub(super) struct Socket {
    socket: ManuallyDrop<OwnedFd>,
    closers: Option<Closers>,
}

impl Socket {
    /// With `closers` if the socket cannot refuse descriptors.
    pub(super) fn new(socket: OwnedFd, closers: Option<Closers>) -> Self {
        Self { socket: ManuallyDrop::new(socket), closers }
    }

    pub(super) fn closers(&self) -> Option<&Closers> {
        self.closers.as_ref()
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        // SAFETY: only this takes the socket, and nothing uses it afterwards.
        let socket = unsafe { ManuallyDrop::take(&mut self.socket) };
        match &self.closers {
            Some(closers) => closers.close(socket),
            None => drop(socket),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closers_are_full_while_too_many_sockets_do_not_close() {
        let closers = Closers::default();
        // The state if no thread has ended.
        closers.0.closing.store(CLOSING_MAX - 1, Ordering::Relaxed);
        assert!(!closers.is_full());
        closers.0.closing.fetch_add(1, Ordering::Relaxed);
        assert!(closers.is_full());
        let (socket, other) = std::os::unix::net::UnixStream::pair().unwrap();
        drop(Socket::new(socket.into(), Some(closers.clone())));
        // The socket is closed although the closers are full.
        other.set_read_timeout(Some(std::time::Duration::from_secs(20))).unwrap();
        assert_eq!(io::Read::read(&mut &other, &mut [0]).unwrap(), 0);
    }

    #[test]
    fn a_peers_user_is_known() {
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let own = rustix::process::geteuid().as_raw();
        assert_eq!(peer_user(socket.as_fd()).unwrap(), own);
    }
}
