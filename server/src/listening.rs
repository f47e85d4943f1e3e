//! Listening, before there is a region to serve: quick, and the likeliest to fail.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use farside_config::ServerConfig;
use farside_control::address::Address;
use farside_fabric::{shm, verbs};

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
            Address::Shm(path) => socket(path, config).map(Self::Socket),
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

fn socket(path: &Path, config: &ServerConfig) -> Result<shm::Listener, ServerError> {
    let path_buf = || path.to_owned();
    let options = shm::SocketOptions {
        mode: config.socket_mode.map(|mode| mode.0),
        group: config.socket_group.map(|group| group.0),
        ..Default::default()
    };
    shm::Listener::bind_with(path, &options).map_err(|source| match source.kind() {
        io::ErrorKind::AddrInUse => ServerError::SocketInUse { path: path_buf() },
        io::ErrorKind::AlreadyExists => ServerError::NotASocket { path: path_buf() },
        io::ErrorKind::NotFound => ServerError::NoFolder { path: path_buf() },
        io::ErrorKind::PermissionDenied if owner_else(&shm::lock_path(path)).is_some() => {
            let path = shm::lock_path(path);
            ServerError::LockOfAnother { user: owner_else(&path).unwrap_or_default(), path }
        }
        io::ErrorKind::InvalidInput => ServerError::NotOwnLock { path: shm::lock_path(path) },
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            ServerError::NotWritable { path: path_buf() }
        }
        _ => ServerError::Listen { path: path_buf(), source },
    })
}

/// The user that a file belongs to, if it is not this process's.
fn owner_else(path: &Path) -> Option<u32> {
    let own = rustix::process::geteuid().as_raw();
    let owner = std::fs::symlink_metadata(path).ok()?.uid();
    (owner != own).then_some(owner)
}
