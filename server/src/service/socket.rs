//! Clients on this host: they connect to a Unix socket, identify themselves in their first message,
//! and receive the region's descriptor.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use farside_config::ServerConfig;
use farside_control::{ControlChannel, FabricKind, Role};
use farside_fabric::memory::RegionMemory;
use farside_fabric::shm::{Listener, ShmChannel, SocketOptions, lock_path};

use super::acceptor::{Acceptor, Arrival, BoundListener, RegionDevice};
use crate::error::{ServerError, system};
use crate::region::own_endpoint::OwnEndpoint;
use crate::region::served::ServedRegion;

/// Limit on the connections that are accepted in one turn.
const ACCEPTS_MAX: usize = 16;

/// A listening socket, and the region's descriptors for the clients that connect to it.
struct SocketAcceptor {
    listener: Listener,
    for_writers: File,
    for_readers: File,
}

/// Binds a listener to a socket at this path.
pub(crate) fn bind(path: &Path, config: &ServerConfig) -> Result<Listener, ServerError> {
    let path_buf = || path.to_owned();
    let options = SocketOptions {
        mode: config.socket_mode.map(|mode| mode.0),
        group: config.socket_group.map(|group| group.0),
        ..Default::default()
    };
    Listener::bind_with(path, &options).map_err(|source| match source.kind() {
        io::ErrorKind::AddrInUse => ServerError::SocketInUse { path: path_buf() },
        io::ErrorKind::AlreadyExists => ServerError::NotASocket { path: path_buf() },
        io::ErrorKind::NotFound => ServerError::NoFolder { path: path_buf() },
        io::ErrorKind::PermissionDenied if other_owner(&lock_path(path)).is_some() => {
            let path = lock_path(path);
            ServerError::LockOfAnother { user: other_owner(&path).unwrap_or_default(), path }
        }
        io::ErrorKind::InvalidInput => ServerError::LockNotRegularFile { path: lock_path(path) },
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            ServerError::NotWritable { path: path_buf() }
        }
        _ => ServerError::Listen { path: path_buf(), source },
    })
}

/// Returns the owner of a file, unless it is the user of this process.
fn other_owner(path: &Path) -> Option<u32> {
    let this_user = rustix::process::geteuid().as_raw();
    let owner = std::fs::symlink_metadata(path).ok()?.uid();
    (owner != this_user).then_some(owner)
}

impl BoundListener for Listener {
    fn open(
        self: Box<Self>,
        _: &ServerConfig,
        memory: &RegionMemory,
        opened: &ServedRegion,
        _: Option<&dyn RegionDevice>,
    ) -> Result<(Box<dyn Acceptor>, OwnEndpoint), ServerError> {
        // Non-blocking: a connection that epoll reports may be gone before it is accepted, and the
        // thread would block until another client connects.
        let prepared = rustix::io::ioctl_fionbio(&*self, true).map_err(io::Error::from);
        let for_writers = prepared.and_then(|()| memory.file.try_clone());
        let for_writers = for_writers.map_err(system("prepare the socket"))?;
        let for_readers = memory.reader_descriptor()?;
        let acceptor = SocketAcceptor { listener: *self, for_writers, for_readers };
        Ok((Box::new(acceptor), OwnEndpoint::over_memory(&opened.region)))
    }
}

impl Acceptor for SocketAcceptor {
    fn fabric(&self) -> FabricKind {
        FabricKind::Shm
    }

    fn arrivals_max(&self) -> usize {
        ACCEPTS_MAX
    }

    fn next(&mut self) -> io::Result<Option<Arrival>> {
        let connection = match self.listener.accept() {
            Ok(connection) => connection,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(error) => return Err(error),
        };
        let user = connection.peer_user();
        let connection_and_user = ShmChannel::over(connection).and_then(|channel| {
            let channel: Box<dyn ControlChannel> = Box::new(channel);
            Ok((channel, user?))
        });
        Ok(Some(Arrival::Unidentified(connection_and_user)))
    }

    fn descriptor(&self, role: Role) -> Option<BorrowedFd<'_>> {
        Some(match role {
            Role::Writer => self.for_writers.as_fd(),
            Role::Reader => self.for_readers.as_fd(),
        })
    }
}

impl AsFd for SocketAcceptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}
