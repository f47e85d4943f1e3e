//! Connecting to a server over RDMA: a control channel, then a queue pair for each session.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use farside_common::control::{
    Channel, ControlError, Purpose, REQUEST_BYTES_MAX, Refusal, Role, Welcome, decode_reply,
};
use farside_common::fabric::verbs::{
    Options, RemoteRegion, VerbsError, VerbsFabric, connect_control, connect_data,
};

use super::{Attempt, Connected, Target};
use crate::Error;
use crate::engine::{EngineOptions, Failure};

/// The least an attempt to connect may take, where there is that much time left.
const ATTEMPT_MIN: Duration = Duration::from_millis(500);

/// How long one attempt may take: RDMA-CM sends a request that got lost again only after 4.3 s, so
/// half of the time is for another one.
fn attempt_max(left: Duration) -> Duration {
    (left / 2).max(ATTEMPT_MIN).min(left)
}

/// What a session needs to reach the region.
pub(super) struct Route {
    address: SocketAddr,
    server: String,
    request: [u8; REQUEST_BYTES_MAX],
    remote: RemoteRegion,
    options: Options,
}

pub(super) fn connect(target: &Target, left: Duration) -> Connected<Route> {
    let options = Options { connect_timeout: attempt_max(left), ..target.rdma };
    let request = target.request(Purpose::Control).encode();
    let addresses = target.address.resolve().map_err(Attempt::Absent)?;
    let mut failure = Attempt::Absent(io::ErrorKind::NotFound.into());
    for address in addresses {
        let (channel, reply) = match connect_control(address, &request, &options) {
            Ok(connected) => connected,
            Err(error) => {
                failure = from_connect(target, error);
                continue;
            }
        };
        let welcome =
            decode_reply(&reply).map_err(Error::from)?.map_err(|source| target.refused(source))?;
        let Welcome { client_id, lease, base_address, region_bytes, rkey, .. } = welcome;
        let round_trip_min_ns = welcome.round_trip_min_ns;
        let request = target.request(Purpose::Data { client_id, lease }).encode();
        let writable = target.role == Role::Writer;
        let remote = RemoteRegion { base_address, region_bytes, rkey, writable, round_trip_min_ns };
        // For sessions to come, the whole of it.
        let options = Options { connect_timeout: target.timeout, ..options };
        let server = target.address.to_string();
        let route = Route { address, server, request, remote, options };
        return Ok((welcome, route, Channel::Verbs(channel)));
    }
    Err(failure)
}

fn from_connect(target: &Target, error: VerbsError) -> Attempt {
    match error {
        error if error.is_passing() => Attempt::Absent(io::Error::other(error)),
        VerbsError::Rejected { reason, .. } => match refusal(&reason) {
            // The server goes; another one may come.
            Ok(Refusal::ShuttingDown) => Attempt::Absent(io::ErrorKind::ConnectionRefused.into()),
            Ok(source) => Attempt::Final(target.refused(source)),
            Err(error) => Attempt::Final(error.into()),
        },
        error => Attempt::Final(error.into()),
    }
}

/// Why a server refused. Something else than Farside may listen there.
fn refusal(reason: &[u8]) -> Result<Refusal, ControlError> {
    decode_reply(reason)?.err().ok_or(ControlError::NotFarside)
}

impl Route {
    /// The fabric of one session.
    pub(super) fn fabric(&self, options: EngineOptions) -> Result<VerbsFabric, Failure> {
        let started = Instant::now();
        let link = loop {
            let left = self.options.connect_timeout.saturating_sub(started.elapsed());
            let attempt = Options { connect_timeout: attempt_max(left), ..self.options };
            match connect_data(self.address, &self.request, options.lanes, &attempt) {
                Err(VerbsError::TimedOut { .. }) if left > ATTEMPT_MIN => {}
                link => break link,
            }
        };
        let fabric = link.and_then(|link| link.into_fabric(self.remote));
        fabric.map_err(|error| match error {
            VerbsError::Rejected { reason, .. } => match refusal(&reason) {
                // The control channel is gone, and this client does not know it yet.
                Ok(Refusal::UnknownClient { .. } | Refusal::ShuttingDown) => Failure::Disconnected,
                Ok(source) => Error::Refused { server: self.server.clone(), source }.into(),
                Err(error) => Error::from(error).into(),
            },
            error if error.is_passing() => Failure::Disconnected,
            error => Error::from(error).into(),
        })
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
