//! Listening at a host's name, which may have several addresses.

use std::fmt;
use std::io;
use std::net::SocketAddr;

use rustix::io::Errno;

/// Why a program can listen at none of a host's addresses, or not at one that this host has.
#[derive(Debug)]
pub struct ListenError {
    /// The addresses that were tried, with their errors. The last one decides.
    tried: Vec<(SocketAddr, io::Error)>,
}

impl ListenError {
    /// The kind of the decisive error; `NotFound` if the host has no address.
    pub fn kind(&self) -> io::ErrorKind {
        self.tried.last().map_or(io::ErrorKind::NotFound, |(_, error)| error.kind())
    }
}

impl fmt::Display for ListenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.tried.is_empty() {
            return f.write_str("the host has no address");
        }
        for (at, (address, error)) in self.tried.iter().enumerate() {
            let separator = if at == 0 { "" } else { "; " };
            write!(f, "{separator}{address}: {error}")?;
        }
        Ok(())
    }
}

impl std::error::Error for ListenError {}

/// Binds a socket to each of a host's addresses that this host has. A name such as `localhost` may
/// have an IPv6 address where the system has no IPv6.
///
/// # Errors
/// [`ListenError`] if this host has none of the addresses, or one of them cannot be bound.
pub fn bind_each<T>(
    addresses: &[SocketAddr],
    mut bind: impl FnMut(SocketAddr) -> io::Result<T>,
) -> Result<Vec<T>, ListenError> {
    let (mut bound, mut tried) = (Vec::new(), Vec::new());
    for &address in addresses {
        match bind(address) {
            Ok(socket) => bound.push(socket),
            Err(error) => {
                let is_lacking = is_lacking(&error);
                tried.push((address, error));
                if !is_lacking {
                    return Err(ListenError { tried });
                }
            }
        }
    }
    if bound.is_empty() {
        return Err(ListenError { tried });
    }
    for (address, error) in tried {
        tracing::info!(%address, "does not listen at an address that this host lacks: {error}");
    }
    Ok(bound)
}

/// Whether this host lacks the address, or its family.
fn is_lacking(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::AddrNotAvailable
        || Errno::from_io_error(error) == Some(Errno::AFNOSUPPORT)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Binds to addresses as a host would on which these calls fail.
    fn bind(fail: &[(&str, Errno)]) -> Result<Vec<SocketAddr>, ListenError> {
        let addresses = ["[::1]:7400", "127.0.0.1:7400", "10.9.0.1:7400"];
        let addresses = addresses.map(|address| address.parse().unwrap());
        bind_each(&addresses, |address| {
            match fail.iter().find(|(failing, _)| *failing == address.to_string()) {
                Some((_, errno)) => Err(io::Error::from(*errno)),
                None => Ok(address),
            }
        })
    }

    #[test]
    fn a_host_without_a_family_listens_at_its_other_addresses() {
        for errno in [Errno::ADDRNOTAVAIL, Errno::AFNOSUPPORT] {
            let bound = bind(&[("[::1]:7400", errno)]).unwrap();
            assert_eq!(bound, ["127.0.0.1:7400", "10.9.0.1:7400"].map(|a| a.parse().unwrap()));
        }
    }

    #[test]
    fn the_error_names_each_address() {
        let lacking = |address| (address, Errno::ADDRNOTAVAIL);
        let all = ["[::1]:7400", "127.0.0.1:7400", "10.9.0.1:7400"];
        let error = bind(&all.map(lacking)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrNotAvailable);
        assert!(all.iter().all(|address| error.to_string().contains(address)), "{error}");
        // Another program listens at one of them: it would get clients of this one.
        let error = bind(&[lacking(all[0]), (all[1], Errno::ADDRINUSE)]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        assert!(error.to_string().contains("127.0.0.1:7400: "), "{error}");
        assert_eq!(bind_each(&[], |_| Ok(())).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
