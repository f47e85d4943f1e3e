//! Unix sockets that keep message boundaries and carry descriptors: the connection of the `shm`
//! fabric.

use std::fs::{self, File};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::net::{
    self, AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use super::descriptors::{self, Closers, Socket};
use super::own_file::{self, Place};
use crate::MESSAGE_BYTES_MAX;

const BACKLOG: i32 = 128;

fn new_socket(flags: SocketFlags) -> io::Result<OwnedFd> {
    let flags = flags | SocketFlags::CLOEXEC;
    Ok(net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

/// Which users may connect to a socket.
#[derive(Clone, Copy, Debug, Default)]
pub struct SocketOptions {
    /// The permissions of its path; else what the process's mask leaves.
    pub mode: Option<u32>,
    /// The group of its path; else the process's.
    pub group: Option<u32>,
    /// As on Linux before 6.16, where a socket cannot refuse descriptors: for tests.
    #[doc(hidden)]
    pub takes_descriptors: bool,
}

/// A socket that clients connect to. Removes its path when dropped.
pub struct Listener {
    socket: Socket,
    path: PathBuf,
    /// Device and inode of the path, for another socket may have taken its place.
    bound: (u64, u64),
    /// Keeps the path from other servers. The file itself stays: to remove it safely is harder
    /// than to leave it.
    lock: File,
}

impl Listener {
    /// Binds the path; takes over one that a dead server left behind. A lock on a file beside it,
    /// `<path>.lock`, keeps two servers from doing so at the same time.
    ///
    /// # Errors
    /// `AddrInUse` when a server answers or starts there, `AlreadyExists` when the path is no
    /// socket, else what the system says.
    pub fn bind(path: &Path) -> io::Result<Self> {
        Self::bind_with(path, &SocketOptions::default())
    }

    /// The same, with these permissions before anybody can connect.
    ///
    /// # Errors
    /// As [`Listener::bind`].
    pub fn bind_with(path: &Path, options: &SocketOptions) -> io::Result<Self> {
        // Before the lock, which would leave a file beside something that is not ours.
        is_socket(path)?;
        let lock = lock_beside(path)?;
        if is_socket(path)? {
            let probe = new_socket(SocketFlags::NONBLOCK)?;
            match net::connect(&probe, &SocketAddrUnix::new(path)?) {
                // Another kind of socket is another program's, and so is a full backlog.
                Ok(()) | Err(rustix::io::Errno::PROTOTYPE | rustix::io::Errno::AGAIN) => {
                    return Err(io::ErrorKind::AddrInUse.into());
                }
                Err(rustix::io::Errno::CONNREFUSED) => fs::remove_file(path)?,
                Err(error) => return Err(error.into()),
            }
        }
        let socket = new_socket(SocketFlags::empty())?;
        let refuses =
            !options.takes_descriptors && descriptors::refuse_descriptors(socket.as_fd()).is_ok();
        let socket = Socket::new(socket, (!refuses).then(Closers::default));
        net::bind(&socket, &SocketAddrUnix::new(path)?)?;
        let listener = Self { bound: identity(path)?, socket, path: path.to_owned(), lock };
        // Nothing connects before it listens.
        permit(&listener.path, options)?;
        net::listen(&listener.socket, BACKLOG)?;
        Ok(listener)
    }

    /// The next client, without waiting for its request. Blocks.
    ///
    /// # Errors
    /// What the system says; `Other` while too many former connections cannot be closed.
    pub fn accept(&self) -> io::Result<Connection> {
        let closers = self.socket.closers();
        if closers.is_some_and(Closers::is_full) {
            let why = "former connections brought descriptors that do not close";
            return Err(io::Error::other(why));
        }
        let socket = net::accept_with(&self.socket, SocketFlags::CLOEXEC)?;
        Ok(Connection { socket: Socket::new(socket, closers.cloned()) })
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Nothing is lost if it stays: the next server takes a dead socket over.
        if identity(&self.path).is_ok_and(|found| found == self.bound) {
            let _ = fs::remove_file(&self.path);
        }
        // Explicitly, for a child that is just being started may hold a copy of the descriptor.
        own_file::unlock(&self.lock);
    }
}

/// Whether there is a socket; an error for anything else.
fn is_socket(path: &Path) -> io::Result<bool> {
    match fs::symlink_metadata(path) {
        Ok(found) if found.file_type().is_socket() => Ok(true),
        Ok(_) => Err(io::Error::new(io::ErrorKind::AlreadyExists, "it is not a socket")),
        Err(_) => Ok(false),
    }
}

/// Sets a new socket's group and mode, of the socket itself if something else has taken its path.
fn permit(path: &Path, options: &SocketOptions) -> io::Result<()> {
    use rustix::fs::{AtFlags, Gid, Mode, OFlags};
    if options.mode.is_none() && options.group.is_none() {
        return Ok(());
    }
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let socket = rustix::fs::open(path, flags, Mode::empty())?;
    if let Some(group) = options.group {
        let group = Some(Gid::from_raw(group));
        rustix::fs::chownat(&socket, c"", None, group, AtFlags::EMPTY_PATH)?;
    }
    if let Some(mode) = options.mode {
        // A descriptor with O_PATH takes no fchmod, but chmod follows its link in /proc.
        let opened = format!("/proc/self/fd/{}", socket.as_raw_fd());
        fs::set_permissions(opened, fs::Permissions::from_mode(mode))?;
    }
    Ok(())
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    let found = fs::symlink_metadata(path)?;
    Ok((found.dev(), found.ino()))
}

/// What keeps other servers away from a socket's path.
pub fn lock_path(socket: &Path) -> PathBuf {
    let mut name = socket.as_os_str().to_owned();
    name.push(".lock");
    PathBuf::from(name)
}

fn lock_beside(path: &Path) -> io::Result<File> {
    let lock = Place::of(&lock_path(path))?.open_own()?;
    if own_file::lock(&lock)? { Ok(lock) } else { Err(io::ErrorKind::AddrInUse.into()) }
}

/// One end of a connection.
pub struct Connection {
    socket: Socket,
}

impl Connection {
    /// Connects to a server, or waits this long, which must not be zero, for room in its backlog.
    ///
    /// # Errors
    /// `NotFound` or `ConnectionRefused` when no server listens there, `WouldBlock` after the
    /// timeout, `Interrupted` by a signal, else what the system says.
    pub fn connect(path: &Path, timeout: Duration) -> io::Result<Self> {
        use net::sockopt::{Timeout, set_socket_timeout};
        let socket = new_socket(SocketFlags::empty())?;
        set_socket_timeout(&socket, Timeout::Send, Some(timeout))?;
        net::connect(&socket, &SocketAddrUnix::new(path)?)?;
        Ok(Self { socket: Socket::new(socket, None) })
    }

    /// The user at the other end: on the accepting side the one that connected, on the connecting
    /// side the one that listens.
    ///
    /// # Errors
    /// What the system says.
    pub fn peer_user(&self) -> io::Result<u32> {
        descriptors::peer_user(self.as_fd())
    }

    /// How long [`Connection::receive`] waits before it fails with `WouldBlock`; `None` for ever.
    ///
    /// # Errors
    /// What the system says.
    pub fn set_receive_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        use net::sockopt::{Timeout, set_socket_timeout};
        Ok(set_socket_timeout(&self.socket, Timeout::Recv, timeout)?)
    }

    /// Sends one message, with a descriptor if there is one. Never blocks: a peer that does not
    /// take what it asked for fails with `WouldBlock`.
    ///
    /// # Errors
    /// `BrokenPipe` when the peer is gone, else what the system says.
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

    /// Sends nothing more: the peer sees the end once it has taken what was sent.
    ///
    /// # Errors
    /// What the system says; the peer is gone already.
    pub fn hang_up(&self) -> io::Result<()> {
        Ok(net::shutdown(&self.socket, net::Shutdown::Write)?)
    }

    /// Receives one message into `buffer`; returns its length and the descriptor it carried. An
    /// empty message means that the peer is gone.
    ///
    /// # Errors
    /// `InvalidData` for a message longer than the buffer, and on the accepting side for one with
    /// a descriptor, `WouldBlock` after the timeout, else what the system says.
    pub fn receive(&self, buffer: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
        if self.socket.closers().is_some() && descriptors::brings_descriptors(self.as_fd())? {
            let why = "a message with a descriptor, which a server does not take";
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [io::IoSliceMut::new(buffer)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let received = net::recvmsg(&self.socket, &mut parts, &mut ancillary, flags)?;
        if received.flags.contains(ReturnFlags::TRUNC) {
            let most = format!("a message over {} bytes", buffer.len().min(MESSAGE_BYTES_MAX));
            return Err(io::Error::new(io::ErrorKind::InvalidData, most));
        }
        if received.flags.contains(ReturnFlags::CTRUNC) {
            // A descriptor came and this process may have no more of them.
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

#[cfg(test)]
mod tests;
