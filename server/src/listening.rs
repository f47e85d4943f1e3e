//! Listening, before there is a region to serve: quick, and the likeliest to fail.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use farside_config::ServerConfig;
use farside_control::address::Address;
use farside_fabric::shm::{self, RegionMemory};

use crate::error::{ServerError, system};
use crate::own_endpoint::OwnEndpoint;
use crate::recovery::Opened;
use crate::service::Acceptor;

/// Where clients will connect. Those that do already wait for their answer.
pub(crate) trait BoundListener: AsFd + Send {
    /// Begins to accept clients of a region; returns the server's own endpoint of it, too.
    fn open(
        self: Box<Self>,
        config: &ServerConfig,
        memory: &RegionMemory,
        opened: &Opened,
    ) -> Result<(Box<dyn Acceptor>, OwnEndpoint), ServerError>;
}

/// Listens at an address.
pub(crate) fn listen(
    address: &Address,
    config: &ServerConfig,
) -> Result<Box<dyn BoundListener>, ServerError> {
    match address {
        Address::Shm(path) => Ok(Box::new(socket(path, config)?)),
        #[cfg(feature = "verbs")]
        Address::Rdma { .. } => {
            let addresses = address.resolve().map_err(system("find the address to listen at"))?;
            Ok(Box::new(crate::service::bind_device(&addresses, config)?))
        }
        #[cfg(not(feature = "verbs"))]
        Address::Rdma { .. } => Err(farside_fabric::rdma::VerbsError::NotBuilt.into()),
        _ => Err(system("listen")(io::Error::from(io::ErrorKind::Unsupported))),
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
