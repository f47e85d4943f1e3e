//! Unix sockets that keep message boundaries and carry descriptors: the connection of the `shm`
//! fabric.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::FlockOperation;
use rustix::net::{
    self, AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use crate::control::MESSAGE_BYTES_MAX;

const BACKLOG: i32 = 128;
/// Who may lock a socket's path: the user the server runs as.
const LOCK_MODE: u32 = 0o600;

fn new_socket(flags: SocketFlags) -> io::Result<OwnedFd> {
    let flags = flags | SocketFlags::CLOEXEC;
    Ok(net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

/// A socket that clients connect to. Removes its path when dropped.
pub struct Listener {
    socket: OwnedFd,
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
        net::bind(&socket, &SocketAddrUnix::new(path)?)?;
        let bound = identity(path)?;
        net::listen(&socket, BACKLOG)?;
        Ok(Self { socket, path: path.to_owned(), bound, lock })
    }

    /// The next client, without waiting for its request. Blocks.
    ///
    /// # Errors
    /// What the system says.
    pub fn accept(&self) -> io::Result<Connection> {
        let socket = net::accept_with(&self.socket, SocketFlags::CLOEXEC)?;
        Ok(Connection { socket })
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
        let _ = rustix::fs::flock(&self.lock, FlockOperation::Unlock);
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
    let mut options = OpenOptions::new();
    // The standard library adds O_CLOEXEC.
    let lock =
        options.write(true).create(true).truncate(false).mode(LOCK_MODE).open(lock_path(path))?;
    match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(lock),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(io::ErrorKind::AddrInUse.into()),
        Err(error) => Err(error.into()),
    }
}

/// One end of a connection.
pub struct Connection {
    socket: OwnedFd,
}

impl Connection {
    /// Connects to a server, or waits this long, which must not be zero, for room in its backlog.
    ///
    /// # Errors
    /// `NotFound` or `ConnectionRefused` when nobody listens there, `WouldBlock` after the timeout,
    /// `Interrupted` by a signal, else what the system says.
    pub fn connect(path: &Path, timeout: Duration) -> io::Result<Self> {
        use net::sockopt::{Timeout, set_socket_timeout};
        let socket = new_socket(SocketFlags::empty())?;
        set_socket_timeout(&socket, Timeout::Send, Some(timeout))?;
        net::connect(&socket, &SocketAddrUnix::new(path)?)?;
        Ok(Self { socket })
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
    /// `InvalidData` for a message longer than the buffer, `WouldBlock` after the timeout, else
    /// what the system says.
    pub fn receive(&self, buffer: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
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
mod tests {
    use std::io::{Read, Seek, Write};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    fn pair() -> (Connection, Connection) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kv.sock");
        let listener = Listener::bind(&path).unwrap();
        let client = Connection::connect(&path, PATIENCE).unwrap();
        (client, listener.accept().unwrap())
    }

    #[test]
    fn messages_keep_their_boundaries_and_carry_descriptors() {
        let (client, server) = pair();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"inside").unwrap();
        server.send(b"one", Some(file.as_fd())).unwrap();
        server.send(b"two", None).unwrap();
        let mut buffer = [0; 8];
        let (bytes, descriptor) = client.receive(&mut buffer).unwrap();
        assert_eq!(&buffer[..bytes], b"one");
        let mut passed = std::fs::File::from(descriptor.unwrap());
        passed.rewind().unwrap();
        let mut content = String::new();
        passed.read_to_string(&mut content).unwrap();
        assert_eq!(content, "inside");
        let (bytes, descriptor) = client.receive(&mut buffer).unwrap();
        assert_eq!((&buffer[..bytes], descriptor.is_none()), (&b"two"[..], true));
        server.send(b"far too long", None).unwrap();
        assert_eq!(client.receive(&mut buffer).unwrap_err().kind(), io::ErrorKind::InvalidData);
        drop(server);
        assert_eq!(client.receive(&mut buffer).unwrap().0, 0);
    }

    /// As when the process may not have one more; the system does not say how many there were.
    #[test]
    fn a_descriptor_that_could_not_be_received_is_an_error() {
        let (client, server) = pair();
        let many = [server.as_fd(); 9];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(9))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&many)));
        let parts = [io::IoSlice::new(b"one")];
        net::sendmsg(&server.socket, &parts, &mut ancillary, SendFlags::empty()).unwrap();
        let error = client.receive(&mut [0; 8]).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::MFILE.raw_os_error()));
    }

    #[test]
    fn a_socket_in_use_is_refused_and_a_dead_one_taken_over() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kv.sock");
        let listener = Listener::bind(&path).unwrap();
        assert_eq!(Listener::bind(&path).err().unwrap().kind(), io::ErrorKind::AddrInUse);
        let Listener { socket, lock, .. } = &listener;
        // What a SIGKILL leaves behind: the path without a listener, and the file without a lock.
        net::shutdown(socket, net::Shutdown::Both).unwrap();
        let starting = Listener::bind(&path);
        assert_eq!(starting.err().unwrap().kind(), io::ErrorKind::AddrInUse, "while it is locked");
        rustix::fs::flock(lock, FlockOperation::Unlock).unwrap();
        assert!(Listener::bind(&path).is_ok());
        std::mem::forget(listener);
        std::fs::write(folder.path().join("file"), "").unwrap();
        let file = Listener::bind(&folder.path().join("file"));
        assert_eq!(file.err().unwrap().kind(), io::ErrorKind::AlreadyExists);
        assert!(!folder.path().join("file.lock").exists());
    }

    #[test]
    fn nobody_waits_for_ever_for_a_listener_that_never_accepts() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kv.sock");
        let Listener { socket, lock, .. } = &Listener::bind(&path).unwrap();
        // One may wait.
        net::listen(socket, 0).unwrap();
        let waiting = Connection::connect(&path, PATIENCE).unwrap();
        let refused = Connection::connect(&path, Duration::from_millis(1));
        assert_eq!(refused.err().unwrap().kind(), io::ErrorKind::WouldBlock);
        // Without the lock it is a program that knows nothing of it.
        rustix::fs::flock(lock, FlockOperation::Unlock).unwrap();
        assert_eq!(Listener::bind(&path).err().unwrap().kind(), io::ErrorKind::AddrInUse);
        drop(waiting);
    }

    #[test]
    fn a_listener_removes_its_own_socket_only() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kv.sock");
        drop(Listener::bind(&path).unwrap());
        assert!(!path.exists());
        let listener = Listener::bind(&path).unwrap();
        // Somebody who knows nothing of locks cleans up and listens there.
        fs::remove_file(&path).unwrap();
        let other = std::os::unix::net::UnixListener::bind(&path).unwrap();
        drop(listener);
        assert!(path.exists());
        drop(other);
        assert!(Listener::bind(&path).is_ok(), "a lock that was held is free again");
    }

    #[test]
    fn of_many_listeners_that_start_at_once_one_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kv.sock");
        // A dead socket, which all of them would like to take over.
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let barrier = std::sync::Barrier::new(8);
        let bound: Vec<_> = std::thread::scope(|scope| {
            let start = || {
                barrier.wait();
                Listener::bind(&path)
            };
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(start)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let (listeners, refused): (Vec<_>, Vec<_>) = bound.into_iter().partition(Result::is_ok);
        assert_eq!(listeners.len(), 1);
        for error in refused {
            assert_eq!(error.err().unwrap().kind(), io::ErrorKind::AddrInUse);
        }
        assert!(Connection::connect(&path, PATIENCE).is_ok());
    }
}
