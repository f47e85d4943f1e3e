//! Attaching over RDMA: connection request and reply travel as RDMA-CM's private data.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use farside_fabric::rdma::{Options, RemoteRegion, VerbsError};
use farside_fabric::verbs::{DataLink, VerbsChannel, connect_control, connect_data};
use farside_fabric::{AnyFabric, Fabric, RegionIndex, Trust};

use super::{
    Attached, ConnectError, ConnectOptions, Contact, DataProofs, FabricFactory, Result, refused,
    unreachable_untimed,
};
use crate::{
    Challenge, ControlChannel, ControlError, Purpose, REQUEST_BYTES_MAX, SessionKey, Welcome,
};

/// The shortest timeout of one attempt to connect over RDMA, unless less time is left.
const ATTEMPT_TIMEOUT_MIN: Duration = Duration::from_millis(500);

/// Returns the timeout of one attempt. RDMA-CM resends a lost request only after 4.3 s, so half of
/// the time is left for another attempt.
fn attempt_timeout(left: Duration) -> Duration {
    (left / 2).max(ATTEMPT_TIMEOUT_MIN).min(left)
}

/// Makes fabrics that reach a region over RDMA.
struct VerbsFactory {
    server: String,
    address: SocketAddr,
    proofs: DataProofs,
    region: RemoteRegion,
    trust: Trust,
    rdma: Options,
}

impl FabricFactory for VerbsFactory {
    fn fabric(&self, lanes: u16) -> Result<AnyFabric> {
        let link = self.connect(|hello, rdma| connect_data(self.address, hello, lanes, rdma))?;
        let fabric = link.into_fabric(self.region).map_err(|error| self.failed(error))?;
        Ok(AnyFabric::Verbs(fabric))
    }

    fn add_to(&self, fabric: &mut AnyFabric, replaces: Option<RegionIndex>) -> Result<RegionIndex> {
        let Some(AnyFabric::Verbs(own)) = fabric.any() else {
            return Err(ConnectError::OtherFabric);
        };
        let link = self.connect(|hello, rdma| own.connect_data(self.address, hello, rdma))?;
        let added = own.add_region(link, self.region, replaces);
        let index = added.map_err(|error| self.failed(error))?;
        replaces.inspect(|replaced| fabric.replaced(*replaced));
        Ok(index)
    }
}

impl VerbsFactory {
    /// Returns the error of a session. A transient error becomes `Rdma`, so that the session
    /// retries on this connection. `Unreachable` would end the connection.
    fn failed(&self, error: VerbsError) -> ConnectError {
        match error.is_transient() {
            true => error.into(),
            false => from_verbs(&self.server, error),
        }
    }

    /// Makes a data connection, in several attempts, to the server that answered before.
    fn connect(
        &self,
        attempt: impl Fn(&[u8], &Options) -> std::result::Result<DataLink, VerbsError>,
    ) -> Result<DataLink> {
        let started = Instant::now();
        let link = self.proofs.connect(|hello: &[u8; REQUEST_BYTES_MAX]| {
            loop {
                let left = self.rdma.connect_timeout.saturating_sub(started.elapsed());
                let rdma = Options { connect_timeout: attempt_timeout(left), ..self.rdma };
                return match attempt(hello, &rdma) {
                    Err(VerbsError::TimedOut { .. }) if left > ATTEMPT_TIMEOUT_MIN => continue,
                    Err(VerbsError::Rejected { reason, .. }) => Ok((None, reason)),
                    Err(error) => Err(self.failed(error)),
                    Ok(link) => {
                        let answer = link.reply().to_vec();
                        Ok((Some(link), answer))
                    }
                };
            }
        })?;
        // A server that accepts the hello does not reject the connection.
        let link = link.ok_or(ControlError::NotFarside)?;
        Ok(link.with_trust(self.trust.clone()))
    }
}

/// The channel, the server's welcome, the key for sessions, and the address that was reached.
type Welcomed = (VerbsChannel, Welcome, SessionKey, SocketAddr);

/// Connects with this purpose, and proves both ways.
fn connect(options: &ConnectOptions, purpose: Purpose, timeout: Duration) -> Result<Welcomed> {
    let started = Instant::now();
    let request = options.request(purpose)?;
    let hello = request.encode();
    let unreachable = |source| options.unreachable(Contact::None, started.elapsed(), Some(source));
    let addresses = options.address.resolve(timeout).map_err(unreachable)?;
    let mut failure = unreachable(io::ErrorKind::NotFound.into());
    for address in addresses {
        let left = timeout.saturating_sub(started.elapsed());
        let rdma = Options { connect_timeout: attempt_timeout(left), ..options.rdma };
        match connect_control(address, &hello, &rdma) {
            Ok((mut channel, challenge)) => {
                let answered = (&request, &challenge[..]);
                let (welcome, key) =
                    options.prove_over(&mut channel, answered, (started, timeout))?;
                return Ok((channel, welcome, key, address));
            }
            Err(error) => match from_verbs(&options.address.to_string(), error) {
                unreachable @ ConnectError::Unreachable { .. } => failure = unreachable,
                // The server answered, so the other addresses are not tried.
                refused => return Err(refused),
            },
        }
    }
    Err(failure)
}

/// Connects for the map of the server's cluster.
pub(super) fn map_channel(
    options: &ConnectOptions,
    timeout: Duration,
) -> Result<(Box<dyn ControlChannel>, Welcome)> {
    let (channel, welcome, ..) = connect(options, Purpose::Map, timeout)?;
    Ok((Box::new(channel), welcome))
}

pub(super) fn attach(options: &ConnectOptions, timeout: Duration) -> Result<Attached> {
    let (channel, welcome, key, address) = connect(options, Purpose::Control, timeout)?;
    options.check(&welcome)?;
    let factory = VerbsFactory {
        server: options.address.to_string(),
        address,
        proofs: DataProofs::new(options, &welcome, key),
        region: welcome.remote_region(options.role),
        trust: options.trust.clone(),
        // Sessions that are opened later get the whole timeout.
        rdma: Options { connect_timeout: options.timeout, ..options.rdma },
    };
    Ok(Attached {
        address: options.address.clone(),
        welcome,
        factory: Box::new(factory),
        channel: Box::new(channel),
    })
}

fn from_verbs(server: &str, error: VerbsError) -> ConnectError {
    match error {
        error if error.is_transient() => {
            unreachable_untimed(server.to_owned(), Contact::None, io::Error::other(error))
        }
        VerbsError::Rejected { reason, .. } => match Challenge::decode(&reason) {
            Ok(Err(refusal)) => refused(server, refusal),
            // A challenge cannot be a rejection, so the peer is no Farside server.
            Ok(Ok(_)) => ControlError::NotFarside.into(),
            Err(error) => error.into(),
        },
        error => error.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_leave_time_for_another_one() {
        let mut left = Duration::from_secs(4);
        let mut attempts = Vec::new();
        while !left.is_zero() {
            attempts.push(attempt_timeout(left).as_millis());
            left -= attempt_timeout(left);
        }
        assert_eq!(attempts, [2000, 1000, 500, 500]);
        assert_eq!(attempt_timeout(Duration::from_millis(100)), Duration::from_millis(100));
    }
}
