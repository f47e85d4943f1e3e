//! Attaching over TCP: the control channel and each session's connection go to one port.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use farside_fabric::rdma::RemoteRegion;
use farside_fabric::tcp::{self, DataLink, OtherProtocol, TcpChannel, TlsClient, TlsError};
use farside_fabric::{AnyFabric, Fabric, RegionIndex, Trust};

use super::{
    Attached, ConnectError, ConnectOptions, Contact, DataProofs, FabricFactory, Result, system,
    unreachable_untimed,
};
use crate::address::Address;
use crate::{ControlChannel, Purpose, SessionKey, Welcome};

/// Makes fabrics that reach a region over TCP.
struct TcpFactory {
    server: String,
    address: SocketAddr,
    tls: Option<TlsClient>,
    proofs: DataProofs,
    region: RemoteRegion,
    trust: Trust,
    timeout: Duration,
}

impl FabricFactory for TcpFactory {
    fn fabric(&self, lanes: u16) -> Result<AnyFabric> {
        let fabric = self.connect()?.into_fabric(self.region, lanes);
        Ok(AnyFabric::Tcp(fabric.map_err(system("setting up the connection"))?))
    }

    fn add_to(&self, fabric: &mut AnyFabric, replaces: Option<RegionIndex>) -> Result<RegionIndex> {
        let Some(AnyFabric::Tcp(own)) = fabric.any() else { return Err(ConnectError::OtherFabric) };
        let added = own.add_region(self.connect()?, self.region, replaces);
        let index = added.map_err(system("setting up the connection"))?;
        replaces.inspect(|replaced| fabric.replaced(*replaced));
        Ok(index)
    }
}

impl TcpFactory {
    /// Makes a session's connection to the server that answered before.
    fn connect(&self) -> Result<DataLink> {
        let link = self.proofs.connect(|hello| {
            let link = tcp::connect_data(self.address, self.tls.as_ref(), hello, self.timeout);
            let link = link.map_err(|error| self.failed(error))?;
            let answer = link.reply().to_vec();
            Ok((link, answer))
        })?;
        Ok(link.with_trust(self.trust.clone()))
    }

    fn failed(&self, error: io::Error) -> ConnectError {
        match error.kind() {
            io::ErrorKind::InvalidData => invalid(&self.server, &error),
            // The server may only be busy or stopped, so the client keeps its connection.
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                unreachable_untimed(self.server.clone(), Contact::Silent, error)
            }
            _ => unreachable_untimed(self.server.clone(), Contact::Lost, error),
        }
    }
}

/// The error for bytes that are no answer of a server.
fn invalid(server: &str, error: &io::Error) -> ConnectError {
    let (server, tls) = (server.to_owned(), TlsError::of(error));
    tls.map(|source| ConnectError::Tls { server: server.clone(), source }).unwrap_or_else(|| {
        let protocol = OtherProtocol::of(error);
        ConnectError::NoServer { server, protocol }
    })
}

/// Reads the files for TLS, if the client is to use it.
fn load_tls(options: &ConnectOptions) -> Result<Option<TlsClient>> {
    let Address::Tcp { host, .. } = &options.address else { return Ok(None) };
    if !options.tls.is_used() {
        return Ok(None);
    }
    let loaded = TlsClient::load(&options.tls, host);
    let server = options.address.to_string();
    loaded.map(Some).map_err(|source| ConnectError::Tls { server, source })
}

/// The channel, the server's welcome, the key for sessions, and the address that was reached.
type Welcomed = (TcpChannel, Welcome, SessionKey, SocketAddr);

/// Connects with this purpose, and proves both ways.
fn connect(
    options: &ConnectOptions,
    tls: Option<&TlsClient>,
    purpose: Purpose,
    timeout: Duration,
) -> Result<Welcomed> {
    let started = Instant::now();
    let request = options.request(purpose)?;
    let hello = request.encode();
    let unreachable = |contact, source| options.unreachable(contact, started.elapsed(), source);
    let no_address = |source| unreachable(Contact::None, Some(source));
    let addresses = options.address.resolve(timeout).map_err(no_address)?;
    let mut failures = Vec::new();
    for (at, address) in addresses.iter().enumerate() {
        // An address that does not answer leaves time for the others.
        let left = timeout.saturating_sub(started.elapsed()) / (addresses.len() - at) as u32;
        match tcp::connect_control(*address, tls, &hello, left.max(Duration::from_millis(1))) {
            Ok((mut channel, challenge)) => {
                let answered = (&request, &challenge[..]);
                let (welcome, key) =
                    options.prove_over(&mut channel, answered, (started, timeout))?;
                return Ok((channel, welcome, key, *address));
            }
            Err(error) => failures.push((*address, error)),
        }
    }
    // An address that accepts connections tells more than one that does not.
    failures.sort_by_key(|(_, error)| contact(error) != Contact::None);
    let tried: Vec<_> =
        failures.iter().map(|(address, error)| format!("{address}: {error}")).collect();
    let Some((_, error)) = failures.pop() else {
        return Err(no_address(io::ErrorKind::NotFound.into()));
    };
    Err(match contact(&error) {
        _ if error.kind() == io::ErrorKind::InvalidData => {
            invalid(&options.address.to_string(), &error)
        }
        Contact::None if failures.is_empty() => no_address(error),
        Contact::None => no_address(io::Error::new(error.kind(), tried.join("; "))),
        contact => unreachable(contact, None),
    })
}

/// How far an attempt came that failed with this error.
fn contact(error: &io::Error) -> Contact {
    match error.kind() {
        io::ErrorKind::WouldBlock => Contact::Silent,
        io::ErrorKind::UnexpectedEof
        | io::ErrorKind::ConnectionReset
        | io::ErrorKind::BrokenPipe
        | io::ErrorKind::InvalidData => Contact::HungUp,
        _ => Contact::None,
    }
}

/// Connects for the map of the server's cluster.
pub(super) fn map_channel(
    options: &ConnectOptions,
    timeout: Duration,
) -> Result<(Box<dyn ControlChannel>, Welcome)> {
    let tls = load_tls(options)?;
    let (channel, welcome, ..) = connect(options, tls.as_ref(), Purpose::Map, timeout)?;
    Ok((Box::new(channel), welcome))
}

pub(super) fn attach(options: &ConnectOptions, timeout: Duration) -> Result<Attached> {
    let tls = load_tls(options)?;
    let (channel, welcome, key, address) =
        connect(options, tls.as_ref(), Purpose::Control, timeout)?;
    options.check(&welcome)?;
    let factory = TcpFactory {
        server: options.address.to_string(),
        address,
        tls,
        proofs: DataProofs::new(options, &welcome, key),
        region: welcome.remote_region(options.role),
        trust: options.trust.clone(),
        // Sessions that are opened later get the whole timeout.
        timeout: options.timeout,
    };
    Ok(Attached {
        address: options.address.clone(),
        welcome,
        factory: Box::new(factory),
        channel: Box::new(channel),
    })
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use farside_fabric::rdma;
    use farside_fabric::tcp::TlsFiles;

    use super::*;
    use crate::{Role, SecretKey};

    /// Options for a server at this port.
    fn options(port: u16) -> ConnectOptions {
        ConnectOptions {
            address: Address::Tcp { host: "127.0.0.1".into(), port },
            others: Vec::new(),
            role: Role::Writer,
            view: None,
            secret_key: SecretKey::NONE,
            timeout: Duration::from_millis(50),
            answer_timeout: Duration::from_millis(50),
            rdma: rdma::Options::default(),
            tls: TlsFiles::default(),
            trust: farside_fabric::Trust::forever(),
        }
    }

    #[test]
    fn the_error_says_how_far_an_attempt_came() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let options = options(listener.local_addr().unwrap().port());
        let attempt = || options.attach(options.timeout);
        // The system accepts the connection, and no server reads from it.
        let Err(ConnectError::Unreachable { contact, .. }) = attempt() else { panic!("answered") };
        assert_eq!(contact, Contact::Silent);
        drop(listener);
        let Err(ConnectError::Unreachable { contact, source, .. }) = attempt() else {
            panic!("no program listens")
        };
        assert!(contact == Contact::None && source.is_some(), "{contact:?}");
    }
}
