//! Where clients connect: ports and Unix sockets.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use farside_control::address::{Address, OWN_NAME_TIMEOUT};
use farside_control::listening;
use rustix::io::Errno;
use rustix::net::sockopt::{
    set_socket_keepalive, set_socket_reuseaddr, set_tcp_keepcnt, set_tcp_keepidle,
    set_tcp_keepintvl, set_tcp_nodelay,
};
use rustix::net::{
    AddressFamily, SocketAddrAny, SocketAddrUnix, SocketFlags, SocketType, accept_with,
    acceptfrom_with, bind, connect, getsockname, listen, socket_with,
};

/// How many connections may wait to be accepted.
const BACKLOG: i32 = 511;
/// After so long without a packet the system asks a client's host whether it is still there.
const PROBE_AFTER: Duration = Duration::from_secs(60);
/// It asks at this interval, and ends the connection after so many questions without an answer.
const PROBE_INTERVAL: Duration = Duration::from_secs(15);
const PROBES: u32 = 4;

/// An address at which clients connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ListenAddress {
    /// A host and a port.
    Tcp(Address),
    /// The path of a Unix socket.
    Unix(PathBuf),
}

impl FromStr for ListenAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const ADVICE: &str = "write for example tcp://127.0.0.1:6379 or unix:///run/resp.sock";
        if let Some(path) = text.strip_prefix("unix://") {
            let is_valid = path.starts_with('/') && path.len() <= 107;
            return if is_valid {
                Ok(Self::Unix(path.into()))
            } else {
                Err(format!("the path of a socket is absolute and has at most 107 bytes; {ADVICE}"))
            };
        }
        match text.parse() {
            Ok(address @ Address::Tcp { .. }) => Ok(Self::Tcp(address)),
            _ => Err(format!("it is neither tcp://HOST:PORT nor unix:///PATH; {ADVICE}")),
        }
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix(path) => write!(f, "unix://{}", path.display()),
        }
    }
}

/// Why the gateway cannot listen.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ListenError {
    #[error("{0}: another program listens there; stop it, or give another --listen")]
    InUse(String),
    #[error("{listen}: {source}")]
    Port { listen: String, source: listening::ListenError },
    #[error("{listen}: {source}")]
    System { listen: String, source: io::Error },
}

/// A listening socket.
pub(crate) struct Listener {
    socket: OwnedFd,
    address: ListenAddress,
    /// The device and inode of the Unix socket's file.
    file: Option<(u64, u64)>,
}

/// An accepted connection.
pub(crate) struct Accepted {
    pub(crate) socket: OwnedFd,
    /// The client's address, and the gateway's, for CLIENT LIST.
    pub(crate) peer: String,
    pub(crate) local: String,
    /// The client's host, for TCP.
    pub(crate) host: Option<IpAddr>,
}

impl ListenAddress {
    /// Whether other hosts may reach it.
    ///
    /// # Errors
    /// The host's name has no address.
    pub(crate) fn is_open(&self) -> Result<bool, ListenError> {
        let Self::Tcp(host) = self else { return Ok(false) };
        let found = host.resolve(OWN_NAME_TIMEOUT);
        let found =
            found.map_err(|source| ListenError::System { listen: self.to_string(), source })?;
        Ok(found.iter().any(|address| !address.ip().is_loopback()))
    }
}

impl Listener {
    /// Listens at all addresses of the host that this machine has.
    pub(crate) fn bind(address: &ListenAddress) -> Result<Vec<Self>, ListenError> {
        let explain = |source: io::Error| {
            let listen = address.to_string();
            match source.kind() {
                io::ErrorKind::AddrInUse => ListenError::InUse(listen),
                _ => ListenError::System { listen, source },
            }
        };
        let new = |socket| Self { socket, address: address.clone(), file: None };
        match address {
            ListenAddress::Unix(path) => {
                let mut listener = new(bind_unix(path).map_err(explain)?);
                listener.file = identity(path);
                Ok(vec![listener])
            }
            ListenAddress::Tcp(host) => {
                let found = host.resolve(OWN_NAME_TIMEOUT).map_err(explain)?;
                let bound = listening::bind_each(&found, bind_tcp).map_err(|source| {
                    let listen = address.to_string();
                    match source.kind() {
                        io::ErrorKind::AddrInUse => ListenError::InUse(listen),
                        _ => ListenError::Port { listen, source },
                    }
                })?;
                Ok(bound.into_iter().map(new).collect())
            }
        }
    }

    /// Accepts a connection.
    ///
    /// # Errors
    /// The system's error.
    pub(crate) fn accept(&self) -> io::Result<Accepted> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        match &self.address {
            ListenAddress::Unix(path) => {
                let socket = accept_with(&self.socket, flags)?;
                let local = format!("{}:0", path.display());
                Ok(Accepted { socket, peer: local.clone(), local, host: None })
            }
            ListenAddress::Tcp(_) => {
                let (socket, peer) = acceptfrom_with(&self.socket, flags)?;
                // Without it replies may wait for acknowledgements; nothing else depends on it.
                let _ = set_tcp_nodelay(&socket, true);
                probe_peer(&socket)?;
                let peer = peer.and_then(internet);
                let host = peer.map(|peer| host_of(peer.ip()));
                let local = getsockname(&socket).ok().and_then(internet);
                let text = |address: Option<SocketAddr>| {
                    address.map_or_else(String::new, |address| address.to_string())
                };
                let (peer, local) = (text(peer), text(local));
                Ok(Accepted { socket, peer, local, host })
            }
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let ListenAddress::Unix(path) = &self.address
            && self.file.is_some()
            && identity(path) == self.file
        {
            // If it is gone meanwhile, there is nothing to do.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// The device and inode of a file: another program may have made a new one at the same path.
fn identity(path: &Path) -> Option<(u64, u64)> {
    let found = std::fs::symlink_metadata(path).ok()?;
    Some((found.dev(), found.ino()))
}

fn internet(address: SocketAddrAny) -> Option<SocketAddr> {
    address.try_into().ok()
}

/// Makes the system end the connection of a client whose host is gone.
fn probe_peer(socket: &OwnedFd) -> io::Result<()> {
    set_socket_keepalive(socket, true)?;
    set_tcp_keepidle(socket, PROBE_AFTER)?;
    set_tcp_keepintvl(socket, PROBE_INTERVAL)?;
    set_tcp_keepcnt(socket, PROBES)?;
    Ok(())
}

/// The host of an address. A network of 64 bits counts as one host in IPv6.
fn host_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from(u128::from(address) >> 64 << 64).into(),
        address => address,
    }
}

fn bind_tcp(address: SocketAddr) -> io::Result<OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    set_socket_reuseaddr(&socket, true)?;
    bind(&socket, &address)?;
    listen(&socket, BACKLOG)?;
    Ok(socket)
}

fn bind_unix(path: &Path) -> io::Result<OwnedFd> {
    // A socket that another gateway has left behind refuses connections.
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let new_socket = || socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
    match connect(new_socket()?, &SocketAddrUnix::new(path)?) {
        // One whose backlog is full has a listener.
        Ok(()) | Err(Errno::AGAIN) => return Err(io::ErrorKind::AddrInUse.into()),
        Err(Errno::CONNREFUSED) => {
            if !std::fs::symlink_metadata(path)?.file_type().is_socket() {
                return Err(io::Error::other("a file that is no socket has this path"));
            }
            std::fs::remove_file(path)?;
        }
        Err(_) => {}
    }
    let socket = new_socket()?;
    bind(&socket, &SocketAddrUnix::new(path)?)?;
    listen(&socket, BACKLOG)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_ports_or_sockets() {
        for text in ["tcp://127.0.0.1:6379", "tcp://[::1]:6379", "unix:///run/resp.sock"] {
            assert_eq!(text.parse::<ListenAddress>().unwrap().to_string(), text);
        }
        for wrong in ["", "127.0.0.1:6379", "unix://run/resp.sock", "shm:///run/kv.sock", "tcp://a"]
        {
            assert!(wrong.parse::<ListenAddress>().is_err(), "{wrong}");
        }
    }
}
