//! Addresses of servers: `shm:///run/farside/kv.sock`, `tcp://kv-1:7400`, `rdma://10.9.0.1:7400`.

use std::net::{Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;
use std::{fmt, io};

use serde::{Deserialize, Serialize};

use crate::{FabricKind, listening};

/// How long a program that starts waits for the addresses of its own name.
pub const OWN_NAME_TIMEOUT: Duration = Duration::from_secs(10);

/// The address of a server, by fabric.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
#[non_exhaustive]
pub enum Address {
    /// The Unix socket of a server on this host.
    Shm(PathBuf),
    /// The host and the port of a server on any network.
    Tcp {
        /// A name or an IP address. An IPv6 address has no brackets here.
        host: String,
        /// The port.
        port: u16,
    },
    /// The host and the port of a server with an RDMA device.
    Rdma {
        /// A name or an IP address, which has to be that of the device's own network interface. An
        /// IPv6 address has no brackets here.
        host: String,
        /// The port, in RDMA-CM's number space, which is not TCP's.
        port: u16,
    },
}

impl Address {
    /// Returns its fabric.
    pub fn fabric(&self) -> FabricKind {
        match self {
            Self::Shm(_) => FabricKind::Shm,
            Self::Tcp { .. } => FabricKind::Tcp,
            Self::Rdma { .. } => FabricKind::Rdma,
        }
    }

    /// Whether this is an [`Address::Rdma`].
    pub fn is_rdma(&self) -> bool {
        matches!(self, Self::Rdma { .. })
    }

    /// Whether this is an [`Address::Tcp`].
    pub fn is_tcp(&self) -> bool {
        matches!(self, Self::Tcp { .. })
    }

    /// Whether this is an [`Address::Shm`].
    pub fn is_shm(&self) -> bool {
        matches!(self, Self::Shm(_))
    }

    /// Returns the addresses in a text such as `shm:///run/farside/kv.sock,tcp://kv-1:7400`, those
    /// first that a client prefers: shared memory, then RDMA, then TCP.
    ///
    /// # Errors
    /// [`AddressError`] for the first part that is no address.
    pub fn parse_several(text: &str) -> Result<Vec<Self>, AddressError> {
        let mut addresses = text.split(',').map(str::parse).collect::<Result<Vec<Self>, _>>()?;
        addresses.sort_by_key(Self::preference);
        Ok(addresses)
    }

    /// The rank of the address among those of one server; 0 is tried first.
    pub(crate) fn preference(&self) -> u8 {
        match self {
            Self::Shm(_) => 0,
            Self::Rdma { .. } => 1,
            Self::Tcp { .. } => 2,
        }
    }

    /// Returns the socket addresses of a host, each once; none for an [`Address::Shm`]. Waits for a
    /// name server, but not longer than the timeout.
    ///
    /// # Errors
    /// `TimedOut` if no name server answers in time, otherwise the resolver's error.
    pub fn resolve(&self, timeout: Duration) -> io::Result<Vec<SocketAddr>> {
        match self {
            Self::Shm(_) => Ok(Vec::new()),
            Self::Tcp { host, port } | Self::Rdma { host, port } => {
                listening::SYSTEM.resolve(host, *port, timeout)
            }
        }
    }
}

/// Why a text is no address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct AddressError {
    text: String,
    why: &'static str,
}

impl fmt::Display for AddressError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { text, why } = self;
        if text.is_empty() {
            write!(f, "no server address is given; ")?;
        } else {
            write!(f, "`{text}` is no server address ({why}); ")?;
        }
        if host_and_port(text).is_some() {
            write!(f, "write tcp://{text}")
        } else if text.starts_with('/') {
            write!(f, "write shm://{text}")
        } else {
            write!(f, "write for example shm:///run/farside/kv.sock or tcp://kv-1:7400")
        }
    }
}

/// The longest path of a socket that the system accepts, in bytes.
const SOCKET_PATH_BYTES_MAX: usize = 107;

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let error = |why| Err(AddressError { text: text.to_owned(), why });
        let Some((scheme, rest)) = text.split_once("://") else {
            return error("it has no scheme");
        };
        match scheme {
            "shm" if !rest.starts_with('/') => error("the path of the socket is not absolute"),
            "shm" if rest.len() > SOCKET_PATH_BYTES_MAX => error("the path is over 107 bytes"),
            "shm" => Ok(Self::Shm(rest.into())),
            "tcp" | "rdma" => match host_and_port(rest) {
                Some((host, port)) if scheme == "tcp" => {
                    Ok(Self::Tcp { host: host.to_owned(), port })
                }
                Some((host, port)) => Ok(Self::Rdma { host: host.to_owned(), port }),
                None => error("after the scheme it needs HOST:PORT, such as 10.9.0.1:7400"),
            },
            _ => error("the scheme is unknown"),
        }
    }
}

/// Returns the host and the port in `host:port`. An IPv6 address has to be in brackets.
fn host_and_port(text: &str) -> Option<(&str, u16)> {
    let (host, port) = text.rsplit_once(':')?;
    let port: u16 = port.parse().ok().filter(|port| *port != 0)?;
    if let Some(inner) = host.strip_prefix('[') {
        let inner = inner.strip_suffix(']')?;
        return inner.parse::<Ipv6Addr>().ok().map(|_| (inner, port));
    }
    let is_name = !host.is_empty()
        && host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-_".contains(&byte));
    is_name.then_some((host, port))
}

impl TryFrom<String> for Address {
    type Error = AddressError;

    fn try_from(text: String) -> Result<Self, AddressError> {
        text.parse()
    }
}

impl From<Address> for String {
    fn from(address: Address) -> Self {
        address.to_string()
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shm(path) => write!(f, "shm://{}", path.display()),
            Self::Tcp { host, port } => write_host(f, "tcp", host, *port),
            Self::Rdma { host, port } => write_host(f, "rdma", host, *port),
        }
    }
}

fn write_host(f: &mut fmt::Formatter<'_>, scheme: &str, host: &str, port: u16) -> fmt::Result {
    match host.contains(':') {
        true => write!(f, "{scheme}://[{host}]:{port}"),
        false => write!(f, "{scheme}://{host}:{port}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_hosts_have_a_host_and_a_port() {
        for (scheme, rest) in ["tcp", "rdma"].into_iter().flat_map(|scheme| {
            ["10.9.0.1:7400", "kv-1.rack:1", "[fe80::1]:65535"].map(|a| (scheme, a))
        }) {
            let text = format!("{scheme}://{rest}");
            let address: Address = text.parse().unwrap();
            assert_eq!(address.to_string(), text);
            assert_eq!(address.is_rdma(), scheme == "rdma");
        }
        let address: Address = "rdma://10.9.0.1:7400".parse().unwrap();
        assert_eq!(address.resolve(Duration::ZERO).unwrap(), ["10.9.0.1:7400".parse().unwrap()]);
        for rest in ["10.9.0.1", ":7400", "a:0", "a:65536", "a:", "a/b:7400", "::1:7400", "[a]:1"] {
            let error = format!("tcp://{rest}").parse::<Address>().unwrap_err().to_string();
            assert!(error.contains("HOST:PORT"), "{error}");
        }
    }

    #[test]
    fn several_addresses_are_tried_in_the_order_of_preference() {
        let text = "tcp://a:1,rdma://a:2,shm:///a,tcp://b:3";
        let addresses = Address::parse_several(text).unwrap();
        let addresses: Vec<_> = addresses.iter().map(ToString::to_string).collect();
        assert_eq!(addresses, ["shm:///a", "rdma://a:2", "tcp://a:1", "tcp://b:3"]);
        for text in ["", "tcp://a:1,", "tcp://a:1, tcp://b:2"] {
            assert!(Address::parse_several(text).is_err(), "{text}");
        }
    }

    #[test]
    fn addresses_round_trip_or_the_error_shows_a_right_one() {
        let address: Address = "shm:///run/farside/kv.sock".parse().unwrap();
        assert_eq!(address, Address::Shm("/run/farside/kv.sock".into()));
        assert_eq!(address.to_string(), "shm:///run/farside/kv.sock");
        for text in ["", "kv.sock", "shm://kv.sock", "http:///x", "rdma://", "rdma://a"] {
            let error = text.parse::<Address>().unwrap_err().to_string();
            assert!(error.contains("shm:///run/farside/kv.sock"), "{error}");
        }
        assert!(format!("shm:///{}", "x".repeat(107)).parse::<Address>().is_err());
    }
}
