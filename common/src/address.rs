//! Where a server is: `shm:///run/farside/kv.sock`, `rdma://10.9.0.1:7400`.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// The address of a server, by fabric.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Address {
    /// The Unix socket of a server on this host.
    Shm(PathBuf),
}

/// Why a text is no address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is no server address ({why}); write for example shm:///run/farside/kv.sock")]
pub struct AddressError {
    text: String,
    why: &'static str,
}

/// What the system takes as the path of a socket, in bytes.
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
            "rdma" => error("this build has no RDMA fabric"),
            _ => error("the scheme is unknown"),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shm(path) => write!(f, "shm://{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_come_back_or_say_what_is_wrong() {
        let address: Address = "shm:///run/farside/kv.sock".parse().unwrap();
        assert_eq!(address, Address::Shm("/run/farside/kv.sock".into()));
        assert_eq!(address.to_string(), "shm:///run/farside/kv.sock");
        for text in ["", "kv.sock", "shm://kv.sock", "http:///x", "rdma://10.9.0.1:7400"] {
            let error = text.parse::<Address>().unwrap_err().to_string();
            assert!(error.contains("shm:///run/farside/kv.sock"), "{error}");
        }
        assert!(format!("shm:///{}", "x".repeat(107)).parse::<Address>().is_err());
    }
}
