//! The region itself, read-only, for the checker.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use farside_common::address::Address;
use farside_common::check::{self, Observer, Report, Scope};
use farside_common::config::ClientConfig;
use farside_common::control::{
    Channel, ConnectRequest, Purpose, REPLY_BYTES_MAX, REQUEST_BYTES_MAX, Request, Role, Welcome,
    decode_reply,
};
use farside_common::fabric::shm::{Connection, Region, ShmFabric};
use farside_common::fabric::verbs::{
    Options, RemoteRegion, VerbsError, VerbsFabric, connect_control, connect_data,
};
use farside_common::fabric::{Endpoint, LaneId};
use indicatif::ProgressBar;

use crate::output;

/// The only lane of the checker's endpoint.
const LANE: LaneId = LaneId(0);

/// A region that cannot be changed from here: the memory, or the device, refuses it.
pub(crate) struct RawRegion {
    endpoint: Way,
    region_bytes: u64,
    channel: Channel,
}

/// The checker's way to the region.
enum Way {
    Shm(Endpoint<ShmFabric>),
    Verbs(Endpoint<VerbsFabric>),
}

/// How long the server may take to take the goodbye.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

impl RawRegion {
    /// Connects as a reader of its own.
    pub(crate) fn open(config: &ClientConfig) -> anyhow::Result<Self> {
        let server = config.server.as_deref().unwrap_or_default();
        let address: Address = server.parse()?;
        match &address {
            Address::Shm(path) => Self::map(config, server, path),
            _ => Self::reach(config, server, &address),
        }
    }

    fn request(config: &ClientConfig, purpose: Purpose) -> [u8; REQUEST_BYTES_MAX] {
        ConnectRequest { role: Role::Reader, purpose, token: config.token() }.encode()
    }

    /// What the server answered.
    fn welcome(server: &str, reply: &[u8]) -> anyhow::Result<Welcome> {
        decode_reply(reply)?.with_context(|| format!("{server} refused the connection"))
    }

    /// Maps the region of a server on this host.
    fn map(config: &ClientConfig, server: &str, path: &Path) -> anyhow::Result<Self> {
        let unreachable = || format!("no server answers at {server}: is kv-server running there?");
        let connection = Connection::connect(path).with_context(unreachable)?;
        let timeout = Duration::from_millis(config.connect_timeout_ms);
        connection.set_receive_timeout(Some(timeout))?;
        let request = Self::request(config, Purpose::Control);
        connection.send(&request, None).with_context(unreachable)?;
        let mut reply = [0; REPLY_BYTES_MAX];
        let (bytes, descriptor) = connection.receive(&mut reply).with_context(unreachable)?;
        if bytes == 0 {
            bail!("the server at {server} hung up: its log says why");
        }
        let welcome = Self::welcome(server, &reply[..bytes])?;
        let descriptor = descriptor.context("the server sent no region")?;
        let region =
            Region::map_read_only(&File::from(descriptor)).context("mapping the region")?;
        // Without a lease, because a reader has nothing to be fenced from.
        let fabric = ShmFabric::new(Arc::new(region), None, 1);
        Ok(Self {
            endpoint: Way::Shm(Endpoint::new(fabric, 1)),
            region_bytes: welcome.region_bytes,
            channel: Channel::over(connection)?,
        })
    }

    /// READs the region over RDMA.
    fn reach(config: &ClientConfig, server: &str, address: &Address) -> anyhow::Result<Self> {
        let timeout = Duration::from_millis(config.connect_timeout_ms);
        let options = Options { connect_timeout: timeout, ..config.rdma.options() };
        let found = address.resolve().with_context(|| format!("looking for {server}"))?;
        let found = *found.first().with_context(|| format!("{server} has no address"))?;
        let refused = |error| match error {
            VerbsError::Rejected { reason, .. } => {
                let why = Self::welcome(server, &reason).map(drop);
                why.err().unwrap_or_else(|| anyhow::anyhow!("{server} refused the connection"))
            }
            error => error.into(),
        };
        let request = Self::request(config, Purpose::Control);
        let (channel, reply) = connect_control(found, &request, &options).map_err(refused)?;
        let Welcome { client_id, lease, base_address, region_bytes, rkey, .. } =
            Self::welcome(server, &reply)?;
        let request = Self::request(config, Purpose::Data { client_id, lease });
        let link = connect_data(found, &request, 1, &options).map_err(refused)?;
        let (writable, round_trip_min_ns) = (false, 0);
        let remote = RemoteRegion { base_address, region_bytes, rkey, writable, round_trip_min_ns };
        let endpoint = Way::Verbs(Endpoint::new(link.into_fabric(remote)?, 1));
        Ok(Self { endpoint, region_bytes, channel: Channel::Verbs(channel) })
    }

    /// Checks the region while clients go on.
    pub(crate) fn check(&self, scope: Scope, bar: &ProgressBar) -> anyhow::Result<Report> {
        let (bytes, mut observer) = (self.region_bytes, OnBar(bar));
        Ok(match &self.endpoint {
            Way::Shm(endpoint) => check::check(endpoint, LANE, bytes, scope, &mut observer)?,
            Way::Verbs(endpoint) => check::check(endpoint, LANE, bytes, scope, &mut observer)?,
        })
    }
}

impl Drop for RawRegion {
    fn drop(&mut self) {
        let mut goodbye = Vec::new();
        Request::Goodbye.encode(&mut goodbye);
        // If it does not arrive, the server sees the connection end.
        let _ = self.channel.send(&goodbye);
        let _ = self.channel.flush(FLUSH_TIMEOUT);
    }
}

pub(crate) struct OnBar<'a>(pub(crate) &'a ProgressBar);

impl Observer for OnBar<'_> {
    fn progress(&mut self, done: u64, total: u64) {
        if self.0.length() != Some(total) {
            output::set_total(self.0, total);
        }
        self.0.set_position(done);
    }
}
