//! Listening, before there is a region to serve: quick, and the likeliest to fail.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use farside_common::address::Address;
use farside_common::config::ServerConfig;
use farside_common::fabric::{shm, verbs};

use crate::error::{ServerError, system};
use crate::service::bind_device;

/// Where clients will connect. Those that do already wait for their answer.
pub(crate) enum Listening {
    Socket(shm::Listener),
    Device(verbs::Listener),
}

impl Listening {
    pub(crate) fn at(address: &Address, config: &ServerConfig) -> Result<Self, ServerError> {
        match address {
            Address::Shm(path) => socket(path).map(Self::Socket),
            Address::Rdma { .. } => {
                let addresses =
                    address.resolve().map_err(system("find the address to listen at"))?;
                bind_device(&addresses, config).map(Self::Device)
            }
            _ => Err(system("listen")(io::Error::from(io::ErrorKind::Unsupported))),
        }
    }
}

impl AsFd for Listening {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Socket(listener) => listener.as_fd(),
            Self::Device(listener) => listener.as_fd(),
        }
    }
}

fn socket(path: &Path) -> Result<shm::Listener, ServerError> {
    let path_buf = || path.to_owned();
    shm::Listener::bind(path).map_err(|source| match source.kind() {
        io::ErrorKind::AddrInUse => ServerError::SocketInUse { path: path_buf() },
        io::ErrorKind::AlreadyExists => ServerError::NotASocket { path: path_buf() },
        io::ErrorKind::NotFound => ServerError::NoFolder { path: path_buf() },
        io::ErrorKind::PermissionDenied if is_of_another(&shm::lock_path(path)) => {
            ServerError::LockOfAnother { path: shm::lock_path(path) }
        }
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            ServerError::NotWritable { path: path_buf() }
        }
        _ => ServerError::Listen { path: path_buf(), source },
    })
}

/// Whether there is a file that belongs to another user.
fn is_of_another(path: &Path) -> bool {
    let own = rustix::process::geteuid().as_raw();
    std::fs::symlink_metadata(path).is_ok_and(|found| found.uid() != own)
}
