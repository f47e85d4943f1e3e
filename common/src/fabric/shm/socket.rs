//! Unix sockets that keep message boundaries and carry descriptors: the connection of the `shm`
//! fabric.

use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::net::{
    self, AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use crate::control::MESSAGE_BYTES_MAX;

const BACKLOG: i32 = 128;

fn new_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    Ok(net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

/// A socket that clients connect to. Removes its path when dropped.
pub struct Listener {
    socket: OwnedFd,
    path: PathBuf,
}

impl Listener {
    /// Binds the path; takes over one that a dead server left behind.
    ///
    /// # Errors
    /// `AddrInUse` when a server answers there, `AlreadyExists` when the path is no socket, else
    /// what the system says.
    pub fn bind(path: &Path) -> io::Result<Self> {
        use std::os::unix::fs::FileTypeExt;
        match fs::symlink_metadata(path) {
            Ok(found) if !found.file_type().is_socket() => {
                return Err(io::Error::new(io::ErrorKind::AlreadyExists, "it is not a socket"));
            }
            Ok(_) => match net::connect(&new_socket()?, &SocketAddrUnix::new(path)?) {
                Ok(()) => return Err(io::ErrorKind::AddrInUse.into()),
                Err(rustix::io::Errno::CONNREFUSED) => fs::remove_file(path)?,
                Err(error) => return Err(error.into()),
            },
            Err(_) => {}
        }
        let socket = new_socket()?;
        net::bind(&socket, &SocketAddrUnix::new(path)?)?;
        net::listen(&socket, BACKLOG)?;
        Ok(Self { socket, path: path.to_owned() })
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
        let _ = fs::remove_file(&self.path);
    }
}

/// One end of a connection.
pub struct Connection {
    socket: OwnedFd,
}

impl Connection {
    /// Connects to a server.
    ///
    /// # Errors
    /// `NotFound` or `ConnectionRefused` when nobody listens there, else what the system says.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let socket = new_socket()?;
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

    #[test]
    fn messages_keep_their_boundaries_and_carry_descriptors() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kv.sock");
        let listener = Listener::bind(&path).unwrap();
        let client = Connection::connect(&path).unwrap();
        let server = listener.accept().unwrap();
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

    #[test]
    fn a_socket_in_use_is_refused_and_a_dead_one_taken_over() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kv.sock");
        let listener = Listener::bind(&path).unwrap();
        assert_eq!(Listener::bind(&path).err().unwrap().kind(), io::ErrorKind::AddrInUse);
        let Listener { socket, .. } = &listener;
        // What a SIGKILL leaves behind: the path without a listener.
        net::shutdown(socket, net::Shutdown::Both).unwrap();
        assert!(Listener::bind(&path).is_ok());
        std::mem::forget(listener);
        std::fs::write(folder.path().join("file"), "").unwrap();
        let file = Listener::bind(&folder.path().join("file"));
        assert_eq!(file.err().unwrap().kind(), io::ErrorKind::AlreadyExists);
    }
}
