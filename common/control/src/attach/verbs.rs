//! Attaching over RDMA: the hello travels in what RDMA-CM carries for a connection.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use farside_fabric::rdma::{Options, RemoteRegion, VerbsError};
use farside_fabric::verbs::{DataLink, connect_control, connect_data};
use farside_fabric::{AnyFabric, RegionIndex};

use super::{
    Attached, ConnectError, ConnectOptions, Contact, FabricFactory, Result, absent_now, refused,
};
use crate::{ControlError, Purpose, REQUEST_BYTES_MAX, Role, Welcome, decode_reply};

/// The least an attempt to connect over RDMA may take, where there is that much time left.
const ATTEMPT_MIN: Duration = Duration::from_millis(500);

/// How long one attempt may take: RDMA-CM sends a request that got lost again only after 4.3 s, so
/// half of the time is for another one.
fn attempt_max(left: Duration) -> Duration {
    (left / 2).max(ATTEMPT_MIN).min(left)
}

/// What a session needs to reach a region over RDMA.
struct VerbsFactory {
    server: String,
    address: SocketAddr,
    request: [u8; REQUEST_BYTES_MAX],
    welcome: Welcome,
    region: RemoteRegion,
    rdma: Options,
}

impl FabricFactory for VerbsFactory {
    fn fabric(&self, lanes: u16) -> Result<AnyFabric> {
        let link = self.connect(|rdma| connect_data(self.address, &self.request, lanes, rdma))?;
        let fabric = link.into_fabric(self.region).map_err(|error| self.failed(error))?;
        Ok(AnyFabric::Verbs(fabric))
    }

    fn add_to(&self, fabric: &mut AnyFabric) -> Result<RegionIndex> {
        let AnyFabric::Verbs(fabric) = fabric else { return Err(ConnectError::OtherFabric) };
        let link = self.connect(|rdma| fabric.connect_data(self.address, &self.request, rdma))?;
        fabric.add_region(link, self.region).map_err(|error| self.failed(error))
    }
}

impl VerbsFactory {
    fn failed(&self, error: VerbsError) -> ConnectError {
        match error.is_passing() {
            true => ConnectError::Rdma(error),
            false => from_verbs(&self.server, error),
        }
    }

    /// A data connection, in several attempts, to the server that answered before.
    fn connect(
        &self,
        attempt: impl Fn(&Options) -> std::result::Result<DataLink, VerbsError>,
    ) -> Result<DataLink> {
        let started = Instant::now();
        let link = loop {
            let left = self.rdma.connect_timeout.saturating_sub(started.elapsed());
            let rdma = Options { connect_timeout: attempt_max(left), ..self.rdma };
            match attempt(&rdma) {
                Err(VerbsError::TimedOut { .. }) if left > ATTEMPT_MIN => {}
                link => break link.map_err(|error| self.failed(error))?,
            }
        };
        if decode_reply(link.reply())? != Ok(self.welcome) {
            return Err(ControlError::NotFarside.into());
        }
        Ok(link)
    }
}

pub(super) fn attach(options: &ConnectOptions, most: Duration) -> Result<Attached> {
    let started = Instant::now();
    let request = options.request(Purpose::Control);
    let absent = |source| options.absent(Contact::None, started.elapsed(), Some(source));
    let addresses = options.address.resolve().map_err(absent)?;
    let mut failure = absent(io::ErrorKind::NotFound.into());
    for address in addresses {
        let left = most.saturating_sub(started.elapsed());
        let rdma = Options { connect_timeout: attempt_max(left), ..options.rdma };
        let (channel, reply) = match connect_control(address, &request, &rdma) {
            Ok(connected) => connected,
            Err(error) => match from_verbs(&options.address.to_string(), error) {
                absent @ ConnectError::Unreachable { .. } => {
                    failure = absent;
                    continue;
                }
                // The server was there.
                refused => return Err(refused),
            },
        };
        let welcome = options.welcome(&reply, true)?;
        let Welcome { client_id, ticket, base_address, region_bytes, rkey, .. } = welcome;
        let factory = VerbsFactory {
            server: options.address.to_string(),
            address,
            request: options.request(Purpose::Data { client_id, ticket }),
            welcome,
            region: RemoteRegion {
                base_address,
                region_bytes,
                rkey,
                writable: options.role == Role::Writer,
                round_trip_min_ns: welcome.round_trip_min_ns,
            },
            // For sessions to come, the whole of it.
            rdma: Options { connect_timeout: options.timeout, ..options.rdma },
        };
        return Ok(Attached { welcome, factory: Box::new(factory), channel: Box::new(channel) });
    }
    Err(failure)
}

fn from_verbs(server: &str, error: VerbsError) -> ConnectError {
    match error {
        error if error.is_passing() => {
            absent_now(server.to_owned(), Contact::None, io::Error::other(error))
        }
        VerbsError::Rejected { reason, .. } => match decode_reply(&reason) {
            Ok(Err(refusal)) => refused(server, refusal),
            // Something else than Farside may listen there.
            Ok(Ok(_)) => ControlError::NotFarside.into(),
            Err(error) => error.into(),
        },
        error => ConnectError::Rdma(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_request_leaves_time_for_another() {
        let mut left = Duration::from_secs(4);
        let mut attempts = Vec::new();
        while !left.is_zero() {
            attempts.push(attempt_max(left).as_millis());
            left -= attempt_max(left);
        }
        assert_eq!(attempts, [2000, 1000, 500, 500]);
        assert_eq!(attempt_max(Duration::from_millis(100)), Duration::from_millis(100));
    }
}
